"""What a person sees of a run: its present, its past, what to look at, and whether its process still lives."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline import overview
from pipeline.alarms import alarms
from pipeline.params import load_params
from pipeline.status import process_started
from stages.core.errors import GranularError
from tests.pipeline.fake_world import FakeWorker, World

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def world(tmp_path: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A project with the shipped params.yaml, as the current folder."""
    (tmp_path / "params.yaml").write_bytes((project / "params.yaml").read_bytes())
    monkeypatch.chdir(tmp_path)
    return World(tmp_path)


def status(run: str = "toy") -> dict[str, Any]:
    return json.loads(Path(f"runs/{run}/status.json").read_text(encoding="utf-8"))


def log(run: str = "toy") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(f"runs/{run}/log.jsonl").read_text(encoding="utf-8").splitlines()]


def line(run: str) -> overview.Line:
    (found,) = [one for one in overview.runs(load_params()) if one.run == run]
    return found


# --- what a run writes -------------------------------------------------------------------------------------------


def test_status_tells_where_a_run_is_how_fast_and_what_it_earned(world: World) -> None:
    result = world.align(2)
    now = status()
    assert (now["state"], now["round"], now["rounds"], now["pid"]) == ("finished", 2, 2, os.getpid())
    assert now["rate"] > 0 and now["rounds_per_hour"] > 0 and now["eta"] is None
    row = json.loads((result.rounds[-1].rewards["clip"].published.folder / "summary.json").read_text())
    assert now["rewards"]["clip"] == row["mean"]


def test_the_log_holds_every_stage_with_its_time_place_and_length(world: World) -> None:
    world.align(2)
    said = log()
    keys = {"time", "run", "round", "stage", "event", "seconds", "host", "pid", "message"}
    assert all(keys <= set(one) <= keys | {"figures"} for one in said)
    done = [(one["round"], one["stage"]) for one in said if one["event"] == "stage done"]
    calls = ["rollout", "reward.clip", "reward.oracle", "advantage", "update"]
    assert [one for one in done if one[1] != "evaluate"] == [(n, call) for n in (1, 2) for call in calls]
    assert [one["round"] for one in said if one["event"] == "round done"] == [0, 1, 2]
    assert [said[0]["event"], said[-1]["event"]] == ["run started", "run done"]
    assert sorted(one["time"] for one in said) == [one["time"] for one in said]
    assert {(one["host"], one["pid"]) for one in said} == {(socket.gethostname(), os.getpid())}


def test_a_run_that_goes_on_appends_to_its_log_and_repeats_nothing_it_found(world: World) -> None:
    world.align(2)
    before = log()
    world.align(3)
    after = log()
    assert after[: len(before)] == before
    assert {one["round"] for one in after[len(before) :] if one["event"] == "stage done"} == {3}


def test_the_log_says_why_a_run_stopped(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> None:
        raise GranularError("scorer clip: 3 of 4 images have no reward.")

    monkeypatch.setattr(FakeWorker, "_advantage", fails)
    with pytest.raises(GranularError):
        world.align(2, name="g2rpo")
    events = {one["event"]: one["message"] for one in log("g2rpo")}
    assert events["stage failed"] == events["run failed"] == "scorer clip: 3 of 4 images have no reward."
    assert "stopped" in line("g2rpo").state and "3 of 4 images" in line("g2rpo").state


# --- alarms ------------------------------------------------------------------------------------------------------

CALM = {"reward.clip": 0.5, "constant_groups": 0, "groups": 8, "clip_fraction": 0.1, "grad_norm": 1.0}


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({"reward.clip": None}, "no image has a reward from clip"),
        ({"constant_groups": 6}, "75% of groups have equal rewards"),
        ({"clip_fraction": 0.8}, "80% of update points are clipped"),
        ({"grad_norm": 30.0}, "the gradient is 30 times its usual size"),
    ],
)
def test_an_alarm_says_what_is_unusual_and_nothing_else(now: dict[str, Any], said: str) -> None:
    calm = [CALM] * 6
    assert alarms(calm, {"clip": 1.0}) == []
    assert alarms([*calm, {**CALM, **now}], {"clip": 1.0}) == [said]


def test_a_method_without_ratios_alarms_nobody() -> None:
    assert alarms([{"round": 1, "reward.clip": 0.5, "clip_fraction": None, "grad_norm": None}], {"clip": 1.0}) == []
    assert alarms([], {"clip": 1.0}) == []


def validated(*rows: tuple[float, float]) -> list[dict[str, Any]]:
    return [{**CALM, "validation.clip": clip, "validation.other": other} for clip, other in rows]


