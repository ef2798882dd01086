"""The run's side of Prefect: events go to a child process that shows them, and nothing ever comes back.

The round loop stays plain Python. `shown(run)` yields a function to call with every event; the child (`flows.py`)
turns them into a flow run with one task per round and stage. A child that is slow, broken or without a server costs
the run nothing: events wait in a queue of this process, a thread passes them on, and at the end the child has
`GRACE` seconds to catch up before it is ended.

    GRANULAR_PREFECT=off    no view at all
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
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING

from pipeline.children import child, end, start
from stages.core.errors import GranularError
from stages.core.progress import say

if TYPE_CHECKING:
    from pipeline.events import Event

PROJECT = Path(__file__).resolve().parents[1]
GRACE = 8.0  # seconds after the run's last event

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
    if os.environ.get("GRANULAR_PREFECT", "").lower() == "off":
        yield lambda event: None
        return
    mirror = _Mirror(run, project, log)
    try:
        yield mirror.show
    finally:
        mirror.close()


class _Mirror:
    """The child, the queue before it and the thread between them."""

    def __init__(self, run: str, project: Path, log: Path) -> None:
        self._run, self._project, self._log = run, project, log
        self._waiting: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._process: subprocess.Popen | None = None

    def show(self, event: Event) -> None:
        self._waiting.put(json.dumps(asdict(event), default=str))
        # A run that finds everything done ends before a temporary server is up: only work is worth one.
        working = event.kind == "stage" and event.status == "started"
        if self._process is None and (working or os.environ.get("PREFECT_API_URL")):
            self._start()

    def _start(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("w", encoding="utf-8") as log:
            self._process = start(
                [sys.executable, "-m", "pipeline.flows", "mirror", self._run],
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
                pipe.write(line + "\n")
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
    argv = [sys.executable, "-m", "pipeline.flows", "repro", *(["--force"] if force else []), *targets]
    with child(argv, environment=environment(project), cwd=project) as process:
        return process.wait()


def serve(port: int, project: Path) -> None:
    """A Prefect server on this machine with `repro` on offer, until Ctrl-C."""
    address = f"http://127.0.0.1:{port}"
    settings = {**environment(project), "PREFECT_API_URL": f"{address}/api"}
    argv = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    log = project / ".prefect" / "server.log"
    log.parent.mkdir(exist_ok=True)
    with (
        log.open("w", encoding="utf-8") as lines,
        child(argv, environment=settings, cwd=project, stdout=lines, stderr=subprocess.STDOUT, grace=10) as server,
    ):
        wait_until_healthy(f"{address}/api", server, log)
        say(f"Prefect's pages: {address}   (`export PREFECT_API_URL={address}/api` makes runs report there)")
        say("Deployments → repro → Run brings the project up to date. Ctrl-C ends.")
        with child([sys.executable, "-m", "pipeline.flows", "offer"], environment=settings, cwd=project):
            server.wait()


def wait_until_healthy(api: str, server: subprocess.Popen, log: Path, limit: float = 120) -> None:
    """Wait for a starting server to answer.

    Raises:
        GranularError: it ended, or took longer than `limit` seconds.
    """
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline and server.poll() is None:
        with suppress(OSError), urllib.request.urlopen(f"{api}/health", timeout=2):
            return
        time.sleep(0.3)
    raise GranularError(f"{api}: the Prefect server did not come up; what it said is in {log}.")
