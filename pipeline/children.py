"""Child processes: the one place that starts them, and the one way they end.

A child leads a process group of its own and is ended as a group: SIGTERM, a wait, SIGKILL. DVC shows why: a DVC that
is terminated alone leaves its stage command behind as an orphan that goes on writing; and a card stays held.

Some descendants leave the group (Prefect's flow runs, the ranks of torchrun, Ray's daemons lead sessions of their own).
They still carry the mark that every child gets in its environment, and are ended by it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

GRACE = 25.0  # seconds between SIGTERM and SIGKILL: enough to write a checkpoint
MARK = "GRANULAR_CHILD"  # "a/b/c": the marks of a process's ancestors and its own


@contextmanager
def child(
    argv: Sequence[str], *, grace: float = GRACE, environment: Mapping[str, str] | None = None, **options: Any
) -> Iterator[subprocess.Popen]:
    """A running child; however the block is left, nothing of its group is alive afterwards.

    Args:
        argv: command line.
        grace: seconds it has to end itself after SIGTERM. It gets them only when the block is left early or with an
            error: a child that has ended by itself costs nothing.
        environment: additions to this process's environment.
        options: passed to `subprocess.Popen` (stdin, stdout, stderr, text).
    """
    process = start(argv, environment, **options)
    try:
        yield process
    finally:
        end(process, grace)


def start(argv: Sequence[str], environment: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen:
    """A child that leads its own process group; who starts it here calls `end` on it."""
    mark = f"{os.environ.get(MARK, '')}/{uuid.uuid4().hex}"
    whole = {**os.environ, **(environment or {}), MARK: mark}
    process = subprocess.Popen(list(argv), env=whole, start_new_session=True, **options)
    process.mark = mark  # type: ignore[attr-defined]
    return process


def end(process: subprocess.Popen, grace: float) -> None:
    """Terminate a child's group, wait, terminate what left the group, then kill whatever is left of both."""
    deadline = time.monotonic() + grace
    mark = getattr(process, "mark", "")
    try:
        _signal(process, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace)
        for pid in descendants(mark):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGTERM)
        while descendants(mark) and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        # Even where the child itself went quietly, a grandchild may not have.
        _signal(process, signal.SIGKILL)
        for pid in descendants(mark):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def descendants(mark: str) -> list[int]:
    """Living processes that carry a child's mark, whatever group they are in (none where there is no /proc)."""
    if not mark:
        return []
    entry, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            values = (folder / "environ").read_bytes().split(b"\0")  # empty for a process that has ended
            if any(value == entry or value.startswith(entry + b"/") for value in values):
                found.append(int(folder.name))
    return found


def _signal(process: subprocess.Popen, number: signal.Signals) -> None:
    # The group outlives its leader as long as one member lives, and its id is not given away before that.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def run_command(
    argv: Sequence[str],
    line: Callable[[str], None],
    *,
    grace: float = GRACE,
    environment: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Run a command to its end, handing every output line (stderr too) to `line` as it comes.

    Returns:
        (exit code, all output).
    """
    with child(
        argv, grace=grace, environment=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace",
    ) as process:  # fmt: skip
        output: IO[str] = process.stdout  # type: ignore[assignment]
        text = []
        for part in output:
            text.append(part)
            line(part.rstrip("\n"))
        return process.wait(), "".join(text)
