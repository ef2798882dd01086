"""What a run delivers: complete, deterministic, free of times and places; and links that survive a move."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from safetensors.numpy import load_file

from pipeline import outputs
from stages.policies.spec import PolicySpec
from tests.pipeline.fake_world import WEIGHTS, FakeWorker, World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_the_delivered_policy_is_the_last_average_under_the_name_diffusers_reads(world: World) -> None:
    result = world.align(3)
    delivered = world.folder / "data/runs/toy/policy"
    ema = result.rounds[-1].update.published.folder / "policy" / "ema"
    assert (load_file(delivered / "transformer" / WEIGHTS)["w"] == load_file(ema / WEIGHTS)["w"]).all()
    state = json.loads((delivered / "state.json").read_text())
    assert state["digests"]["train"] == state["digests"]["ema"] and state["round"] == 3


def test_a_delivered_policy_loads_as_either_set_of_weights(tiny_base: Path, tmp_path: Path) -> None:
    import torch

    from stages.policies.flux import FluxPolicy
    from stages.update import state as states

    policy = FluxPolicy(PolicySpec(base=str(tiny_base)))
    other = {name: tensor + 1 for name, tensor in policy.module.state_dict().items()}
    (tmp_path / "policy").mkdir()
    states.save(policy, tmp_path / "policy", ema=other, moments={}, round_=1, steps=1, base="b")

    class Final:
        def folder(self, need: tuple[str, ...]) -> Path:
            return tmp_path

    outputs._copy_policy(Final(), tmp_path / "delivered")  # type: ignore[arg-type]
    for which in ("train", "ema"):
        states.load_weights(policy, tmp_path / "delivered", which)  # type: ignore[arg-type]
        assert all(torch.equal(tensor, other[name]) for name, tensor in policy.module.state_dict().items())


def test_tables_hold_every_round_once(world: World) -> None:
    world.align(3)
    folder = world.folder / "data/runs/toy"
    rounds = pd.read_parquet(folder / "rounds.parquet")
    assert rounds["round"].tolist() == [1, 2, 3]
    assert rounds["equivalents_total"].tolist() == rounds["equivalents"].cumsum().tolist()
    rewards = pd.read_parquet(folder / "rewards.parquet")
    assert rewards.groupby(["round", "scorer"]).size().tolist() == [4] * 6
    mean = rewards[(rewards["round"] == 2) & (rewards["scorer"] == "clip")]["value"].mean()
    assert rounds["reward.clip"][1] == pytest.approx(mean)
    for name in ("advantages", "transitions"):
        assert pd.read_parquet(folder / f"{name}.parquet")["round"].unique().tolist() == [1, 2, 3]
    validation = pd.read_parquet(folder / "validation.parquet")
    assert sorted(validation["round"].unique()) == [0, 2, 3] and set(validation["scorer"]) == {
        "clip",
        "oracle",
        "other",
    }
    assert sorted(p.name for p in (folder / "samples").iterdir()) == [f"round-000{n}.png" for n in (0, 2, 3)]


def test_no_time_and_no_place_is_delivered(world: World) -> None:
    world.align(2)
    for file in (world.folder / "data").rglob("*.json"):
        text = file.read_text()
        assert str(world.folder) not in text and "seconds" not in text and "host" not in text, file


def test_the_ledger_counts_an_image_once_however_many_scorers_see_it(world: World) -> None:
    from pipeline import plan
    from tests.pipeline.fake_world import make_run

    world.align(2)
    record = json.loads((world.folder / "data/runs/toy/run.json").read_text())
    planned = sum(plan.ledger(make_run(world.folder, 2)), plan.Ledger())
    assert record["ledger"] == {**planned.__dict__, "equivalents": planned.equivalents}


def test_round_folders_are_relative_links_that_survive_a_move(world: World, tmp_path: Path) -> None:
    world.align(2)
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("store", "runs"):
        shutil.move(world.folder / name, moved / name)
    folder = moved / "runs/toy/rounds/0002"
    assert (folder / "policy/state.json").is_file() and (folder / "rollouts.zarr/zarr.json").is_file()
    assert len(pd.read_parquet(folder / "rewards/clip.parquet")) == 4
    names = {"rollouts.zarr", "rewards", "advantages.parquet", "transitions.parquet", "update.json", "policy"}
    assert {path.name for path in folder.iterdir()} == names | {"manifest.json"}


def test_the_request_in_the_store_names_its_inputs(world: World) -> None:
    result = world.align(1)
    request = json.loads((result.rounds[0].update.published.folder / "request.json").read_text())
    assert set(request) == {"inputs", "spec"} and set(request["inputs"]) == {
        *("rollout", "advantage", "policy", "base", "embeddings"),
    }
    assert all(Path(path).exists() for path in request["inputs"].values())


def test_equal_tables_give_equal_bytes_in_one_piece_or_many(tmp_path: Path) -> None:
    table = pd.DataFrame({"a": [1, 2, 3], "b": ["x", None, "z"], "c": [0.5, float("nan"), 1.5]})
    outputs.write_table(table, tmp_path / "one.parquet")
    outputs.write_table(table.copy(), tmp_path / "two.parquet")
    assert (tmp_path / "one.parquet").read_bytes() == (tmp_path / "two.parquet").read_bytes()
    outputs.write_tables([table[:2], table[2:]], tmp_path / "many.parquet")
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "many.parquet"), pd.read_parquet(tmp_path / "one.parquet"))


def test_what_a_judge_replied_is_delivered_beside_scorers_that_say_nothing(world: World) -> None:
    class Talking(FakeWorker):
        def _reward(self, inputs: Mapping[str, Path], spec: Any, out: Path) -> None:
            super()._reward(inputs, spec, out)
            if spec.name == "oracle":
                table = pd.read_parquet(out / "rewards.parquet").assign(reply="Final Score: 4")
                table.to_parquet(out / "rewards.parquet", index=False)

    world.align(1, Talking())
    rewards = pd.read_parquet(world.folder / "data/runs/toy/rewards.parquet")
    assert rewards.groupby("scorer")["reply"].unique().map(list).to_dict() == {
        "clip": [""],
        "oracle": ["Final Score: 4"],
    }


def test_rewards_say_where_their_leaf_branched_off(world: World) -> None:
    world.align(2)
    rewards = pd.read_parquet(world.folder / "data/runs/toy/rewards.parquet")
    assert rewards.columns[:7].tolist() == ["round", "scorer", "leaf", "prompt", "s", "member", "stride"]
    assert (rewards["s"] == rewards["leaf"] % 2).all()


def test_times_lie_beside_the_run_and_say_how_long_each_stage_took(world: World) -> None:
    world.align(2)
    times = pd.read_parquet(world.folder / "data/times/toy.parquet")
    assert times.columns.tolist() == ["round", "stage", "seconds"] and (times["seconds"] >= 0).all()
    assert set(times["stage"]) == {"rollout", "reward.clip", "reward.oracle", "advantage", "update"}
    assert not list((world.folder / "data/runs/toy").glob("*time*"))
