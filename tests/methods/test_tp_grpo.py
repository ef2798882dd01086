"""TP-GRPO: what a round costs, where the trend turns, and a loop over single samples that agrees."""

import numpy as np
import pytest
import torch

from stages.advantage.stage import advantages
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

NAME = {"name": "tp_grpo"}
FLOW = NAME | {"kernel": "flow_sde"}


@pytest.mark.parametrize(
    ("method", "steps", "evaluations", "images", "points"),
    [
        (NAME, 10, 1320, 240, 216),
        (NAME | {"ode_baseline": "unpaired"}, 10, 1344, 240, 216),
        (NAME, 6, 504, 144, 120),
        (NAME | {"window": 5}, 6, 504, 144, 120),
        (FLOW | {"window": 6}, 6, 504, 168, 144),
        (NAME | {"window": 3}, 10, 24 * (10 + 9 + 8 + 7), 24 * 4, 72),
    ],
)
def test_cost_per_prompt_equals_the_printed_numbers(method, steps, evaluations, images, points):
    ledger = printed(method, steps)
    assert (ledger.evaluations, ledger.images) == (evaluations, images)
    assert (ledger.points, ledger.parents, ledger.frozen) == (points, points, points)
    assert ledger.optimizer_steps == 2


@pytest.mark.parametrize("options", [{}, {"ode_baseline": "unpaired"}, {"window": 2}, {"same_latent": True}])
def test_the_engine_evaluates_what_was_planned(options):
    planned, done = counted(NAME | options)
    assert planned == done


@pytest.mark.parametrize("options", [{}, {"ode_baseline": "unpaired"}, {"window": 2}], ids=str)
def test_the_rollout_equals_a_slow_loop(options):
    """R_j's image is the ODE's from the state after j stochastic steps; the last one is the sample itself."""
    rollout = roll(Policy(), NAME | options, steps=STEPS, group=GROUP)
    states, images, net = states_of(rollout), images_of(rollout), Net().double()
    window = options.get("window", STEPS - 1)
    assert len(images) == len(PROMPTS) * GROUP * (window + 1)
    with torch.no_grad():
        for row, prompt in enumerate(PROMPTS):
            for member in range(GROUP):
                slow = trajectory(net, row, member, [("cps", 0.7)] * window, member)
                start = member + GROUP * (options.get("ode_baseline") == "unpaired")
                baseline = trajectory(net, row, member, [], start)[-1]
                np.testing.assert_allclose(images[prompt, 0, member], baseline, atol=1e-5)
                np.testing.assert_allclose(images[prompt, window, member], slow[-1], atol=1e-5)
                for j in range(1, window + 1):
                    np.testing.assert_allclose(states[prompt, j - 1, member], slow[j], atol=1e-5)
                    image = ode(net, slow[j], list(SIGMAS[j:]), row)
                    np.testing.assert_allclose(images[prompt, j, member], image, atol=1e-5)


def test_the_baselines_differ_in_their_noise_and_in_nothing_else():
    paired, unpaired = (
        images_of(roll(Policy(), NAME | {"ode_baseline": kind}, steps=STEPS, group=GROUP))
        for kind in ("paired", "unpaired")
    )
    for key, image in paired.items():
        assert np.allclose(image, unpaired[key], atol=1e-6) == (key[1] > 0)


def step_rewards(r: list[float], turning: str) -> tuple[list[float], list[int]]:
    """r_j of one sample as the paper writes it, and the steps j that turn the trend; j counts from 1."""
    last = len(r) - 1
    d = [0.0] + [r[j] - r[j - 1] for j in range(1, last + 1)]
    total = r[last] - r[0]
    q = [np.sign(one) * np.sign(total) for one in d]
    points = []
    for j in range(1, last + 1):
        ahead = np.sign(d[j]) * np.sign(r[last] - r[j]) > 0
        if j == 1:
            found = ahead if turning == "consistent" else q[1] > 0
        else:
            found = q[j - 1] < 0 and q[j] > 0 and (ahead or turning == "sign")
        if found and turning != "none":
            points.append(j)
    return d[1:], points


