"""Where a flow's events come from: the standard input of a mirror, or a child that computes a run for the flow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import IO, Any

from pipeline.children import child
from pipeline.view import EVENTS

Said = dict[str, Any]  # an Event as JSON


class Mirrored:
    """Events that another process pushes; nothing here can make it try again. code: always None."""

    code: int | None = None

    def __init__(self, lines: IO[str]) -> None:
        self._lines = (json.loads(line) for line in lines if line.strip())

    def next(self) -> Said | None:
        """The next event, None after the last one."""
        return next(self._lines, None)


class Computed:
    """`granular ARGUMENTS` in a child that leads a process group of its own; however the block is left, it is gone.

    code: its exit code, once it has ended (negative: the signal that killed it). last: the last line it said.
    """

    def __init__(self, arguments: Sequence[str], log: Callable[[str], None]) -> None:
        self.arguments, self.last = list(arguments), ""
        self.code: int | None = None
        self._log, self._stack = log, ExitStack()
        self._events: Iterator[Said] = iter(())

    def __enter__(self) -> Computed:
        self._start(self.arguments)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def next(self) -> Said | None:
        """The next event; after the last one None, and `code` is known."""
        event = next(self._events, None)
        if event is None and self.code is None:
            self.code = self._process.wait()
            self._listener.join(timeout=5)
        return event

    def again(self, failed: Said) -> Said | None:
        """Start the child once more, at the stage that failed, and pass over what it finds in the store on the way."""
        self._stack.close()
        self._start(_from(self.arguments, failed))
        while (event := self.next()) is not None:
            if event["kind"] == "stage" and (event["round"], event["stage"]) == (failed["round"], failed["stage"]):
                return event
        return None

    def _start(self, arguments: Sequence[str]) -> None:
        self.code = None
        self._stack = ExitStack()
        reading, writing = os.pipe()
        events = self._stack.enter_context(os.fdopen(reading, encoding="utf-8"))
        try:
            self._process = self._stack.enter_context(
                child(
                    [sys.executable, "-m", "pipeline.cli", *arguments],
                    environment={EVENTS: str(writing), "PYTHONUNBUFFERED": "1"},
                    pass_fds=(writing,),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                )
            )
        finally:
            os.close(writing)
        self._listener = threading.Thread(target=self._say, args=(self._process.stdout,), daemon=True)
        self._listener.start()
        self._events = (json.loads(line) for line in events if line.endswith("\n"))

    def _say(self, output: IO[str]) -> None:
        for line in output:
            if text := line.rstrip():
                self.last = text
                self._log(text)


def _from(arguments: Sequence[str], failed: Mapping[str, Any]) -> list[str]:
    """The same run, to begin where it failed; only a forced one needs to be told, what was made is found anyway."""
    if "--force" not in arguments:
        return list(arguments)
    kept = list(arguments)
    for option in ("--start-round", "--start-stage"):
        if option in kept:
            at = kept.index(option)
            del kept[at : at + 2]
    return [*kept, "--start-round", str(max(failed["round"], 1)), "--start-stage", failed["stage"]]
