"""Pave-GRPO: sub-trajectories in the update, with every gradient of theirs, and G²RPO where there are none."""

import numpy as np
import pytest
import torch

from stages.core.errors import GateError, GranularError
from stages.methods import build, sampling_options
from stages.rollout.grid import GridSpec, make_grid
from stages.rollout.kernels import Kernel
from stages.update.subtrajectory import SubTrajectory
from tests.methods.branch_world import (
    assert_equal,
    counted,
    draw,
    exact,
    flow_sde,
    gradients,
    images_of,
    ledger,
    moved,
    plan,
    sampled,
    slow_gradient,
    states_of,
    velocity,
)
from tests.update.test_trainer import update
from tests.update.toy import PROMPTS, Net, Policy, roll

PAVE = {"name": "pave"}
STEPS, GROUP = 8, 4
SIGMAS = make_grid(GridSpec(steps=STEPS)).sigmas


@pytest.mark.parametrize(
    ("method", "steps", "evaluations"), [(PAVE, 16, 583), (PAVE | {"steps": [0, 1, 2, 3]}, 8, 268)]
)
def test_cost_per_prompt_equals_the_printed_numbers(method, steps, evaluations):
    """No anchor image: the prefix ends at the last trained state."""
    found = ledger(method, steps, 12)
    assert (found.evaluations, found.images, found.points, found.parents) == (evaluations, 48, 48, 4)
    assert (found.with_gradient, found.frozen, found.optimizer_steps) == (16, 0, 1)


def test_the_engine_evaluates_what_was_planned():
    planned, done = counted(PAVE, STEPS, GROUP)
    assert planned == done == len(PROMPTS) * (3 + GROUP * (7 + 5))


@pytest.mark.parametrize("segments", [[], [2], [2, 3], [5, 3]])
def test_the_update_evaluates_what_was_planned(segments):
    method = PAVE | {"segments": segments}
    *_, points = sampled(method, STEPS, GROUP)
    policy = Policy()
    update(policy, points, method, update_batch=1)
    assert sum(policy.calls) == len(PROMPTS) * ledger(method, STEPS, GROUP).with_gradient
    assert sum(policy.calls) == len(PROMPTS) * 2 * (1 + sum(n - 1 for n in segments))


def test_the_tree_is_that_of_g2rpo_with_one_stride():
    pave = build(PAVE).tree(plan(STEPS, GROUP))
    g2rpo = build({"name": "g2rpo", "granularities": [1], "steps": [0, 2], "update": "B", "eta": 0.8})
    other = g2rpo.tree(plan(STEPS, GROUP))
    assert pave.paths == other.paths
    assert all(np.array_equal(pave.edges[name], other.edges[name]) for name in pave.edges)


def test_the_rollout_equals_a_slow_loop():
    rollout, net = roll(Policy(), PAVE, steps=STEPS, group=GROUP), Net().double()
    images, states = images_of(rollout), states_of(rollout)
    assert set(images) == set(states)
    with torch.no_grad():
        for row, prompt in enumerate(PROMPTS):
            anchor = draw(row, "root", (-1,))
            for s in range(3):
                v = velocity(net, anchor, SIGMAS[s], row)
                for member in range(GROUP if s in (0, 2) else 0):
                    step = flow_sde(anchor, v, SIGMAS[s], SIGMAS[s + 1], 0.8, SIGMAS[1])
                    x = step.mean + step.stddev * draw(row, "step", (-1, s, member))
                    np.testing.assert_allclose(states[prompt, s, member], x, atol=1e-5)
                    for t in range(s + 1, STEPS):
                        x = x + (SIGMAS[t + 1] - SIGMAS[t]) * velocity(net, x, SIGMAS[t], row)
                    np.testing.assert_allclose(images[prompt, s, member][0], x, atol=1e-5)
                anchor = anchor + (SIGMAS[s + 1] - SIGMAS[s]) * v


def test_advantages_are_z_scores_of_each_step():
    rollout, rewards, table, _ = sampled(PAVE, STEPS, GROUP)
    values = rollout.leaves.merge(rewards[["leaf", "value"]], on="leaf")
    for (prompt, s), rows in table.groupby(["prompt", "s"]):
        group = values[(values["prompt"] == prompt) & (values["s"] == s)].sort_values("member")["value"].to_numpy()
        expected = (group - group.mean()) / (group.std(ddof=1) + 1e-8)
        np.testing.assert_allclose(rows.sort_values("member")["advantage"], expected, atol=1e-12)


