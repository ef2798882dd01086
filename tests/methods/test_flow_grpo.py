"""Flow-GRPO: its tree, its advantages and its loss equal a slow loop; its options do what they say."""

import numpy as np
import pytest
from torch.distributions import kl_divergence

from stages.core.errors import GranularError
from stages.core.types import Ledger
from stages.methods import Plan, build, sampling_options
from stages.rollout.grid import GridSpec, make_grid
from stages.update.gradient import MEASURED, gradient
from stages.update.ppo import PPO
from stages.update.spec import OptimizerSpec
from stages.update.trainer import train
from tests.methods.flow_world import (
    World,
    check_advantages,
    check_gradients,
    check_rollout,
    evaluated,
    ledger,
    ppo,
    released_kl,
    reward_table,
    standardised,
    summed,
    velocity,
    walk,
)
from tests.update.toy import PROMPTS, Net, Policy, conditions

FLOW = {"name": "flow_grpo", "clip_range": 1e-3}


def slow_samples(world: World, root=None) -> list:
    trained = range(int(world.steps * 0.99))
    return [
        walk(world, prompt, member, member if root is None else root, range(world.steps), trained)
        for prompt in PROMPTS
        for member in range(world.group)
    ]


@pytest.mark.parametrize(
    ("options", "evaluations", "parents"), [({}, 240, 216), ({"same_latent": True}, 1 + 24 * 9, 1 + 24 * 8)]
)
def test_cost_per_prompt_equals_the_printed_numbers(options, evaluations, parents):
    made = ledger({"name": "flow_grpo", "optimizer_steps": 1, **options}, 10, 24, "sd3")
    assert made == Ledger(evaluations, evaluations, 24, 0, parents, 216, parents, parents, 1)
    assert evaluated({"name": "flow_grpo", **options}, 10, 24) == evaluations


def test_without_a_kl_term_nothing_is_evaluated_frozen():
    made = ledger({"name": "flow_grpo", "kl_coef": 0}, 10, 24)
    assert (made.frozen, made.with_gradient, made.optimizer_steps) == (0, 216, 2)


@pytest.mark.parametrize("kernel", ["flow_sde", "cps", "dance_sde"])
def test_states_equal_those_of_single_samples(kernel):
    world = World(FLOW | {"kernel": kernel})
    check_rollout(world, slow_samples(world))


def test_with_same_latent_a_group_starts_from_one_noise():
    world = World(FLOW | {"same_latent": True})
    check_rollout(world, slow_samples(world, root=-1))


@pytest.mark.parametrize("global_std", [True, False])
def test_advantages_equal_a_slow_loop(global_std):
    world = World(FLOW | {"global_std": global_std})
    samples = slow_samples(world)
    rewards = {(one.prompt, one.member): summed(world, one) for one in samples}
    expected = {}
    for prompt in PROMPTS:
        group = [rewards[prompt, member] for member in range(world.group)]
        values = standardised(group, list(rewards.values()) if global_std else None)
        for member, value in enumerate(values):
            expected |= {(prompt, member, s): value for s in range(5)}
    check_advantages(world, expected)


@pytest.mark.parametrize("kl_form", ["flow_grpo", "gaussian", "velocity"])
@pytest.mark.parametrize("kernel", ["flow_sde", "cps"])
def test_loss_and_gradient_equal_a_slow_loop(kernel, kl_form):
    world = World(FLOW | {"kernel": kernel, "kl_form": kl_form})
    net = world.moved()

    def loss(step, new, old, reference, advantage):
        log_ratio = (new.log_prob(step.next_x) - old.log_prob(step.next_x)).mean()
        if kernel == "cps":  # released without 1/(2·std²)
            log_ratio = (-((step.next_x - new.mean) ** 2) + (step.next_x - old.mean) ** 2).mean()
        if kl_form == "velocity":
            sigma = world.grid.sigmas[step.s]
            start = velocity(Net(5).double(), step.x, sigma, step.prompt)
            kl = ((velocity(net, step.x, sigma, step.prompt) - start) ** 2).mean()
        else:
            kl = released_kl(world, step, new, reference)
            if kl_form == "gaussian":
                kl = kl_divergence(new, reference).mean()
        return ppo(log_ratio.exp(), advantage, 1e-3) + 0.04 * kl

    check_gradients(world, slow_samples(world), loss, net=net)


