"""Forks: a run that shares its first rounds with another one, artifact by artifact, and goes its own way from there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline import forks
from pipeline.params import parse
from pipeline.plan import Past, in_force, round_ledger
from pipeline.reuse import Store
from pipeline.rounds import run_stage
from pipeline.variations import Variation, find
from stages.core.errors import GranularError
from stages.core.spec import read_json, read_yaml
from stages.policies.spec import LoraSpec
from stages.update.spec import OptimizerSpec
from tests.pipeline.fake_world import FakeWorker, World, digests, make_run

HOT = OptimizerSpec(lr=0.3)


@pytest.fixture
def world(tmp_path) -> World:
    return World(tmp_path)


def past(world: World, rounds: int = 2) -> Past:
    return Past(make_run(world.folder, 4), rounds)


def test_a_fork_that_changes_nothing_is_the_old_run(world):
    old = world.align(4)
    new = world.align(4, name="fork", past=past(world))
    assert digests(new) == digests(old)
    assert world.worker.calls == []


def test_a_fork_shares_rounds_up_to_its_point_and_none_after(world):
    old = world.align(4)
    new = world.align(5, name="fork", past=past(world, 3), optimizer=HOT)
    assert digests(new)[:3] == digests(old)[:3]
    assert digests(new)[3]["rollout"] == digests(old)[3]["rollout"]  # sampled by the policy they have in common
    assert digests(new)[3]["update"] != digests(old)[3]["update"]
    assert [call for call in world.worker.calls if call.startswith("update")] == ["update4", "update5"]


def test_a_policy_that_was_evicted_is_made_again_by_the_old_settings(world):
    old = world.align(4)
    new = world.align(4, name="fork", past=past(world, 1), optimizer=HOT)
    assert digests(new)[0] == digests(old)[0] and digests(new)[1]["update"] != digests(old)[1]["update"]
    assert "update1" in world.worker.calls


def test_optimizer_and_average_carry_over(world):
    """Going on from round 2 with the old settings on new ones' way is the old run; starting anew is not."""
    world.align(4)
    fork = world.align(4, name="fork", past=past(world), optimizer=HOT)
    fresh = world.align(4, name="fresh", optimizer=HOT)
    assert digests(fork)[3]["update"] != digests(fresh)[3]["update"]
    state = read_json(fork.policy.published.folder / "policy" / "state.json")
    assert state["round"] == 4


def test_a_fork_of_a_fork_looks_back_through_both(world):
    old = world.align(4)
    one = replace(make_run(world.folder, 4), name="one", past=past(world), optimizer=HOT)
    world.align(4, name="one", past=past(world), optimizer=HOT)
    two = world.align(4, name="two", past=Past(one, 3), ema=0.1)
    assert digests(two)[:2] == digests(old)[:2]
    plan = two.run
    assert [in_force(plan, n).name for n in (1, 2, 3, 4)] == ["toy", "toy", "one", "two"]
    assert world.worker.calls.count("update4") == 1 and "update3" not in world.worker.calls


def test_more_scorers_after_the_fork(world):
    world.align(4)
    new = world.align(4, name="fork", past=past(world), rewards={"clip": 1.0, "oracle": 1.0, "other": 1.0})
    assert [sorted(one.rewards) for one in new.rounds] == [["clip", "oracle"]] * 2 + [["clip", "oracle", "other"]] * 2
    record = read_json(world.folder / "data" / "runs" / "fork" / "run.json")
    assert record["spec"]["past"] == {"run": "toy", "rounds": 2}
    assert "reward.other" not in record["rounds"][1] and "reward.other" in record["rounds"][2]


def test_rounds_of_other_columns_make_one_table(world):
    """Another credit rule has other parts; what a round does not have is missing there, not an error."""
    import pandas as pd

    class Other(FakeWorker):
        def _advantage(self, inputs, spec, out):
            super()._advantage(inputs, spec, out)
            table = pd.read_parquet(out / "advantages.parquet")
            more = "z.old" if spec.rewards["clip"] == 1 else "z.new"
            table.assign(**{more: 1, "why_zero": ""}).to_parquet(out / "advantages.parquet", index=False)

    world.align(4, Other())
    world.align(4, Other(), name="fork", past=past(world), rewards={"clip": 2.0, "oracle": 1.0})
    table = pd.read_parquet(world.folder / "data" / "runs" / "fork" / "advantages.parquet")
    present = table.groupby("round")[["z.old", "z.new"]].count()
    assert (present["z.old"] > 0).tolist() == [True, True, False, False]
    assert (present["z.new"] > 0).tolist() == [False, False, True, True]


