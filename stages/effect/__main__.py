"""`python -m stages.effect --request request.json --out DIR`."""

from stages.core.command import main
from stages.effect.spec import EffectSpec
from stages.effect.stage import run

if __name__ == "__main__":
    main(run, EffectSpec, "effect")
