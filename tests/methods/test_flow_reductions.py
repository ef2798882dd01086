"""Special cases that make one flow method another one."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from stages.methods import Plan, build
from stages.rollout.grid import GridSpec, make_grid
from stages.rollout.tree import FrozenTree
from stages.update.ppo import PPO
from tests.methods.flow_world import World, reward_table
from tests.update.toy import Policy, roll

STEPS, GROUP = 6, 4
GRID = make_grid(GridSpec(steps=STEPS))
PLAN = Plan(GRID, GROUP)
MIX = {"name": "mixgrpo", "window": STEPS - 1, "strategy": "frozen", "optimizer_steps": 2}
FLOW = {"name": "flow_grpo", "same_latent": True, "kl_coef": 0, "global_std": False}


def edges(tree: FrozenTree, root: int | None = None) -> set[tuple]:
    """Every step as what it computes: noise path and level of both ends, coefficients, whether it is trained.

    root: replaces the number of the initial noise.
    """

    def path(node: int) -> tuple[int, ...]:
        own = tree.paths[node]
        return own if root is None else (root, *own[1:])

    columns = [tree.edges[name] for name in ("parent", "child", "a", "kappa", "std", "recorded", "s", "member")]
    return {
        (path(parent), path(child), tree.nodes["sigma"][parent], tree.nodes["sigma"][child], *rest)
        for parent, child, *rest in zip(*(column.tolist() for column in columns))
    }


@pytest.mark.parametrize("kernel", ["flow_sde", "cps"])
def test_mixgrpo_with_a_window_of_all_but_the_last_step_is_flow_grpo_but_for_that_step(kernel):
    mix, flow = (build(options | {"kernel": kernel}).tree(PLAN) for options in (MIX, FLOW))
    ours, theirs = edges(mix), edges(flow)
    last = GRID.sigmas[-2]
    assert {edge for edge in ours if edge[2] > last} == {edge for edge in theirs if edge[2] > last}
    assert len([edge for edge in theirs if edge[2] == last]) == GROUP
    assert np.array_equal(
        mix.edges["optimizer_step"][mix.edges["recorded"]], flow.edges["optimizer_step"][flow.edges["recorded"]]
    )


def test_they_sample_the_same_states():
    one, other = (roll(Policy(), options, steps=STEPS, group=GROUP) for options in (MIX, FLOW))
    np.testing.assert_array_equal(one.next_x, other.next_x)
    np.testing.assert_array_equal(one.parent_x, other.parent_x)
    np.testing.assert_array_equal(one.parent_v, other.parent_v)


def test_they_pay_the_same_for_one_reward_with_their_statistics_matched():
    values = np.random.default_rng(0).standard_normal((3, 1, GROUP, 1))
    mix, flow = (build(options).credit(reward_table(values))["advantage"] for options in (MIX, FLOW))
    spread = np.std(values * 0.7, axis=2).repeat(GROUP)
    matched = flow * (spread + 1e-4) / spread * math.sqrt((GROUP - 1) / GROUP)  # eps 1e-4 → 0, ddof 0 → 1
    np.testing.assert_allclose(mix / 0.7, matched, rtol=1e-6)  # MixGRPO's weight multiplies the z-score


def test_they_have_the_same_loss_and_gradient():
    assert build(MIX).objective == replace(build(FLOW).objective, kl_form="flow_grpo") == PPO(1e-4)
    worlds = World(MIX, STEPS, GROUP), World(FLOW, STEPS, GROUP)
    worlds[1].table["advantage"] = worlds[0].table["advantage"]
    one, other = (world.gradients(world.moved()) for world in worlds)
    for (loss, grads), (other_loss, others) in zip(one, other):
        assert other_loss == loss
        assert all(torch.equal(a, b) for a, b in zip(grads, others))


def test_g2rpo_at_stride_one_is_the_branch_form_of_fast_at_every_step():
    """Λ = {1}, w = 1, one mini-group; every trained step is a branch-form tree of its own."""
    trained = range(STEPS - 1)
    whole = build({"name": "g2rpo", "granularities": [1], "steps": list(trained)}).tree(PLAN)
    parts: set[tuple] = set()
    for s in trained:
        fast = build(
            {"name": "flow_grpo_fast", "form": "branch", "window": 1, "mini": GROUP, "branch_steps": [s]}
            | {"kernel": "flow_sde", "eta": 0.7}
        )
        tree = fast.tree(PLAN)
        parts |= edges(tree, root=-1)
        assert tree.ledger().evaluations == (s + 1) + GROUP * (STEPS - s - 1)
    assert edges(whole) == parts


def test_and_their_credit_is_the_same_per_step_with_matched_statistics():
    values = np.random.default_rng(0).standard_normal((2, 1, GROUP, 1))
    one = build({"name": "g2rpo", "granularities": [1]}).credit(reward_table(values, s=[2]))["advantage"]
    fast = build({"name": "flow_grpo_fast", "form": "branch", "global_std": False})
    other = fast.credit(reward_table(values))["advantage"]
    spread = np.std(values * 0.7, axis=2).repeat(GROUP)
    matched = other * (spread + 1e-4) / spread * math.sqrt((GROUP - 1) / GROUP)
    np.testing.assert_allclose(one / 0.7, matched, rtol=1e-6)


def test_tempflow_with_one_noise_and_equal_weights_is_g2rpo_at_stride_one():
    temp = build({"name": "tempflow", "noises": 1, "weighting": "uniform"}).tree(PLAN)
    whole = build({"name": "g2rpo", "granularities": [1], "steps": list(range(STEPS - 1))}).tree(PLAN)
    assert edges(temp, root=-1) == edges(whole)
    assert set(temp.edges["weight"][temp.edges["recorded"]]) == {1.0}
