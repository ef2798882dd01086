"""Prefect is a view: it shows what happens, and nothing that becomes of it reaches the run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline import view
from pipeline.children import child, run_command
from pipeline.events import Event
from stages.core.spec import read_yaml

ROOT = Path(__file__).resolve().parents[2]
PYTHON = sys.executable


def gone(pid: int, within: float = 10) -> bool:
    """Whether a process ends soon (a signal takes a moment to be obeyed)."""
    deadline = time.monotonic() + within
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def stages(rounds: int, cached: int = 0) -> Iterator[Event]:
    """A run's events: the first `cached` rounds were found."""
    yield Event(kind="run", run="toy", round=0, status="started")
    for number in range(1, rounds + 1):
        for name in ("rollout", "reward.hps", "advantage", "update"):
            if number <= cached:
                yield Event(kind="stage", run="toy", round=number, stage=name, status="cached")
                continue
            yield Event(kind="stage", run="toy", round=number, stage=name, status="started")
            yield Event(kind="stage", run="toy", round=number, stage=name, status="done", detail="0.1 s")
        yield Event(kind="round", run="toy", round=number, status="done", detail=f"round {number} of {rounds}")
    yield Event(kind="run", run="toy", round=rounds, status="done", detail="all of it")


# --- children ---------------------------------------------------------------------------------------------------


def test_a_child_is_ended_with_its_own_children(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    script = (
        "import subprocess, sys, time\n"
        "one = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(note)!r}, 'w').write(str(one.pid)); time.sleep(60)"
    )
    with pytest.raises(KeyboardInterrupt), child([PYTHON, "-c", script], grace=5) as process:
        while not note.exists() or not note.read_text():
            time.sleep(0.05)
        raise KeyboardInterrupt
    assert not alive(process.pid)
    assert gone(int(note.read_text()))


def test_a_child_that_ignores_sigterm_is_killed() -> None:
    script = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    )
    with child([PYTHON, "-c", script], grace=0.3, stdout=subprocess.PIPE) as process:
        process.stdout.readline()  # type: ignore[union-attr]
    assert process.returncode == -signal.SIGKILL


def test_a_child_is_asked_before_it_is_killed(tmp_path: Path) -> None:
    note = tmp_path / "saved"
    script = (
        "import pathlib, signal, sys, time\n"
        f"def save(*_): pathlib.Path({str(note)!r}).write_text('saved'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save); print('up', flush=True); time.sleep(60)"
    )
    with child([PYTHON, "-c", script], grace=20, stdout=subprocess.PIPE) as process:
        process.stdout.readline()  # type: ignore[union-attr]
    assert process.returncode == 0 and note.read_text() == "saved"


def test_a_command_hands_over_its_lines_and_its_exit_code() -> None:
    heard: list[str] = []
    script = "import sys; print('one'); print('two', file=sys.stderr); sys.exit(3)"
    code, output = run_command([PYTHON, "-u", "-c", script], heard.append)
    assert (code, heard, output) == (3, ["one", "two"], "one\ntwo\n")


# --- the view without Prefect ------------------------------------------------------------------------------------


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a Python script in the place of the Prefect child and shortens its grace."""
    monkeypatch.setenv("GRANULAR_PREFECT", "on")
    monkeypatch.setattr(view, "GRACE", 1.0)
    started: list[subprocess.Popen] = []

    def stand_in(script: str) -> list[subprocess.Popen]:
        def start(argv: list[str], environment: Any = None, **options: Any) -> subprocess.Popen:
            started.append(subprocess.Popen([PYTHON, "-c", script], start_new_session=True, **options))
            return started[-1]

        monkeypatch.setattr(view, "start", start)
        return started

    return stand_in


def test_off_means_no_child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GRANULAR_PREFECT", "off")
    monkeypatch.setattr(view, "start", None)
    with view.shown("toy", tmp_path, tmp_path / "log") as emit:
        for event in stages(2):
            emit(event)


def test_a_run_that_finds_everything_starts_no_temporary_server(mirror: Any, tmp_path: Path) -> None:
    started = mirror("")
    with view.shown("toy", tmp_path, tmp_path / "log") as emit:
        for event in stages(3, cached=3):
            emit(event)
    assert started == []


def test_every_event_arrives_in_order_also_those_before_the_child_started(mirror: Any, tmp_path: Path) -> None:
    out = tmp_path / "heard"
    mirror(f"import sys; open({str(out)!r}, 'w').write(sys.stdin.read())")
    with view.shown("toy", tmp_path, tmp_path / "log") as emit:
        for event in stages(4, cached=2):
            emit(event)
    heard = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(one["kind"], one["round"], one["stage"], one["status"]) for one in heard] == [
        (one.kind, one.round, one.stage, one.status) for one in stages(4, cached=2)
    ]


@pytest.mark.parametrize("script", ["import time; time.sleep(60)", "raise SystemExit(1)"], ids=["hangs", "dies"])
def test_a_child_that_hangs_or_dies_delays_no_event_and_holds_up_no_end(
    mirror: Any, tmp_path: Path, script: str
) -> None:
    started = mirror(script)
    with view.shown("toy", tmp_path, tmp_path / "log") as emit:
        began = time.monotonic()
        for event in stages(2000):  # far more than a pipe holds
            emit(event)
        assert time.monotonic() - began < 45  # a hang would be for ever
        ended = time.monotonic()
    assert time.monotonic() - ended < view.GRACE + 30
    assert not alive(started[0].pid)


def test_an_error_of_the_run_comes_through(mirror: Any, tmp_path: Path) -> None:
    mirror("import sys; sys.stdin.read()")
    with pytest.raises(ValueError, match="gate"), view.shown("toy", tmp_path, tmp_path / "log") as emit:
        emit(Event(kind="stage", run="toy", round=1, stage="rollout", status="started"))
        raise ValueError("gate")


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PREFECT_HOME", "/elsewhere")
    monkeypatch.setenv("PREFECT_UI_API_URL", "")
    found = view.environment(tmp_path)
    assert (found["PREFECT_HOME"], found["PREFECT_UI_API_URL"]) == ("/elsewhere", "/api")
    assert found["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false" and found["DO_NOT_TRACK"] == "1"


# --- DVC's graph -------------------------------------------------------------------------------------------------


def test_the_flow_sees_dvcs_graph_in_an_order_that_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pins the one use of DVC's Python API."""
    from pipeline.graph_flows import STUDY, graph

    monkeypatch.chdir(ROOT)
    found = graph([])
    order = list(found)
    assert all(order.index(producer) < order.index(name) for name, producers in found.items() for producer in producers)
    runs = list(read_yaml(ROOT / "params.yaml")["runs"])
    assert {name for name in order if name.startswith("align@")} == {f"align@{run}" for run in runs}
    assert "prompts" in found["embed"] and f"align@{runs[0]}" in found[f"evaluate@{runs[0]}"]
    part = graph(["embed"])
    assert list(part)[-1] == "embed" and "report" not in part and set(part) == {"code", "lab", "prompts", "embed"}
    # Without targets it is `dvc repro` without targets: the study's graph is its own.
    assert not [name for name in found if name.startswith("reports/")]
    studied = graph([STUDY])
    assert {"embed", "evaluate_base", f"{STUDY}:table"} <= set(studied) and "report" not in studied
