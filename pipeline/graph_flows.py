"""DVC's graph as Prefect flows: one task per DVC stage. DVC decides what runs; Prefect shows, schedules and cancels.

repro      the whole of dvc.yaml, or some stages with what they need
study      the graph of the study with what it needs
evaluate   finished policies; report: tables, figures and page
"""

from __future__ import annotations

import re
import sys
from typing import Any, Literal

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.states import Completed, Failed, State

from pipeline.children import run_command
from pipeline.forms import device
from pipeline.gpus import reserved
from pipeline.healing import HEALING
from pipeline.studies import METHODS, NAMES

STUDY = "reports/methods/dvc.yaml"
StudyName: Any = Literal[(METHODS, *NAMES)]


@task(task_run_name="{name}", cache_policy=NO_CACHE, persist_result=False, **HEALING)
def dvc_stage(name: str, force: bool = False) -> State:
    """One stage of dvc.yaml: `dvc repro --single-item`, its output in the task's log."""
    forced = ["--force"] if force else []
    argv = [sys.executable, "-m", "dvc", "--wait-for-lock", "repro", "--single-item", *forced, name]
    code, output = _logged(argv, name)
    if code != 0:
        return Failed(message=_last_line(output))
    if "Running stage" in output:
        return Completed(message="ran")
    restored = "is cached" in output
    return Completed(name="Cached" if restored else "Skipped", message="restored" if restored else "up to date")


@task(task_run_name="{command} {name}", cache_policy=NO_CACHE, persist_result=False, **HEALING)
def command(command: str, name: str) -> State:
    """`granular COMMAND NAME`, for what DVC's graph does not know; it finds in the store what was done before."""
    code, output = _logged([sys.executable, "-m", "pipeline.cli", command, name], "evaluate")
    return Completed() if code == 0 else Failed(message=f"{_last_line(output)} (exited with {code})")


def _logged(argv: list[str], stage: str) -> tuple[int, str]:
    # A run inside this flow has its own line here already; a view per run would be a second server.
    environment = {"GRANULAR_PREFECT": "off", "PYTHONUNBUFFERED": "1"}
    kind = stage.rpartition(":")[2].partition("@")[0]
    models = kind.startswith(("embed", "align", "evaluate"))
    with reserved([device()] if models else []):
        return run_command(argv, get_run_logger().info, environment=environment)


@flow(name="repro", persist_result=False)
def repro(targets: list[str] = [], force: bool = False) -> State:  # noqa: B006  the form's default
    """The pipeline as `dvc repro` runs it, stage by stage in the order of the graph.

    Args:
        targets: DVC stages (`align@g2rpo`, or `align` for all of them) to bring up to date with everything they
            need; none means all.
        force: run exactly the targets again, even if nothing changed.
    """
    return _graph_of(targets, force)


@flow(name="study", persist_result=False)
def study(name: StudyName = METHODS) -> State:
    """Answer a question about methods on the lab.

    Args:
        name: `methods` compares every method at one budget, as `make study` does; `granular study` lists the others.
    """
    if name == METHODS:
        return _graph_of([STUDY], False)
    return command("study", name, return_state=True)


@flow(name="report", persist_result=False)
def report() -> State:
    """Tables, figures and page, if anything they are made from has changed."""
    return _in_order({"code": [], "report": ["code"]}, ())


@flow(name="evaluate", persist_result=False)
def evaluate(policies: list[str] = []) -> State:  # noqa: B006  the form's default
    """Evaluate policies on held-out prompts; what has not changed since is skipped.

    Args:
        policies: `base` or finished runs; none means `base` and every finished run of params.yaml.
    """
    from pipeline.evaluations import STUDY as STUDIED
    from pipeline.evaluations import finished_runs
    from pipeline.params import load_params
    from pipeline.run_sections import BASE

    params = load_params()
    finished = {*finished_runs(), *finished_runs(STUDIED / "runs")}
    names = policies or [BASE, *(name for name in params.runs if name in finished)]
    states = [dvc_stage("code", return_state=True)]
    for name in names if states[0].is_completed() else ():
        if name == BASE:
            states.append(dvc_stage("evaluate_base", return_state=True))
        elif name in params.runs or name in params.study:
            place = "" if name in params.runs else f"{STUDY}:"
            states.append(dvc_stage(f"{place}evaluate@{name}", return_state=True))
        else:
            states.append(command("evaluate", name, return_state=True))
    # One policy that cannot be evaluated does not keep the others from it.
    failed = [state for state in states if not state.is_completed()]
    if failed:
        return Failed(message=f"{len(failed)} of {len(states)}: {failed[0].message}")
    return _summary(states)


def _graph_of(targets: list[str], force: bool) -> State:
    kinds = {target.split("@")[0] for target in targets}
    order = graph(targets)
    return _in_order(order, [name for name in order if force and name.split("@")[0] in kinds])


def _in_order(order: dict[str, list[str]], forced: Any) -> State:
    """Stages one after the other; the first that fails ends it, since what follows reads it."""
    states: dict[str, State] = {}
    for name, producers in order.items():
        state = dvc_stage(
            name, name in forced, wait_for=[states[p] for p in producers if p in states], return_state=True
        )
        states[name] = state
        if not state.is_completed():
            return Failed(message=f"{name}: {state.message}")
    return _summary(list(states.values()))


def _summary(states: list[State]) -> State:
    cached = sum(state.name in ("Cached", "Skipped") for state in states)
    return Completed(message=f"{len(states) - cached} stages ran, {cached} were up to date")


def graph(targets: list[str]) -> dict[str, list[str]]:
    """DVC's stages in an order that respects the graph: name → the stages it reads from.

    targets: stages, or a dvc.yaml with what it needs; none means the whole of ./dvc.yaml, as for `dvc repro`.
    """
    from dvc.repo import Repo
    from networkx import topological_sort

    # The only use of DVC's Python API, which is not a stable one; tests/pipeline/test_flows.py pins it.
    with Repo() as repo:
        whole = repo.index.graph  # an edge leads from a stage to the one it reads from
        wanted = {
            stage
            for target in targets or ["dvc.yaml"]
            for stage in repo.stage.collect(target, with_deps=True, graph=whole)
        }
        chosen = whole.subgraph(wanted)
        order = list(topological_sort(chosen.reverse()))
        return {stage.addressing: [other.addressing for other in chosen.successors(stage)] for stage in order}


def _last_line(output: str) -> str:
    lines = [line for line in re.sub(r"\x1b\[[0-9;]*m", "", output).splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    return (errors or lines or ["no output"])[0]


def _repro(*arguments: str) -> None:
    targets = [one for one in arguments if one != "--force"]
    state = repro(targets, "--force" in arguments, return_state=True)
    print(f"{'repro' if state.is_completed() else 'error'}: {state.message}", file=sys.stderr)
    sys.exit(0 if state.is_completed() else 1)


if __name__ == "__main__":
    _repro(*sys.argv[1:])
