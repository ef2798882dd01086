"""Where a run begins: a round, a stage of it, and whether what is there is computed again."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.driver import Start
from stages.core.errors import GranularError
from tests.pipeline.fake_world import FakeWorker, World, digests, make_run
from tests.pipeline.test_rounds import KEEP, calls_of, without_validation


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def begin(world: World, start: Start, rounds: int = 4) -> FakeWorker:
    """The run again, in a process of its own; returns what it computed."""
    from pipeline.reuse import Store
    from pipeline.rounds import align

    worker, run = FakeWorker(), make_run(world.folder, rounds, retention=KEEP)
    store = Store(world.folder / "store")
    accepted = world.folder / "accepted-code.json"
    align(run, store, worker, world.events.append, project=world.folder, accepted=accepted, start=start)
    return worker


def test_without_force_a_start_computes_nothing_that_is_there(world: World) -> None:
    world.align(4, retention=KEEP)
    assert begin(world, Start(round=3, stage="reward")).calls == []


def test_with_force_everything_from_there_on_is_computed_and_nothing_before(world: World) -> None:
    expected = digests(world.align(4, retention=KEEP))
    worker = begin(world, Start(round=3, stage="advantage", force=True))
    assert without_validation(worker.calls) == ["advantage", "update3", *calls_of(4)]
    assert worker.calls.count("evaluate") == 1  # of round 4; the start and round 2 lie before
    assert digests(world.align(4, retention=KEEP)) == expected and world.worker.calls == []


def test_one_scorer_alone_can_be_the_start(world: World) -> None:
    world.align(2, retention=KEEP)
    worker = begin(world, Start(round=2, stage="reward.oracle", force=True), rounds=2)
    assert without_validation(worker.calls) == ["reward.oracle", "advantage", "update2"]


def test_force_from_the_first_round_computes_the_whole_run(world: World) -> None:
    world.align(2, retention=KEEP)
    worker = begin(world, Start(force=True), rounds=2)
    assert without_validation(worker.calls) == calls_of(1, 2)


def test_rounds_before_the_start_must_be_there(world: World) -> None:
    world.align(2, retention=KEEP)
    with pytest.raises(GranularError, match="asked to start at round 4, but round 3 is not in the store yet"):
        begin(world, Start(round=4))
    begin(world, Start(round=3))


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (Start(round=9), "has rounds 1–4, got start round 9"),
        (Start(round=0), "got start round 0"),
        (Start(stage="rewrd"), "did you mean 'reward'"),
    ],
)
def test_a_start_that_is_none_is_one_sentence(world: World, start: Start, said: str) -> None:
    with pytest.raises(GranularError, match=said):
        begin(world, start)


def test_the_option_of_the_command_line_reaches_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from pipeline import cli

    seen = {}
    monkeypatch.setattr("pipeline.variations.align_runs", lambda *_, **options: seen.update(options))
    arguments = ["align", "toy", "--start-round", "3", "--start-stage", "reward.clip", "--force"]
    monkeypatch.setattr(sys, "argv", ["granular", *arguments])
    with pytest.raises(SystemExit):
        cli.main()
    assert seen["start"] == Start(round=3, stage="reward.clip", force=True)
