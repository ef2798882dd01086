"""What is computed, and what never again: resume, extension, kills, changed settings, changed code."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from pipeline import plan
from pipeline.retention import RetentionSpec
from pipeline.reuse import Store
from pipeline.rounds import run_stage
from stages.core.errors import GranularError
from stages.update.spec import OptimizerSpec
from tests.pipeline.fake_world import FakeWorker, World, digests, make_run

ROUND = ["rollout{n}", "reward.clip", "reward.oracle", "advantage", "update{n}"]


KEEP = RetentionSpec(optimizer_rounds=99, weights_every=1, latents_rounds=99)


def calls_of(*rounds: int) -> list[str]:
    return [name.format(n=n) for n in rounds for name in ROUND]


def without_validation(calls: list[str]) -> list[str]:
    return [call for call in calls if call != "evaluate"]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_run_calls_each_stage_once_a_round_and_validates_start_every_and_last(world: World) -> None:
    result = world.align(3)
    assert without_validation(world.worker.calls) == calls_of(1, 2, 3)
    assert sorted(result.validations) == [0, 2, 3]


def test_four_rounds_equal_two_a_stop_and_two(tmp_path: Path) -> None:
    whole, parted = World(tmp_path / "whole"), World(tmp_path / "parted")
    expected = digests(whole.align(4))
    parted.align(2)
    assert digests(parted.align(4)) == expected
    # The run that was cut at two has validated round 2 as its last, which the whole one does as well.
    assert parted.outputs() == whole.outputs()


def test_extending_from_four_to_six_computes_two_rounds(world: World) -> None:
    world.align(4)
    world.align(6)
    assert without_validation(world.worker.calls) == calls_of(5, 6)


def test_an_equal_call_computes_nothing_and_writes_equal_bytes(world: World) -> None:
    world.align()
    before = world.outputs()
    world.align()
    assert world.worker.calls == []
    assert world.outputs() == before
    assert {event.status for event in world.events if event.kind == "stage"} == {"cached"}


def test_the_project_may_lie_elsewhere(tmp_path: Path) -> None:
    one, two = World(tmp_path / "one"), World(tmp_path / "somewhere" / "else")
    one.align()
    two.align()
    assert one.outputs() == two.outputs()
    names = [sorted(p.name for p in (w.folder / "store" / "update").iterdir()) for w in (one, two)]
    assert names[0] == names[1]


@pytest.mark.slow
def test_killed_at_random_it_goes_on_to_the_same_result(tmp_path: Path) -> None:
    expected = World(tmp_path / "whole")
    expected.align(4)
    killed = World(tmp_path / "killed")
    script = [sys.executable, str(Path(__file__).parent / "fake_world.py"), str(killed.folder), "4", "0.03"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    rng = random.Random(0)
    for _ in range(4):
        process = subprocess.Popen(script, env=environment, stderr=subprocess.DEVNULL)
        deadline = time.time() + 60
        while not any(killed.folder.glob("store/*/.attempt-*")) and process.poll() is None and time.time() < deadline:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.5))
        process.send_signal(signal.SIGKILL)
        process.wait()
    killed.align(4)
    assert killed.outputs() == expected.outputs()
    assert not list(killed.folder.glob("store/*/.attempt-*"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_by_signal_it_says_where_it_resumes(tmp_path: Path, number: signal.Signals) -> None:
    world = World(tmp_path)
    script = [sys.executable, str(Path(__file__).parent / "fake_world.py"), str(tmp_path), "40", "0.1"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    # A test run in the background hands an ignored SIGINT down to its children.
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(script, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    while not list(world.folder.glob("store/advantage/*/manifest.json")) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert "the next call resumes at round 1" in said
    Store(world.folder / "store")  # sweeps what a signal in an unlucky moment left behind
    assert not list(world.folder.glob("store/*/.attempt-*"))
    assert json.loads((tmp_path / "runs" / "toy" / "status.json").read_text())["state"] == "stopped"


def test_another_weight_of_a_scorer_samples_and_scores_round_1_no_more(world: World) -> None:
    world.align(1)
    world.align(1, rewards={"clip": 1.0, "oracle": 2.0})
    assert without_validation(world.worker.calls) == ["advantage", "update1"]


def test_another_learning_rate_repeats_the_update_of_round_1_alone(world: World) -> None:
    world.align(1)
    world.align(1, optimizer=OptimizerSpec(lr=0.2))
    assert without_validation(world.worker.calls) == ["update1"]


def test_one_more_scorer_is_scored_alone(world: World) -> None:
    world.align(1)
    world.align(1, rewards={"clip": 1.0, "oracle": 1.0, "other": 1.0})
    assert without_validation(world.worker.calls) == ["reward.other", "advantage", "update1"]


def test_other_scorer_weights_under_the_same_path_are_noticed(world: World) -> None:
    world.align(1)
    (world.folder / "scorer.json").write_text("[0.75]")
    world.align(1)
    assert "reward.clip" in world.worker.calls and "rollout1" not in world.worker.calls
    assert "reward.oracle" not in world.worker.calls


def test_another_device_number_is_the_same_run(world: World) -> None:
    run = make_run(world.folder)
    world.align(1, policy=replace(run.policy, device="cuda:0"))
    world.align(1, policy=replace(run.policy, device="cuda:1"))
    assert world.worker.calls == []


def test_a_lost_manifest_repeats_its_stage_and_nothing_that_still_fits(world: World) -> None:
    result = world.align(3, retention=KEEP)
    (result.rounds[1].update.published.folder / "manifest.json").unlink()
    assert digests(world.align(3, retention=KEEP)) == digests(result)
    # Round 2 is validated from an equal policy, so its validation stays as well.
    assert world.worker.calls == ["update2"]


def test_a_lost_manifest_whose_stage_comes_out_different_repeats_what_follows(world: World) -> None:
    result = world.align(3, retention=KEEP)
    (result.rounds[1].update.published.folder / "manifest.json").unlink()
    world.align(3, FakeWorker(drift=1e-3), retention=KEEP)
    assert without_validation(world.worker.calls) == ["update2", *calls_of(3)]


def test_other_code_stops_the_run_and_names_the_rounds(world: World) -> None:
    world.align(3)
    with pytest.raises(GranularError) as error:
        world.align(4, FakeWorker(codes={"update": "new"}))
    assert "update of rounds 1–3" in str(error.value)
    assert '{"update": ["update-code"]}' in str(error.value)
    assert world.worker.calls == []


def test_accepted_code_lets_the_run_go_on_and_the_manifest_tells(world: World) -> None:
    world.align(2)
    (world.folder / "accepted-code.json").write_text('{"update": ["update-code"]}')
    result = world.align(3, FakeWorker(codes={"update": "new"}))
    assert without_validation(world.worker.calls) == calls_of(3)
    made_by = [one.update.published.code for one in result.rounds]
    assert made_by == ["update-code", "update-code", "new"]
    record = json.loads((world.folder / "runs/toy/rounds/0001/manifest.json").read_text())
    assert record["stages"]["update"]["code"] == "update-code"


def test_redo_computes_what_other_code_made(world: World) -> None:
    before = digests(world.align(2))
    assert digests(world.align(2, FakeWorker(codes={"update": "new"}), redo=True)) == before
    # Equal updates: what follows from them is found.
    assert without_validation(world.worker.calls) == ["update1", "update2"]
    world.align(2, FakeWorker(codes={"update": "new"}))
    assert world.worker.calls == []


def test_code_and_settings_changed_together_still_stop(world: World) -> None:
    world.align(2)
    with pytest.raises(GranularError, match="rollout of round 1"):
        world.align(2, FakeWorker(codes={"rollout": "new"}), optimizer=OptimizerSpec(lr=0.3))


def test_other_library_versions_compute_again_and_say_so(world: World, capsys: pytest.CaptureFixture) -> None:
    world.align(1)
    worker = FakeWorker()
    worker.library = "2"
    world.align(1, worker)
    assert without_validation(worker.calls) == calls_of(1)
    assert "library 1 → 2" in capsys.readouterr().err


def test_one_stage_again_says_whether_it_is_the_same(world: World) -> None:
    world.align(3)
    run, store = make_run(world.folder, 3), Store(world.folder / "store")
    for worker, same in ((FakeWorker(), True), (FakeWorker(drift=1.0), False)):
        (done,) = run_stage(run, store, worker, world.events.append, "rollout", 2, force=True)
        assert done.same is same
        assert worker.calls[-1] == "rollout2"


def test_one_stage_without_force_is_found(world: World) -> None:
    world.align(2)
    worker = FakeWorker()
    run = make_run(world.folder, 2)
    done = run_stage(run, Store(world.folder / "store"), worker, world.events.append, "reward", 2, force=False)
    assert [one.stage for one in done] == ["reward.clip", "reward.oracle"] and worker.calls == []


def test_one_stage_of_a_round_that_is_not_there_names_what_is_missing(world: World) -> None:
    world.align(1)
    run, store = make_run(world.folder, 4), Store(world.folder / "store")
    with pytest.raises(GranularError, match="rollout of round 2"):
        run_stage(run, store, FakeWorker(), world.events.append, "update", 3, force=False)
    with pytest.raises(GranularError, match="did you mean 'reward'"):
        run_stage(run, store, FakeWorker(), world.events.append, "rewrd", 1, force=False)
    with pytest.raises(GranularError, match="rounds 1–4"):
        run_stage(run, store, FakeWorker(), world.events.append, "update", 5, force=False)


def test_a_failing_stage_leaves_nothing_and_tells(world: World) -> None:
    class Broken(FakeWorker):
        def _advantage(self, *args: object) -> None:
            raise GranularError("scorer clip failed")

    with pytest.raises(GranularError, match="scorer clip failed"):
        world.align(2, Broken())
    assert not list(world.folder.glob("store/*/.attempt-*"))
    assert ("advantage", "failed") in {(event.stage, event.status) for event in world.events}
    world.align(2)
    assert without_validation(world.worker.calls) == ["advantage", "update1", *calls_of(2)]


def test_the_plan_of_a_round_is_a_pure_function_and_no_epoch_repeats_a_prompt(world: World) -> None:
    run = make_run(world.folder)
    epoch = [prompt for n in (1, 2, 3) for prompt in plan.round_prompts(run, n)]
    assert sorted(epoch) == list(range(12))
    assert plan.round_prompts(run, 4) != plan.round_prompts(run, 1)
    assert plan.round_prompts(replace(run, rounds=9), 2) == plan.round_prompts(run, 2)
    with pytest.raises(GranularError, match="at most 12"):
        plan.round_prompts(replace(run, prompts_per_round=13), 1)


def test_a_budget_buys_as_many_whole_rounds_as_it_pays_for(world: World) -> None:
    run = make_run(world.folder, 3)
    spent = sum(one.equivalents for one in plan.ledger(run))
    assert plan.rounds_within(run, spent) == 3
    assert plan.rounds_within(run, spent - 1) == 2
    with pytest.raises(GranularError, match="one round costs"):
        plan.rounds_within(run, 1)


def test_the_code_of_a_base_policys_own_parts_is_code_behind_its_images(world: World) -> None:
    from pipeline.calls import _components

    assert _components(world.folder / "base") == []
    index = {"_class_name": "FluxPipeline", "vae": ["stages.lab.autoencoder", "A"], "scheduler": ["diffusers", "B"]}
    (world.folder / "base" / "model_index.json").write_text(json.dumps(index))
    used: dict[str, set[str]] = {}

    class Watching(FakeWorker):
        def code(self, stage: str, uses: Sequence[str]) -> str:
            used.setdefault(stage, set()).update(uses)
            return super().code(stage, uses)

    world.align(1, Watching())
    assert {stage for stage, names in used.items() if "stages.lab.autoencoder" in names} == {"reward", "evaluate"}


def test_a_half_written_folder_is_no_finished_run(tmp_path: Path) -> None:
    from pipeline.evaluations import finished_runs

    for name in ("done", ".done.123-ab.tmp"):
        (tmp_path / name / "policy").mkdir(parents=True)
        (tmp_path / name / "policy" / "state.json").write_text("{}")
    assert finished_runs(tmp_path) == ["done"]