def balanced(points: list[tuple[float, int, int]]) -> set[tuple[int, int]]:
    """(D_tot, j, member) of all turning points of a scope → (j, member) of those that are kept."""
    up = sorted((-abs(total), j, i) for total, j, i in points if total > 0)
    down = sorted((-abs(total), j, i) for total, j, i in points if total < 0)
    if up and down:
        count = min(len(up), len(down))
        up, down = up[:count], down[:count]
    return {(j, i) for _, j, i in up + down}


@pytest.mark.parametrize("turning", ["consistent", "sign", "none"])
@pytest.mark.parametrize("balance", ["prompt", "none"])
def test_advantages_equal_a_slow_loop(turning, balance):
    _, rollout, rewards, table, _ = sampled(NAME | {"turning": turning, "balance": balance}, group=8)
    value, turned = rewards_of(rollout, rewards), 0
    for prompt in PROMPTS:
        r = {i: [value[prompt, s, i] for s in range(STEPS)] for i in range(8)}
        rows = {i: step_rewards(r[i], turning)[0] for i in r}
        points = [(r[i][-1] - r[i][0], j, i) for i in r for j in step_rewards(r[i], turning)[1]]
        kept = balanced(points) if balance == "prompt" else {(j, i) for _, j, i in points}
        for j, i in kept:
            rows[i][j - 1] = r[i][-1] - r[i][j - 1]
        turned += len(kept)
        mine = table[table["prompt"] == prompt]
        for s in range(STEPS - 1):
            expected = zscore([rows[i][s] for i in range(8)])
            found = mine[mine["s"] == s].sort_values("member")
            np.testing.assert_allclose(found["advantage"], expected, atol=1e-9)
            np.testing.assert_allclose(found["r.sum.1"], [rows[i][s] for i in range(8)], atol=1e-12)
    assert (turned > 0) == (turning != "none")


@pytest.mark.parametrize("method", [NAME, NAME | {"kl_form": "gaussian"}, FLOW], ids=str)
def test_loss_and_gradient_equal_a_slow_loop(method):
    method = method | {"clip_range": 0.003, "kl_coef": 0.5}
    compare_gradients(method, sampled(method)[-1])


@pytest.mark.parametrize("kernel", ["flow_sde", "cps"])
def test_without_turning_points_it_is_densegrpo_with_uniform_noise(kernel):
    """The same states, images, dense rewards and advantages, number for number."""
    mine = sampled(NAME | {"turning": "none", "kernel": kernel})
    dense = sampled({"name": "densegrpo", "kernel": kernel})
    assert all(np.array_equal(image, images_of(dense[1])[key]) for key, image in images_of(mine[1]).items())
    assert all(np.array_equal(state, states_of(dense[1])[key]) for key, state in states_of(mine[1]).items())
    # The same rewards for the same images.
    r = rewards_of(mine[1], mine[2])
    leaves = dense[1].leaves
    values = [r.get(key, 0.5) for key in zip(leaves["prompt"], leaves["s"], leaves["member"])]
    table, _ = advantages(
        dense[1], {"a": dense[2].assign(value=values)}, {"a": 1.0}, build({"name": "densegrpo"}).credit
    )
    keys = ["prompt", "s", "member"]
    ours, theirs = (one.sort_values(keys, ignore_index=True).drop(columns="edge") for one in (mine[3], table))
    assert ours.equals(theirs)


def test_members_without_any_advantage_leave_the_update():
    assert build(NAME).zero_groups == "drop"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": STEPS}, f"at most {STEPS - 1} of {STEPS} steps can be stochastic with kernel cps"),
        ({"optimizer_steps": GROUP + 1}, "at most one per member"),
        ({"balance": "batch"}, "method.balance"),
        ({"eta": 1.2}, "method.eta"),
        ({"windows": 3}, "did you mean 'window'"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(GranularError, match=message):
        build(NAME | options).tree(Plan(make_grid(GridSpec(steps=STEPS)), GROUP))
