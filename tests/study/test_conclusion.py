"""A conclusion is computed from intervals: what includes 0 is never called a difference, whoever made the numbers."""

from __future__ import annotations

import math

import pytest

from stages.report.statistics import Interval
from stages.study.conclusion import Comparison, conclude, told

UP, DOWN, OPEN = Interval(0.2, 0.1, 0.3, 9), Interval(-0.2, -0.3, -0.1, 9), Interval(0.2, -0.1, 0.5, 9)


def sentence(interval: Interval, **options) -> str:
    return conclude([Comparison("A", options.pop("other", "B"), "reward", interval, **options)])


def test_an_interval_above_zero_is_higher():
    assert sentence(UP) == "Reward of A is higher than that of B (+0.200 [+0.100, +0.300])."


def test_an_interval_below_zero_is_lower():
    assert sentence(DOWN) == "Reward of A is lower than that of B (−0.200 [−0.300, −0.100])."


@pytest.mark.parametrize("interval", [OPEN, Interval(0.2, 0.0, 0.4, 9), Interval(0, 0, 0, 9)])
def test_an_interval_with_zero_in_it_shows_nothing(interval):
    found = sentence(interval)
    assert found.startswith("A difference between A and B in reward is not shown (")
    assert "higher" not in found and "lower" not in found


def test_without_an_interval_nothing_is_shown():
    assert sentence(Interval(9.0, math.nan, math.nan, 1)) == (
        "A difference between A and B in reward is not shown (+9.000, no interval)."
    )


def test_against_zero():
    assert sentence(UP, other="") == "Reward of A is above 0 (+0.200 [+0.100, +0.300])."
    assert sentence(DOWN, other="").startswith("Reward of A is below 0")
    assert sentence(OPEN, other="").startswith("A difference of A from 0 in reward is not shown")


def test_comparisons_of_one_context_share_its_words_and_make_one_sentence():
    found = conclude(
        [
            Comparison("A", "B", "reward", UP, "at equal cost"),
            Comparison("A", "C", "reward", OPEN, "at equal cost"),
            Comparison("A", "B", "reward", DOWN, "at equal time"),
            Comparison("A", "D", "reward", UP, "in the table only", decisive=False),
        ]
    )
    assert found.count("equal cost") == found.count("equal time") == 1 and "D" not in found
    assert found.endswith(").") and found.count(". ") == 0


def test_nothing_compared_is_said():
    assert conclude([]) == "Nothing was compared."


def test_signs_are_typographic():
    assert told(OPEN) == "+0.200 [−0.100, +0.500]"
