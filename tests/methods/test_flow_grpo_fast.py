"""Flow-GRPO-Fast: where its windows and branches stand, what a round costs, and that a slow loop agrees."""

import numpy as np
import pytest

from stages.core.errors import GranularError
from stages.methods import Plan, build, sampling_options
from stages.rollout.grid import GridSpec, make_grid
from stages.update.ppo import PPO
from tests.methods.flow_world import (
    World,
    check_advantages,
    check_gradients,
    check_rollout,
    evaluated,
    ledger,
    ppo,
    standardised,
    summed,
    walk,
)
from tests.update.toy import PROMPTS

FAST = {"name": "flow_grpo_fast", "window": 2, "clip_range": 1e-3}
BRANCH = FAST | {"form": "branch", "kernel": "flow_sde", "mini": 3}


def plan(prompt: int = 0, steps: int = 10, group: int = 24, **options) -> Plan:
    return Plan(make_grid(GridSpec(steps=steps, family="sd3")), group, **{"seed": 1, "prompt": prompt, **options})


@pytest.mark.parametrize(("window", "points"), [(3, 72), (2, 48), (1, 24)])
def test_the_window_form_costs_what_is_printed(window, points):
    options = {"name": "flow_grpo_fast", "window": window, "optimizer_steps": 1}
    made = ledger(options, 10, 24, "sd3")
    assert (made.evaluations, made.points, made.parents, made.images) == (240, points, points, 24)
    assert (made.frozen, made.optimizer_steps) == (0, 1)
    assert evaluated(options, 10, 24) == 240


@pytest.mark.parametrize(("branch", "evaluations"), [(0, 82), (1, 74)])
@pytest.mark.parametrize("window", [1, 2])
def test_a_mini_group_of_the_branch_form_costs_what_is_printed(branch, evaluations, window):
    options = {"name": "flow_grpo_fast", "form": "branch", "branch_steps": [branch], "window": window}
    made = ledger(options | {"optimizer_steps": 1}, 10, 9, "sd3")
    assert (made.evaluations, made.points, made.images) == (evaluations, 9 * window, 9)
    assert made.parents == 1 + 9 * (window - 1)
    assert evaluated(options, 10, 9) == evaluations


