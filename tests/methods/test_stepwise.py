"""Stepwise-Flow-GRPO: every state is estimated, gains are standardised together, and a loop agrees."""

from itertools import pairwise

import numpy as np
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

NAME = {"name": "stepwise"}
KERNELS = [{"kernel": name} for name in ("flow_sde", "ddim_intent", "ddim_literal")]


@pytest.mark.parametrize(
    ("options", "evaluations", "images", "points", "parents"),
    [
        ({}, 1085, 241, 216, 193),
        ({"last_step": "trained"}, 1085, 241, 240, 217),
        ({"last_step": "left_out"}, 1085, 241, 216, 193),
        ({"substeps": 1}, 1 + 24 * 9, 241, 216, 193),
        ({"same_latent": False}, 24 * 10 * 5, 264, 216, 216),
    ],
)
def test_cost_per_prompt_equals_the_printed_numbers(options, evaluations, images, points, parents):
    ledger = printed(NAME | {"optimizer_steps": 1} | options, 10)
    assert (ledger.evaluations, ledger.images) == (evaluations, images)
    assert (ledger.points, ledger.parents, ledger.frozen) == (points, parents, parents)


def test_the_shared_state_is_trained_once_per_optimizer_step():
    assert printed(NAME, 10).parents == 193 + 1


@pytest.mark.parametrize("options", [{}, {"substeps": "grid"}, {"kernel": "ddim_literal"}, {"same_latent": False}])
def test_the_engine_evaluates_what_was_planned(options):
    planned, done = counted(NAME | options)
    assert planned == done


@pytest.mark.parametrize("options", [*KERNELS, {"substeps": 1}, {"substeps": "grid"}, {"same_latent": False}], ids=str)
def test_the_rollout_equals_a_slow_loop(options):
    """Every drawn state and every estimate, in float64, one member and one sub-step at a time."""
    rollout = roll(Policy(), NAME | {"substeps": 3} | options, steps=STEPS, group=GROUP)
    kernel, substeps = options.get("kernel", "flow_sde"), options.get("substeps", 3)
    states, images, net = states_of(rollout), images_of(rollout), Net().double()
    met = set()
    with torch.no_grad():
        for row, prompt in enumerate(PROMPTS):
            for member in range(GROUP):
                root = member if "same_latent" in options else -1
                slow = trajectory(net, row, member, [(kernel, 0.7)] * STEPS, root)
                for s, x in enumerate(slow):
                    levels = [SIGMAS[s] * (1 - m / substeps) for m in range(substeps + 1)] if substeps != "grid" else []
                    image = ode(net, x, levels or list(SIGMAS[s:]), row) if s < STEPS else x
                    key = (prompt, s, member) if (prompt, s, member) in images else (prompt, s, -1)
                    np.testing.assert_allclose(images[key], image, atol=1e-5)
                    met.add(key)
                    if (prompt, s - 1, member) in states:
                        np.testing.assert_allclose(states[prompt, s - 1, member], x, atol=1e-5)
    assert met == set(images)


@pytest.mark.parametrize("normalise", ["joint", "per_step"])
@pytest.mark.parametrize("last_step", ["trained", "counted", "left_out"])
def test_advantages_equal_a_slow_loop(normalise, last_step):
    _, rollout, rewards, table, _ = sampled(NAME | {"normalise": normalise, "last_step": last_step})
    value = rewards_of(rollout, rewards)
    for prompt in PROMPTS:
        r = [[value.get((prompt, s, i), value.get((prompt, s, -1))) for s in range(STEPS + 1)] for i in range(GROUP)]
        gains = [[after - before for before, after in pairwise(one)] for one in r]
        kept = range(STEPS - 1 if last_step == "left_out" else STEPS)
        expected = {}
        groups = [[(s, i) for s in kept for i in range(GROUP)]]
        if normalise == "per_step":
            groups = [[(s, i) for i in range(GROUP)] for s in kept]
        for group in groups:
            expected |= dict(zip(group, zscore([gains[i][s] for s, i in group])))
        mine = table[table["prompt"] == prompt]
        assert len(mine) == GROUP * (STEPS if last_step == "trained" else STEPS - 1)
        for found in mine.itertuples():
            assert found.advantage == pytest.approx(expected[found.s, found.member], abs=1e-9)
        np.testing.assert_allclose(mine["r.sum.1"], [gains[i][s] for s, i in zip(mine["s"], mine["member"])])


