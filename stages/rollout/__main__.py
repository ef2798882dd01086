"""`python -m stages.rollout --request request.json --out DIR`."""

from stages.core.command import main
from stages.rollout.spec import RolloutSpec
from stages.rollout.stage import run

if __name__ == "__main__":
    main(run, RolloutSpec, "rollout")
