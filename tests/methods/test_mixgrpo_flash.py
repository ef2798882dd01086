"""MixGRPO-Flash: the compressed grid, its solver, its cost, and what is left of it at r = 1 and order 1."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from stages.core.errors import GranularError
from stages.methods import Plan, build
from stages.methods.mixgrpo_flash import compressed
from stages.rollout.grid import GridSpec, make_grid
from tests.methods.branch_world import (
    assert_equal,
    counted,
    draw,
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
from tests.update.toy import PROMPTS, Net, Policy, roll

FLASH = {"name": "mixgrpo_flash", "optimizer_steps": 1}
STAR = FLASH | {"strategy": "frozen", "compression": 0.2}
GRID = make_grid(GridSpec(steps=25))


def tree(method: dict, steps: int = 25, group: int = 12, round_: int = 1):
    return build(method).tree(plan(steps, group, round_))


@pytest.mark.parametrize(
    ("ratio", "printed"),
    [
        (0.4, [0.940299, 0.885246, 0.818182, 0.734694, 0.627907, 0.486486, 0.290323, 0]),
        (0.2, [0.940299, 0.792453, 0.538462, 0]),
    ],
)
def test_the_compressed_grid_equals_the_printed_numbers(ratio, printed):
    assert [GRID.at(index) for index in compressed(4, 25, ratio, "coded")] == pytest.approx(printed, abs=1e-6)
    assert len(compressed(4, 25, ratio, "paper")) == len(printed) + 1


@pytest.mark.parametrize(
    ("method", "round_", "evaluations"), [(FLASH, 1, 121), (FLASH, 281, 75), (STAR, 1, 73), (STAR, 300, 73)]
)
def test_cost_per_prompt_equals_the_printed_numbers(method, round_, evaluations):
    for optimizer_steps, parents in ((1, 37), (4, 40)):
        found = ledger(method | {"optimizer_steps": optimizer_steps}, 25, 12, round_)
        assert (found.evaluations, found.points, found.images) == (evaluations, 48, 12)
        assert (found.parents, found.with_gradient, found.optimizer_steps) == (parents, parents, optimizer_steps)


def test_the_mean_over_300_rounds_is_the_printed_one():
    assert np.mean([ledger(FLASH, 25, 12, round_).evaluations for round_ in range(1, 301)]) == pytest.approx(99.2)


@pytest.mark.parametrize("steps", [5, 8, 25])
@pytest.mark.parametrize("count", ["coded", "paper"])
def test_cost_per_prompt_equals_its_formula_for_every_window(steps, count):
    for start in range(steps - 2):
        method = FLASH | {"window": 2, "hold": 1, "post_count": count}
        end = build(method).trained(plan(steps, 12, start + 1))[-1]
        points = int(max((steps - end) * 0.4, 1)) + (count == "paper")
        assert ledger(method, steps, 12, start + 1).evaluations == (start + 1) + 12 * (end + points - start - 1)


@pytest.mark.parametrize("options", [{"window": 2}, {"window": 2, "post_count": "paper"}, {"window": 4}], ids=str)
def test_the_engine_evaluates_what_was_planned(options):
    planned, done = counted(FLASH | options, 6, 4)
    assert planned == done


@pytest.mark.parametrize("end", ["code", "paper"])
def test_without_compression_a_first_order_solver_is_mixgrpo(end):
    """The whole tree: states, coefficients, draws and leaves, wherever the window stands."""
    options = {"window": 3, "hold": 1, "end": end, "optimizer_steps": 3}
    for round_ in range(1, 10):
        plain = tree({"name": "mixgrpo", **options}, 8, 3, round_)
        flash = tree(FLASH | options | {"compression": 1.0, "solver_order": 1}, 8, 3, round_)
        assert flash.paths == plain.paths
        for one, other in ((flash.nodes, plain.nodes), (flash.edges, plain.edges), (flash.leaves, plain.leaves)):
            assert all(np.array_equal(one[name], other[name]) for name in one)


def test_only_steps_behind_the_window_have_a_history_and_it_is_the_state_before():
    made = tree(FLASH, 25, 2, round_=41)
    edges, nodes = made.edges, made.nodes
    multistep = edges["history"] >= 0
    assert multistep.sum() == 2 * 6  # n = 8 points are 7 steps, the last of them first order
    assert (nodes["sigma"][edges["parent"][multistep]] <= GRID.sigmas[6]).all()
    for edge in np.flatnonzero(multistep):
        assert edges["history"][edge] == nodes["parent"][edges["parent"][edge]]
    assert (nodes["sigma"][edges["child"][multistep]] > 0).all()


def test_a_history_at_sigma_1_leaves_a_first_order_step():
    """lsnr is −∞ there, so h_0 is infinite: the coded arithmetic gives the same. The next step is of second order."""
    one, two = (tree(FLASH | {"window": 1, "solver_order": order}, 10, 2).edges for order in (1, 2))
    behind, after = np.flatnonzero(~one["recorded"])[:2]
    for name in ("a", "kappa", "a_history", "kappa_history"):
        assert two[name][behind] == pytest.approx(one[name][behind], abs=1e-15)
        assert abs(two[name][after] - one[name][after]) > 1e-3


def test_one_point_returns_the_clean_estimate_of_the_windows_last_state():
    """T = 6, w = 4, r = 0.4: T − e = 3, so n = 1; the last draw is trained, but no image has seen it."""
    made = tree(FLASH, 6, 3)
    edges = made.edges
    last = edges["recorded"] & (edges["s"] == 3)
    assert not made.nodes["evaluated"][edges["child"][last]].any()
    assert sorted(made.nodes["parent"][made.leaves["node"]]) == sorted(edges["parent"][last])
    paper = tree(FLASH | {"post_count": "paper"}, 6, 3)
    drawn = paper.edges["child"][paper.edges["recorded"] & (paper.edges["s"] == 3)]
    assert sorted(paper.nodes["parent"][paper.leaves["node"]]) == sorted(drawn)


def lsnr(sigma: float) -> float:
    return math.log(1 - sigma) - math.log(sigma)


def slow_image(net: Net, row: int, member: int, window: tuple[int, int], points: list[float], order: int):
    """One sample, in the printed form of DPM-Solver++; also the states that the window drew."""
    grid, round_ = make_grid(GridSpec(steps=8)), window[0] + 1
    x, path, drawn = draw(row, "root", (-1,), round_), (-1,), []
    for s in range(window[-1] + 1):
        sigma, after = grid.sigmas[s], grid.sigmas[s + 1]
        v = velocity(net, x, sigma, row)
        before = sigma, x - sigma * v
        if s in window:
            path = (*path, s, member)
            step = flow_sde(x, v, sigma, after, 0.7, grid.sigmas[1])
            x = step.mean + step.stddev * draw(row, "step", path, round_)
            drawn.append(x)
        else:
            x = x + (after - sigma) * v
    for sigma, after in pairwise(points):
        m0 = x - sigma * velocity(net, x, sigma, row)
        if after == 0:
            x = m0
        else:
            h = lsnr(after) - lsnr(sigma)
            d1 = (m0 - before[1]) * h / (lsnr(sigma) - lsnr(before[0])) if order == 2 else 0.0
            x = after / sigma * x - (1 - after) * (math.exp(-h) - 1) * (m0 + d1 / 2)
        before = sigma, m0
    return x, drawn


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("round_", [1, 3])
def test_the_rollout_equals_a_slow_loop(order, round_):
    method = FLASH | {"window": 2, "hold": 1, "compression": 0.7, "solver_order": order}
    rollout = roll(Policy(), method, steps=8, group=3, round_=round_)
    window = round_ - 1, round_
    u = np.linspace(1 - (window[1] + 1) / 8, 0, int((8 - window[1]) * 0.7))
    points = (3 * u / (1 + 2 * u)).tolist()
    images, states, net = images_of(rollout), states_of(rollout), Net().double()
    with torch.no_grad():
        for row, prompt in enumerate(PROMPTS):
            for member in range(3):
                image, drawn = slow_image(net, row, member, window, points, order)
                np.testing.assert_allclose(images[prompt, -1, member][0], image, atol=1e-5)
                for s, x in zip(window, drawn):
                    np.testing.assert_allclose(states[prompt, s, member], x, atol=1e-5)


def test_second_order_is_not_first_order():
    method = FLASH | {"window": 2, "compression": 0.8}
    one, two = (images_of(roll(Policy(), method | {"solver_order": order}, steps=8, group=3)) for order in (1, 2))
    assert all(np.abs(one[key][0] - two[key][0]).max() > 1e-3 for key in one)


def test_loss_and_gradient_equal_a_slow_loop():
    method = FLASH | {"window": 2, "post_count": "paper", "optimizer_steps": 2}
    _, _, _, points = sampled(method, 6, 4)
    net, sigmas = moved(), make_grid(GridSpec(steps=6)).sigmas
    for step, found in zip(points.steps(3), gradients(net, points, build(method).objective)):
        losses = []
        for edge in points.table.iloc[step.points].itertuples():
            x, old = (torch.from_numpy(array[edge.parent]).double() for array in (points.x, points.v))
            sample = torch.from_numpy(points.next_x[edge.next]).double()
            now = velocity(net, x, sigmas[edge.s], points.condition[edge.parent])
            new, behaviour = (flow_sde(x, v, sigmas[edge.s], sigmas[edge.s + 1], 0.7, sigmas[1]) for v in (now, old))
            ratio = (new.log_prob(sample) - behaviour.log_prob(sample)).mean().exp()
            losses.append(-torch.minimum(edge.advantage * ratio, edge.advantage * ratio.clamp(1 - 1e-4, 1 + 1e-4)))
        assert_equal(found, slow_gradient(net, sum(losses) / len(losses)), rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression": 0.0}, "compression"),
        ({"compression": 1.5}, "compression"),
        ({"solver_order": 3}, "solver_order"),
        ({"post_count": "both"}, "post_count"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(GranularError, match=message):
        build(FLASH | options)


def test_a_grid_without_points_between_its_own_is_refused():
    with pytest.raises(GranularError, match=r"grid\.family"):
        build(FLASH).tree(Plan(make_grid(GridSpec(steps=25, family="sd3")), 12))


def test_a_window_of_one_step_without_points_behind_it_leaves_a_leaf_for_every_member():
    """Late windows are one step wide; as coded, the image then is the estimate of the shared state in front of it."""
    grid = make_grid(GridSpec(steps=8))
    method = build({"name": "mixgrpo_flash", "window": 2, "hold": 8})
    tree = method.tree(Plan(grid, 4, round_=41))
    assert sorted(tree.leaves["member"]) == [0, 1, 2, 3]
    assert len(set(tree.leaves["node"])) == 1
