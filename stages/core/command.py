"""One stage from the shell: `python -m stages.<stage> --request request.json --out DIR`.

A request is `{"inputs": {name: path}, "spec": {...}}`; every published stage folder carries the one it was made from,
so any stage of any round can be run again, alone, into a folder of one's own.
"""

from __future__ import annotations

import argparse
import errno
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stages.core.errors import GranularError, passing
from stages.core.publish import scratch_beside
from stages.core.spec import build, read_json

# A disk a person can do something about: full, read-only, not theirs.
_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR})


TRY_AGAIN = 75  # sysexits' EX_TEMPFAIL: the same command may succeed a little later


def guarded(work: Callable[[], None]) -> None:
    """Run a command: a person's mistake is one sentence and exit code 1, Ctrl-C and SIGTERM are exit code 130.

    A failure that may pass by itself (`stages.core.errors.passing`) is one sentence and exit code 75.
    """
    try:
        with stoppable():
            work()
    except GranularError as error:
        _leave(str(error), TRY_AGAIN if passing(error) else 1)
    except KeyboardInterrupt:
        print("stopped: nothing was left half-written.", file=sys.stderr)
        raise SystemExit(130) from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _DISK:
            _leave(f"{error.filename or 'output'}: {(error.strerror or '').lower()}.", 1)
        if not passing(error):
            raise
        said = str(error).strip().splitlines() or [""]
        _leave(f"{type(error).__name__}: {said[0]} (the same command may succeed a little later)", TRY_AGAIN)


def _leave(sentence: str, code: int) -> None:
    print(f"error: {sentence}", file=sys.stderr)
    raise SystemExit(code) from None


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM counts as Ctrl-C, so that a scheduler's cancel unwinds like a person's and leaves nothing half-written.

    Only the main thread hears signals; elsewhere this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
