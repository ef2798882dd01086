"""Curves: every round once, whatever stopped in between; no tracker costs a run anything; every figure documented."""

from __future__ import annotations

import json
import re
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.events import Event
from pipeline.params import TrackSection, load_params
from pipeline.tracking import Curve, names, tracked
from stages.core.errors import GranularError
from tests.pipeline.fake_world import FakeWorker, World, make_run

ROOT = Path(__file__).resolve().parents[2]


class Watched(World):
    """A fake project whose validations hold pictures, and whose runs are tracked as `granular align` does it."""

    def align(self, rounds: int = 4, *, to: str = "tensorboard", **options: Any) -> Any:
        run = make_run(self.folder, rounds)
        with tracked(TrackSection(to=to, project="shapes", tags=("lab",)), run, self.folder / "runs/toy") as track:  # type: ignore[arg-type]

            class Both(list):
                def append(self, event: Event) -> None:
                    super().append(event)
                    track(event)

            self.events = Both()
            return super().align(rounds, **options)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    plain = FakeWorker._evaluate

    def with_pictures(self: FakeWorker, inputs: Any, spec: Any, out: Path) -> None:
        plain(self, inputs, spec, out)
        images = np.zeros((len(spec.prompts), spec.noises, 16, 16, 3), np.uint8)
        texts = [f"prompt {one}" for one in spec.prompts]
        np.savez(out / "images.npz", prompt=spec.prompts, noise=range(spec.noises), text=texts, images=images)

    monkeypatch.setattr(FakeWorker, "_evaluate", with_pictures)
    return Watched(tmp_path)


