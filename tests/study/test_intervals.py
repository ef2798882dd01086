"""Intervals of studies cover the luck of a training seed and the choice of prompts."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from stages.study.intervals import difference, over_seeds, rank_agreement, training_reward


def test_seeds_alone_give_students_interval():
    from scipy.stats import t

    seeds = np.array([0.1, 0.3, 0.2, 0.6])
    interval = over_seeds(pd.DataFrame(np.repeat(seeds[:, None], 5, 1)))
    low, high = t.interval(0.95, 3, loc=seeds.mean(), scale=seeds.std(ddof=1) / 2)
    assert (interval.low, interval.high) == pytest.approx((low, high))


def test_seeds_that_agree_leave_the_prompts():
    prompts = np.array([0.0, 1.0, 2.0, 3.0])
    interval = over_seeds(pd.DataFrame(np.repeat(prompts[None], 3, 0)))
    assert interval.high - interval.mean == pytest.approx(1.959964 * prompts.std(ddof=1) / 2)


def test_seeds_that_disagree_show_nothing_however_many_prompts_there_are():
    rows = np.repeat(np.array([[1.0], [1.2], [-0.5]]), 1000, 1)
    assert over_seeds(pd.DataFrame(rows)).verdict == "not shown"
    assert over_seeds(pd.DataFrame(np.ones((3, 10)))).verdict == "higher"


def test_one_seed_has_no_interval():
    interval = over_seeds(pd.DataFrame([[1.0, 1.0]]))
    assert math.isnan(interval.low) and interval.verdict == "not shown"


def test_the_interval_covers_as_often_as_it_says():
    """Noise between seeds and between prompts; the truth is 0."""
    rng, hits = np.random.default_rng(0), 0
    for _ in range(400):
        table = rng.normal(size=(4, 1)) + rng.normal(size=(1, 30)) + rng.normal(size=(4, 30))
        hits += over_seeds(pd.DataFrame(table)).verdict == "not shown"
    assert hits / 400 >= 0.95


def scores(arm: str, seed: int, shift: float) -> pd.DataFrame:
    rows = [
        {"arm": arm, "seed": seed, "prompt": p, "noise": n, "scorer": m, "value": p + n + shift * k}
        for p in range(3) for n in range(2) for m, k in (("a", 1.0), ("b", 10.0))
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_rewards_are_counted_in_standard_deviations_of_the_base():
    base = scores("base", 0, 0.0)
    std = base.loc[base["scorer"] == "a", "value"].std(ddof=0)
    table = training_reward(scores("x", 1, 1.0), base, {"a": 2.0, "b": 1.0})
    start = training_reward(base, base, {"a": 2.0, "b": 1.0})
    np.testing.assert_allclose((table.loc["x"].iloc[0] - start.loc["base"].iloc[0]).to_numpy(), (2 + 10) / std)


def test_differences_are_paired_on_seed_and_prompt():
    base = scores("base", 0, 0.0)
    both = pd.concat([scores("x", s, 1.0 + s) for s in (1, 2, 3)] + [scores("y", s, s) for s in (1, 2, 3)])
    interval = difference(training_reward(both, base, {"a": 1.0}), "x", "y")
    assert interval.low == pytest.approx(interval.mean) and interval.verdict == "higher"


def test_agreement_is_spearmans_and_resamples_prompts():
    rng = np.random.default_rng(1)
    truth = rng.normal(size=60)
    units = pd.Series(np.repeat(np.arange(20), 3))
    close, _ = rank_agreement(units, np.exp(truth), truth)
    assert close.mean == close.low == close.high == pytest.approx(1) and close.prompts == 20
    none, _ = rank_agreement(units, rng.normal(size=60), truth)
    assert none.verdict == "not shown"
    constant, _ = rank_agreement(units, np.zeros(60), truth)
    assert math.isnan(constant.mean) and constant.verdict == "not shown"