def test_a_trained_reward_that_rises_while_a_watching_one_falls_is_an_alarm_after_two_validations() -> None:
    trained = {"clip": 1.0}
    said = ["trained rewards rise while other validates below the start"]
    assert alarms(validated((0.5, 0.5), (0.6, 0.4)), trained) == []
    assert alarms(validated((0.5, 0.5), (0.6, 0.6), (0.7, 0.4)), trained) == []
    assert alarms(validated((0.5, 0.5), (0.6, 0.4), (0.7, 0.4)), trained) == said
    # A weight below 0 turns the aim round; a round without a validation repeats no alarm.
    assert alarms(validated((0.5, 0.5), (0.6, 0.6), (0.7, 0.7)), {"clip": -1.0}) == [
        "every trained reward validates below the start"
    ]
    assert alarms([*validated((0.5, 0.5), (0.6, 0.4), (0.7, 0.4)), CALM], trained) == []


def test_an_alarm_reaches_the_status_and_the_person_at_the_screen(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pipeline.status.alarms", lambda rows, trained: [f"{len(rows)} rows"])
    world.align(2, name="g2rpo")
    assert status("g2rpo")["alarms"] == ["3 rows"]  # the validated start, and two rounds
    assert "g2rpo round 2: look at this: 3 rows" in capsys.readouterr().err
    assert "look at g2rpo: 3 rows" in "\n".join(overview.lines(load_params()))


# --- a run in another process ------------------------------------------------------------------------------------


@pytest.fixture
def other(world: World) -> Iterator[Callable[[], subprocess.Popen]]:
    """Starts a run of the name g2rpo in a process of its own; returns when its second round is under way."""
    script = (
        "import sys; from pathlib import Path; from tests.pipeline.fake_world import FakeWorker, World\n"
        f"World(Path({str(world.folder)!r})).align(500, FakeWorker(delay=0.05), name='g2rpo')"
    )
    started: list[subprocess.Popen] = []

    def start() -> subprocess.Popen:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "GRANULAR_PREFECT": "off"}
        started.append(subprocess.Popen([sys.executable, "-c", script], env=environment, stderr=subprocess.DEVNULL))
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if Path("runs/g2rpo/status.json").is_file() and status("g2rpo")["round"] >= 2:
                return started[-1]
            assert started[-1].poll() is None
            time.sleep(0.05)
        raise AssertionError("no second round")

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_status_of_a_run_in_another_process_and_after_it_was_killed(other: Callable[[], subprocess.Popen]) -> None:
    process = other()
    seen = line("g2rpo")
    assert seen.state.startswith("round ") and "evaluations/s" in seen.rate and "rounds/h" in seen.rate
    assert seen.left != "-" and "clip" in seen.rewards and seen.rounds.partition("/")[0] != "0"
    process.kill()
    process.wait()
    gone = line("g2rpo")
    assert gone.state.startswith("gone: its process ended without a word") and gone.left == "-"


@pytest.mark.slow
def test_watch_shows_a_running_run_and_ctrl_c_leaves_it_in_peace(other: Callable[[], subprocess.Popen]) -> None:
    import pty

    process = other()
    screen, terminal = pty.openpty()
    watching = subprocess.Popen(
        [sys.executable, "-m", "pipeline.cli", "status", "--watch"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "TERM": "xterm"},
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    shown, looks = b"", 0
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and looks < 2:
        shown += os.read(screen, 65536)
        looks = shown.count(b"Ctrl-C leaves")
    watching.send_signal(signal.SIGINT)
    while watching.poll() is None:
        try:
            shown += os.read(screen, 65536)
        except OSError:  # the terminal closes with its last user
            break
    assert looks >= 2 and watching.wait() == 0
    assert b"g2rpo" in shown and b"evaluations/s" in shown and b"Traceback" not in shown
    assert process.poll() is None


def test_a_process_number_given_away_again_is_not_taken_for_the_run(world: World) -> None:
    world.align(1, name="g2rpo")
    born = process_started(os.getpid())
    now = {**status("g2rpo"), "state": "running"}
    assert overview.state(now, time.time()).startswith("round 1")
    assert overview.state({**now, "pid_started": born - 3600}, time.time()).startswith("gone")


def test_a_run_on_another_host_is_gone_when_its_heartbeat_stops(world: World) -> None:
    world.align(1, name="g2rpo")
    now = {**status("g2rpo"), "state": "running", "host": "node-7"}
    assert overview.state(now, time.time() - 5).startswith("round 1")
    assert overview.state(now, time.time() - overview.SILENT - 5).startswith("gone on node-7")


def test_a_living_run_touches_its_status_file(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.status import Journal
    from tests.pipeline.fake_world import make_run

    monkeypatch.setattr("pipeline.status.HEARTBEAT", 0.01)
    file = Path("runs/toy/status.json")
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    os.utime(file, (0, 0))
    with Journal(make_run(world.folder), Path(), lambda event: None).beating():
        deadline = time.monotonic() + 30
        while file.stat().st_mtime == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert file.stat().st_mtime > 0
