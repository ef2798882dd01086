"""`python -m stages.advantage --request request.json --out DIR`."""

from stages.advantage.spec import AdvantageSpec
from stages.advantage.stage import run
from stages.core.command import main

if __name__ == "__main__":
    main(run, AdvantageSpec, "advantage")
