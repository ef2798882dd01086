"""`python -m stages.evaluate --request request.json --out DIR`."""

from stages.core.command import main
from stages.evaluate.spec import EvaluateSpec
from stages.evaluate.stage import run

if __name__ == "__main__":
    main(run, EvaluateSpec, "evaluate")
