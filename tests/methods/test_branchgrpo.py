"""BranchGRPO: one tree whose leaves are the group, siblings that draw alike, values fused upwards, edges pruned."""

import math

import numpy as np
import pandas as pd
import pytest
import torch

from stages.advantage.fusion import Fusion, PruneWidth
from stages.advantage.stage import advantages
from stages.core.errors import GranularError
from stages.methods import build, sampling_options
from stages.rollout.engine import run_forest
from stages.rollout.forest import Forest, Noise
from stages.rollout.grid import GridSpec, make_grid
from tests.methods.branch_world import (
    assert_equal,
    counted,
    draw,
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
from tests.update.toy import PROMPTS, Net, Policy, roll, score

PAPER = {"name": "branchgrpo"}
ONE = PAPER | {"optimizer_steps": 1}
SMALL = PAPER | {"splits": [0, 1, 3], "optimizer_steps": 2}
STEPS, GROUP = 6, 8
SIGMAS = make_grid(GridSpec(steps=STEPS)).sigmas


def tree(method: dict, steps: int = 20, group: int = 16, round_: int = 1):
    return build(method).tree(plan(steps, group, round_))


def test_cost_per_prompt_equals_the_printed_numbers():
    found = ledger(ONE, 20, 16)
    assert (found.evaluations, found.images, found.points, found.parents) == (203, 16, 218, 203)
    assert found.optimizer_steps == 1


def test_an_optimizer_step_takes_twelve_edges_as_released():
    edges = tree(PAPER).edges
    counts = np.bincount(edges["optimizer_step"][edges["recorded"]])
    assert counts.sum() == 218
    assert set(counts) == {11, 12}
    assert len(counts) == -(-218 // 12)


@pytest.mark.parametrize("method", [SMALL, SMALL | {"splits": [2, 4, 1]}], ids=str)
def test_the_engine_evaluates_what_was_planned(method):
    planned, done = counted(method, STEPS, GROUP)
    widths = [2 ** sum(b < s for b in method["splits"]) for s in range(STEPS)]
    assert planned == done == len(PROMPTS) * sum(widths)


def test_every_state_has_two_children_at_the_splits_and_one_elsewhere():
    made = tree(PAPER)
    edges = made.edges
    stochastic = edges["std"] > 0
    assert np.array_equal(stochastic, edges["recorded"])
    for s in range(20):
        here = edges["recorded"] & (edges["s"] == s)
        assert set(np.bincount(edges["parent"][here])[np.unique(edges["parent"][here])]) == {
            2 if s in (0, 3, 6, 9) else 1
        }
        assert edges["member"][here].tolist() == list(range(here.sum()))
    assert set(edges["common"][stochastic].round(12)) == {0.0, round(1 / math.sqrt(17), 12)}


def test_a_leaf_is_the_member_of_the_last_edge_on_its_way():
    made = tree(SMALL, STEPS, GROUP)
    edges, nodes, leaves = made.edges, made.nodes, made.leaves
    last = edges["recorded"] & (edges["s"] == STEPS - 1)
    for node, member in zip(leaves["node"], leaves["member"]):
        assert nodes["parent"][node] == edges["parent"][last & (edges["member"] == member)]
        assert nodes["sigma"][node] == 0


def test_draws_of_siblings_have_the_covariance_of_the_paper():
    """ξ_b = (ξ_0 + r·η_b)/√(1 + r²): unit variance, 1/(1 + r²) between siblings, 0 between all others."""
    made = tree(SMALL | {"branch_noise": 2.0}, STEPS, GROUP)
    shard = run_forest(
        Forest.of([made], [5]), velocity=lambda x, time, index: 0 * x, noise=Noise(1, 1, (100_000,)), max_batch=8
    )
    edges = made.edges
    rows = np.flatnonzero(np.isin(shard.next_edges, np.flatnonzero(edges["s"] < 3)))
    chosen = shard.next_edges[rows]
    parents = shard.parent_x[np.searchsorted(shard.parent_nodes, edges["parent"][chosen])]
    drawn = (shard.next_x[rows] - edges["a"][chosen, None] * parents) / edges["std"][chosen, None]
    expected = np.where(edges["parent"][chosen][:, None] == edges["parent"][chosen], 1 / 5, 0.0)
    np.fill_diagonal(expected, 1.0)
    np.testing.assert_allclose(drawn @ drawn.T / drawn.shape[1], expected, atol=0.02)


def slow_states(net: Net, row: int, r: float = 4.0) -> list[list[torch.Tensor]]:
    """All states, depth by depth; the last entry holds the images."""
    states, splits = [(draw(row, "root", (-1,)), (-1,))], (0, 1, 3)
    levels = []
    for s in range(STEPS):
        children, images = [], []
        for x, path in states:
            v = velocity(net, x, SIGMAS[s], row)
            clean = x - SIGMAS[s] * v
            images.append(clean)
            delta = SIGMAS[s] - SIGMAS[s + 1]
            score_ = -(x - (1 - SIGMAS[s]) * clean) / SIGMAS[s] ** 2
            mean = x - delta * v + delta * 0.3**2 / 2 * score_
            for _ in range(2 if s in splits else 1):
                own = (*path, s, len(children))
                xi = draw(row, "step", own)
                if s in splits:
                    xi = (draw(row, "common", path) + r * xi) / math.sqrt(1 + r**2)
                children.append((mean + 0.3 * math.sqrt(delta) * xi, own))
        levels.append([x for x, _ in children])
        states = children
    return [*levels, images]


def test_the_rollout_equals_a_slow_loop():
    rollout, net = roll(Policy(), SMALL, steps=STEPS, group=GROUP), Net().double()
    states, images = states_of(rollout), images_of(rollout)
    with torch.no_grad():
        for row, prompt in enumerate(PROMPTS):
            *levels, last = slow_states(net, row)
            for s, level in enumerate(levels):
                for member, x in enumerate(level):
                    np.testing.assert_allclose(states[prompt, s, member], x, atol=1e-5)
            for member, x in enumerate(last):
                np.testing.assert_allclose(images[prompt, -1, member][0], x, atol=1e-5)


def slow_values(rollout, rewards: pd.DataFrame, beta: float, along: str) -> dict[tuple[int, int, int], float]:
    """(prompt, s, member) → value of the state the edge leads to, by recursion over children."""
    edges = rollout.edges[rollout.edges["recorded"]]
    by_leaf = rollout.leaves.merge(rewards[["leaf", "value"]], on="leaf")
    reward = dict(zip(zip(by_leaf["prompt"], by_leaf["member"]), by_leaf["value"]))

    def leaves(edge) -> list[tuple[float, float]]:
        """(log-probability of the way from the edge's child, reward) of every leaf."""
        below = edges[edges["parent"] == edge.child]
        if not len(below):
            return [(0.0, reward[edge.prompt, edge.member])]
        return [(one.log_prob + p, r) for one in below.itertuples() for p, r in leaves(one)]

    def value(edge) -> float:
        below = list(edges[edges["parent"] == edge.child].itertuples())
        pairs = leaves(edge)
        if along == "edge" and below:
            pairs = [(one.log_prob, value(one)) for one in below]
        weights = torch.softmax(beta * torch.tensor([p for p, _ in pairs], dtype=torch.float64), 0)
        return float(weights @ torch.tensor([r for _, r in pairs], dtype=torch.float64))

    return {(edge.prompt, edge.s, edge.member): value(edge) for edge in edges.itertuples()}


@pytest.mark.parametrize("along", ["path", "edge"])
@pytest.mark.parametrize("beta", [0.0, 1.0, 7.0])
def test_fusion_and_advantages_equal_a_slow_recursion(along, beta):
    rollout, rewards, table, _ = sampled(SMALL | {"beta": beta, "along": along}, STEPS, GROUP)
    values = slow_values(rollout, rewards, beta, along)
    keys = list(zip(table["prompt"], table["s"], table["member"]))
    np.testing.assert_allclose(table["r.a.1"], [values[key] for key in keys], atol=1e-12)
    for prompt, s, member in keys:
        group = np.array([v for (p, t, _), v in values.items() if (p, t) == (prompt, s)])
        expected = (values[prompt, s, member] - group.mean()) / (group.std(ddof=1) + 1e-8)
        row = table[(table["prompt"] == prompt) & (table["s"] == s) & (table["member"] == member)]
        assert float(row["advantage"].iloc[0]) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("along", ["path", "edge"])
def test_fusion_with_beta_0_is_the_mean_of_the_leaves(along):
    rollout, rewards, table, _ = sampled(SMALL | {"beta": 0.0, "along": along}, STEPS, GROUP)
    values = rollout.leaves.merge(rewards[["leaf", "value"]], on="leaf")
    for prompt, rows in values.groupby("prompt"):
        leaves = rows.sort_values("member")["value"].to_numpy()
        for s, width in ((0, 2), (1, 4), (2, 4), (3, 8), (5, 8)):
            here = table[(table["prompt"] == prompt) & (table["s"] == s)].sort_values("member")
            np.testing.assert_allclose(here["r.a.1"], leaves.reshape(width, -1).mean(1), atol=1e-12)


def test_a_large_beta_takes_the_most_probable_leaf_and_does_not_overflow():
    rollout, rewards, *_ = sampled(SMALL, STEPS, GROUP)
    rollout.edges["log_prob"] *= 1000
    table = rollout.leaves.merge(rewards[["leaf", "value"]], on="leaf").rename(columns={"value": "reward"})
    fused = Fusion(100.0)(table.assign(scorer="a", weight=1.0), rollout)
    distance = np.abs(fused["reward"].to_numpy()[:, None] - table["reward"].to_numpy())
    assert distance.min(axis=1).max() < 1e-12


def with_rewards(change, method: dict = SMALL) -> pd.DataFrame:
    rollout = roll(Policy(), method, steps=STEPS, group=GROUP)
    rewards = score(rollout)
    table, _ = advantages(rollout, {"a": change(rewards, rollout)}, {"a": 1.0}, build(method).credit)
    return table


def test_offset_and_scale_of_rewards_change_nothing():
    plain = with_rewards(lambda rewards, _: rewards)
    for scale, offset in ((1.0, 7.0), (1e4, 0.0)):
        other = with_rewards(lambda rewards, _, a=scale, b=offset: rewards.assign(value=a * rewards["value"] + b))
        np.testing.assert_allclose(other["advantage"], plain["advantage"], atol=1e-6)


def test_swapping_the_halves_of_the_tree_swaps_their_advantages():
    method = SMALL | {"beta": 0.0}

    def swapped(rewards, rollout):
        values = rewards["value"].to_numpy().reshape(len(PROMPTS), 2, GROUP // 2)
        return rewards.assign(value=values[:, ::-1].reshape(-1))

    plain, other = with_rewards(lambda rewards, _: rewards, method), with_rewards(swapped, method)
    for (_, s), rows in plain.groupby(["prompt", "s"]):
        half = len(rows) // 2
        twin = other[(other["prompt"] == rows["prompt"].iloc[0]) & (other["s"] == s)].sort_values("member")
        ours = rows.sort_values("member")["advantage"].to_numpy()
        np.testing.assert_allclose(twin["advantage"], np.concatenate([ours[half:], ours[:half]]), atol=1e-12)


@pytest.mark.parametrize("beta", [0.0, 1.0, 30.0])
def test_constant_rewards_of_a_prompt_give_exactly_zero(beta):
    def constant(rewards, _):
        return rewards.assign(value=rewards["value"].mask(rewards["prompt"] == PROMPTS[0], 0.1))

    table = with_rewards(constant, SMALL | {"beta": beta})
    mine = table[table["prompt"] == PROMPTS[0]]
    assert (mine["advantage"] == 0).all()
    assert (mine["why_zero"] == "constant").all()
    assert (table.loc[table["prompt"] != PROMPTS[0], "advantage"] != 0).all()


def test_a_leaf_without_a_reward_leaves_the_values_above_it():
    rollout = roll(Policy(), SMALL | {"beta": 0.0}, steps=STEPS, group=GROUP)
    rewards = score(rollout)
    rewards.loc[rewards.index[0], ["value", "status"]] = [np.nan, "failed"]
    table, _ = advantages(rollout, {"a": rewards}, {"a": 1.0}, build(SMALL | {"beta": 0.0}).credit, failures="drop")
    prompt, values = PROMPTS[0], rewards["value"].to_numpy()
    mine = table[table["prompt"] == prompt].set_index(["s", "member"])
    assert mine.loc[(0, 0), "r.a.1"] == pytest.approx(values[1:4].mean())
    assert (mine.loc[[(3, 0), (4, 0), (5, 0)], "why_zero"] == "dropped").all()


def dance(x, v, s):
    """Dance-SDE as DanceGRPO's code has it."""
    delta = SIGMAS[s] - SIGMAS[s + 1]
    score_ = -(x - (1 - SIGMAS[s]) * (x - SIGMAS[s] * v)) / SIGMAS[s] ** 2
    return torch.distributions.Normal(x - delta * v + delta * 0.3**2 / 2 * score_, 0.3 * math.sqrt(delta))


@pytest.mark.parametrize("options", [{}, {"prune_width": "extremes"}, {"prune_steps": [4, 5]}], ids=str)
def test_loss_and_gradient_equal_a_slow_loop(options):
    method = SMALL | options
    *_, points = sampled(method, STEPS, GROUP)
    net = moved()
    for step, found in zip(points.steps(3), gradients(net, points, build(method).objective)):
        losses = []
        for edge in points.table.iloc[step.points].itertuples():
            x, old = (torch.from_numpy(array[edge.parent]).double() for array in (points.x, points.v))
            sample = torch.from_numpy(points.next_x[edge.next]).double()
            now = velocity(net, x, SIGMAS[edge.s], points.condition[edge.parent])
            ratio = (dance(x, now, edge.s).log_prob(sample) - dance(x, old, edge.s).log_prob(sample)).mean().exp()
            losses.append(-torch.minimum(edge.advantage * ratio, edge.advantage * ratio.clamp(1 - 1e-3, 1 + 1e-3)))
        assert_equal(found, slow_gradient(net, sum(losses) / len(losses)), rtol=1e-6)


@pytest.mark.parametrize("keep", ["parent_top1", "extremes"])
def test_width_keeps_the_edges_towards_half_of_the_leaves(keep):
    rollout, rewards, table, points = sampled(SMALL | {"prune_width": keep, "optimizer_steps": 1}, STEPS, GROUP)
    values = rollout.leaves.merge(rewards[["leaf", "value"]], on="leaf")
    for prompt, rows in values.groupby("prompt"):
        leaves = rows.sort_values("member")["value"].to_numpy()
        kept = {2 * i + int(leaves[2 * i + 1] > leaves[2 * i]) for i in range(4)}
        if keep == "extremes":
            order = np.argsort(leaves)
            kept = {*order[:2].tolist(), *order[-2:].tolist()}
        mine = table[table["prompt"] == prompt]
        assert not (mine.loc[mine["s"] < 3, "why_zero"] == "pruned").any()
        for s in (3, 4, 5):
            here = mine[mine["s"] == s]
            assert set(here.loc[here["why_zero"] != "pruned", "member"]) == kept
            assert (here.loc[here["why_zero"] == "pruned", "advantage"] == 0).all()
    assert len(points.table) == len(PROMPTS) * (2 + 4 + 4 + 4 + 4 + 4)


def test_what_width_keeps_is_paid_as_before():
    plain, pruned = (sampled(SMALL | {"prune_width": keep}, STEPS, GROUP)[2] for keep in ("none", "parent_top1"))
    kept = pruned["why_zero"] != "pruned"
    np.testing.assert_array_equal(pruned.loc[kept, "advantage"], plain.loc[kept, "advantage"])
    np.testing.assert_array_equal(pruned["total"], plain["total"])


def test_ties_are_broken_and_nobody_is_lost():
    table = pd.DataFrame({"prompt": 0, "s": 3, "member": range(8), "total": 1.0, "advantage": 1.0, "why_zero": ""})
    for keep in ("parent_top1", "extremes"):
        assert (PruneWidth(keep, 3)(table)["why_zero"] == "pruned").sum() == 4


@pytest.mark.parametrize(
    ("options", "points", "parents"),
    [
        ({}, 218, 203),
        ({"prune_width": "parent_top1"}, 218 - 8 * 11, 203 - 8 * 10),
        ({"prune_steps": [14, 15, 16, 17]}, 218 - 64, 203 - 64),
        ({"prune_steps": [14, 15, 16, 17], "prune_width": "parent_top1"}, 218 - 64 - 8 * 7, 203 - 64 - 8 * 6),
    ],
)
def test_the_plan_knows_what_is_pruned(options, points, parents):
    found = ledger(ONE | options, 20, 16)
    assert (found.evaluations, found.points, found.parents, found.with_gradient) == (203, points, parents, parents)


@pytest.mark.parametrize("options", [{"prune_width": "parent_top1"}, {"prune_steps": [3, 4]}, {}], ids=str)
def test_the_update_does_what_the_plan_says(options):
    method = SMALL | {"optimizer_steps": 1} | options
    *_, points = sampled(method, STEPS, GROUP)
    policy, planned = Policy(), ledger(method, STEPS, GROUP)
    result = update(policy, points, method, update_batch=1)
    assert len(policy.calls) == len(PROMPTS) * planned.with_gradient
    assert len(result.transitions) == len(PROMPTS) * planned.points
    assert (result.transitions["ratio"] - 1).abs().max() <= 1e-6


@pytest.mark.parametrize(
    ("steps", "shift", "windows"),
    [
        ([14, 15, 16, 17], -1, {1: 14, 30: 14, 31: 13, 61: 12, 151: 9, 300: 9}),
        ([9, 10, 11, 12], 1, {1: 9, 30: 9, 31: 10, 211: 16, 300: 16}),
        ([9, 10, 11, 12], 0, {1: 9, 300: 9}),
        ([2, 3], -1, {1: 2, 300: 2}),
    ],
)
def test_the_depth_window_moves_between_the_last_split_and_the_end(steps, shift, windows):
    method = ONE | {"prune_steps": steps, "prune_shift": shift}
    for round_, first in windows.items():
        edges = tree(method, round_=round_).edges
        untrained = edges["recorded"] & (edges["weight"] == 0)
        assert sorted(set(edges["s"][untrained])) == list(range(first, first + len(steps)))
        assert edges["recorded"].sum() == 218


def test_fusion_reads_the_depths_that_are_not_trained():
    plain, pruned = (sampled(SMALL | {"prune_steps": steps}, STEPS, GROUP)[2] for steps in ([], [2, 4]))
    np.testing.assert_array_equal(plain["total"], pruned["total"])


def test_the_order_of_edges_is_a_pure_function_of_seed_and_round():
    one, again, later = (tree(PAPER, round_=round_).edges["optimizer_step"] for round_ in (1, 1, 2))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, later)


def test_credit_options_re_use_the_rollouts():
    assert sampling_options(PAPER) == sampling_options(
        PAPER | {"beta": 0.0, "along": "edge", "prune_width": "extremes", "clip_range": 1e-4}
    )
    assert sampling_options(PAPER) != sampling_options(PAPER | {"branch_noise": 2.0})


@pytest.mark.parametrize(
    ("options", "group", "message"),
    [
        ({}, 12, "4 splits make 16 leaves, got group 12"),
        ({"splits": [0, 3, 3]}, 8, "each once"),
        ({"splits": [0, 19]}, 4, r"grid indices 0\.\.18"),
        ({"splits": []}, 16, "splits"),
        ({"splits": [0], "prune_width": "extremes"}, 2, "at least four leaves"),
        ({"prune_steps": [20]}, 16, r"grid indices 0\.\.19"),
        ({"optimizer_steps": 219}, 16, "at most one per trained edge, 218"),
        ({"branch_noise": 0.0}, 16, "branch_noise"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, group, message):
    with pytest.raises(GranularError, match=message):
        tree(PAPER | options, group=group)
