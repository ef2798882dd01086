"""DiffusionNFT and E²PO through the real stages on a tiny FLUX: who samples, who is asked for v_old, and resuming."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from stages.advantage import stage as advantage
from stages.advantage.spec import AdvantageSpec
from stages.core import digest
from stages.core.resident import Resident
from stages.methods import build
from stages.methods.nft import DiffusionNFT
from stages.policies.spec import PolicySpec
from stages.rollout import stage as rollout
from stages.rollout.store import read_rollout
from stages.update import frozen
from stages.update import stage as update
from stages.update import state as states
from stages.update.spec import OptimizerSpec, UpdateSpec
from tests.rollout.text_world import GRID, SAMPLER, rollout_spec, write_world
from tests.update.toy import score

NFT = {"name": "nft", "optimizer_steps": 2}
E2PO = {"name": "e2po", "noises": 2, "perturb": {"conditions": 2, "steps": 5, "lr": 0.3}}


@pytest.fixture(scope="module")
def world(tiny_base, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("world")
    (folder / "start").mkdir()
    states.start(PolicySpec(base=str(tiny_base), threads=1), tiny_base, folder / "start")
    return write_world(folder, tiny_base) | {"start": folder / "start"}


def sampled(world, method: dict, resident: Resident, policy: Path, round_: int, out: Path) -> Path:
    """The rollout of a round by a policy state."""
    out.mkdir(parents=True)
    given = {name: world[name] for name in ("base", "prompts", "embeddings")} | {"policy": policy}
    rollout.run(given, rollout_spec(world["base"], method, 4, round_=round_), resident, out)
    return out


def round_of(world, method: dict, resident: Resident, policy: Path, round_: int, out: Path, ema: float = 0.5) -> Path:
    """A whole round with random rewards; returns the update's folder."""
    folder = sampled(world, method, resident, policy, round_, out / "rollout")
    for name in ("rewards", "advantage", "update"):
        (out / name).mkdir()
    rewards = score(read_rollout(folder / "rollouts.zarr"), seed=round_)
    rewards.to_parquet(out / "rewards" / "rewards.parquet", index=False)
    given = {"rollout": folder, "rewards.hps": out / "rewards"}
    advantage.run(given, AdvantageSpec(method=method, rewards={"hps": 1.0}), resident, out / "advantage")
    spec = UpdateSpec(
        method=method, optimizer=OptimizerSpec(lr=1e-3), ema=ema, update_batch=6, grid=GRID, sampler=SAMPLER,
        policy=PolicySpec(base=str(world["base"]), threads=1), round_=round_,
    )  # fmt: skip
    inputs = {"rollout": folder, "advantage": out / "advantage", "policy": policy}
    inputs |= {name: world[name] for name in ("base", "embeddings")}
    update.run(inputs, spec, resident, out / "update")
    return out / "update"


def decay(self, optimizer_steps: int) -> float:
    """A schedule that lags at once."""
    return min(0.2 * optimizer_steps, 0.5)


@pytest.fixture(scope="module")
def four(world, tmp_path_factory):
    """Four rounds of DiffusionNFT in one process, and the weights that were asked for velocities in each of them."""
    asked: list[list[str | None]] = []

    def watched(policy, points, conditions, rows, weights: Mapping[str, torch.Tensor] | None, processes):
        asked[-1].append(None if weights is None else digest.of_tensors(dict(weights)))
        return original(policy, points, conditions, rows, weights, processes)

    original = frozen.frozen_velocities
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiffusionNFT, "behaviour_decay", decay)
        patch.setattr(frozen, "frozen_velocities", watched)
        resident, policy, done = Resident(), world["start"], []
        for round_ in range(1, 5):
            asked.append([])
            done.append(round_of(world, NFT, resident, policy, round_, tmp_path_factory.mktemp(f"round{round_}")))
            policy = done[-1] / "policy"
    return done, asked


def tensors(folder: Path, which: states.Which) -> dict[str, torch.Tensor]:
    return states.read_tensors(folder / "policy" / states.FOLDERS[which])


def contents(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): digest.of_file(file) for file in folder.rglob("*") if file.is_file()}


def test_the_sampling_weights_follow_their_recursion(world, four):
    lagging = {n: t.double() for n, t in states.read_tensors(world["base"] / "transformer").items()}
    for round_, folder in enumerate(four[0], start=1):
        d, trained = min(0.4 * round_, 0.5), tensors(folder, "train")
        lagging = {name: d * tensor + (1 - d) * trained[name].double() for name, tensor in lagging.items()}
        for name, tensor in tensors(folder, "behaviour").items():
            torch.testing.assert_close(tensor.double(), lagging[name], atol=1e-6, rtol=0)
        state = states.read_state(folder / "policy")
        assert (state.sampler, state.optimizer_steps) == ("behaviour", 2 * round_)
        assert state.digests["behaviour"] == digest.of_tensors(tensors(folder, "behaviour"))
        assert len(set(state.digests.values())) == 4


