"""`python -m stages.reward --request request.json --out DIR`."""

from stages.core.command import main
from stages.reward.spec import RewardSpec
from stages.reward.stage import run

if __name__ == "__main__":
    main(run, RewardSpec, "reward")
