"""Gains telescope, cost only what they lack, and turn exactly where the definitions say."""

from itertools import product

import numpy as np
import pandas as pd
import pytest

from stages.advantage.credit import Combine, Total, ZScore
from stages.advantage.gains import Gains, TurningPoints
from stages.advantage.stage import advantages
from stages.core.errors import GateError
from stages.core.noise import generator
from stages.methods import build
from tests.update.toy import PROMPTS, Policy, roll, score

METHODS = [
    {"name": "stepwise", "substeps": 1},
    {"name": "stepwise", "substeps": 1, "normalise": "per_step"},
    {"name": "tp_grpo"},
    {"name": "tp_grpo", "turning": "sign", "balance": "none"},
    {"name": "densegrpo"},
]
KEYS = ["prompt", "s", "member"]


def table(rewards: np.ndarray, shared: bool = False) -> pd.DataFrame:
    """Rewards [prompt, s, member] of states as the table a rule reads; with `shared`, state 0 is one row a prompt."""
    index = np.indices(rewards.shape).reshape(3, -1)
    made = pd.DataFrame(dict(zip(KEYS, index))).assign(reward=rewards.reshape(-1))
    if shared:
        made = made[(made["s"] > 0) | (made["member"] == 0)]
        made["member"] = made["member"].where(made["s"] > 0, -1)
    return made.assign(leaf=range(len(made)), stride=1, occurrence=0, scorer="a", weight=1.0)


