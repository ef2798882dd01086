"""`python -m stages.sheet --request request.json --out DIR`."""

from stages.core.command import main
from stages.sheet.spec import SheetSpec
from stages.sheet.stage import run

if __name__ == "__main__":
    main(run, SheetSpec, "sheet")