def test_the_released_kl_is_delta_times_the_gaussian_one_but_for_cps():
    for kernel, form in (("flow_sde", "flow_grpo"), ("dance_sde", "flow_grpo"), ("cps", "gaussian")):
        assert build({"name": "flow_grpo", "kernel": kernel}).objective.kl_form == form
    assert build({"name": "flow_grpo", "kernel": "cps", "kl_form": "velocity"}).objective.kl_form == "velocity"


def test_all_steps_are_stochastic_and_the_last_is_not_trained():
    edges = build(FLOW).tree(Plan(make_grid(GridSpec(steps=10, family="sd3")), 3)).edges
    assert (edges["std"] > 0).all()
    assert edges["s"][~edges["recorded"]].tolist() == [9, 9, 9]


@pytest.mark.parametrize(("steps", "fraction", "count"), [(10, 0.99, 9), (8, 0.99, 7), (200, 0.99, 198), (10, 1, 10)])
def test_the_first_part_of_the_steps_is_trained(steps, fraction, count):
    assert build(FLOW | {"fraction": fraction}).trained(steps) == range(count)


@pytest.mark.parametrize("kernel", ["flow_sde", "cps", "dance_sde"])
def test_the_first_optimizer_step_is_on_policy_and_the_second_is_not(kernel):
    world = World(FLOW | {"kernel": kernel, "kl_coef": 0})
    points = world.points()
    result = train(
        world.policy,
        points,
        conditions(),
        objective=world.method.objective,
        optimizer=OptimizerSpec(lr=1e-2),
        moments={},
        update_batch=5,
        max_batch=4,
    )
    rows = result.transitions
    first = rows["optimizer_step"] == 0
    assert (rows.loc[first, "ratio"] - 1).abs().max() < 1e-6
    assert (rows.loc[~first, "ratio"] - 1).abs().max() > 1e-4
    assert rows["member"].groupby(rows["optimizer_step"]).agg(["min", "max"]).to_numpy().tolist() == [[0, 1], [2, 3]]


def test_samples_of_constant_groups_leave_the_update_or_make_it_smaller():
    found = {}
    for policy in ("keep", "drop"):
        world = World(FLOW | {"zero_groups": policy, "kl_coef": 0})
        flat = world.table["prompt"] == PROMPTS[0]
        world.table["advantage"] = world.table["advantage"].mask(flat, 0.0)
        found[policy] = world.gradients(world.moved())
        assert len(world.points().table) == (40 if policy == "keep" else 20)
    for (kept, grads), (dropped, others) in zip(found["keep"], found["drop"]):
        assert dropped == pytest.approx(2 * kept, rel=1e-9)
        for one, other in zip(grads, others):
            np.testing.assert_allclose(other, 2 * one, rtol=1e-9)


def test_a_round_of_constant_groups_changes_nothing_and_is_counted():
    world = World(FLOW)
    world.table["advantage"] = 0.0
    points = world.points()
    assert points.steps(4) == []
    result = train(
        world.policy,
        points,
        conditions(),
        objective=world.method.objective,
        optimizer=OptimizerSpec(),
        moments={},
        update_batch=5,
        max_batch=4,
    )
    assert (result.param_change, len(result.transitions)) == (0, 0)
    assert all(step["skipped"] for step in result.steps) and len(result.steps) == 2
    assert sum(step["zero_advantages"] for step in result.steps) == len(world.table)


# Credit.


