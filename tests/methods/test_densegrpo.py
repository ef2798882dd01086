"""DenseGRPO: dense rewards per step, noise levels that learn between rounds, and a tree that never changes shape."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

from stages.core.errors import GranularError
from stages.methods import Plan, build
from stages.rollout.grid import GridSpec, make_grid
from tests.methods.gain_world import (
    GROUP,
    SIGMAS,
    STEPS,
    compare_gradients,
    counted,
    images_of,
    ode,
    printed,
    rewards_of,
    sampled,
    states_of,
    trajectory,
    zscore,
)
from tests.update.toy import PROMPTS, Net, Policy, roll

NAME = {"name": "densegrpo"}
GRID = make_grid(GridSpec(steps=STEPS))
MEMORY = {"eta": {"0": 0.5, "2": 0.9}}


def test_cost_per_prompt_equals_the_printed_numbers():
    ledger = printed(NAME, 10)
    assert (ledger.evaluations, ledger.images, ledger.points, ledger.parents) == (1320, 264, 216, 216)
    assert (ledger.frozen, ledger.optimizer_steps) == (216, 2)


@pytest.mark.parametrize("options", [{}, {"same_latent": True}])
def test_the_engine_evaluates_what_was_planned(options):
    planned, done = counted(NAME | options)
    assert planned == done


@pytest.mark.parametrize("memory", [{}, MEMORY], ids=["first round", "later round"])
def test_the_rollout_equals_a_slow_loop(memory, monkeypatch):
    """Each step at its own noise level; R_s is the ODE's image from the state before step s."""
    monkeypatch.setattr("tests.update.toy.Plan", lambda *a: Plan(*a, memory=memory))
    rollout = roll(Policy(), NAME, steps=STEPS, group=GROUP)
    states, images, net = states_of(rollout), images_of(rollout), Net().double()
    assert len(images) == len(PROMPTS) * GROUP * (STEPS + 1)
    kernels = [("flow_sde", memory.get("eta", {}).get(str(s), 0.7)) for s in range(STEPS)]
    with torch.no_grad():
        for row, prompt in enumerate(PROMPTS):
            for member in range(GROUP):
                slow = trajectory(net, row, member, kernels, member)
                for s, x in enumerate(slow):
                    image = ode(net, x, list(SIGMAS[s:]), row)
                    np.testing.assert_allclose(images[prompt, s, member], image, atol=1e-5)
                    if 0 < s < STEPS:
                        np.testing.assert_allclose(states[prompt, s - 1, member], x, atol=1e-5)


def test_advantages_equal_a_slow_loop_and_hold_the_dense_rewards():
    _, rollout, rewards, table, _ = sampled(NAME)
    value = rewards_of(rollout, rewards)
    for prompt in PROMPTS:
        for s in range(STEPS - 1):
            gains = [value[prompt, s + 1, i] - value[prompt, s, i] for i in range(GROUP)]
            found = table[(table["prompt"] == prompt) & (table["s"] == s)].sort_values("member")
            np.testing.assert_allclose(found["advantage"], zscore(gains), atol=1e-9)
            np.testing.assert_allclose(found["r.sum.1"], gains, atol=1e-12)


def test_loss_and_gradient_equal_a_slow_loop():
    method = NAME | {"clip_range": 0.003, "kl_coef": 0.5}
    compare_gradients(method, sampled(method)[-1])


def gains(**by_step: list[float]) -> pd.DataFrame:
    """An advantages table that holds the given dense rewards of steps `s0`, `s1`, …"""
    rows = [(int(name[1:]), value) for name, values in by_step.items() for value in values]
    return pd.DataFrame(rows, columns=["s", "r.sum.1"])


def test_a_balanced_step_gets_more_noise_and_any_other_step_less():
    table = gains(s0=[1, 1, -1, -1], s1=[1, 1, 1, 1], s2=[-1, -1, -1, 1], s3=[0.0, 0.0, np.nan, 0.0])
    made = build(NAME | {"eta_step": 0.05}).remember({"other": 1}, table)
    assert made == {"other": 1, "eta": {"0": 0.75, "1": 0.65, "2": 0.65}}
    again = build(NAME | {"eta_step": 0.05}).remember(json.loads(json.dumps(made)), table)
    assert again["eta"] == {"0": 0.8, "1": 0.6, "2": 0.6}


def test_balance_is_meant_within_a_share_of_the_rewards():
    table = gains(s0=[1] * 11 + [-1] * 9, s1=[1] * 12 + [-1] * 8)
    assert build(NAME).remember({}, table)["eta"] == {"0": 0.72, "1": 0.68}
    assert build(NAME | {"imbalance": 0.2}).remember({}, table)["eta"] == {"0": 0.72, "1": 0.72}


def test_noise_levels_stay_in_their_range():
    table, made = gains(s0=[1, -1], s1=[1, 1]), {}
    for _ in range(100):
        made = build(NAME | {"eta_step": 0.1, "eta_range": [0.2, 1.0]}).remember(made, table)
    assert made["eta"] == {"0": 1.0, "1": 0.2}


def test_without_a_step_width_nothing_moves():
    assert set(build(NAME | {"eta_step": 0.0}).remember({}, gains(s0=[1, -1], s1=[1, 1]))["eta"].values()) == {0.7}


def test_it_learns_from_a_real_table_of_advantages():
    table = sampled(NAME)[3]
    levels = build(NAME).remember({}, table)["eta"]
    assert list(levels) == [str(s) for s in range(STEPS - 1)]
    assert set(levels.values()) == {0.72, 0.68}


def test_memory_moves_noise_and_nothing_else():
    first, later = (build(NAME).tree(Plan(GRID, GROUP, memory=memory)) for memory in ({}, MEMORY))
    method = build(NAME)
    assert method.ledger(first) == method.ledger(later)
    assert first.paths == later.paths
    for kind in ("nodes", "leaves"):
        assert all(np.array_equal(getattr(first, kind)[name], column) for name, column in getattr(later, kind).items())
    changed = {name for name, column in later.edges.items() if not np.array_equal(first.edges[name], column)}
    assert changed == {"a", "kappa", "std"}
    moved = first.edges["std"] != later.edges["std"]
    assert set(later.edges["s"][moved].tolist()) == {0, 2}


def test_what_is_not_stated_is_that_of_flow_grpo():
    method = build(NAME)
    assert (method.clip_range, method.optimizer_steps, method.zero_groups) == (1e-4, 2, "drop")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eta": 2.0}, r"method.eta_range: \[0.1, 1\] must hold method.eta, 2"),
        ({"kernel": "cps", "eta_range": [0.1, 1.2]}, "kernel cps is at most 1"),
        ({"eta_range": [0.0, 1.0]}, "method.eta_range"),
        ({"imbalance": 1.5}, "method.imbalance"),
        ({"optimizer_steps": GROUP + 1}, "at most one per member"),
        ({"etas": 0.3}, "did you mean 'eta'"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(GranularError, match=message):
        build(NAME | options).tree(Plan(GRID, GROUP))
