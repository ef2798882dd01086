"""Rounds through the real stages on a tiny FLUX: rollout, advantage, update, resumed, repeated, refused."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from stages.advantage import stage as advantage
from stages.advantage.spec import AdvantageSpec
from stages.core import digest
from stages.core.errors import GateError, GranularError
from stages.core.resident import Resident
from stages.embed.store import write_embeddings
from stages.policies.spec import PolicySpec
from stages.rollout import stage as rollout
from stages.rollout.grid import GridSpec
from stages.rollout.spec import RolloutSpec, SamplerSpec
from stages.rollout.store import read_rollout
from stages.update import stage as update
from stages.update import state as states
from stages.update.spec import OptimizerSpec, UpdateSpec
from tests.update.toy import score

METHOD = {"name": "g2rpo", "granularities": [1]}
GRID = GridSpec(steps=4)
PROMPTS = (5, 2)
SAMPLER = SamplerSpec(max_batch=8, prompts_per_shard=2)


@pytest.fixture(scope="module")
def world(tiny_base, tmp_path_factory):
    """Inputs of every round: a base, embeddings of two prompts, and the start policy."""
    folder = tmp_path_factory.mktemp("world")
    config = json.loads((tiny_base / "transformer" / "config.json").read_text())
    rng = np.random.default_rng(0)
    arrays = {
        "prompt_embeds": rng.standard_normal((2, 16, config["joint_attention_dim"])).astype(np.float32),
        "pooled_prompt_embeds": rng.standard_normal((2, config["pooled_projection_dim"])).astype(np.float32),
    }
    (folder / "embeddings").mkdir()
    write_embeddings(folder / "embeddings", PROMPTS, [arrays], {"family": "flux"})
    (folder / "start").mkdir()
    states.start(PolicySpec(base=str(tiny_base), threads=1), tiny_base, folder / "start")
    return {"base": tiny_base, "embeddings": folder / "embeddings", "start": folder / "start"}


def update_spec(base, round_: int, **options) -> UpdateSpec:
    values = {
        "method": METHOD,
        "optimizer": OptimizerSpec(lr=1e-3),
        "ema": 0.5,
        "update_batch": 3,
        "grid": GRID,
        "policy": PolicySpec(base=str(base), threads=1),
        "sampler": SAMPLER,
    }
    return UpdateSpec(**(values | options), round_=round_)


def sample(world, resident: Resident, before: Path, round_: int, out: Path) -> dict[str, Path]:
    """One round up to its advantages; returns the update's inputs."""
    folders = {name: out / name for name in ("rollout", "hps", "advantage")}
    for folder in folders.values():
        folder.mkdir(parents=True)
    common = {"base": world["base"], "embeddings": world["embeddings"], "policy": before}
    spec = RolloutSpec(
        seed=1, round_=round_, prompts=PROMPTS, method=METHOD, group=3, grid=GRID,
        policy=world.get("policy") or PolicySpec(base=str(world["base"]), threads=1), sampler=SAMPLER,
    )  # fmt: skip
    rollout.run(common | {"prompts": world["embeddings"]}, spec, resident, folders["rollout"])
    rewards = score(read_rollout(folders["rollout"] / "rollouts.zarr"), seed=round_)
    rewards.to_parquet(folders["hps"] / "rewards.parquet", index=False)
    given = {"rollout": folders["rollout"], "rewards.hps": folders["hps"]}
    advantage.run(given, AdvantageSpec(method=METHOD, rewards={"hps": 1.0}), resident, folders["advantage"])
    return common | {"rollout": folders["rollout"], "advantage": folders["advantage"]}


def round_of(world, resident: Resident, before: Path, round_: int, out: Path) -> Path:
    """A whole round; returns the update's output folder."""
    inputs = sample(world, resident, before, round_, out)
    (out / "update").mkdir()
    update.run(inputs, update_spec(world["base"], round_), resident, out / "update")
    return out / "update"


@pytest.fixture(scope="module")
def four(world, tmp_path_factory):
    """Four rounds in one process."""
    resident, before, done = Resident(), world["start"], []
    for round_ in range(1, 5):
        done.append(round_of(world, resident, before, round_, tmp_path_factory.mktemp(f"round{round_}")))
        before = done[-1] / "policy"
    return done


def contents(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): digest.of_file(file) for file in folder.rglob("*") if file.is_file()}


def test_four_rounds_equal_two_a_restart_and_two(world, four, tmp_path):
    """Everything the second process needs is in the files: weights, average, moments, tables, bit for bit."""
    resident, before = Resident(), four[1] / "policy"
    for round_ in (3, 4):
        out = round_of(world, resident, before, round_, tmp_path / str(round_))
        assert contents(out) == contents(four[round_ - 1])
        before = out / "policy"