def scalars(world: World) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself reads from the run's folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(world.folder / "runs/toy/tensorboard")).Reload()
    return {tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


# --- TensorBoard -------------------------------------------------------------------------------------------------


def test_tensorboard_shows_every_round_and_the_pictures_of_validations(world: Watched) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    world.align(3)
    curves = scalars(world)
    assert [step for step, _ in curves["reward/clip"]] == [1, 2, 3]
    assert [step for step, _ in curves["validation/other"]] == [0, 2, 3]
    rounds = {event.round: event.figures for event in world.events if event.kind == "round"}
    assert curves["reward/clip"][1][1] == pytest.approx(rounds[2]["reward.clip"])
    found = EventAccumulator(str(world.folder / "runs/toy/tensorboard")).Reload()
    assert [one.step for one in found.Images("validation images")] == [0, 2, 3]
    assert "plan/text_summary" in found.Tags()["tensors"]


def test_a_run_that_goes_on_continues_its_curve(world: Watched) -> None:
    world.align(2)
    world.align(2)
    world.align(5)
    curves = scalars(world)
    assert [step for step, _ in curves["reward/clip"]] == [1, 2, 3, 4, 5]
    # Two of the first plan: its end was validated, and so was round 2 of the second.
    assert [step for step, _ in curves["validation/clip"]] == [0, 2, 4, 5]


def test_a_killed_run_repeats_no_point_of_its_curve(world: Watched) -> None:
    world.align(3)
    # Killed between the point of round 3 and the note of it.
    file = world.folder / "runs/toy/track.json"
    state = json.loads(file.read_text())
    del state["tensorboard"]["rounds"]["3"]
    file.write_text(json.dumps(state))
    world.align(4)
    assert [step for step, _ in scalars(world)["reward/clip"]] == [1, 2, 3, 4]


def test_a_run_that_was_tracked_late_is_caught_up(world: Watched) -> None:
    world.align(3, to="none")
    world.align(3)
    assert world.worker.calls == []
    assert [step for step, _ in scalars(world)["reward/clip"]] == [1, 2, 3]


def test_rounds_that_came_out_different_replace_the_rest_of_the_curve(world: Watched) -> None:
    world.align(3)
    before = scalars(world)["reward/clip"]
    world.align(3, worker=FakeWorker(codes={"rollout": "new"}, drift=0.5), redo=True)
    after = scalars(world)["reward/clip"]
    assert [step for step, _ in after] == [1, 2, 3] and after != before


# --- Weights & Biases, offline -----------------------------------------------------------------------------------


def records(file: Path) -> Iterator[Any]:
    """The records of a .wandb file: LevelDB's log format (blocks of 32 KiB, records of 7 bytes' head) of protobufs."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a record in one piece, or its last piece
            record = Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def kept(world: World) -> list[dict[str, Any]]:
    """One entry per session, oldest first: id, project, tags, and history as {step: {name: value}}.

    A process of W&B's own writes the files, and may still be at it.
    """
    before, now = None, read_sessions(world)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (now != before or not all("id" in one for one in now)):
        time.sleep(1)
        before, now = now, read_sessions(world)
    return now


def read_sessions(world: World) -> list[dict[str, Any]]:
    """What the files of all sessions hold now."""
    sessions = []
    for file in sorted((world.folder / "runs/toy/wandb").glob("offline-run-*/*.wandb")):
        one: dict[str, Any] = {"history": {}}
        for record in records(file):
            if record.HasField("run"):
                one |= {"id": record.run.run_id, "project": record.run.project, "tags": list(record.run.tags)}
            elif record.HasField("history"):
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                one["history"][record.history.step.num] = items
        sessions.append(one)
    return sessions


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    for name in ("WANDB_PROJECT", "WANDB_DIR", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
def test_wandb_offline_keeps_the_curve_under_one_id_over_every_session(world: Watched) -> None:
    world.align(2, to="wandb")
    world.align(4, to="wandb")
    first, second = kept(world)
    assert (first["id"], first["project"], first["tags"]) == (second["id"], "shapes", ["lab"])
    assert first["id"] == json.loads((world.folder / "runs/toy/track.json").read_text())["wandb"]["id"]
    assert [sorted(one["history"]) for one in (first, second)] == [[0, 1, 2], [3, 4]]
    rounds = {event.round: event.figures for event in world.events if event.kind == "round"}
    assert json.loads(second["history"][3]["reward/clip"]) == pytest.approx(rounds[3]["reward.clip"])
    # Round 4 was validated: a table with a row per image.
    assert json.loads(second["history"][4]["validation images/nrows"]) == 4
    assert not any("validation images" in name for name in second["history"][3])


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
def test_a_run_that_came_out_different_is_another_run_of_wandb_with_all_its_rounds(world: Watched) -> None:
    world.align(2, to="wandb")
    world.align(2, to="wandb", worker=FakeWorker(codes={"rollout": "new"}, drift=0.5), redo=True)
    sessions = kept(world)
    assert sessions[0]["id"] != sessions[-1]["id"]
    assert sorted(step for one in sessions if one["id"] == sessions[-1]["id"] for step in one["history"]) == [0, 1, 2]


# --- what may go wrong -------------------------------------------------------------------------------------------


def test_tracking_changes_no_result(world: Watched, tmp_path: Path) -> None:
    world.align(3, to="none")
    plain = world.outputs()
    other = Watched(tmp_path / "other")
    other.align(3)
    assert other.outputs() == plain


def test_a_tracker_that_fails_says_so_once_and_the_run_goes_on(
    world: Watched, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*arguments: Any) -> None:
        raise ConnectionError("no route to host\nand a long story")

    with monkeypatch.context() as patch:
        patch.setattr("pipeline.tracking.TensorBoard.log", fails)
        world.align(3)
    said = [line for line in capsys.readouterr().err.splitlines() if "no route" in line]
    assert said == ["toy: tensorboard failed (no route to host); the run goes on, and its next call catches up"]
    world.align(3)
    assert [step for step, _ in scalars(world)["reward/clip"]] == [1, 2, 3]


def test_a_library_that_is_not_installed_is_one_sentence_before_any_work(
    world: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.tracking.find_spec", lambda name: None)
    with pytest.raises(GranularError, match=r"track.to: wandb is not installed.*\.\[tracking\]"):
        world.align(2, to="wandb")


def test_a_mistyped_place_is_refused_with_what_is_allowed() -> None:
    with pytest.raises(GranularError, match=r"track\.to.*tensorboard"):
        load_params(ROOT / "params.yaml", ["track.to=tensorbord"])


def test_figures_that_measured_nothing_are_no_points() -> None:
    assert names({"reward.a.b": 1, "loss": None, "groups": 3}) == {"reward/a.b": 1.0, "groups": 3.0}


def test_a_curve_hears_rounds_only(tmp_path: Path) -> None:
    class Nothing:
        name, rewinds = "nothing", True

    curve = Curve(Nothing(), tmp_path / "track.json")  # type: ignore[arg-type]
    curve.hear(Event(kind="stage", run="toy", round=1, stage="update", status="done", seconds=1.0))
    curve.hear(Event(kind="round", run="toy", round=0, status="cached"))
    curve.close()
    assert not (tmp_path / "track.json").exists()


@contextmanager
def listening(said: list[Any]) -> Iterator[Any]:
    yield said.append


def test_align_of_the_command_line_tracks_what_params_ask_for(
    tmp_path: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    heard: list[Any] = []
    text = (project / "params.yaml").read_text(encoding="utf-8").replace("to: none", "to: tensorboard", 1)
    (tmp_path / "params.yaml").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pipeline.variations.require_weights", lambda *_: None)
    monkeypatch.setattr(
        "pipeline.tracking.tracked", lambda spec, run, folder: asked.append((spec.to, folder)) or listening(heard)
    )
    monkeypatch.setattr("pipeline.rounds.align", lambda run, store, worker, emit, **_: emit("an event"))
    from pipeline.variations import align_runs

    align_runs("g2rpo", [], "1,2", None, redo=False)
    assert asked == [("tensorboard", Path("runs/g2rpo-seed1")), ("tensorboard", Path("runs/g2rpo-seed2"))]
    assert heard == ["an event", "an event"]


# --- docs/metrics.md ---------------------------------------------------------------------------------------------


def documented(heading: str) -> list[str]:
    """Names in the table under a heading of docs/metrics.md; `<…>` in a name stands for anything."""
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    part = re.split(r"^## ", text, flags=re.MULTILINE)
    (section,) = [one for one in part if one.startswith(heading)]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def fits(name: str, pattern: str) -> bool:
    parts = re.split(r"<[^>]+>", pattern)
    return re.fullmatch(r"[^/]+".join(map(re.escape, parts)), name) is not None


def test_every_figure_of_a_round_is_documented_in_one_line_and_every_line_is_a_figure(world: Watched) -> None:
    world.align(2, to="none")
    logged = {name for event in world.events for name in event.figures}
    patterns = documented("Figures of a round")
    assert sorted(logged) == sorted(name for name in logged if any(fits(name, one) for one in patterns))
    assert [one for one in patterns if not any(fits(name, one) for name in logged)] == []
    assert len(patterns) == len(set(patterns))


def test_every_number_of_the_report_is_documented_and_every_line_is_a_number(project: Path) -> None:
    numbers = json.loads((project / "reports/metrics.json").read_text(encoding="utf-8"))
    patterns = documented("Numbers of the report")
    assert [name for name in numbers if not any(fits(name, one) for one in patterns)] == []
    assert [one for one in patterns if not any(fits(name, one) for name in numbers)] == []
