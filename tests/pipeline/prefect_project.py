"""A project of its own on the lab's weights, small enough for a run in seconds, served by `granular serve`."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from stages.core.spec import read_yaml

ROOT = Path(__file__).resolve().parents[2]
PYTHON = sys.executable
MARK = "GRANULAR_TEST_OF"  # every process that a test of here starts carries it, whatever group it flees to


def make_project(folder: Path) -> None:
    """Code, settings and inputs of two tiny runs, `toy` and `long`, in a git and DVC project of its own."""
    for name in ("dvc.yaml", "prefect.yaml", "constraints.txt", ".dvcignore", ".gitignore"):
        shutil.copy(ROOT / name, folder)
    for name in ("pipeline", "stages"):
        # A copy, so that nobody who edits the code meanwhile changes what a cached round is compared with.
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / ".dvc", folder / ".dvc", ignore=shutil.ignore_patterns("cache", "tmp", "*.local"))
    (folder / "data").mkdir()
    (folder / "data" / "lab").symlink_to(ROOT / "data" / "lab")
    raw = read_yaml(ROOT / "params.yaml")
    raw = {
        name: raw[name] for name in ("seed", "prompts", "policy", "sampler", "scorers", "align", "evaluate", "report")
    }
    raw["policy"] |= {"threads": 1}
    raw["sampler"] |= {"max_batch": 8}
    raw["scorers"] = {name: raw["scorers"][name] for name in ("hps", "clip")}
    raw["align"].pop("budget", None)
    raw["align"] |= {"rounds": 2, "prompts_per_round": 2, "group": 3, "grid": {"steps": 4, "shift": 3.0}}
    raw["align"] |= {"update_batch": 4, "validate": {"every": 0, "prompts": 2, "noises": 1}}
    raw["runs"] = {
        "toy": {"method": {"name": "g2rpo", "granularities": [1, 2]}},
        "long": {"method": {"name": "g2rpo", "granularities": [1]}, "rounds": 6},
    }
    YAML().dump(raw, folder / "params.yaml")
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    for stage in ("prompts", "embed"):
        subprocess.run([PYTHON, "-m", f"stages.{stage}"], cwd=folder, check=True, capture_output=True)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Served:
    """A running `granular serve`, and its API."""

    def __init__(self, project: Path, port: int, process: subprocess.Popen, out: Path) -> None:
        self.project, self.process, self.out = project, process, out
        self.address = f"http://127.0.0.1:{port}"
        self.api = f"{self.address}/api"

    def ask(self, path: str, body: Mapping[str, Any] | None = None, method: str = "POST") -> Any:
        data = None if method == "GET" else json.dumps(body or {}).encode()
        request = urllib.request.Request(
            f"{self.api}/{path}", data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            text = reply.read()
        return json.loads(text) if text else None

    def deployments(self) -> dict[str, Any]:
        return {one["name"]: one for one in self.ask("deployments/filter")}

    def start(self, deployment: str, **parameters: Any) -> str:
        """A flow run of a deployment, as the button Run makes one; returns its id."""
        number = self.deployments()[deployment]["id"]
        return self.ask(f"deployments/{number}/create_flow_run", {"parameters": parameters})["id"]

    def run(self, number: str) -> Any:
        return self.ask(f"flow_runs/{number}", method="GET")

    def tasks(self, number: str) -> dict[str, str]:
        """Names of a flow run's tasks → their states."""
        found = self.ask("task_runs/filter", {"flow_runs": {"id": {"any_": [number]}}, "limit": 200})
        return {one["name"]: one["state_name"] for one in found}

    def ended(self, number: str, within: float = 900) -> Any:
        """The flow run once it has ended in whatever way."""
        final = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
        wait(lambda: self.run(number)["state"]["type"] in final, within, lambda: self.said())
        return self.run(number)

    def said(self) -> str:
        log = self.project / ".prefect" / "worker.log"
        return self.out.read_text() + (log.read_text()[-4000:] if log.is_file() else "")


def wait(what: Callable[[], Any], within: float, otherwise: Callable[[], str] = lambda: "") -> Any:
    """The first truthy answer."""
    end = time.monotonic() + within
    while time.monotonic() < end:
        if value := what():
            return value
        time.sleep(0.2)
    raise AssertionError(f"not within {within:g} s\n{otherwise()}")


@contextmanager
def serving(project: Path, mark: str, out: Path, **environment: str) -> Iterator[Served]:
    """`granular serve` on a free port, from its first word to SIGINT; whatever outlives that is killed."""
    port = free_port()
    whole = {**os.environ, "GRANULAR_PREFECT": "on", MARK: mark, **environment}
    # The settings of the project itself, not those of the tests: `serve` has to bring them.
    for name in ("PREFECT_HOME", *(() if "PREFECT_API_URL" in environment else ("PREFECT_API_URL",))):
        whole.pop(name, None)
    whole["PATH"] = f"{Path(PYTHON).parent}{os.pathsep}{whole['PATH']}"  # DVC's commands say `python`
    with out.open("w") as lines:
        process = subprocess.Popen(
            [PYTHON, "-m", "pipeline.cli", "serve", "--port", str(port)], cwd=project, env=whole, stdout=lines,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        yield Served(project, port, process, out)
    finally:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
        for pid in marked(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        process.wait()


def marked(mark: str) -> dict[int, str]:
    """Living processes with the mark in their environment: number → command line."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    return found
