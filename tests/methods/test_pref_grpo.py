"""Pref-GRPO: DanceGRPO's tree with Flow-SDE; win rates are rewards like any other, compared within their group."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from torch.distributions import Normal

from stages.advantage.stage import advantages
from stages.core.errors import GranularError
from stages.core.noise import normal
from stages.methods import Plan, build
from stages.reward.pairwise import win_rates
from stages.rollout.grid import GridSpec, make_grid
from stages.update.ppo import PPO
from tests.methods.flow_world import World, evaluated, flow_sde, ledger, ppo, velocity
from tests.update.toy import PROMPTS, SHAPE, Net, Policy, roll, score

PREF = {"name": "pref_grpo", "optimizer_steps": 2}


def test_cost_per_prompt_equals_the_printed_numbers():
    """1 + 8·24 states; 8·⌊0.6·24⌋ points, of whose parents the root is one."""
    made = ledger({"name": "pref_grpo", "optimizer_steps": 1}, 25, 8, prompt=3)
    assert (made.evaluations, made.images, made.points, made.optimizer_steps) == (193, 8, 112, 1)
    assert made.parents == made.with_gradient <= 112 and made.frozen == 0
    assert evaluated({"name": "pref_grpo"}, 25, 8) == 193


def test_the_tree_is_dancegrpos_but_for_the_kernel():
    plan = Plan(make_grid(GridSpec(steps=10)), 4, 1, 1, 3)
    pref = build(PREF).tree(plan)
    dance = build({"name": "dancegrpo", "optimizer_steps": 2}).tree(plan)
    assert pref.paths == dance.paths
    for name in ("parent", "child", "recorded", "s", "member", "optimizer_step"):
        np.testing.assert_array_equal(pref.edges[name], dance.edges[name])
    as_flow = build({"name": "dancegrpo", "variant": "as_in_g2rpo", "optimizer_steps": 2}).tree(plan)
    for name in ("kernel", "a", "kappa", "std"):
        np.testing.assert_array_equal(pref.edges[name], as_flow.edges[name])


def test_states_images_loss_and_gradient_equal_a_slow_loop():
    world = World(PREF | {"clip_range": 1e-3})
    net, sigmas, moved = Net().double(), world.grid.sigmas, world.moved()
    edges = world.rollout.edges.set_index("edge")
    payment = world.table.set_index("edge")
    totals = [0.0, 0.0]
    for prompt in PROMPTS:
        for member in range(4):
            x, s, made = roots(prompt), 0, []
            for s in range(5):
                mean, std = flow_sde(x, velocity(net, x, sigmas[s], prompt), sigmas[s], sigmas[s + 1], 0.7, sigmas[1])
                after = mean + std * noise(prompt, member, s)
                made.append((x, after))
                x = after
            image = x - sigmas[5] * velocity(net, x, sigmas[5], prompt)
            leaf = world.rollout.leaves.query("prompt == @prompt and member == @member")["node"].item()
            place = world.rollout.leaf_nodes.tolist().index(leaf)
            np.testing.assert_allclose(world.rollout.leaf_x[place], image.detach().numpy(), atol=1e-5)
            mine = edges[edges["recorded"] & (edges["prompt"] == prompt) & (edges["member"] == member)]
            assert len(mine) == 3  # ⌊0.6·5⌋
            for edge, row in mine.iterrows():
                here, after = made[row["s"]]
                new, old = (
                    Normal(*flow_sde(here, velocity(one, here, sigmas[row["s"]], prompt), sigmas[row["s"]],
                                     sigmas[row["s"] + 1], 0.7, sigmas[1]))
                    for one in (moved, net)
                )  # fmt: skip
                ratio = (new.log_prob(after) - old.log_prob(after)).mean().exp()
                totals[member // 2] += ppo(ratio, payment.loc[edge, "advantage"], 1e-3) / 12
    for (loss, grads), total in zip(world.gradients(world.moved()), totals):
        moved.zero_grad()
        total.backward(retain_graph=True)
        assert loss == pytest.approx(total.item(), abs=1e-5)
        for grad, parameter in zip(grads, moved.parameters()):
            np.testing.assert_allclose(grad, parameter.grad, atol=1e-5 * float(grad.abs().max()), rtol=0)


def roots(prompt: int):
    return draw(prompt, "root", (-1,))


def noise(prompt: int, member: int, s: int):
    path = (-1, *(one for step in range(s + 1) for one in (step, member)))
    return draw(prompt, "step", path)


def draw(prompt: int, purpose: str, path):
    return torch.from_numpy(normal(SHAPE, seed=1, round_=1, prompt=prompt, purpose=purpose, path=path)).double()


def judged(rollout, seed: int = 0) -> pd.DataFrame:
    """Win rates under a judge that prefers the higher of two random scores, as the reward stage writes them."""
    table, leaves = score(rollout, seed), rollout.leaves
    for prompt in PROMPTS:
        rows = np.flatnonzero(leaves["prompt"] == prompt)
        values = table["value"].to_numpy()[rows]
        pairs = [(i, j, "first" if values[i] > values[j] else "second") for i in range(4) for j in range(i + 1, 4)]
        table.loc[rows, "value"] = [reward.value for reward in win_rates(4, pairs)]
    return table


def test_advantages_of_judge_and_clip_are_weighted_by_the_run():
    rollout = roll(Policy(), PREF, group=4)
    rewards = {"judge": judged(rollout), "clip": score(rollout, 1)}
    table, _ = advantages(rollout, rewards, {"judge": 0.4, "clip": 0.6}, build(PREF).credit)
    leaves = rollout.leaves.set_index(["prompt", "member"])["leaf"]
    for row in table.itertuples():
        total = 0.0
        for name, weight in (("judge", 0.4), ("clip", 0.6)):
            values = rewards[name].set_index("leaf")["value"]
            group = values[leaves[row.prompt].to_numpy()].to_numpy()
            mine = values[leaves[row.prompt, row.member]]
            total += weight * (mine - group.mean()) / (group.std(ddof=1) + 1e-8)
        assert row.advantage == pytest.approx(total, abs=1e-12)


def test_what_a_judge_says_does_not_depend_on_the_scale_of_its_scores():
    """Win rates are 0, 1/3, 2/3, 1 whatever the scores: the spread within a group is never blown up."""
    rollout = roll(Policy(), PREF, group=4)
    rates = judged(rollout)["value"].to_numpy()
    assert sorted(rates[rollout.leaves["prompt"] == PROMPTS[0]]) == pytest.approx([0, 1 / 3, 2 / 3, 1])
    table, _ = advantages(rollout, {"judge": judged(rollout)}, {"judge": 1.0}, build(PREF).credit)
    found = sorted(table.loc[table["prompt"] == PROMPTS[1], "advantage"].round(9).unique())
    spread = np.asarray([0, 1 / 3, 2 / 3, 1])
    np.testing.assert_allclose(found, (spread - 0.5) / spread.std(ddof=1), atol=1e-6)


def test_ties_all_around_teach_nothing():
    rollout = roll(Policy(), PREF, group=4)
    table = judged(rollout)
    table.loc[rollout.leaves["prompt"] == PROMPTS[0], "value"] = 0.5
    made, _ = advantages(rollout, {"judge": table}, {"judge": 1.0}, build(PREF).credit)
    flat = made["prompt"] == PROMPTS[0]
    assert (made.loc[flat, "advantage"] == 0).all() and set(made.loc[flat, "why_zero"]) == {"constant"}


def test_the_defaults_are_the_released_ones():
    method = build({"name": "pref_grpo"})
    assert method.objective == PPO(clip_range=1e-4)
    assert (method.eta, method.fraction, method.optimizer_steps, method.adv_clip) == (0.7, 0.6, 2, 5.0)
    assert method.per_prompt and method.kernel.name == "flow_sde"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "as_in_g2rpo"}, r"method\.variant"),
        ({"eta": None}, r"method\.eta"),
        ({"fraction": 0.1}, "trains none of them"),
        ({"optimizer_steps": 4}, "at most one per member"),
        ({"judge": "hps"}, "unknown key"),
    ],
)
def test_knobs_that_do_not_fit_are_refused(options, message):
    with pytest.raises(GranularError, match=message):
        build({"name": "pref_grpo", **options}).tree(Plan(make_grid(GridSpec(steps=6)), 3))