def test_the_next_round_is_sampled_by_them(world, four, tmp_path):
    """The same images come from a state that has nothing but these weights; not from the trained ones."""
    done = four[0]
    expected = read_rollout(done[1].parent / "rollout" / "rollouts.zarr").leaf_x
    for which, same in (("behaviour", True), ("train", False)):
        own = tmp_path / which
        (own / "transformer").mkdir(parents=True)
        source = done[0] / "policy" / states.FOLDERS[which]
        for file in source.iterdir():
            (own / "transformer" / file.name).write_bytes(file.read_bytes())
        values = json.loads((done[0] / "policy" / "state.json").read_text())
        only = {"train": values["digests"][which], "ema": "", "optimizer": ""}
        (own / "state.json").write_text(json.dumps(values | {"digests": only}))
        folder = sampled(world, NFT, Resident(), own, 2, tmp_path / f"{which}-rollout")
        assert np.array_equal(read_rollout(folder / "rollouts.zarr").leaf_x, expected) == same


def test_old_velocities_are_those_of_the_weights_that_sampled(world, four):
    done, asked = four
    start = digest.of_tensors(states.read_tensors(world["base"] / "transformer"))
    lagging = [states.read_state(folder / "policy").digests["behaviour"] for folder in done]
    assert asked == [[sampler, start] for sampler in [start, *lagging[:3]]]


def test_four_rounds_equal_two_a_restart_and_two(world, four, tmp_path, monkeypatch):
    monkeypatch.setattr(DiffusionNFT, "behaviour_decay", decay)
    resident, policy = Resident(), four[0][1] / "policy"
    for round_ in (3, 4):
        out = round_of(world, NFT, resident, policy, round_, tmp_path / str(round_))
        assert contents(out) == contents(four[0][round_ - 1])
        policy = out / "policy"


def test_the_record_counts_re_noised_points_and_has_no_ratio(four):
    for folder in four[0]:
        numbers = json.loads((folder / "update.json").read_text())
        assert numbers["ledger"] == {
            "parents": 24, "points": 24, "with_gradient": 24, "frozen": 48, "optimizer_steps": 2,
        }  # fmt: skip
        assert numbers["total"]["ratio_mean"] is numbers["total"]["ratio_max"] is None
        assert numbers["total"]["param_change"] > 0
        table = pd.read_parquet(folder / "transitions.parquet")
        assert table["ratio"].isna().all() and (table["velocity_grad_norm"] > 0).all()


def test_an_average_that_equals_the_weights_does_not_hide_the_sampling_weights(world, tmp_path, monkeypatch):
    """With ema 0 the state names one set of weights twice, and the lagging ones must still be the ones that sample."""
    monkeypatch.setattr(DiffusionNFT, "behaviour_decay", decay)
    resident = Resident()
    folder = round_of(world, NFT, resident, world["start"], 1, tmp_path / "round", ema=0.0)
    state = states.read_state(folder / "policy")
    assert state.digests["train"] == state.digests["ema"] != state.digests["behaviour"]
    policy = resident.policy(PolicySpec(base=str(world["base"]), threads=1), world["base"])
    states.load_weights(policy, folder / "policy", "behaviour")
    assert digest.of_tensors(policy.module.state_dict()) == state.digests["behaviour"]


def test_without_a_lag_the_trained_weights_sample(world, tmp_path):
    folder = round_of(world, NFT | {"decay": "none"}, Resident(), world["start"], 1, tmp_path / "round")
    assert states.read_state(folder / "policy").sampler == "train"
    assert not (folder / "policy" / "behaviour").exists()


@pytest.mark.parametrize("surrogate", ["nft", "grpo"])
def test_a_round_of_e2po(world, tmp_path, surrogate):
    """Conditions are sampled, the trained points know only the prompt, and the counts are those of the plan."""
    method = E2PO | {"surrogate": surrogate}
    out = round_of(world, method, Resident(), world["start"], 1, tmp_path / "round")
    sampled = read_rollout(out.parent / "rollout" / "rollouts.zarr")
    assert sorted(set(sampled.nodes["condition"])) == [0, 1]
    place = {node: row for row, node in enumerate(sampled.leaf_nodes.tolist())}
    for prompt in sampled.prompts:
        leaves = sampled.leaves[sampled.leaves["prompt"] == prompt].set_index("member")["node"]
        one, other = (sampled.leaf_x[place[leaves[member]]] for member in (0, 1))  # one noise, two conditions
        assert not np.allclose(one, other, atol=1e-4)
    made = build(method)
    planned = [made.ledger(tree) for tree in rollout.plan_trees(rollout_spec(world["base"], method, 4))]
    numbers = json.loads((out / "update.json").read_text())["ledger"]
    for name in ("points", "parents", "with_gradient", "frozen"):
        assert numbers[name] == sum(getattr(one, name) for one in planned)
    ratios = pd.read_parquet(out / "transitions.parquet")["ratio"]
    assert ratios.isna().all() if surrogate == "nft" else (ratios - 1).abs().max() <= 1e-6
