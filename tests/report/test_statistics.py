"""The bootstrap: paired, over prompts, reproducible, and as wide as it should be."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from stages.core.noise import generator
from stages.report.statistics import Bootstrap, paired, per_prompt


def frame(values: dict[tuple[int, int], float | None]) -> pd.DataFrame:
    rows = [(prompt, noise, value) for (prompt, noise), value in values.items()]
    return pd.DataFrame(rows, columns=["prompt", "noise", "value"]).astype({"value": float})


def test_noises_are_averaged_within_a_prompt_first():
    rows = frame({(1, 0): 1.0, (1, 1): 3.0, (1, 2): None, (2, 0): 10.0})
    assert per_prompt(rows).to_dict() == {1: 2.0, 2: 10.0}


def test_a_pair_needs_both_values():
    mine = frame({(1, 0): 2.0, (1, 1): 5.0, (2, 0): 1.0, (3, 0): None})
    base = frame({(1, 0): 1.0, (1, 1): None, (2, 0): 4.0, (3, 0): 1.0})
    assert paired(mine, base).to_dict() == {1: 1.0, 2: -3.0}


def test_pairing_does_not_depend_on_row_order():
    rng = np.random.default_rng(0)
    keys = [(p, n) for p in range(5) for n in range(3)]
    mine, base = (frame({key: rng.normal() for key in keys}) for _ in range(2))
    turned = paired(mine.sample(frac=1, random_state=1), base.sample(frac=1, random_state=2))
    pd.testing.assert_series_equal(turned, paired(mine, base))


def test_equals_a_slow_obvious_loop():
    values = np.random.default_rng(3).normal(0.1, 1.0, 11)
    rng = generator(5, 0, -1, "report/bootstrap", (11,))
    means = [np.mean([values[i] for i in draw]) for draw in rng.integers(0, 11, (400, 11))]
    found = Bootstrap(400, 5).interval(values)
    assert found.low == pytest.approx(np.percentile(means, 2.5))
    assert found.high == pytest.approx(np.percentile(means, 97.5))
    assert found.mean == pytest.approx(values.mean()) and found.prompts == 11


def test_agrees_with_scipy():
    from scipy.stats import bootstrap

    values = np.random.default_rng(1).normal(0.2, 1.0, 60)
    theirs = bootstrap((values,), np.mean, n_resamples=20_000, method="percentile", rng=0).confidence_interval
    ours = Bootstrap(20_000, 0).interval(values)
    assert ours.low == pytest.approx(theirs.low, abs=0.02) and ours.high == pytest.approx(theirs.high, abs=0.02)


def test_bands_are_the_intervals_of_each_column():
    values = np.random.default_rng(2).normal(size=(20, 3))
    boot = Bootstrap(500, 1)
    mean, low, high = boot.bands(values)
    for column in range(3):
        one = boot.interval(values[:, column])
        assert (one.mean, one.low, one.high) == pytest.approx((mean[column], low[column], high[column]))


def test_the_same_numbers_every_time():
    values = np.random.default_rng(4).normal(size=30)
    assert Bootstrap(300, 9).interval(values) == Bootstrap(300, 9).interval(values)
    assert Bootstrap(300, 9).interval(values) != Bootstrap(300, 8).interval(values)


def test_nothing_is_shown_where_nothing_changed():
    assert Bootstrap(300, 0).interval(np.zeros(10)).verdict == "not shown"
    assert Bootstrap(300, 0).interval(np.full(10, 0.1)).verdict == "higher"
    assert Bootstrap(300, 0).interval(np.full(10, -0.1)).verdict == "lower"


def test_one_prompt_has_a_mean_and_no_interval():
    one = Bootstrap(300, 0).interval(np.array([0.5]))
    assert one.mean == 0.5 and math.isnan(one.low) and one.verdict == "not shown"
    assert math.isnan(Bootstrap(300, 0).interval(np.array([])).mean)


def test_coverage_is_about_the_level():
    rng, boot = np.random.default_rng(6), Bootstrap(800, 0)
    hits = 0
    for _ in range(300):
        interval = boot.interval(rng.normal(0.3, 1.0, 96))
        hits += interval.low <= 0.3 <= interval.high
    assert 0.90 <= hits / 300 <= 0.98
