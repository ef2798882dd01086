"""`python -m stages.update --request request.json --out DIR`."""

from stages.core.command import main
from stages.update.spec import UpdateSpec
from stages.update.stage import run

if __name__ == "__main__":
    main(run, UpdateSpec, "update")
