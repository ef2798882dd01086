"""DiffusionNFT has the counts of its tree, samples as DPM-Solver++ does one by one, and credits as its formula says."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch

from stages.advantage.stage import advantages
from stages.core.errors import GranularError
from stages.core.noise import normal
from stages.methods import Plan, build, sampling_options
from stages.rollout.grid import GridSpec, make_grid
from tests.update.toy import PROMPTS, SHAPE, Policy, conditions, roll, score

GRID = make_grid(GridSpec(steps=10, family="sd3"))
NFT = {"name": "nft"}


def tree(group: int = 24, **options):
    return build(NFT | options).tree(Plan(GRID, group))


def test_cost_per_prompt_equals_the_printed_numbers():
    ledger = build(NFT).ledger(tree(), scorers=1)
    assert (ledger.evaluations, ledger.images, ledger.scores) == (240, 24, 24)
    assert (ledger.points, ledger.parents, ledger.with_gradient, ledger.optimizer_steps) == (216, 216, 216, 1)
    assert ledger.frozen == 2 * 216
    assert build(NFT | {"kl_coef": 0}).ledger(tree()).frozen == 216


def test_the_engine_evaluates_what_was_planned():
    policy = Policy()
    evaluated = []
    velocity = policy.velocity
    policy.velocity = lambda x, time, rows: (evaluated.append(len(x)), velocity(x, time, rows))[1]
    rollout = roll(policy, NFT, steps=5, group=3, max_batch=5)
    assert sum(evaluated) == 2 * build(NFT).ledger(build(NFT).tree(Plan(make_grid(GridSpec(steps=5)), 3))).evaluations
    assert len(rollout.renoised) == 2 * 3 * 4 and not rollout.edges["recorded"].any()


def test_every_sample_has_its_own_noise_and_trains_all_of_its_levels_but_the_last():
    made = tree(group=4, optimizer_steps=2)
    roots = np.flatnonzero(made.nodes["parent"] < 0)
    assert {made.paths[root] for root in roots} == {(0,), (1,), (2,), (3,)}
    renoised = pd.DataFrame(made.renoised)
    assert renoised.groupby("member")["s"].apply(list).tolist() == [list(range(9))] * 4
    assert (renoised["sigma"] == np.asarray(GRID.sigmas)[renoised["s"]]).all()
    assert renoised.groupby("member")["optimizer_step"].unique().str[0].tolist() == [0, 0, 1, 1]


def slow_sample(policy: Policy, prompt: int, member: int, sigmas, second_order: bool) -> np.ndarray:
    """DPM-Solver++ 2M in data prediction, as written for one sample: α = 1 − σ, λ = log(α/σ)."""
    x = torch.from_numpy(normal(SHAPE, seed=1, round_=1, prompt=prompt, purpose="root", path=(member,))).double()
    told = conditions().values[[PROMPTS.index(prompt)]].double()
    previous = None
    for s, (now, following) in enumerate(pairwise(sigmas)):
        time = torch.tensor([now], dtype=torch.float64)
        with torch.no_grad():
            x0_hat = x - now * policy.module(x[None], time, told)[0]
        if following == 0:
            x = x0_hat
        elif previous is None or s == 1 or not second_order:  # λ is −∞ at σ = 1: the first difference has weight 0
            x = following / now * x + (1 - following / now) * x0_hat
        else:
            lam = [math.log((1 - sigma) / sigma) for sigma in (sigmas[s - 1], now, following)]
            h, r = lam[2] - lam[1], (lam[1] - lam[0]) / (lam[2] - lam[1])
            slope = (x0_hat - previous) / r
            x = following / now * x - (1 - following) * math.expm1(-h) * (x0_hat + slope / 2)
        previous = x0_hat
    return x.numpy()


@pytest.mark.parametrize("solver", ["dpm2", "euler"])
def test_samples_equal_a_slow_solver(solver):
    policy = Policy()
    rollout = roll(policy, NFT | {"solver": solver}, steps=6, group=3)
    policy.module.double()
    for leaf in rollout.leaves.itertuples():
        found = rollout.leaf_x[rollout.leaf_nodes.tolist().index(leaf.node)]
        expected = slow_sample(policy, leaf.prompt, leaf.member, rollout.attrs["sigmas"], solver == "dpm2")
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.fixture(scope="module")
def rollout():
    return roll(Policy(), NFT, group=4)


def credited(rollout, rewards: dict[str, pd.DataFrame], **options) -> pd.DataFrame:
    return advantages(rollout, rewards, dict.fromkeys(rewards, 1.0), build(NFT | options).credit)[0]


@pytest.mark.parametrize("global_std", [True, False])
def test_advantages_equal_a_slow_loop(rollout, global_std):
    rewards = {"a": score(rollout), "b": score(rollout, 1)}
    total = rewards["a"]["value"] + 2 * rewards["b"]["value"]
    credit = build(NFT | {"global_std": global_std}).credit
    table = advantages(rollout, rewards, {"a": 1.0, "b": 2.0}, credit)[0]
    assert len(table) == len(rollout.renoised)
    for row in table.itertuples():
        group = total[rollout.leaves["prompt"] == row.prompt]
        own = group[rollout.leaves["member"] == row.member].item()
        std = np.std(total if global_std else group)
        assert row.advantage == pytest.approx((own - group.mean()) / (std + 1e-4), abs=1e-12)


def test_advantages_beyond_the_clip_are_cut(rollout):
    rewards = score(rollout)
    cut = credited(rollout, {"a": rewards}, adv_clip=0.5)
    whole = credited(rollout, {"a": rewards})
    assert np.array_equal(cut["advantage"], whole["advantage"].clip(-0.5, 0.5))
    assert np.array_equal(cut["total"], whole["total"])


def test_a_constant_group_gets_exactly_zero(rollout):
    rewards = score(rollout)
    rewards["value"] = rewards["value"].mask(rewards["prompt"] == 7, 0.3)
    table = credited(rollout, {"a": rewards})
    assert (table.loc[table["prompt"] == 7, "advantage"] == 0).all()
    assert set(table.loc[table["prompt"] == 7, "why_zero"]) == {"constant"}


def test_a_constant_offset_changes_nothing_and_members_swap_with_their_rewards(rollout):
    rewards = score(rollout)
    table = credited(rollout, {"a": rewards})
    lifted = credited(rollout, {"a": rewards.assign(value=rewards["value"] + 64)})
    np.testing.assert_allclose(lifted["advantage"], table["advantage"], atol=1e-9)
    order = np.array([2, 0, 3, 1])
    values = rewards["value"].to_numpy().reshape(2, 4)[:, order].reshape(-1)
    swapped = credited(rollout, {"a": rewards.assign(value=values)})

    def by_member(one: pd.DataFrame) -> np.ndarray:
        return one.pivot_table(index="prompt", columns="member", values="advantage", sort=False).to_numpy()

    np.testing.assert_allclose(by_member(swapped), by_member(table)[:, order], atol=1e-12)


def test_sampling_weights_follow_by_the_released_schedules():
    standard, ocr, none = (build(NFT | {"decay": name}).behaviour_decay for name in ("standard", "ocr", "none"))
    assert [standard(n) for n in (0, 1, 100, 500, 9999)] == pytest.approx([0, 0.001, 0.1, 0.5, 0.5])
    assert [ocr(n) for n in (0, 75, 76, 100, 9999)] == pytest.approx([0, 0, 0.0075, 0.1875, 0.999])
    assert none(0) is none(100) is None


def test_options_of_the_update_reuse_every_rollout():
    changed = {"beta": 0.1, "kl_coef": 0.0, "decay": "ocr", "global_std": False, "adv_clip": 2.0, "clip_range": 1e-5}
    assert sampling_options(NFT | changed) == sampling_options(NFT)
    assert sampling_options(NFT | {"solver": "euler"}) != sampling_options(NFT)


def test_wrong_options_are_refused():
    with pytest.raises(GranularError, match="at most one per member, 4, got 5"):
        tree(group=4, optimizer_steps=5)
    with pytest.raises(GranularError, match=r"method\.solver: should be 'dpm2' or 'euler'"):
        build(NFT | {"solver": "dpm1"})
    with pytest.raises(GranularError, match=r"method\.beta: should be greater than 0"):
        build(NFT | {"beta": 0})


def test_the_objective_is_given_the_methods_numbers():
    objective = build(NFT | {"beta": 0.1, "kl_coef": 0.2, "adv_clip": 3.0}).objective
    assert objective == replace(objective, beta=0.1, kl_coef=0.2, adv_clip=3.0)
