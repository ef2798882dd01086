"""`python -m stages.lab`: see `stages.lab.pretrain`."""

import sys

from stages.lab.pretrain import main

if __name__ == "__main__":
    sys.exit(main())
