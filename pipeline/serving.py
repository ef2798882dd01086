"""`granular serve`: one command for Prefect's pages, the deployments of prefect.yaml and a worker that runs them.

Everything is a child of this process and ends with it: the server (unless one is there already), and the worker with
whatever flows it is running. Stopped runs keep what they had and go on when they are started again.

The server's database is `.prefect/prefect.db`, SQLite; nothing of value is in it, so it may be deleted at any time.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

from pipeline.children import child
from pipeline.view import environment
from stages.core.errors import GranularError
from stages.core.progress import say

POOL = "granular"  # the work pool of prefect.yaml
STARTUP = 300.0  # seconds a server may take: a slow disk or a busy machine needs them for the first migration
HERE = ("127.0.0.1", "localhost", "::1")


def serve(port: int, project: Path) -> None:
    """Serve until Ctrl-C.

    Raises:
        GranularError: no server answers where PREFECT_API_URL points, the port is taken, or a child ended by itself.
    """
    settings = {**environment(project), "PWD": str(project)}
    logs = project / ".prefect"
    logs.mkdir(exist_ok=True)
    named = os.environ.get("PREFECT_API_URL", "").rstrip("/")
    with ExitStack() as stack:
        if named and answers(named):
            api, server = named, None
        else:
            port = _own_port(named, port)
            api = f"http://127.0.0.1:{port}/api"
            argv = ["server", "start", "--host", "127.0.0.1", "--port", str(port)]
            server = _prefect(stack, argv, settings, project, logs / "server.log", grace=10)
            wait_until_healthy(api, server, logs / "server.log")
        settings["PREFECT_API_URL"] = api
        deploy(settings, project, logs / "deploy.log")
        argv = ["worker", "start", "--pool", POOL, "--type", "process", "--name", socket.gethostname()]
        worker = _prefect(stack, argv, settings, project, logs / "worker.log", grace=30)
        say(f"Prefect's pages: {api.removesuffix('/api')}   (server and worker write to {logs}/*.log)")
        say("Deployments → align → Run trains a run. Runs started in a shell are shown there as well, after")
        say(f"  export PREFECT_API_URL={api}")
        say("Ctrl-C ends all of it; runs keep what they have.")
        _watch({"server": server, "worker": worker}, logs)


def _own_port(named: str, port: int) -> int:
    """The port of the server to start: that of PREFECT_API_URL where it names this machine, which nobody serves yet."""
    if named:
        parts = urlsplit(named)
        if parts.hostname not in HERE or parts.scheme != "http":
            raise GranularError(
                f"PREFECT_API_URL {named}: no server answers there; start it, or unset PREFECT_API_URL to have one "
                "here."
            )
        port = parts.port or 4200
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            raise GranularError(
                f"port {port} is taken; if a Prefect server is there, set PREFECT_API_URL=http://127.0.0.1:{port}/api "
                "to use it, or choose another one with --port."
            ) from None
    return port


def _prefect(
    stack: ExitStack, argv: list[str], settings: dict[str, str], project: Path, log: Path, grace: float
) -> subprocess.Popen:
    """A Prefect command as a child that ends with the stack; what it says goes to a file."""
    lines = stack.enter_context(log.open("w", encoding="utf-8"))
    options = {"stdin": subprocess.DEVNULL, "stdout": lines, "stderr": subprocess.STDOUT}
    command = [sys.executable, "-m", "prefect", *argv]
    return stack.enter_context(child(command, environment=settings, cwd=project, grace=grace, **options))


def deploy(settings: dict[str, str], project: Path, log: Path) -> None:
    """Make the work pool, if it is not there, and the deployments of prefect.yaml as the file says now."""
    if not (project / "prefect.yaml").is_file():
        raise GranularError(f"{project / 'prefect.yaml'}: no such file; call this from the project's folder.")
    with log.open("w", encoding="utf-8") as lines:
        for argv in (
            ["-m", "pipeline.pool", POOL],
            ["-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", "prefect.yaml"],
        ):
            options = {"stdin": subprocess.DEVNULL, "stdout": lines, "stderr": subprocess.STDOUT}
            with child([sys.executable, *argv], environment=settings, cwd=project, **options) as process:
                if process.wait() != 0:
                    raise GranularError(
                        f"the deployments of prefect.yaml could not be made; what went wrong is in {log}."
                    )


def _watch(children: dict[str, subprocess.Popen | None], logs: Path) -> None:
    while True:
        for name, process in children.items():
            if process is not None and process.poll() is not None:
                raise GranularError(f"the {name} ended by itself; what it said is in {logs / name}.log.")
        time.sleep(1)


def answers(api: str) -> bool:
    """Whether a server is there and well."""
    try:
        with urllib.request.urlopen(f"{api}/health", timeout=5):
            return True
    except (OSError, ValueError):
        return False


def wait_until_healthy(api: str, server: subprocess.Popen, log: Path, limit: float = STARTUP) -> None:
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
