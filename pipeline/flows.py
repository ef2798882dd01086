"""Prefect's side of the pipeline: flows that show what happens, and never decide whether it does.

    align      a run's rounds and their stages; the run is a child process (`pipeline/streams.py`) that tells events
    mirror     the same for a run that somebody started in a shell (`pipeline/view.py`)

Prefect's own result cache is off everywhere (NO_CACHE, nothing persisted): it returned stale results when a helper
function changed. This module is imported by processes of its own only; nothing else imports Prefect.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import task_run
from prefect.states import Completed, Crashed, Failed, State

from pipeline.exhibits import publish
from pipeline.forms import Override, RoundNumber, RunName, StageName, align_arguments, device
from pipeline.gpus import reserved
from pipeline.healing import HEALING
from pipeline.streams import Computed, Mirrored
from stages.core.spec import read_json

# The event stream of this process. No parameter: Prefect looks into parameters, which would consume it.
_STREAM: Any = None


def _task_name() -> str:
    event = task_run.parameters["event"]
    return f"round {event['round']} · {event['stage']}"


@task(task_run_name=_task_name, cache_policy=NO_CACHE, persist_result=False, **HEALING)
def stage(event: dict[str, Any]) -> State:
    """One stage of one round: reads the stream to the event that ends it, so its bar has the stage's true length."""
    now: dict[str, Any] | None = event
    if task_run.run_count > 1:
        now = _STREAM.again(event)
    while now is not None and now["status"] == "started":
        while (now := _STREAM.next()) is not None and now["kind"] != "stage":
            pass
    if now is None and _STREAM.code is None:
        return Crashed(message="the run ended in the middle of this stage")
    if now is None or now["status"] == "failed":
        detail = now["detail"] if now else "the run ended in the middle of this stage"
        return Failed(message=f"{detail}{_exit()}")
    return Completed(name="Cached" if now["status"] == "cached" else None, message=now["detail"] or None)


def _exit() -> str:
    """How the run's process ended, where it is ours: what is left of its events says nothing new."""
    while isinstance(_STREAM, Computed) and _STREAM.next() is not None:
        pass
    return "" if _STREAM.code is None else f" (exited with {_STREAM.code})"


def _show(run: str, every_round: bool) -> State:
    """Turn the stream into tasks and artifacts; ends as the run says it ended."""
    ended: State | None = None
    while (event := _STREAM.next()) is not None:
        if event["kind"] == "stage":
            # A task name per stage, so that the pages can filter by it.
            state = stage.with_options(name=event["stage"].replace(".", "-"))(event, return_state=True)
            if not state.is_completed():
                ended = Failed(message=f"round {event['round']}, {event['stage']}: {state.message}")
        elif event["kind"] == "run" and event["status"] == "failed":
            ended = Failed(message=event["detail"] or None)
        elif event["kind"] == "run" and event["status"] == "done":
            ended = Completed(message=event["detail"] or None)
        elif event["kind"] == "round":
            if event["detail"]:
                get_run_logger().info(event["detail"])
            if every_round or event["status"] != "cached":
                publish(run, event["round"], _rounds(run), Path.cwd())
    if _STREAM.code and not (ended and ended.is_failed()):
        return Failed(message=f"{_STREAM.last} (exited with {_STREAM.code})")
    return ended or Crashed(message="the run ended without saying how")


def _rounds(run: str) -> int:
    """How many rounds a run has in all, by its status file; 0 where that is not there."""
    status = Path("runs", run, "status.json")
    return read_json(status)["rounds"] if status.is_file() else 0


def _run_name() -> str:
    from prefect.runtime import flow_run

    return flow_run.parameters.get("name") or flow_run.parameters["run"]


@flow(name="align", flow_run_name=_run_name, persist_result=False)
def align(
    run: RunName,
    name: str = "",
    overrides: list[Override] = [],  # noqa: B006  Prefect shows the default in the form, and copies it
    start_round: RoundNumber = 1,
    start_stage: StageName = "rollout",
    force: bool = False,
    redo: bool = False,
) -> State:
    """Train a run, or go on where it stopped.

    Args:
        run: A run of params.yaml.
        name: What a variation is called; needed with overrides.
        overrides: KEY=VALUE each, of the run (optimizer.lr=2e-4) or of the file (policy.device=cuda).
        start_round: Round to begin at, counted from 1; the rounds before must be there.
        start_stage: Stage of that round to begin at.
        force: Compute everything from there on again; otherwise what is there is found, not computed.
        redo: Compute again what older code made, instead of stopping there.
    """
    global _STREAM
    arguments = align_arguments(run, name, overrides, start_round, start_stage, force, redo)
    log = get_run_logger()
    log.info("granular %s", " ".join(arguments))
    with reserved([device(run, overrides)]), Computed(arguments, log.info) as _STREAM:
        return _show(name or run, every_round=True)


@flow(name="align", flow_run_name="{run}", persist_result=False)
def mirror(run: str) -> State:
    """A run that was started in a shell, event by event."""
    return _show(run, every_round=False)


def _mirror(run: str, project: str) -> None:
    """The child process of `pipeline/view.py`: events come in on stdin until it closes."""
    global _STREAM
    os.chdir(project)
    # The events get a descriptor of their own, so that no server started from here can read them away.
    lines = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if not os.environ.get("PREFECT_API_URL"):
        # A server of our own would compete with the run for the processor.
        os.nice(19)
    _STREAM = Mirrored(lines)
    mirror(run, return_state=True)


if __name__ == "__main__":
    _mirror(*sys.argv[1:])
