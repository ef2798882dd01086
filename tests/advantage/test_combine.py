"""Rewards summed before they are standardised, the std of another scope than the mean, and the roots of samples."""

import numpy as np
import pandas as pd
import pytest

from stages.advantage.credit import Combine, Total, ZScore
from stages.advantage.roots import Roots
from tests.advantage.test_credit import rewards, table
from tests.update.toy import Policy, roll


def test_the_sum_is_one_row_per_leaf_with_weight_one():
    values = rewards(2, 1, 4, 2, 2)
    made = Combine()(table(values, weights=(0.7, 1.5), strides=(1, 2)))
    np.testing.assert_allclose(made["reward"], (0.7 * values[..., 0] + 1.5 * values[..., 1]).reshape(-1), atol=1e-15)
    assert set(made["scorer"]) == {"sum"}
    assert set(made["weight"]) == {1.0}
    assert len(made) == 16


def test_a_single_scorer_of_weight_one_is_left_as_it_is():
    given = table(rewards(2, 1, 4, 1, 1), strides=(1,))
    np.testing.assert_array_equal(Combine()(given)["reward"], given["reward"])


def test_summing_commutes_with_standardising_only_where_the_spreads_agree():
    values = rewards(1, 1, 6, 1, 2)
    rule = ZScore(("prompt", "scorer"), ddof=0, eps=0)

    def advantages(values: np.ndarray, first: bool) -> np.ndarray:
        made = table(values, strides=(1,))
        return Total(over=("scorer",))(rule(Combine()(made) if first else made))["advantage"].to_numpy()

    apart = advantages(values * np.asarray([1.0, 100.0]), first=True)
    np.testing.assert_allclose(advantages(values * np.asarray([1.0, 100.0]), False), advantages(values, False))
    assert np.corrcoef(apart, values[0, 0, :, 0, 1])[0, 1] > 0.99  # the larger scale rules a sum of rewards


@pytest.mark.parametrize("ddof", [0, 1])
def test_the_std_of_a_wider_scope_divides_the_groups_own_deviation(ddof):
    values = rewards(3, 2, 5, 1, 1)
    made = ZScore(("prompt", "s"), ddof=ddof, eps=1e-4, std_within=())(table(values, strides=(1,)))
    expected = (values - values.mean(2, keepdims=True)) / (values.std(ddof=ddof) + 1e-4)
    np.testing.assert_allclose(made["z"], expected.reshape(-1), atol=1e-12)


def test_the_same_scope_named_twice_is_the_plain_z_score():
    given = table(rewards(3, 2, 5, 1, 1), strides=(1,))
    plain, twice = ZScore(("prompt", "s")), ZScore(("prompt", "s"), std_within=("prompt", "s"))
    pd.testing.assert_frame_equal(plain(given), twice(given))


def test_a_large_offset_does_not_disturb_the_wider_scope_either():
    values = rewards(3, 1, 5, 1, 1)
    rule = ZScore(("prompt",), ddof=0, std_within=())
    one, other = (rule(table(made, strides=(1,)))["z"] for made in (values, values + 1e6))
    np.testing.assert_allclose(one, other, atol=1e-8)


def test_constant_groups_are_zero_whatever_the_round_is():
    values = rewards(3, 1, 5, 1, 1)
    values[1] = 0.1 + 0.2
    made = ZScore(("prompt",), ddof=0, eps=0, std_within=())(table(values, strides=(1,)))
    assert (made.loc[made["prompt"] == 1, "z"] == 0).all()
    flat = ZScore(("prompt",), ddof=0, eps=1e-8, std_within=())(table(values * 0, strides=(1,)))
    assert (flat["z"] == 0).all()


@pytest.mark.parametrize(
    ("options", "roots"), [({"name": "tempflow", "noises": 2}, 2), ({"name": "flow_grpo"}, 4), ({"name": "g2rpo"}, 1)]
)
def test_roots_are_the_initial_noises_of_the_samples(options, roots):
    rollout = roll(Policy(), options, group=4)
    made = Roots()(rollout.leaves[["leaf", "prompt", "member"]].sample(frac=1, random_state=0), rollout)
    assert (rollout.nodes["parent"].to_numpy()[made["root"]] == -1).all()
    assert made.groupby("prompt")["root"].nunique().tolist() == [roots, roots]
    assert (made.groupby(["prompt", "member"])["root"].nunique() == 1).all()
    assert (rollout.nodes["prompt"].to_numpy()[made["root"]] == made["prompt"]).all()
