"""The run's side of Prefect: events go to a child process that shows them, and nothing ever comes back.

The round loop stays plain Python. `shown(run)` yields a function to call with every event; the child (`flows.py`)
turns them into a flow run with one task per round and stage. A child that is slow, broken or without a server costs
the run nothing: events wait in a queue of this process, a thread passes them on, and at the end the child has
`GRACE` seconds to catch up before it is ended. A run that a flow has started writes its events to the flow instead.

    GRANULAR_PREFECT=off    no view at all
    GRANULAR_EVENTS         a descriptor, set by the flow that started this process
    PREFECT_API_URL         the server that shows the run (`granular serve` starts one); without it the child brings a
                            temporary one, whose history stays in the project's own `.prefect`
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING

from pipeline.children import child, end, start

if TYPE_CHECKING:
    from pipeline.events import Event

PROJECT = Path(__file__).resolve().parents[1]
GRACE = 8.0  # seconds after the run's last event
EVENTS = "GRANULAR_EVENTS"

_ENVIRONMENT = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",  # the server's heartbeat to its makers
    "DO_NOT_TRACK": "1",  # the SDK's
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",  # 20 is too short for a slow disk
    "PREFECT_UI_API_URL": "/api",  # relative: right on any port and behind any tunnel
    "PREFECT_LOGGING_LEVEL": "INFO",
}


def environment(project: Path) -> dict[str, str]:
    """What every Prefect process of this project is started with; what the user has set stays."""
    home = {"PREFECT_HOME": str(project / ".prefect")}
    return {name: os.environ.get(name) or value for name, value in {**home, **_ENVIRONMENT}.items()}


@contextmanager
def shown(run: str, project: Path, log: Path) -> Iterator[Callable[[Event], None]]:
    """A function to call with every event of a run.

    Args:
        run: name of the run, and of the flow run that shows it.
        project: its `.prefect` folder keeps the history where there is no server.
        log: file for what the child prints, Prefect's own troubles included.
    """
    if descriptor := os.environ.pop(EVENTS, None):

        def pass_on(event: Event) -> None:
            with suppress(OSError):  # the flow is gone; the run is not
                os.write(int(descriptor), _line(event).encode())

        try:
            yield pass_on
        finally:
            os.close(int(descriptor))
        return
    if os.environ.get("GRANULAR_PREFECT", "").lower() == "off":
        yield lambda event: None
        return
    mirror = _Mirror(run, project, log)
    try:
        yield mirror.show
    finally:
        mirror.close()


def _line(event: Event) -> str:
    return json.dumps(asdict(event), default=str) + "\n"


class _Mirror:
    """The child, the queue before it and the thread between them."""

    def __init__(self, run: str, project: Path, log: Path) -> None:
        self._run, self._project, self._log = run, project, log
        self._waiting: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._process: subprocess.Popen | None = None

    def show(self, event: Event) -> None:
        self._waiting.put(_line(event))
        # A run that finds everything done ends before a temporary server is up: only work is worth one.
        working = event.kind == "stage" and event.status == "started"
        if self._process is None and (working or os.environ.get("PREFECT_API_URL")):
            self._start()

    def _start(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("w", encoding="utf-8") as log:
            self._process = start(
                [sys.executable, "-m", "pipeline.flows", self._run, str(self._project.resolve())],
                environment=environment(self._project),
                cwd=PROJECT,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                encoding="utf-8",
            )
        threading.Thread(target=self._pass_on, args=(self._process.stdin,), daemon=True).start()

    def _pass_on(self, pipe: IO[str]) -> None:
        # The pipe of a child that hangs fills up, and that of a dead one breaks: here that stops only this thread.
        with suppress(OSError):
            while (line := self._waiting.get()) is not None:
                pipe.write(line)
                pipe.flush()
        with suppress(OSError):
            pipe.close()

    def close(self) -> None:
        """Let the child catch up for a while, then end it."""
        if self._process is None:
            return
        self._waiting.put(None)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE)
        end(self._process, grace=1.0)


def repro_flow(targets: Sequence[str], force: bool, project: Path) -> int:
    """Run the flow `repro` in a process with the project's Prefect settings; returns its exit code."""
    argv = [sys.executable, "-m", "pipeline.graph_flows", *(["--force"] if force else []), *targets]
    with child(argv, environment=environment(project), cwd=project) as process:
        return process.wait()
