"""Prefect's side of the pipeline: flows that show what happens, and never decide whether it does.

    align    a run's rounds, fed with events on stdin by the process that computes them (`pipeline/view.py`)
    repro    the graph of dvc.yaml, one task per DVC stage; DVC decides, Prefect shows, schedules and cancels

Prefect's own result cache is off everywhere (NO_CACHE, nothing persisted): it returned stale results when a helper
function changed. This module is imported by processes of its own only; nothing else imports Prefect.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.states import Completed, Crashed, Failed, State

from pipeline.children import run_command

PROJECT = Path(__file__).resolve().parents[1]

# The event stream of this process. No parameter: Prefect looks into parameters, which would consume it.
_EVENTS: Iterator[dict[str, Any]] = iter(())


def _task_name() -> str:
    from prefect.runtime import task_run

    event = task_run.parameters["event"]
    return f"round {event['round']} · {event['stage']}"


@task(task_run_name=_task_name, cache_policy=NO_CACHE, persist_result=False)
def stage(event: dict[str, Any]) -> State:
    """One stage of one round: reads the stream to the event that ends it, so its bar has the stage's true length."""
    while event["status"] == "started":
        following = next(_EVENTS, None)
        if following is None:
            return Crashed(message="the run ended in the middle of this stage")
        if following["kind"] == "stage":
            event = following
    if event["status"] == "failed":
        return Failed(message=event["detail"] or "failed")
    return Completed(name="Cached" if event["status"] == "cached" else None, message=event["detail"] or None)


@flow(name="align", flow_run_name="{run}", persist_result=False)
def align(run: str) -> State:
    """One alignment run, mirrored event by event; ends as the run says it ended."""
    ended: State = Crashed(message="the run ended without saying how")
    for event in _EVENTS:
        if event["kind"] == "stage":
            # A task name per stage, so that the pages can filter by it.
            stage.with_options(name=event["stage"].replace(".", "-"))(event, return_state=True)
        elif event["kind"] == "run" and event["status"] == "failed":
            ended = Failed(message=event["detail"] or None)
        elif event["kind"] == "run" and event["status"] == "done":
            ended = Completed(message=event["detail"] or None)
        elif event["detail"]:
            get_run_logger().info(event["detail"])
    return ended


@task(task_run_name="{name}", cache_policy=NO_CACHE, persist_result=False)
def dvc_stage(name: str, force: bool) -> State:
    """One stage of dvc.yaml: `dvc repro --single-item`, its output in the task's log."""
    log = get_run_logger().info
    argv = [
        sys.executable,
        "-m",
        "dvc",
        "--wait-for-lock",
        "repro",
        "--single-item",
        *(["--force"] if force else []),
        name,
    ]
    # A run inside this flow has its own line here already; a view per run would be a second server.
    code, output = run_command(argv, log, environment={"GRANULAR_PREFECT": "off", "PYTHONUNBUFFERED": "1"})
    if code != 0:
        return Failed(message=_last_line(output))
    if "Running stage" in output:
        return Completed(message="ran")
    return Completed(name="Cached", message="restored" if "is cached" in output else "up to date")


@flow(name="repro", persist_result=False)
def repro(targets: list[str] | None = None, force: bool = False) -> State:
    """The pipeline as `dvc repro` runs it, stage by stage in the order of the graph.

    Args:
        targets: DVC stages (`align@g2rpo`, or `align` for all of them) to bring up to date with everything they
            need; none means all.
        force: run exactly the targets again, even if nothing changed.
    """
    os.chdir(PROJECT)
    states: dict[str, State] = {}
    for name, producers in graph(targets or []).items():
        forced = force and bool(targets) and name.split("@")[0] in {target.split("@")[0] for target in targets or []}
        state = dvc_stage(name, forced, wait_for=[states[p] for p in producers if p in states], return_state=True)
        states[name] = state
        if not state.is_completed():
            return Failed(message=f"{name}: {state.message}")
    cached = sum(state.name == "Cached" for state in states.values())
    return Completed(message=f"{len(states) - cached} stages ran, {cached} were up to date")


def graph(targets: list[str]) -> dict[str, list[str]]:
    """DVC's stages in an order that respects the graph: name → the stages it reads from."""
    from dvc.repo import Repo
    from networkx import topological_sort

    # The only use of DVC's Python API, which is not a stable one; tests/pipeline/test_flows.py pins it.
    with Repo(str(PROJECT)) as repo:
        whole = repo.index.graph  # an edge leads from a stage to the one it reads from
        wanted = {stage for target in targets for stage in repo.stage.collect(target, with_deps=True, graph=whole)}
        chosen = whole.subgraph(wanted) if targets else whole
        order = list(topological_sort(chosen.reverse()))
        return {stage.addressing: [other.addressing for other in chosen.successors(stage)] for stage in order}


def _last_line(output: str) -> str:
    lines = [line for line in re.sub(r"\x1b\[[0-9;]*m", "", output).splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    return (errors or lines or ["no output"])[0]


def _mirror(run: str) -> None:
    """The child process of `pipeline/view.py`: events come in on stdin until it closes."""
    global _EVENTS
    # The events get a descriptor of their own, so that no server started from here can read them away.
    stream = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if not os.environ.get("PREFECT_API_URL"):
        # A server of our own would compete with the run for the processor.
        os.nice(19)
    _EVENTS = (json.loads(line) for line in stream if line.strip())
    align(run, return_state=True)


def _offer() -> None:
    """Keep `repro` on offer: the pages show it under Deployments, with a form, a Run and a Cancel button."""
    repro.serve(name="project", description="Brings the whole project up to date, as `dvc repro` does.", limit=1)


def _repro(*arguments: str) -> None:
    targets = [one for one in arguments if one != "--force"]
    state = repro(targets, "--force" in arguments, return_state=True)
    print(f"{'repro' if state.is_completed() else 'error'}: {state.message}", file=sys.stderr)
    sys.exit(0 if state.is_completed() else 1)


if __name__ == "__main__":
    {"mirror": _mirror, "repro": _repro, "offer": _offer}[sys.argv[1]](*sys.argv[2:])
