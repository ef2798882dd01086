"""One process at a time works on a run: `runs/<run>/lock` says which.

The operating system holds the lock and lets go of it when the process ends, however it ends; so a lock is never stale,
and the file that a killed process leaves behind stops nobody. Different runs do not meet here: they share the round
store, which publishes by one rename, and DVC has locks of its own.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stages.core.errors import GranularError
from stages.core.progress import say


@contextmanager
def alone(run: str, folder: Path) -> Iterator[None]:
    """Hold the lock of a run while the block runs.

    Args:
        run: its name, for the sentence. folder: `runs/<run>`.

    Raises:
        GranularError: another process holds it; the sentence names the process, its host and when it began.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise GranularError(_held(run, file.name)) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            say(f"{run}: {file.name} cannot be locked on this filesystem; see to it that nobody else works on this run")
        file.truncate(0)
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        file.write(json.dumps(holder))
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def _held(run: str, path: str) -> str:
    holder = {"pid": "?", "host": "an unknown host", "since": "a moment ago"}
    with suppress(OSError, ValueError):
        holder |= json.loads(Path(path).read_text(encoding="utf-8"))
    return (
        f"{run}: another process is working on this run (pid {holder['pid']} on {holder['host']}, since "
        f"{holder['since']}); wait for it, stop it, or give a variation a name of its own with --name."
    )
