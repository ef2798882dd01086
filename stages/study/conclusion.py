"""The one sentence of a study, computed from its intervals: nobody writes "better" where an interval does not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stages.report.statistics import Interval

WORDS = {"higher": "is higher than", "lower": "is lower than"}


@dataclass(frozen=True)
class Comparison:
    """`one` against `other` (empty: against 0) by `measure`; interval: of one − other.

    context: what the comparison has in common with its neighbours, as "at equal wall time". decisive: whether the
    conclusion speaks of it; others stand in the table alone.
    """

    one: str
    other: str
    measure: str
    interval: Interval
    context: str = ""
    decisive: bool = True

    @property
    def verdict(self) -> str:
        return self.interval.verdict


def told(interval: Interval) -> str:
    """`+0.12 [−0.03, +0.27]`; a mean alone where there is no interval."""
    if math.isnan(interval.low) or math.isnan(interval.high):
        return f"{_signed(interval.mean)}, no interval"
    return f"{_signed(interval.mean)} [{_signed(interval.low)}, {_signed(interval.high)}]"


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")


def conclude(comparisons: Sequence[Comparison]) -> str:
    """One sentence of all decisive comparisons, those of one context together.

    Where an interval includes 0 the sentence says that nothing is shown, never that there is no difference.
    """
    contexts: dict[str, list[Comparison]] = {}
    for one in comparisons:
        if one.decisive:
            contexts.setdefault(one.context, []).append(one)
    parts = []
    for context, ours in contexts.items():
        clauses = "; ".join(_clause(one) for one in ours)
        parts.append(f"{context}, {clauses}" if context else clauses)
    sentence = "; ".join(parts)
    return sentence[:1].upper() + sentence[1:] + "." if sentence else "Nothing was compared."


def _clause(one: Comparison) -> str:
    if one.verdict == "not shown":
        between = f"between {one.one} and {one.other}" if one.other else f"of {one.one} from 0"
        return f"a difference {between} in {one.measure} is not shown ({told(one.interval)})"
    if not one.other:
        word = "above 0" if one.verdict == "higher" else "below 0"
        return f"{one.measure} of {one.one} is {word} ({told(one.interval)})"
    return f"{one.measure} of {one.one} {WORDS[one.verdict]} that of {one.other} ({told(one.interval)})"