def test_a_round_repeated_alone_gives_the_same_bytes(world, four, tmp_path):
    assert contents(round_of(world, Resident(), four[0] / "policy", 2, tmp_path)) == contents(four[1])


def test_outputs_are_complete_and_agree_with_each_other(world, four):
    for round_, folder in enumerate(four, start=1):
        state = states.read_state(folder / "policy", base=digest.of_path(world["base"]))
        assert (state.round, state.optimizer_steps) == (round_, 2 * round_)
        numbers = json.loads((folder / "update.json").read_text())
        assert numbers["ledger"] == {
            "parents": 4, "points": 12, "with_gradient": 4, "frozen": 0, "optimizer_steps": 2,
        }  # fmt: skip
        table = pd.read_parquet(folder / "transitions.parquet")
        advantages = pd.read_parquet(folder.parent / "advantage" / "advantages.parquet").set_index("edge")
        parts = sorted(name for name in advantages if name.startswith("z."))
        assert list(table) == [
            *("edge", "prompt", "s", "member", "optimizer_step", "advantage", "weight"),
            *("log_ratio", "ratio", "clip_side", "path_variance"),
            *("velocity_grad_norm", "share"),
            *parts,
        ]
        assert parts and (table[parts].to_numpy() == advantages.loc[table["edge"], parts].to_numpy()).all()
        assert len(table) == 12
        assert numbers["total"]["ratio_max"] == table["ratio"].max()
        assert numbers["total"]["param_change"] > 0
        assert (table.loc[table["optimizer_step"] == 0, "ratio"] - 1).abs().max() <= 1e-6


def test_the_average_is_that_of_the_rounds_weights(world, four):
    ema = {n: t.double() for n, t in states.read_tensors(world["base"] / "transformer").items()}
    for folder in four:
        weights = states.read_tensors(folder / "policy" / "transformer")
        ema = {name: 0.5 * tensor + 0.5 * weights[name].double() for name, tensor in ema.items()}
    for name, tensor in states.read_tensors(four[-1] / "policy" / "ema").items():
        torch.testing.assert_close(tensor.double(), ema[name], atol=1e-6, rtol=0)


def test_the_sampler_of_the_next_round_sees_the_new_weights(four):
    first, second = (read_rollout(folder.parent / "rollout" / "rollouts.zarr") for folder in four[:2])
    assert not np.array_equal(first.parent_v, second.parent_v)


def test_a_state_of_another_round_or_base_is_refused(world, four, tiny_base, tmp_path):
    resident = Resident()
    inputs = {"rollout": four[1].parent / "rollout", "advantage": four[1].parent / "advantage"}
    inputs |= {"base": world["base"], "embeddings": world["embeddings"], "policy": four[2] / "policy"}
    with pytest.raises(GranularError, match="round 2 needs its own rollout and the policy after round 1"):
        update.run(inputs, update_spec(world["base"], 2), resident, tmp_path)
    strange = tmp_path / "strange"
    strange.mkdir()
    values = json.loads((four[0] / "policy" / "state.json").read_text())
    (strange / "state.json").write_text(json.dumps(values | {"base": "0" * 40}))
    with pytest.raises(GranularError, match="was trained from base 000000000000"):
        update.run(inputs | {"policy": strange}, update_spec(world["base"], 2), resident, tmp_path)


def test_another_grid_is_refused(world, four, tmp_path):
    inputs = {"rollout": four[0].parent / "rollout", "advantage": four[0].parent / "advantage"}
    inputs |= {"base": world["base"], "embeddings": world["embeddings"], "policy": world["start"]}
    with pytest.raises(GateError, match="the rollout was sampled at"):
        update.run(inputs, update_spec(world["base"], 1, grid=GridSpec(steps=4, shift=2.9)), Resident(), tmp_path)


def test_a_refused_update_writes_nothing_and_the_next_attempt_starts_clean(world, four, tmp_path):
    resident = Resident()
    inputs = {"rollout": four[1].parent / "rollout", "advantage": four[1].parent / "advantage"}
    inputs |= {"base": world["base"], "embeddings": world["embeddings"], "policy": four[0] / "policy"}
    good, out, again = update_spec(world["base"], 2), tmp_path / "out", tmp_path / "again"
    out.mkdir(), again.mkdir()
    with pytest.raises(GateError, match="changed no weight"):
        update.run(inputs, replace(good, optimizer=OptimizerSpec(lr=1e-30)), resident, out)
    assert list(out.iterdir()) == []
    update.run(inputs, good, resident, again)
    assert contents(again) == contents(four[1])
