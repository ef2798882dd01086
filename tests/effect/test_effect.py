"""What a step was worth: completions start at the given states, and the truth they estimate is a martingale."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from stages.checks.sample import SHAPE, Sample, velocity
from stages.effect.spec import EffectSpec
from stages.effect.stage import GivenStates, _means, _owners, chosen_edges, completed
from stages.methods import build
from stages.policies.spec import PolicySpec
from stages.reward.spec import ScorerSpec
from stages.rollout.engine import run_forest
from stages.rollout.forest import Forest, Noise
from stages.rollout.grid import GridSpec, make_grid
from stages.rollout.kernels import Kernel
from stages.rollout.spec import SamplerSpec
from stages.rollout.tree import Tree

GRID = make_grid(GridSpec(steps=6))
KERNEL = Kernel("flow_sde", 0.7)


def complete(states: np.ndarray, steps: list[int], count: int):
    """The latents of all completions, and the state each belongs to."""
    trees = [completed(GRID, s, count, KERNEL) for s in steps]
    forest = Forest.of(trees, range(len(states)))
    shard = run_forest(
        forest, velocity=lambda x, t, i: velocity(x, t, 0 * t), noise=GivenStates(1, 0, SHAPE, states), max_batch=128
    )
    return shard.leaf_x, _owners([shard])


def state(number: int) -> np.ndarray:
    return Noise(9, 0, SHAPE)(number, "state", ())


def test_a_state_is_evaluated_once_and_completed_many_times():
    tree = completed(GRID, 2, 8, KERNEL)
    assert tree.ledger().evaluations == 1 + 8 * 3 and tree.ledger().images == 8
    assert tree.nodes["sigma"][0] == GRID.sigmas[2] and tree.nodes["s"][0] == 2


def test_the_last_state_and_an_image_have_one_completion():
    assert completed(GRID, 5, 8, KERNEL).ledger().images == 1
    image = completed(GRID, 6, 8, KERNEL)
    assert image.ledger().evaluations == 0 and image.ledger().images == 1


def test_completions_start_at_the_given_state():
    leaf, owner = complete(np.stack([state(0), state(1)]), [6, 6], 4)
    np.testing.assert_array_equal(leaf, np.stack([state(0), state(1)])[owner])


def test_equal_states_are_completed_with_noise_of_their_own():
    leaf, owner = complete(np.stack([state(0), state(0)]), [2, 2], 4)
    assert len(np.unique(leaf.reshape(8, -1), axis=0)) == 8 and sorted(owner) == [0] * 4 + [1] * 4


def test_effects_of_all_that_may_follow_a_state_have_mean_zero():
    """E over x' of E[r | x'] is E[r | x], where completions draw by the kernel that the step did."""
    tree, members = Tree(GRID), 200
    root = tree.root(s=1)
    for child in tree.branch(root, 2, KERNEL, range(members)):
        tree.complete(child, range(2, 6))
    forest = Forest.of([tree.freeze()], [0])
    shard = run_forest(
        forest, velocity=lambda x, t, i: velocity(x, t, 0 * t), noise=GivenStates(3, 0, SHAPE, state(0)[None]),
        max_batch=128,
    )  # fmt: skip
    states = np.concatenate([state(0)[None], shard.next_x])
    leaf, owner = complete(states, [1] + [2] * members, 40)
    mean, error = _means(leaf.reshape(len(leaf), -1).sum(1), owner, len(states))
    effects = mean[1:] - mean[0]
    spread = np.hypot(effects.std(ddof=1) / np.sqrt(members), error[0])
    assert abs(effects.mean()) < 4 * spread
    assert effects.std() > 2 * error[1:].mean()  # steps do differ, by more than the noise of their estimates


def test_means_know_their_errors():
    mean, error = _means(np.array([1.0, 3.0, 5.0]), np.array([0, 0, 1]), 2)
    np.testing.assert_allclose(mean, [2, 5])
    np.testing.assert_allclose(error, [1, 0])


@pytest.fixture
def spec() -> EffectSpec:
    return EffectSpec(
        seed=1, per_prompt=3, completions=2, grid=GridSpec(steps=6), policy=PolicySpec(base="b"),
        sampler=SamplerSpec(), scorers={"o": ScorerSpec(kind="lab_oracle")},
    )  # fmt: skip


def test_steps_are_drawn_from_trained_ones_as_many_of_each_prompt(spec):
    rollout = Sample(build({"name": "g2rpo"})).rollout
    edges = chosen_edges(rollout, spec)
    assert edges["recorded"].all() and (edges.groupby("prompt").size() == 3).all()
    pd.testing.assert_frame_equal(edges, chosen_edges(rollout, spec))
    assert not edges["edge"].equals(chosen_edges(rollout, replace(spec, seed=2))["edge"])
    assert len(chosen_edges(rollout, replace(spec, per_prompt=10**6))) == rollout.edges["recorded"].sum()