def rewards(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def advantage(values: np.ndarray, **options) -> np.ndarray:
    return build(FLOW | options).credit(reward_table(values))["advantage"].to_numpy().reshape(values.shape[0], -1)


def test_rewards_are_summed_before_they_are_standardised():
    values = rewards(2, 1, 5, 2)
    once = (values * np.asarray([0.7, 1.5])).sum(-1, keepdims=True) / 0.7
    np.testing.assert_allclose(advantage(values), advantage(once), atol=1e-12)


def test_constant_groups_give_exactly_zero_and_still_count_for_the_std_of_the_round():
    values = rewards(3, 1, 5, 1)
    values[1] = 0.1 + 0.2
    made = build(FLOW).credit(reward_table(values))
    assert (made.loc[made["prompt"] == 1, "advantage"] == 0).all()
    assert set(made.loc[made["prompt"] == 1, "why_zero"]) == {"constant"}
    others = np.delete(values, 1, axis=0)
    shrink = (np.std(others * 0.7) + 1e-4) / (np.std(values * 0.7) + 1e-4)
    np.testing.assert_allclose(advantage(values)[[0, 2]], advantage(others) * shrink, rtol=1e-9)


def test_the_std_of_the_round_contains_what_lies_between_prompts():
    values = rewards(2, 1, 6, 1)
    apart = values + np.asarray([0.0, 100.0])[:, None, None, None]
    assert np.abs(advantage(apart)).max() < 0.1 * np.abs(advantage(values)).max()
    np.testing.assert_allclose(advantage(apart, global_std=False), advantage(values, global_std=False), atol=1e-9)


@pytest.mark.parametrize("global_std", [True, False])
def test_permuting_members_permutes_advantages_and_a_constant_changes_nothing(global_std):
    values, order = rewards(2, 1, 6, 2), np.random.default_rng(1).permutation(6)
    plain = advantage(values, global_std=global_std)
    np.testing.assert_allclose(advantage(values[:, :, order], global_std=global_std), plain[:, order], atol=1e-12)
    np.testing.assert_allclose(advantage(values + 1e3, global_std=global_std), plain, atol=1e-9)


def test_advantages_are_clipped_after_standardising():
    values = np.zeros((40, 1, 24, 1))
    values[0, 0, 0] = 1.0
    assert advantage(values).max() == 5
    assert advantage(values, adv_clip=3.0).max() == 3


# Options.


def test_what_only_the_update_reads_re_uses_rollouts():
    one = sampling_options(FLOW)
    after = {"kl_coef": 0.5, "kl_form": "velocity", "global_std": False, "zero_groups": "keep", "clip_range": 1e-2}
    assert sampling_options(FLOW | after) == one
    assert sampling_options(FLOW | {"eta": 0.6}) != one


def test_the_defaults_are_the_released_ones():
    method = build({"name": "flow_grpo"})
    assert method.objective == PPO(clip_range=1e-4, kl_coef=0.04, kl_form="flow_grpo")
    assert (method.eta, method.optimizer_steps, method.zero_groups, method.per_prompt) == (0.7, 2, "drop", False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer_steps": 4}, "at most one per member"),
        ({"fraction": 0.1}, r"trains 0; with kernel flow_sde it is 1 to 6\."),
        ({"kernel": "cps", "fraction": 1.0}, r"trains 6; with kernel cps it is 1 to 5\."),
        ({"kernel": "cps", "eta": 1.2}, "at most 1"),
        ({"kernel": "ode"}, "kernel"),
        ({"same_latents": True}, "same_latent"),
    ],
)
def test_knobs_that_do_not_fit_are_refused(options, message):
    with pytest.raises(GranularError, match=message):
        build({"name": "flow_grpo", **options}).tree(Plan(make_grid(GridSpec(steps=6)), 3))


def test_the_kl_term_alone_is_a_gradient_too():
    """A round without any preference still pulls towards the start, so no step of it is skipped."""
    world = World(FLOW | {"zero_groups": "keep"})
    world.table["advantage"] = 0.0
    points, net = world.points(), world.moved()
    step = points.steps(5)[0]
    measured = {name: np.zeros(len(points.table)) for name in MEASURED}
    loss = gradient(Policy(net), points, step, conditions(), world.method.objective, 5, measured)
    assert loss > 0
    assert all(parameter.grad.abs().max() > 0 for parameter in net.parameters())
    assert world.method.objective.advantage_free