def slow_loss(net: Net, points, segments) -> torch.Tensor:
    """(1/|M|)·Σ_s Σ_n w_n·mean_i[−A_i·exp(logp_n − sg(logp_n))], one branch after the other, nothing shared."""
    total = 0.0
    for edge in points.table.itertuples():
        sigma, after = SIGMAS[edge.s], SIGMAS[edge.s + 1]
        row = points.condition[edge.parent]
        sample = torch.from_numpy(points.next_x[edge.next]).double()
        for n in (1, *segments):
            h = (after - sigma) / n
            y = torch.from_numpy(points.x[edge.parent]).double()
            for m in range(n - 1):
                y = y + h * velocity(net, y, sigma + m * h, row)
            start = after - h
            # As in the released update, the sub-step's own end stands in for σ = 1.
            step = flow_sde(y, velocity(net, y, start, row), start, after, 0.8, after)
            log_prob = (-((sample - step.mean) ** 2) / (2 * step.stddev**2)).mean()
            weight = 1 if n == 1 else 1 / len(segments)
            total = total - weight * edge.advantage * (log_prob - log_prob.detach()).exp()
    return total / len(points.table)


@pytest.mark.parametrize("segments", [[], [2], [2, 3], [4, 2, 3]])
@pytest.mark.parametrize("update_batch", [1, 3, 8])
def test_loss_and_gradient_equal_a_slow_loop(segments, update_batch):
    """On and off the sampling policy: there is no ratio to it."""
    method = PAVE | {"segments": segments}
    *_, points = sampled(method, STEPS, GROUP)
    for net in (Net().double(), moved()):
        (found,) = gradients(net, points, build(method).objective, update_batch)
        expected = slow_gradient(net, slow_loss(net, points, segments))
        # Standardised advantages sum to 0, so the loss of ratios that are all 1 is rounding.
        assert abs(float(found.pop("loss") - expected.pop("loss"))) < 1e-12
        assert_equal(found, expected)


class LastVelocityOnly(SubTrajectory):
    """The walk without the gradient of how it came to its last state."""

    def walk(self, velocity, x, v, sigma, sigma_next):
        y, last = super().walk(lambda y, sigma: velocity(y.detach(), sigma), x, v.detach(), sigma, sigma_next)
        return y.detach() + 0 * v, last


def test_the_gradient_flows_through_every_velocity():
    *_, points = sampled(PAVE, STEPS, GROUP)
    net, kernel = Net().double(), Kernel("flow_sde", 0.8)
    whole, cut, direct = (
        gradients(net, points, objective)[0]
        for objective in (SubTrajectory((3,), kernel), LastVelocityOnly((3,), kernel), SubTrajectory((), kernel))
    )
    for other in (cut, direct):
        for name in ("enter", "leave"):
            assert (whole[name] - other[name]).abs().max() > 1e-2 * whole[name].abs().max()


def test_without_segments_it_is_g2rpo_without_clipping():
    """On-policy, where PPO's clip is silent: the same advantages, points and gradient."""
    method = PAVE | {"segments": [], "eta": 0.7}
    g2rpo = {"name": "g2rpo", "granularities": [1], "steps": [0, 2], "update": "B"}
    net = Net().double()
    (*_, table, points), (*_, other_table, other) = sampled(method, STEPS, GROUP), sampled(g2rpo, STEPS, GROUP)
    np.testing.assert_array_equal(table["advantage"], other_table["advantage"])
    points, other = exact(points, net), exact(other, net)
    found, expected = (gradients(net, one, build(m).objective)[0] for one, m in ((points, method), (other, g2rpo)))
    assert abs(float(found.pop("loss") - expected.pop("loss"))) < 1e-12
    assert_equal(found, expected)


def test_the_first_ratio_gate_sees_the_direct_transition():
    *_, points = sampled(PAVE, STEPS, GROUP)
    result = update(Policy(), points, PAVE)
    assert (result.transitions["ratio"] - 1).abs().max() <= 1e-6
    assert result.transitions["clip_side"].eq(0).all()
    policy = Policy()
    with torch.no_grad():
        policy.module.leave += 1e-2
    with pytest.raises(GateError, match="before the first optimizer step"):
        update(policy, points, PAVE)


def test_other_segments_re_use_the_rollouts():
    assert sampling_options(PAVE) == sampling_options(PAVE | {"segments": [2, 5], "adv_clip": 3.0})
    assert sampling_options(PAVE) != sampling_options(PAVE | {"eta": 0.7})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"segments": [2, 2]}, "every number of sub-steps once"),
        ({"segments": [1]}, "segments"),
        ({"clip_range": 1e-3}, "clips no ratio"),
        ({"steps": [7]}, r"grid indices 0\.\.6"),
        ({"granularities": [1]}, "granularities"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(GranularError, match=message):
        build(PAVE | options).tree(plan(STEPS, GROUP))
