"""Credit rules: standardise, sum, clip, in that order, with nothing leaking between groups."""

import math

import numpy as np
import pandas as pd
import pytest

from stages.advantage.credit import Clip, Total, ZScore
from stages.methods import build

GROUP = 12
RULE = build({"name": "g2rpo"}).credit
Z = ZScore(within=("prompt", "s", "stride", "scorer"))


def table(rewards: np.ndarray, weights=(1.0, 1.0), strides=(1, 2, 3), member=None) -> pd.DataFrame:
    """Rewards [prompt, s, member, stride, scorer] as the table a rule reads."""
    index = np.indices(rewards.shape).reshape(5, -1)
    names = np.asarray(["hps", "clip"])
    made = pd.DataFrame(dict(zip(("prompt", "s", "member", "stride", "scorer"), index)))
    made["stride"] = np.asarray(strides)[made["stride"]]
    made["weight"] = np.asarray(weights)[made["scorer"]]
    made["scorer"] = names[made["scorer"]]
    made["reward"] = rewards.reshape(-1)
    made["occurrence"] = made.groupby(["prompt", "s", "member", "stride", "scorer"]).cumcount()
    if member is not None:
        made["member"] = np.asarray(member)[made["member"]]
    return made


def rewards(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def by_hand(values: np.ndarray, limit: float = 5.0) -> np.ndarray:
    """The paper's Eq. 9 in plain loops: [prompt, s, member]."""
    out = np.zeros(values.shape[:3])
    for p, s, j, m in np.ndindex(values.shape[0], values.shape[1], values.shape[3], values.shape[4]):
        group = [float(values[p, s, i, j, m]) for i in range(values.shape[2])]
        mean = sum(group) / len(group)
        std = math.sqrt(sum((r - mean) ** 2 for r in group) / (len(group) - 1))
        for i, r in enumerate(group):
            out[p, s, i] += (r - mean) / (std + 1e-8)
    return np.clip(out, -limit, limit)


def advantage(values: np.ndarray, **options) -> np.ndarray:
    return RULE(table(values, **options))["advantage"].to_numpy().reshape(values.shape[:3])


def test_the_rule_equals_a_slow_loop():
    values = rewards(2, 3, 5, 3, 2)
    np.testing.assert_allclose(advantage(values), by_hand(values), atol=1e-12)


def test_every_group_has_mean_zero_and_unit_spread_and_a_bounded_maximum():
    made = Z(table(rewards(3, 2, GROUP, 3, 2))).groupby(["prompt", "s", "stride", "scorer"])["z"]
    np.testing.assert_allclose(made.mean(), 0, atol=1e-12)
    np.testing.assert_allclose(made.std(ddof=1), 1, atol=1e-7)
    assert made.max().max() <= (GROUP - 1) / math.sqrt(GROUP) < 3.1755


def test_the_bound_of_one_z_is_reached_by_a_single_winner():
    values = np.zeros((1, 1, GROUP, 1, 1))
    values[0, 0, 0] = 1
    z = Z(table(values, strides=(1,)))["z"]
    assert z.max() == pytest.approx((GROUP - 1) / math.sqrt(GROUP), abs=1e-6)


def test_the_clip_comes_after_the_sum():
    values = np.zeros((1, 1, GROUP, 3, 2))
    values[0, 0, 0] = 1
    made = RULE(table(values))
    assert made["total"].max() == pytest.approx(6 * (GROUP - 1) / math.sqrt(GROUP), abs=1e-6)
    assert made["advantage"].max() == 5
    assert made["advantage"].min() == made["total"].min() > -5


def test_constant_groups_give_exactly_zero_and_say_so():
    values = rewards(2, 1, 4, 3, 2)
    values[0] = 0.1
    made = RULE(table(values))
    assert (made.loc[made["prompt"] == 0, "advantage"] == 0).all()
    assert made["why_zero"].tolist() == ["constant"] * 4 + [""] * 4


def test_one_constant_scorer_leaves_the_other_one_in_charge():
    values = rewards(1, 1, 4, 1, 2)
    values[..., 1] = 0.3
    made = RULE(table(values, strides=(1,)))
    np.testing.assert_array_equal(made["advantage"], made["z.hps.1"])
    assert set(made["why_zero"]) == {""}


def test_rounding_noise_in_a_large_constant_is_not_amplified():
    values = np.full((1, 1, 8, 1, 1), 0.1 + 0.2)
    assert (advantage(values, strides=(1,)) == 0).all()


@pytest.mark.parametrize("offset", [1.0, -1e3, 1e6])
def test_a_constant_added_to_all_rewards_changes_nothing(offset):
    values = rewards(2, 2, 6, 3, 2)
    # The sum itself rounds by 1e-10 at 1e6; nothing more may be lost.
    np.testing.assert_allclose(advantage(values + offset), advantage(values), atol=abs(offset) * 1e-15)


def test_scaling_the_rewards_changes_nothing():
    values = rewards(2, 2, 6, 3, 2)
    np.testing.assert_allclose(advantage(values * 1000), advantage(values), atol=1e-6)


def test_permuting_members_permutes_advantages():
    values = rewards(2, 2, 6, 3, 2)
    order = np.random.default_rng(1).permutation(6)
    np.testing.assert_allclose(advantage(values[:, :, order]), advantage(values)[:, :, order], atol=1e-12)


def test_the_order_of_rows_does_not_matter():
    made = table(rewards(2, 2, 6, 3, 2))
    shuffled = made.sample(frac=1, random_state=0)
    np.testing.assert_allclose(RULE(shuffled)["advantage"], RULE(made)["advantage"], atol=1e-12)


def test_a_group_never_sees_another_group():
    values = rewards(3, 2, 6, 3, 2)
    other = values.copy()
    other[1, 0] = 1e9 * rewards(6, 3, 2, seed=5)
    before, after = advantage(values), advantage(other)
    keep = np.ones((3, 2), bool)
    keep[1, 0] = False
    np.testing.assert_array_equal(before[keep], after[keep])


def test_weights_multiply_standardised_rewards():
    values = rewards(1, 2, 5, 1, 2)
    made = RULE(table(values, weights=(0.7, 1.4), strides=(1,)))
    np.testing.assert_allclose(made["total"], 0.7 * made["z.hps.1"] + 1.4 * made["z.clip.1"], atol=1e-12)


def test_the_parts_stand_beside_their_sum():
    made = RULE(table(rewards(1, 2, 5, 3, 2)))
    parts = [name for name in made if name.startswith("z.")]
    assert sorted(parts) == [f"z.{m}.{stride}" for m in ("clip", "hps") for stride in (1, 2, 3)]
    np.testing.assert_allclose(made[parts].sum(axis=1), made["total"], atol=1e-12)


def test_a_member_alone_has_nobody_to_be_compared_with():
    made = RULE(table(rewards(1, 1, 1, 3, 2)))
    assert made["advantage"].tolist() == [0.0]
    assert made["why_zero"].tolist() == ["incomplete"]


def test_broadcast_rules_compare_within_the_prompt():
    values = rewards(2, 1, 6, 1, 2)
    made = build({"name": "dancegrpo"}).credit(table(values, strides=(1,)).assign(s=-1))
    np.testing.assert_allclose(made["advantage"], by_hand(values).reshape(-1), atol=1e-12)


def test_steps_are_what_they_say():
    rule = build({"name": "g2rpo", "adv_clip": 2.0}).credit
    assert [type(step) for step in rule] == [ZScore, Total, Clip]
    assert rule[2] == Clip(2.0)
