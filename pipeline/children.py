"""Child processes: the one place that starts them, and the one way they end.

A child leads a process group of its own and is ended as a group: SIGTERM, a wait, SIGKILL. DVC shows why: a DVC that
is terminated alone leaves its stage command behind as an orphan that goes on writing; and a card stays held.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any

GRACE = 25.0  # seconds between SIGTERM and SIGKILL: enough to write a checkpoint


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
    return subprocess.Popen(list(argv), env={**os.environ, **(environment or {})}, start_new_session=True, **options)


def end(process: subprocess.Popen, grace: float) -> None:
    """Terminate a child's group, wait, then kill what is left of it."""
    _signal(process, signal.SIGTERM)
    try:
        process.wait(grace)
    except subprocess.TimeoutExpired:
        pass
    finally:
        # Even where the child itself went quietly, a grandchild may not have.
        _signal(process, signal.SIGKILL)
        process.wait()


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


def exit_on_sigterm() -> None:
    """Make SIGTERM unwind this process like an error, so that scratch folders and children go with it."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