def rewards(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def array(made: pd.DataFrame, column: str = "reward") -> np.ndarray:
    """[prompt, s, member]"""
    made = made.sort_values(KEYS)
    return made[column].to_numpy().reshape([made[key].nunique() for key in KEYS])


def test_gains_are_differences_of_neighbours_and_telescope():
    r = rewards(2, 6, 3)
    gains = array(Gains()(table(r)))
    np.testing.assert_array_equal(gains, r[:, 1:] - r[:, :-1])
    np.testing.assert_allclose(gains.sum(1), r[:, -1] - r[:, 0], atol=1e-14)


def test_ends_stand_beside_every_gain():
    made = Gains()(table(rewards(2, 4, 3)))
    np.testing.assert_array_equal(made["reward"], made["after"] - made["before"])
    total = made.groupby(["prompt", "member"])["reward"].transform("sum")
    np.testing.assert_allclose(total, made["last"] - made["first"], atol=1e-14)


def test_a_shared_state_counts_for_every_member():
    r = rewards(2, 4, 3)
    r[:, 0] = r[:, 0, :1]
    own, shared = Gains()(table(r)), Gains()(table(r, shared=True))
    np.testing.assert_array_equal(array(own), array(shared))
    np.testing.assert_array_equal(array(own, "first"), array(shared, "first"))


def test_the_last_gain_can_be_left_out():
    r = rewards(2, 5, 3)
    np.testing.assert_array_equal(array(Gains(count_last=False)(table(r))), array(Gains()(table(r)))[:, :-1])


@pytest.mark.parametrize("s", range(5))
def test_a_missing_state_drops_the_gains_that_read_it_and_no_other(s):
    made = table(rewards(2, 5, 3))
    whole = Gains()(made)
    gone = (made["prompt"] == 1) & (made["member"] == 2) & (made["s"] == s)
    rest = Gains()(made[~gone].reset_index(drop=True))
    lost = (whole["prompt"] == 1) & (whole["member"] == 2) & whole["s"].isin([s - 1, s])
    columns = [*KEYS, "reward"]
    pd.testing.assert_frame_equal(rest[columns], whole.loc[~lost, columns].reset_index(drop=True), check_exact=True)
    mine = rest[(rest["prompt"] == 1) & (rest["member"] == 2)]
    assert mine["first"].isna().all() == (s == 0)
    assert mine["last"].isna().all() == (s == 4)


def test_a_missing_shared_state_drops_the_first_gain_of_every_member():
    made = table(rewards(2, 4, 3), shared=True)
    rest = Gains()(made[(made["prompt"] == 0) | (made["s"] > 0)].reset_index(drop=True))
    assert sorted(rest.loc[rest["prompt"] == 1, "s"].unique()) == [1, 2]
    assert sorted(rest.loc[rest["prompt"] == 0, "s"].unique()) == [0, 1, 2]


def turned(r: np.ndarray, **options) -> np.ndarray:
    """Which steps [prompt, s, member] a rule pays with the remaining gain."""
    made = Gains()(table(r))
    return array(TurningPoints(**options)(made)) != array(made)


def test_a_step_that_turns_the_trend_is_paid_all_that_follows():
    """Down, down, up, up, up: the third step turns; what it is paid is R_W − R_{j−1}, replacing d_j."""
    r = np.array([5, 4, 3, 4, 6, 7.0])
    made = array(TurningPoints(balance="none")(Gains()(table(r[None, :, None]))))
    assert made[0, :, 0].tolist() == [-1, -1, 4, 2, 1]


@pytest.mark.parametrize(
    ("r", "consistent", "sign"),
    [
        ([0, 1, 2, 3], [0], [0]),  # the first step goes the way of the whole
        ([0, -1, 2, 3], [1], [1]),
        ([0, 3, 2, 1], [], [0]),  # the first step overshoots: its trend is not that of what follows
        ([0, -1, 4, 3], [], [1]),  # so does the second
        ([0, -1, 1, 0.5], [], [1]),
        ([0, -1, -2, 3], [], []),  # the last step is its own remaining gain, with or without a name
        ([0, 1, -1, -2], [1], [1]),  # downwards too
        ([0, 0, 1, 2], [], []),  # a step that changes nothing has no trend
        ([0, 1, 0, 0], [], []),  # neither has a trajectory
    ],
)
def test_turning_points_of_single_trajectories(r, consistent, sign):
    r = np.array(r, float)[None, :, None]
    for wanted, strict in ((consistent, True), (sign, False)):
        assert np.flatnonzero(turned(r, consistent=strict, balance="none")[0, :, 0]).tolist() == wanted


def test_steps_that_turn_downwards_balance_those_that_turn_upwards():
    """Of three upward trajectories and one downward one, the largest |D_tot| of either side keeps its point."""
    r = np.array([[0, 1, 2, 3], [0, 1, 2, 5], [0, 1, 2, 4], [0, -1, -2, -2.5]], float).T[None]
    assert turned(r, balance="none")[0, 0].tolist() == [True] * 4
    assert turned(r)[0, 0].tolist() == [False, True, False, True]


def test_a_scope_with_one_sign_keeps_all():
    r = np.array([[0, 1, 2, 3], [0, 1, 2, 5]], float).T[None]
    assert turned(r)[0, 0].all()


def test_balancing_leaves_equally_many_of_both_signs():
    r = rewards(6, 10, 24)
    kept = turned(r) * np.sign(r[:, -1] - r[:, 0])[:, None]
    assert (kept.sum((1, 2)) == 0).all()
    assert np.abs(kept).sum() > 100
    assert np.abs(kept).sum() < turned(r, balance="none").sum()


def test_prompts_are_balanced_alone():
    r = rewards(3, 10, 12)
    other = r.copy()
    other[1] = rewards(10, 12, seed=9)
    before, after = turned(r), turned(other)
    assert np.array_equal(before[[0, 2]], after[[0, 2]])


@pytest.mark.parametrize("size", [1, 5, 9, 48])
def test_device_batches_equal_a_slow_loop(size):
    """Samples of the round are dealt at random to batches; each batch is balanced alone."""
    r = rewards(4, 8, 12)
    points, total = turned(r, balance="none"), r[:, -1] - r[:, 0]
    order = generator(0, 1, -1, "device-batch").permutation(48)
    samples = list(product(range(4), range(12)))
    expected = np.zeros_like(points)
    for batch in set((order // size).tolist()):
        mine = [samples[at] for at in np.flatnonzero(order // size == batch)]
        found = [(-abs(total[p, i]), s, p, i) for p, i in mine for s in np.flatnonzero(points[p, :, i])]
        up = sorted(point for point in found if total[point[2], point[3]] > 0)
        down = sorted(point for point in found if total[point[2], point[3]] < 0)
        count = min(len(up), len(down)) if up and down else len(found)
        for _, s, p, i in up[:count] + down[:count]:
            expected[p, s, i] = True
    assert np.array_equal(turned(r, balance="device_batch", device_batch=size), expected)
    if size > 1:
        assert not np.array_equal(expected, turned(r))


@pytest.mark.parametrize("s", range(6))
def test_a_missing_state_leaves_no_turning_point_that_needs_it(s):
    """Down, down, up, up, up, so s = 2 turns, if R_0, R_W, and the states on both sides of it and before are there."""
    made = table(np.repeat(np.array([5, 4, 3, 4, 6, 7.0])[None, :, None], 2, 2))
    rest = TurningPoints(balance="none")(Gains()(made[(made["s"] != s) | (made["member"] > 0)].reset_index(drop=True)))
    mine = rest[rest["member"] == 0]
    paid = dict(zip(mine["s"], mine["reward"]))
    plain = {at: gain for at, gain in enumerate([-1, -1, 1, 2, 1]) if s not in (at, at + 1)}
    assert paid == (plain | {2: 4} if s == 4 else plain)


def test_scorers_have_turning_points_of_their_own():
    up, down = np.array([0, 1, 2, 3.0])[None, :, None], np.array([0, 1, -1, -2.0])[None, :, None]
    both = pd.concat([table(up), table(down).assign(scorer="b")], ignore_index=True)
    made = TurningPoints(balance="none")(Gains()(both))
    assert made.loc[made["scorer"] == "a", "reward"].tolist() == [3, 1, 1]
    assert made.loc[made["scorer"] == "b", "reward"].tolist() == [1, -3, -1]


def test_the_reward_stays_beside_its_score():
    made = Total(over=("scorer",), rewards=True)(ZScore(within=("prompt", "s"))(Gains()(table(rewards(2, 4, 3)))))
    assert [name for name in made if name.startswith(("z.", "r."))] == ["z.a.1", "r.a.1"]
    np.testing.assert_array_equal(made["r.a.1"], array(Gains()(table(rewards(2, 4, 3)))).reshape(-1))
    assert "r.a.1" not in Total(over=("scorer",))(ZScore(within=("prompt", "s"))(table(rewards(2, 4, 3))))


def advantage(r: np.ndarray, method: dict, eps: float | None = None) -> np.ndarray:
    """[prompt, s, member]; `eps` replaces that of the z-score."""
    made = table(r)
    for step in build(method).credit:
        if isinstance(step, ZScore) and eps is not None:
            step = ZScore(step.within, step.ddof, eps, step.std_within)
        made = step(made)
    return array(made, "advantage")


@pytest.mark.parametrize("method", METHODS, ids=str)
class TestEveryRule:
    def test_permuting_members_permutes_advantages(self, method):
        r, order = rewards(2, 6, 8), np.random.default_rng(1).permutation(8)
        np.testing.assert_allclose(advantage(r[:, :, order], method), advantage(r, method)[:, :, order], atol=1e-12)

    def test_a_constant_added_to_all_rewards_changes_nothing(self, method):
        r = rewards(2, 6, 8)
        np.testing.assert_allclose(advantage(r + 1e3, method), advantage(r, method), atol=1e-9)

    def test_scaling_the_rewards_changes_nothing_without_eps(self, method):
        r = rewards(2, 6, 8)
        np.testing.assert_allclose(advantage(1000 * r, method, 0.0), advantage(r, method, 0.0), atol=1e-9)

    def test_equal_rewards_give_exactly_zero(self, method):
        r = rewards(2, 6, 8)
        r[0] = 0.1
        found = advantage(r, method)
        assert (found[0] == 0).all()
        assert (found[1] != 0).any()

    def test_prompts_do_not_see_each_other(self, method):
        r = rewards(3, 6, 8)
        other = r.copy()
        other[1] *= 7
        np.testing.assert_array_equal(advantage(r, method)[[0, 2]], advantage(other, method)[[0, 2]])


@pytest.fixture(scope="module", params=METHODS, ids=str)
def round_(request):
    rollout = roll(Policy(), request.param, steps=5, group=4)
    return request.param, rollout, {"a": score(rollout), "b": score(rollout, 1)}


def failed(scores: pd.DataFrame, leaf: int) -> pd.DataFrame:
    return scores.assign(
        value=scores["value"].where(scores["leaf"] != leaf),
        status=scores["status"].where(scores["leaf"] != leaf, "failed"),
    )


def pay(method, rollout, scores):
    return advantages(rollout, scores, {"a": 1.0, "b": 0.5}, build(method).credit, "drop")[0]


def test_a_failed_estimate_costs_the_gains_that_read_it_and_other_prompts_nothing(round_):
    method, rollout, scores = round_
    whole = pay(method, rollout, scores)
    leaves = rollout.leaves[(rollout.leaves["prompt"] == PROMPTS[1]) & (rollout.leaves["member"] <= 0)]
    for leaf in leaves.itertuples():
        made = pay(method, rollout, scores | {"a": failed(scores["a"], leaf.leaf)})
        other = made["prompt"] != leaf.prompt
        pd.testing.assert_frame_equal(made[other], whole[other], check_exact=True)
        mine = (made["member"] == leaf.member) | (leaf.member == -1)
        reads = ~other & mine & made["s"].isin([leaf.s - 1, leaf.s])
        assert made["why_zero"].eq("dropped").equals(reads)
        assert (made.loc[reads, "advantage"] == 0).all()
        assert made.loc[reads, "r.sum.1"].isna().all()
        if method["name"] != "tp_grpo":  # a trajectory without its ends has no turning points either
            pd.testing.assert_series_equal(made.loc[~reads, "r.sum.1"], whole.loc[~reads, "r.sum.1"], check_exact=True)
        if method["name"] == "densegrpo" or method.get("normalise") == "per_step":
            far = ~other & ~made["s"].isin([leaf.s - 1, leaf.s])
            pd.testing.assert_frame_equal(made[far], whole[far], check_exact=True)


def test_a_round_of_estimates_without_neighbours_pays_nothing(round_):
    """Every second state failed: no gain is left, and every step says why."""
    method, rollout, scores = round_
    odd = rollout.leaves.loc[rollout.leaves["s"] % 2 == 1, "leaf"]
    gone = scores["a"].assign(status=scores["a"]["status"].mask(scores["a"]["leaf"].isin(odd), "failed"))
    made = pay(method, rollout, scores | {"a": gone.assign(value=gone["value"].mask(gone["status"] == "failed"))})
    assert (made["why_zero"] == "dropped").all()
    assert (made["advantage"] == 0).all()


def test_rewards_are_summed_first_as_in_flow_grpo(round_):
    method, rollout, scores = round_
    assert isinstance(build(method).credit[0], Combine)
    both = scores["a"].assign(value=scores["a"]["value"] + 0.5 * scores["b"]["value"])
    one = advantages(rollout, {"a": both}, {"a": 1.0}, build(method).credit)[0]
    np.testing.assert_allclose(pay(method, rollout, scores)["advantage"], one["advantage"], atol=1e-12)


def test_the_estimate_of_a_shared_state_is_no_constant_group(round_):
    method, rollout, scores = round_
    summary = advantages(rollout, scores, {"a": 1.0, "b": 0.5}, build(method).credit)[1]
    states = rollout.leaves.loc[rollout.leaves["member"] >= 0, "s"].nunique()
    assert (summary["groups"], summary["constant_groups"]) == (2 * len(PROMPTS) * states, 0)


def test_a_round_without_any_reward_is_still_a_gate(round_):
    method, rollout, scores = round_
    nothing = scores["a"].assign(status="failed", value=np.nan)
    with pytest.raises(GateError, match="no reward at all"):
        pay(method, rollout, scores | {"a": nothing})