@pytest.mark.parametrize("options", [*KERNELS, {"kl_form": "gaussian"}, {"last_step": "trained"}], ids=str)
def test_loss_and_gradient_equal_a_slow_loop(options):
    method = NAME | {"substeps": 2, "clip_range": 0.003, "kl_coef": 0.5} | options
    compare_gradients(method, sampled(method)[-1])


def test_sub_steps_on_the_base_grid_give_the_completions_of_tp_grpo():
    shared = {"kernel": "flow_sde", "same_latent": True}
    mine = images_of(roll(Policy(), NAME | {"substeps": "grid"} | shared, steps=STEPS, group=GROUP))
    theirs = images_of(roll(Policy(), {"name": "tp_grpo"} | shared, steps=STEPS, group=GROUP))
    assert set(theirs) == {key for key in mine if key[1] < STEPS}
    for key, image in theirs.items():
        np.testing.assert_allclose(mine[key], image, atol=1e-6)


def tree(**options):
    return build(NAME | options).tree(Plan(make_grid(GridSpec(steps=STEPS)), GROUP))


def test_a_first_step_without_noise_is_shared_and_not_trained():
    made = tree(kernel="ddim_literal")
    edges = made.edges
    assert set(edges["s"][edges["recorded"]].tolist()) == set(range(1, STEPS - 1))
    leaves = list(zip(made.leaves["s"].tolist(), made.leaves["member"].tolist()))
    assert leaves[:3] == [(0, -1), (1, -1), (2, 0)]
    assert len(leaves) == 2 + GROUP * (STEPS - 1)


def test_its_gain_counts_once_for_every_member():
    _, rollout, rewards, table, _ = sampled(NAME | {"kernel": "ddim_literal"})
    value = rewards_of(rollout, rewards)
    prompt = PROMPTS[0]
    gains = [value[prompt, 1, -1] - value[prompt, 0, -1]] * GROUP
    for i in range(GROUP):
        r = [value[prompt, 1, -1], *(value[prompt, s, i] for s in range(2, STEPS + 1))]
        gains += [after - before for before, after in pairwise(r)]
    mine = table[table["prompt"] == prompt].sort_values(["member", "s"])
    trained = [z for at, z in enumerate(zscore(gains)[GROUP:]) if at % (STEPS - 1) < STEPS - 2]
    np.testing.assert_allclose(mine["advantage"], trained, atol=1e-9)


@pytest.mark.parametrize("kernel", ["flow_sde", "ddim_intent", "ddim_sigma", "ddim_sigma_clamped"])
def test_all_but_the_last_step_are_trained(kernel):
    edges = tree(kernel=kernel).edges
    for member in range(GROUP):
        assert edges["s"][edges["recorded"] & (edges["member"] == member)].tolist() == list(range(STEPS - 1))


def test_estimates_lie_off_the_grid_at_equal_distances():
    nodes = tree().nodes
    off = nodes["s"] == -1
    assert off.sum() == 4 * (1 + GROUP * (STEPS - 1))
    np.testing.assert_allclose(nodes["sigma"][off][:4], [0.8, 0.6, 0.4, 0.2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": "ddim_intent", "last_step": "trained"}, "has no noise and cannot be trained"),
        ({"optimizer_steps": GROUP + 1}, "at most one per member"),
        ({"substeps": 0}, "method.substeps"),
        ({"substeps": "base"}, "method.substeps"),
        ({"kernel": "cps"}, "method.kernel"),
        ({"sub_steps": 3}, "substeps"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(GranularError, match=message):
        tree(**options)
