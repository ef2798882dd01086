"""A run's scorers: another one stops it, and what a service lost is scored again, alone, once there is a chance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from pipeline.reuse import Store, settings
from pipeline.rounds import run_stage
from stages.core.errors import GateError, GranularError
from stages.reward import remote, vlm
from tests.pipeline.fake_world import FakeWorker, World, make_run


class Judged(FakeWorker):
    """A fake worker whose scorers say who they are. lost: calls of scorers of which some or all images failed. probe:
    what its scorers answer to the built-in probe."""

    def __init__(
        self,
        lost: Mapping[str, int] | None = None,
        identity: Mapping[str, str] | None = None,
        probe: list[float] | None = None,
    ) -> None:
        super().__init__()
        self.probe = probe
        self.lost = dict(lost or {})
        self.identity = dict(identity or {"kind": "fake", "weights": "w1", "code": "c1"})

    def _reward(self, inputs: Mapping[str, Path], spec: Any, out: Path) -> None:
        super()._reward(inputs, spec, out)
        table = pd.read_parquet(out / "rewards.parquet")
        lost = self.lost.get(spec.name, 0)
        table.loc[: lost - 1, ["value", "status", "reason"]] = [np.nan, "failed", "no answer in time"]
        table.to_parquet(out / "rewards.parquet", index=False)
        summary = {"mean": 0.0, "images": len(table), "ok": len(table) - lost, "identity": self.identity}
        summary["probe"] = self.probe
        (out / "summary.json").write_text(json.dumps(summary))

    def _advantage(self, inputs: Mapping[str, Path], spec: Any, out: Path) -> None:
        for name in spec.rewards:
            table = pd.read_parquet(inputs[f"rewards.{name}"] / "rewards.parquet")
            lost = int((table["status"] != "ok").sum())
            if lost and (spec.failures == "stop" or lost == len(table)):
                raise GranularError(f"{name}: {lost} of {len(table)} rewards are not there")
        super()._advantage(inputs, spec, out)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


# --- what a service lost ---------------------------------------------------------------------------------------------


def test_a_run_that_stopped_for_lost_rewards_scores_them_again_and_nothing_else(world: World) -> None:
    with pytest.raises(GranularError, match="clip: 2 of 4 rewards are not there"):
        world.align(2, Judged(lost={"clip": 2}))
    resumed = world.align(2, Judged())
    assert world.worker.calls[:3] == ["reward.clip", "advantage", "update1"]
    fresh = World(world.folder / "fresh").align(2, Judged())
    assert resumed.policy.digest == fresh.policy.digest


def test_as_long_as_the_service_is_down_the_run_stops_at_the_same_place(world: World) -> None:
    for _ in range(3):
        with pytest.raises(GranularError, match="clip: 2 of 4"):
            world.align(2, Judged(lost={"clip": 2}))
    assert world.worker.calls == ["reward.clip", "advantage"]


def test_where_lost_members_are_dropped_they_stay_dropped(world: World) -> None:
    first = world.align(2, Judged(lost={"clip": 2}), failures="drop")
    again = world.align(2, Judged(), failures="drop")
    assert world.worker.calls == [] and again.policy.digest == first.policy.digest


def test_a_round_without_one_reward_is_scored_again_under_either_policy(world: World) -> None:
    with pytest.raises(GranularError, match="clip: 4 of 4"):
        world.align(1, Judged(lost={"clip": 4}), failures="drop")
    world.align(1, Judged(), failures="drop")
    assert world.worker.calls[0] == "reward.clip"


def test_one_stage_of_a_round_whose_rewards_were_lost_says_what_is_missing(world: World) -> None:
    with pytest.raises(GranularError, match="are not there"):
        world.align(1, Judged(lost={"clip": 2}))
    run, store = make_run(world.folder, 1), world.folder / "store"
    with pytest.raises(GranularError, match=r"reads reward.clip of round 1, which is not there yet"):
        run_stage(run, Store(store), Judged(), world.events.append, "advantage", 1, force=False)
    (again,) = run_stage(run, Store(store), Judged(), world.events.append, "reward.clip", 1, force=False)
    assert again.before is None
    run_stage(run, Store(store), Judged(), world.events.append, "advantage", 1, force=False)


# --- who scores ------------------------------------------------------------------------------------------------------


def test_another_scorer_in_a_later_round_stops_the_run(world: World) -> None:
    world.align(2, Judged())
    with pytest.raises(
        GateError,
        match=r"'clip' of round 3 is not the one of round 1 \(weights changed\).*reward.clip --run toy --round 3",
    ):
        world.align(3, Judged(identity={"kind": "fake", "weights": "w2", "code": "c1"}))
    # It stays refused however often it is asked, and the round scored by the former one is taken.
    with pytest.raises(GateError, match="is not the one of round 1"):
        world.align(3, Judged())
    run_stage(
        make_run(world.folder, 3), Store(world.folder / "store"), Judged(), world.events.append, "reward", 3,
        force=True,
    )  # fmt: skip
    world.align(3, Judged())


def test_a_scorer_that_changes_while_its_digests_do_not_stops_the_run(world: World) -> None:
    world.align(2, Judged(probe=[0.25, 0.5]))
    world.align(3, Judged(probe=[0.2501, 0.5]))
    with pytest.raises(
        GateError,
        match=r"'clip' of round 4 answers \[0\.26, 0\.5\] to the built-in probe, in round 1 it answered \[0\.25, 0\.5\]"
        r".*reward\.clip --run toy --round 4 --force",
    ):
        world.align(4, Judged(probe=[0.26, 0.5]))


def test_rounds_without_answers_to_the_probe_are_not_compared_by_them(world: World) -> None:
    world.align(2, Judged())
    world.align(3, Judged(probe=[0.25]))
    with pytest.raises(GateError, match=r"in round 3 it answered \[0\.25\]"):
        world.align(4, Judged(probe=[0.3]))


def test_other_code_of_a_scorer_is_the_driver_s_to_accept(world: World) -> None:
    world.align(2, Judged())
    world.align(3, Judged(identity={"kind": "fake", "weights": "w1", "code": "c2"}))


# --- what names a reward ---------------------------------------------------------------------------------------------


def test_where_a_service_is_and_how_patiently_it_is_asked_names_no_reward() -> None:
    here, there = (
        remote.Options(url="http://a:1"),
        remote.Options(url="http://b:2", timeout=1.0, retries=0, concurrency=9, chunk=1),
    )
    assert settings(here) == settings(there)


def test_what_a_judge_is_asked_for_names_its_rewards_and_the_name_of_a_key_does_not() -> None:
    one = vlm.Options(url="http://a:1/v1", model="m")
    assert settings(one) == settings(replace(one, api_key_env="KEY", url="http://b:1/v1"))
    for other in (replace(one, model="n"), replace(one, judge="unified_reward"), replace(one, max_tokens=7)):
        assert settings(one) != settings(other)