def test_a_group_is_cut_into_mini_groups_with_their_own_noise_and_branch_step():
    method = build({"name": "flow_grpo_fast", "form": "branch", "branch_steps": [0, 1, 2], "window": 1})
    found = set()
    for prompt in range(20):
        made = method.tree(plan(prompt))
        roots = np.flatnonzero(made.nodes["parent"] < 0)
        assert [made.paths[root] for root in roots] == [(0,), (9,), (18,)]
        edges = made.edges
        recorded = edges["recorded"]
        steps = [set(edges["s"][recorded & (edges["member"] // 9 == mini)].tolist()) for mini in range(3)]
        assert all(len(step) == 1 for step in steps)  # one step for the whole mini-group
        parents = [set(edges["parent"][recorded & (edges["member"] // 9 == mini)].tolist()) for mini in range(3)]
        assert all(len(parent) == 1 for parent in parents)
        found.add(tuple(step.pop() for step in steps))
        assert (made.leaves["s"] == -1).all()
    assert len(found) > 5  # mini-groups of a prompt choose on their own


def test_windows_start_uniformly_over_both_ends_and_are_one_per_group():
    method = build({"name": "flow_grpo_fast", "window": 2})
    starts = [method.trained(plan(prompt))[0] for prompt in range(4000)]
    share = np.bincount(starts, minlength=4) / len(starts)
    assert set(starts) == {0, 1, 2, 3}  # hi = T/2 = 5, so l is 0..3
    np.testing.assert_allclose(share, 0.25, atol=0.03)
    edges = method.tree(plan(5)).edges
    window = list(method.trained(plan(5)))
    for member in range(24):
        assert edges["s"][edges["recorded"] & (edges["member"] == member)].tolist() == window
    assert np.array_equal(edges["std"] > 0, edges["recorded"])


def test_the_choice_is_a_pure_function_of_seed_round_and_prompt():
    method = build({"name": "flow_grpo_fast", "window": 1, "hi": 9})
    assert method.per_prompt
    pick = [[method.trained(plan(prompt, round_=round_))[0] for prompt in range(50)] for round_ in (1, 1, 2)]
    assert pick[0] == pick[1] != pick[2]


@pytest.mark.parametrize(
    ("steps", "window", "hi", "end"), [(10, 3, None, 5), (8, 3, None, 4), (4, 3, None, 3), (10, 2, 8, 8)]
)
def test_windows_end_at_half_the_grid_unless_told_otherwise(steps, window, hi, end):
    method = build({"name": "flow_grpo_fast", "window": window, "hi": hi})
    ends = {method.trained(plan(prompt, steps))[-1] + 1 for prompt in range(200)}
    assert ends == set(range(window, end + 1))


def test_a_window_of_nothing_is_all_steps_but_the_last():
    method = build({"name": "flow_grpo_fast", "window": 0})
    edges = method.tree(plan(group=2)).edges
    assert edges["s"][edges["recorded"]].tolist() == [*range(9), *range(9)]
    assert (edges["std"][edges["s"] == 9] == 0).all()


def slow_samples(world: World) -> list:
    samples = []
    for prompt in PROMPTS:
        place = world.plan(prompt)
        rng = place.rng("branch-step")
        for member in range(world.group):
            if world.method.form == "window":
                root, window = member, list(world.method.trained(place))
            else:
                if member % world.method.mini == 0:
                    root, branch = member, int(rng.choice(world.method.branch_steps))
                window = [branch + i for i in range(world.method.window)]
            samples.append(walk(world, prompt, member, root, window, window))
    return samples


@pytest.mark.parametrize("options", [FAST, FAST | {"kernel": "flow_sde", "window": 3}, BRANCH], ids=str)
def test_states_advantages_loss_and_gradient_equal_a_slow_loop(options):
    world = World(options, group=4)
    samples = slow_samples(world)
    check_rollout(world, samples)
    rewards = {(one.prompt, one.member): summed(world, one) for one in samples}
    expected = {}
    for prompt in PROMPTS:
        values = standardised([rewards[prompt, member] for member in range(4)], list(rewards.values()))
        for one in samples:
            if one.prompt == prompt:
                expected |= {(prompt, one.member, step.s): values[one.member] for step in one.steps}
    check_advantages(world, expected)

    def loss(step, new, old, reference, advantage):
        log_ratio = new.log_prob(step.next_x) - old.log_prob(step.next_x)
        if world.method.kernel == "cps":
            log_ratio = (step.next_x - old.mean) ** 2 - (step.next_x - new.mean) ** 2
        return ppo(log_ratio.mean().exp(), advantage, 1e-3)

    check_gradients(world, samples, loss)


def test_the_defaults_are_those_of_the_later_form():
    method = build({"name": "flow_grpo_fast"})
    assert method.objective == PPO(clip_range=1e-5, log_ratio="cps", kl_form="gaussian")
    assert (method.form, method.window, method.kernel, method.eta) == ("window", 3, "cps", 0.8)
    assert not method.objective.needs_reference
    assert sampling_options(FAST | {"clip_range": 1.0}) == sampling_options(FAST)
    assert sampling_options(FAST | {"window": 1}) != sampling_options(FAST)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 4, "hi": 3}, "4 steps before hi = 3 do not fit"),
        ({"hi": 10}, "with kernel cps the first 9 of 10"),
        ({"hi": 11, "kernel": "flow_sde"}, "the first 10 of 10"),
        ({"form": "branch", "branch_steps": [0, 9], "window": 1}, "within the first 9 of 10"),
        ({"form": "branch", "window": 0}, "at least one"),
        ({"form": "branch", "branch_steps": []}, "branch_steps"),
        ({"optimizer_steps": 25}, "at most one per member"),
        ({"fraction": 0.5}, "fraction"),
    ],
)
def test_knobs_that_do_not_fit_are_refused(options, message):
    with pytest.raises(GranularError, match=message):
        build({"name": "flow_grpo_fast", **options}).tree(plan())