def test_evicted_bytes_of_the_past_come_back_by_the_old_settings(world):
    old = world.align(4)
    world.align(4, name="fork", past=past(world), optimizer=HOT)
    plan = replace(make_run(world.folder, 4), name="fork", past=past(world), optimizer=HOT)
    (done,) = run_stage(plan, Store(world.folder / "store"), FakeWorker(), lambda event: None, "update", 1, force=True)
    assert done.same and done.after == digests(old)[0]["update"]


def test_a_fork_costs_what_its_rounds_cost_wherever_they_come_from(world):
    plan = replace(make_run(world.folder, 4), past=past(world), group=4)
    costs = [round_ledger(plan, n).equivalents for n in (1, 2, 3, 4)]
    assert costs[0] == costs[1] < costs[2] == costs[3]


def test_what_the_state_does_not_fit_is_refused(world):
    before = make_run(world.folder, 4)
    for policy, said in (
        (replace(before.policy, base="elsewhere"), "policy.base"),
        (replace(before.policy, lora=LoraSpec()), "policy.lora"),
    ):
        with pytest.raises(GranularError, match=rf"--set {said}.*a run of\s+its own"):
            forks.refuse_other_state(before, replace(before, policy=policy), 2)
    lagging = replace(before, method={"name": "nft"})
    with pytest.raises(GranularError, match="nft remembers things between rounds"):
        forks.refuse_other_state(before, lagging, 2)
    with pytest.raises(GranularError, match="nothing left to train"):
        forks.refuse_other_state(before, replace(before, rounds=2), 2)
    forks.refuse_other_state(before, replace(before, method={"name": "mixgrpo", "optimizer_steps": 1}), 2)


def test_rounds_that_were_never_trained_cannot_be_forked_from(world, tmp_path):
    world.align(2)
    store, accepted = Store(world.folder / "store"), tmp_path / "accepted.json"
    forks.require_rounds(make_run(world.folder, 4), 2, store, FakeWorker(), accepted)
    with pytest.raises(GranularError, match="toy is in the store up to round 2; align it further"):
        forks.require_rounds(make_run(world.folder, 4), 3, store, FakeWorker(), accepted)


@pytest.fixture
def params(tmp_path, monkeypatch, project):
    raw = read_yaml(project / "params.yaml")
    monkeypatch.chdir(tmp_path)
    Path("data").symlink_to(project / "data")
    raw["runs"] = {"mine": {"method": {"name": "g2rpo"}, "budget": None, "rounds": 6}}
    raw["presets"], raw["study"] = {}, {}
    raw["align"] = {key: value for key, value in raw["align"].items() if key != "budget"}
    return parse(raw)


def test_a_fork_is_written_down_and_found_again(params):
    fork = forks.forked(params, "mine", 2, ["optimizer.lr=1e-3"], None)
    assert fork.name == "mine-at2" and fork.of == "mine"
    fork.keep()
    plan = find(params, "mine-at2")
    assert plan.past == Past(find(params, "mine"), 2) and plan.optimizer.lr == 1e-3
    assert plan.past.run.optimizer.lr != 1e-3
    second = forks.forked(params, "mine-at2", 4, ["ema=0.5"], "deeper")
    assert second.sets == ("optimizer.lr=1e-3", "ema=0.5") and second.run == "mine"
    with pytest.raises(GranularError, match="this name already stands for"):
        Variation(name="mine-at2", run="mine", of="mine", at=3).keep()


def test_mistakes_of_a_fork_are_one_sentence_each(params):
    for run, at, sets, name, said in (
        ("mine", 9, [], None, "mine has rounds 1–6"),
        ("mine", 6, [], None, "nothing left to train"),
        ("other", 1, [], None, "no such run"),
        ("mine", 2, [], "mine", "stands for another policy or run"),
        ("mine", 2, [], "base", "stands for another policy or run"),
        ("mine", 2, ["optimiser.lr=1"], None, "did you mean 'optimizer'"),
    ):
        with pytest.raises(GranularError, match=said):
            forks.forked(params, run, at, sets, name)
