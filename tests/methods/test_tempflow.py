"""TempFlow-GRPO: seed groups, one stochastic step at a time, and a loss weighted by its noise."""

import numpy as np
import pytest

from stages.advantage.stage import advantages
from stages.core.errors import GranularError
from stages.methods import Plan, build, sampling_options
from stages.rollout.grid import GridSpec, make_grid
from stages.rollout.kernels import Kernel
from stages.update.points import gather
from tests.methods.flow_world import (
    World,
    check_advantages,
    check_gradients,
    check_rollout,
    evaluated,
    flow_sde,
    ledger,
    ppo,
    released_kl,
    standardised,
    summed,
    walk,
)
from tests.update.toy import PROMPTS

TEMPFLOW = {"name": "tempflow", "noises": 2, "clip_range": 1e-3}


@pytest.mark.parametrize("s", range(9))
def test_one_trained_step_costs_what_is_printed(s):
    options = {"name": "tempflow", "steps": [s], "optimizer_steps": 1}
    made = ledger(options, 10, 24, "sd3")
    expected = 4 * ((s + 1) + 6 * (10 - s - 1))
    assert (made.evaluations, made.parents, made.points, made.images) == (expected, 4, 24, 24)
    assert evaluated(options, 10, 24) == expected
    assert {0: 220, 8: 60}.get(s, expected) == expected


def test_all_steps_share_the_prefix_of_their_noise():
    made = ledger({"name": "tempflow", "optimizer_steps": 1}, 10, 24, "sd3")
    assert made.evaluations == 4 * (9 + 6 * sum(10 - s - 1 for s in range(9)))
    assert (made.parents, made.points, made.images) == (4 * 9, 24 * 9, 24 * 9)


def slow_samples(world: World) -> list:
    branches = world.group // world.method.noises
    return [
        walk(world, prompt, member, member // branches, [s], [s], s=s)
        for prompt in PROMPTS
        for member in range(world.group)
        for s in range(world.steps - 1)
    ]


@pytest.mark.parametrize("seed_groups", [True, False])
def test_states_and_advantages_equal_a_slow_loop(seed_groups):
    world = World(TEMPFLOW | {"seed_groups": seed_groups})
    samples = slow_samples(world)
    check_rollout(world, samples)
    rewards = {(one.prompt, one.member, one.s): summed(world, one) for one in samples}
    expected = {}
    for prompt in PROMPTS:
        for s in range(world.steps - 1):
            for group in ([0, 1], [2, 3]) if seed_groups else ([0, 1, 2, 3],):
                values = standardised([rewards[prompt, member, s] for member in group])
                expected |= {(prompt, member, s): value for member, value in zip(group, values)}
    check_advantages(world, expected)


@pytest.mark.parametrize("weighting", ["std", "uniform"])
def test_loss_and_gradient_equal_a_slow_loop(weighting):
    world = World(TEMPFLOW | {"weighting": weighting})
    sigmas = world.grid.sigmas

    def loss(step, new, old, reference, advantage):
        log_ratio = (new.log_prob(step.next_x) - old.log_prob(step.next_x)).mean()
        return ppo(log_ratio.exp(), advantage, 1e-3) + 0.04 * released_kl(world, step, new, reference)

    def weight(step) -> float:
        return flow_sde(0.0, 0.0, sigmas[step.s], sigmas[step.s + 1], 0.7, sigmas[1])[1]

    check_gradients(world, slow_samples(world), loss, weight=weight if weighting == "std" else None)


def test_weights_are_the_noise_of_the_step_with_mean_one():
    grid = make_grid(GridSpec(steps=10, family="sd3"))
    edges = build({"name": "tempflow"}).tree(Plan(grid, 24)).edges
    recorded = edges["recorded"]
    weights = {int(s): edges["weight"][recorded & (edges["s"] == s)] for s in range(9)}
    assert all(len(set(values)) == 1 for values in weights.values())
    one = np.asarray([values[0] for values in weights.values()])
    std = [
        Kernel("flow_sde", 0.7).coefficients(grid.sigmas[s], grid.sigmas[s + 1], grid.sigmas[1]).std for s in range(9)
    ]
    assert one.mean() == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(one / one[0], np.asarray(std) / std[0], atol=1e-12)


def test_differences_within_a_seed_group_are_due_to_one_step():
    world = World(TEMPFLOW)
    points = gather(world.rollout, world.table, world.grid)
    for (_, _), rows in points.table.groupby(["prompt", "s"]):
        parents = [set(rows.loc[rows["member"].isin(group), "parent"]) for group in ([0, 1], [2, 3])]
        assert [len(parent) for parent in parents] == [1, 1]
        assert parents[0] != parents[1]


def test_a_constant_seed_group_gives_exactly_zero_and_no_other_does():
    world = World(TEMPFLOW)
    rewards = {name: table.copy() for name, table in world.rewards.items()}
    leaves = world.rollout.leaves
    flat = leaves.loc[(leaves["prompt"] == 7) & (leaves["s"] == 2) & (leaves["member"] < 2), "leaf"]
    for table in rewards.values():
        table.loc[table["leaf"].isin(flat), "value"] = 0.1
    made, _ = advantages(world.rollout, rewards, {"a": 1, "b": 1}, world.method.credit)
    zero = (made["prompt"] == 7) & (made["s"] == 2) & (made["member"] < 2)
    assert (made.loc[zero, "advantage"] == 0).all()
    assert set(made.loc[zero, "why_zero"]) == {"constant"}
    assert (made.loc[~zero, "advantage"] != 0).all()
    np.testing.assert_array_equal(made.loc[~zero, "why_zero"], "")


def test_what_only_the_update_reads_re_uses_rollouts():
    assert sampling_options(TEMPFLOW | {"seed_groups": False, "global_std": True}) == sampling_options(TEMPFLOW)
    assert sampling_options(TEMPFLOW | {"weighting": "uniform"}) != sampling_options(TEMPFLOW)  # weights of the tree


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noises": 5}, "5 noises cannot share out a group of 24"),
        ({"noises": 24}, "at least two samples each"),
        ({"steps": [10]}, r"grid indices 0\.\.9"),
        ({"steps": [9], "kernel": "cps"}, r"grid indices 0\.\.8"),
        ({"steps": []}, r"got \[\]"),
    ],
)
def test_knobs_that_do_not_fit_are_refused(options, message):
    with pytest.raises(GranularError, match=message):
        build({"name": "tempflow", **options}).tree(Plan(make_grid(GridSpec(steps=10)), 24))
