"""E²PO samples K_c × G_n under blended conditions as one group, and trains it under the prompt's own condition."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch
from torch.distributions import Normal

from stages.advantage.stage import advantages
from stages.core.errors import GateError, GranularError
from stages.methods import Plan, build, sampling_options
from stages.policies.conditions import Conditions as Rows
from stages.rollout.conditions import BlendedConditions
from stages.rollout.engine import run_forest
from stages.rollout.forest import Forest, Noise
from stages.rollout.grid import Grid, GridSpec, make_grid
from stages.rollout.store import Rollout
from stages.update.frozen import frozen_velocities
from stages.update.points import gather
from stages.update.spec import OptimizerSpec
from stages.update.trainer import train
from tests.update import toy
from tests.update.toy import PROMPTS, SHAPE, Policy, conditions, score

GRID = make_grid(GridSpec(steps=10, family="sd3"))
E2PO = {"name": "e2po", "noises": 2, "perturb": {"conditions": 3}}
GRPO = E2PO | {"surrogate": "grpo", "kl_coef": 0.0}


def tree(group: int, **options):
    return build({"name": "e2po", **options}).tree(Plan(GRID, group))


# The tree.


@pytest.mark.parametrize("surrogate", ["nft", "grpo"])
def test_cost_per_prompt_equals_the_printed_numbers(surrogate):
    method = build({"name": "e2po", "surrogate": surrogate})
    ledger = method.ledger(method.tree(Plan(GRID, 48)), scorers=1)
    assert (ledger.evaluations, ledger.images, ledger.scores) == (480, 48, 48)
    assert (ledger.points, ledger.parents, ledger.with_gradient, ledger.frozen) == (432, 432, 432, 864)


@pytest.mark.parametrize(("noises", "conditions"), [(4, 12), (2, 4), (8, 3)])
def test_every_noise_meets_every_condition_once(noises, conditions):
    made = tree(noises * conditions, noises=noises, perturb={"conditions": conditions})
    roots = np.flatnonzero(made.nodes["parent"] < 0)
    pairs = [(made.paths[root][0], int(made.nodes["condition"][root])) for root in roots]
    assert sorted(pairs) == [(n, c) for n in range(noises) for c in range(conditions)]
    assert len(roots) == noises * conditions == len(made.leaves["node"])
    # All that follows a root is under its condition.
    children = made.nodes["parent"] >= 0
    assert (made.nodes["condition"][children] == made.nodes["condition"][made.nodes["parent"][children]]).all()


def test_the_group_must_be_conditions_times_noises():
    with pytest.raises(GranularError, match=r"12 × 4 = 48, got 24"):
        tree(24)
    with pytest.raises(GranularError, match=r"method\.perturb\.conditions: should be greater than or equal to 2"):
        build({"name": "e2po", "perturb": {"conditions": 1}})
    with pytest.raises(GranularError, match=r"method\.perturb\.blendd: unknown key; did you mean 'blend'"):
        build({"name": "e2po", "perturb": {"blendd": 0.3}})


def test_conditions_belong_to_what_is_sampled():
    assert sampling_options(E2PO | {"beta": 0.1}) == sampling_options(E2PO)
    assert sampling_options(E2PO | {"perturb": {"conditions": 3, "blend": 0.3}}) != sampling_options(E2PO)
    assert build(sampling_options(E2PO)) == build(E2PO)
    assert build(GRPO).behaviour_decay(100) is None and build(E2PO).behaviour_decay(100) == 0.1


# Rollouts of a toy whose conditions are numbers: condition c of a prompt is its own number plus 0.3·c.


def blend(apart: float = 0.3, count: int = 3) -> BlendedConditions:
    own = conditions().values
    values = (own[:, None] + apart * torch.arange(count)).reshape(-1)
    return BlendedConditions(Rows({"values": values}), per_prompt=count, blend=0.5)


def roll(policy: Policy, method: dict, blended: BlendedConditions, steps: int = 6) -> Rollout:
    made, grid = build(method), make_grid(GridSpec(steps=steps))
    forest = Forest.of([made.tree(Plan(grid, 6, 1))] * len(PROMPTS), PROMPTS)

    def velocity(x, time, index):
        return policy.velocity(x, time, toy.Conditions(blended.at(index, time).tensors["values"]))

    shard = run_forest(forest, velocity=velocity, noise=Noise(1, 1, SHAPE), max_batch=16, conditions=3)
    edges, leaves, renoised = (pd.DataFrame(one) for one in (forest.edges, forest.leaves, forest.renoised))
    for name, table in (("edge", edges), ("leaf", leaves), ("edge", renoised)):
        table.insert(0, name, np.arange(len(table)))
    return Rollout(
        prompts=np.asarray(PROMPTS, np.int64), nodes=pd.DataFrame(forest.nodes), edges=edges, leaves=leaves,
        renoised=renoised, parent_nodes=shard.parent_nodes, parent_x=shard.parent_x, parent_v=shard.parent_v,
        next_edges=shard.next_edges, next_x=shard.next_x, leaf_nodes=shard.leaf_nodes, leaf_x=shard.leaf_x,
        attrs={"spec": {"seed": 1, "round_": 1}, "sigmas": list(grid.sigmas)},
    )  # fmt: skip


def images(rollout: Rollout) -> dict[tuple[int, int], np.ndarray]:
    """(prompt, member) → leaf."""
    place = {node: row for row, node in enumerate(rollout.leaf_nodes.tolist())}
    return {(leaf.prompt, leaf.member): rollout.leaf_x[place[leaf.node]] for leaf in rollout.leaves.itertuples()}


def test_samples_equal_a_slow_loop_with_a_condition_blended_at_every_step():
    policy = Policy()
    found = images(roll(policy, E2PO | {"solver": "euler"}, blend()))
    sigmas = make_grid(GridSpec(steps=6)).sigmas
    policy.module.double()
    for (prompt, member), leaf in found.items():
        noise, condition = divmod(member, 3)
        x = torch.from_numpy(Noise(1, 1, SHAPE)(prompt, "root", (noise,))).double()
        own = float(conditions().values[PROMPTS.index(prompt)])
        for now, following in pairwise(sigmas):
            gamma = min(max((now - 0.5) / 0.5, 0), 1)
            told = gamma * (own + 0.3 * condition) + (1 - gamma) * own
            with torch.no_grad():
                v = policy.module(x[None], torch.tensor([now]).double(), torch.tensor([told]).double())[0]
            x = x + (following - now) * v
        np.testing.assert_allclose(leaf, x.numpy(), atol=1e-5)


def test_conditions_that_agree_make_the_samples_of_diffusionnft():
    """A group of K_c equal conditions is G_n samples, each K_c times: those of NFT with G = G_n."""
    agreeing = images(roll(Policy(), E2PO, blend(apart=0.0)))
    plain = images(toy.roll(Policy(), {"name": "nft"}, group=2))
    apart = images(roll(Policy(), E2PO, blend()))
    for (prompt, member), leaf in agreeing.items():
        np.testing.assert_array_equal(leaf, plain[prompt, member // 3])
        same = np.array_equal(apart[prompt, member], leaf)
        assert same == (member % 3 == 0)


@pytest.mark.parametrize("method", [E2PO, GRPO], ids=["nft", "grpo"])
def test_all_samples_of_a_prompt_are_one_group(method):
    rollout = roll(Policy(), method, blend())
    rewards = score(rollout)
    table = advantages(rollout, {"a": rewards}, {"a": 1.0}, build(method).credit)[0]
    for prompt in PROMPTS:
        own = rewards.loc[rewards["prompt"] == prompt, "value"].to_numpy()
        per_member = table[table["prompt"] == prompt].groupby("member")["advantage"].first()
        expected = (own - own.mean()) / (rewards["value"].std(ddof=0) + 1e-4)
        np.testing.assert_allclose(per_member, expected, atol=1e-12)
    assert len(table) == len(PROMPTS) * 6 * 5


@pytest.mark.parametrize("method", [E2PO, GRPO], ids=["nft", "grpo"])
def test_training_is_always_at_the_prompts_own_condition(method):
    _, points = gathered(method)
    # A position among the round's prompts, not among their conditions.
    assert set(points.condition.tolist()) == {0, 1}
    assert (np.asarray(PROMPTS)[points.condition[points.table["parent"]]] == points.table["prompt"]).all()


# The extension: PPO under the prompt's own condition.


def gathered(method: dict, fresh: bool = True):
    policy = Policy()
    rollout = roll(policy, method, blend())
    table = advantages(rollout, {"a": score(rollout)}, {"a": 1.0}, build(method).credit)[0]
    points = gather(rollout, table, Grid(tuple(rollout.attrs["sigmas"])))
    policy.calls.clear()
    if fresh:
        points = replace(points, v=frozen_velocities(policy, points, conditions(), 16, None))
    return policy, points


def update(policy, points, method=GRPO):
    return train(
        policy, points, conditions(), objective=build(method).objective, optimizer=OptimizerSpec(lr=1e-3), moments={},
        update_batch=16, max_batch=16,
    )  # fmt: skip


def test_the_first_ratio_is_one_only_under_the_prompts_own_condition():
    policy, points = gathered(GRPO)
    first = update(policy, points).transitions
    assert (first["ratio"] - 1).abs().max() <= 1e-6
    policy, points = gathered(GRPO, fresh=False)
    with pytest.raises(GateError, match="ratios differ from 1"):
        update(policy, points)


def test_the_loss_of_the_extension_equals_a_slow_loop():
    """PPO with both likelihoods under the prompt's own condition, at a draw made under another one."""
    policy, points = gathered(GRPO)
    policy.module.double()
    slow = toy.Net().double()
    result = update(policy, points)
    assert build(GRPO).objective.fresh and not build(GRPO).objective.needs_reference
    total = 0.0
    for point in points.table.itertuples():
        x, old, sample = (
            torch.from_numpy(array[row]).double()
            for array, row in ((points.x, point.parent), (points.v, point.parent), (points.next_x, point.next))
        )
        told = conditions().values[[PROMPTS.index(point.prompt)]].double()
        v = slow(x[None], torch.tensor([point.sigma]).double(), told)[0]
        ratio = (
            Normal(point.a * x + point.kappa * v, point.std).log_prob(sample).mean()
            - Normal(point.a * x + point.kappa * old, point.std).log_prob(sample).mean()
        ).exp()
        total = total + point.weight * torch.maximum(
            -point.advantage * ratio, -point.advantage * ratio.clamp(1 - 1e-4, 1 + 1e-4)
        )
    assert result.steps[0]["loss"] == pytest.approx(total.item(), abs=1e-9)
    total.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in slow.parameters()]).norm()
    assert result.steps[0]["grad_norm"] == pytest.approx(norm.item(), rel=1e-6)
