"""One stage from the shell: `python -m stages.<stage> --request request.json --out DIR`.

A request is `{"inputs": {name: path}, "spec": {...}}`; every published stage folder carries the one it was made from,
so any stage of any round can be run again, alone, into a folder of one's own.
"""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stages.core.errors import GranularError
from stages.core.publish import scratch_beside
from stages.core.spec import build, read_json

# A disk a person can do something about: full, read-only, not theirs.
_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR})


def guarded(work: Callable[[], None]) -> None:
    """Run a command; a person's mistake is one sentence and exit code 1, Ctrl-C is exit code 130."""
    try:
        work()
    except GranularError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except OSError as error:
        if error.errno not in _DISK:
            raise
        print(f"error: {error.filename or 'output'}: {(error.strerror or '').lower()}.", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("stopped: nothing was left half-written.", file=sys.stderr)
        raise SystemExit(130) from None


def main(run: Callable[..., None], spec_type: type, stage: str) -> None:
    """The whole command line of a stage module."""
    parser = argparse.ArgumentParser(prog=f"python -m stages.{stage}", description=sys.modules["__main__"].__doc__)
    parser.add_argument("--request", type=Path, required=True, help="JSON file with the stage's inputs and spec")
    parser.add_argument("--out", type=Path, required=True, help="folder to create with the stage's outputs")
    arguments = parser.parse_args()

    def work() -> None:
        from stages.core.resident import Resident

        request: Any = read_json(arguments.request)
        if not isinstance(request, dict) or set(request) != {"inputs", "spec"}:
            raise GranularError(f"{arguments.request}: expected exactly the keys 'inputs' and 'spec'.")
        inputs = {name: Path(path) for name, path in request["inputs"].items()}
        for name, path in inputs.items():
            if not path.exists():
                raise GranularError(f"{arguments.request}: input '{name}' is not there: {path}.")
        spec = build(spec_type, request["spec"], "spec")
        with scratch_beside(arguments.out) as out:
            run(inputs, spec, Resident(), out)
        print(f"{stage}: wrote {arguments.out}")

    guarded(work)
