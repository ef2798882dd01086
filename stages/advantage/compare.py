"""Two advantages of the same trained steps side by side: how far another credit rule would have taken the round."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Likeness:
    """What changes between two advantages of `edges` trained steps.

    rank_correlation: Spearman's, over all steps; NaN where one of them does not vary. flips: share of steps that were
    pulled and are now pushed, or the other way round. silenced, woken: shares that lose, and that gain, an advantage
    other than 0. clipped_before, clipped_after: shares at the limit, |A| ≥ adv_clip.
    """

    edges: int
    rank_correlation: float
    flips: float
    silenced: float
    woken: float
    clipped_before: float
    clipped_after: float


def likeness(before: np.ndarray, after: np.ndarray, limit: float) -> Likeness:
    """Compare two arrays of advantages, one entry a trained step, in one order."""
    before, after = np.asarray(before, np.float64), np.asarray(after, np.float64)
    there = (before != 0, after != 0)
    return Likeness(
        edges=len(before),
        rank_correlation=spearman(before, after),
        flips=float((before * after < 0).mean()),
        silenced=float((there[0] & ~there[1]).mean()),
        woken=float((~there[0] & there[1]).mean()),
        clipped_before=float((np.abs(before) >= limit).mean()),
        clipped_after=float((np.abs(after) >= limit).mean()),
    )


def spearman(one: np.ndarray, two: np.ndarray) -> float:
    """Spearman's rank correlation with mean ranks for ties; NaN where either does not vary."""
    from scipy.stats import rankdata

    ranks = [rankdata(values) for values in (one, two)]
    centred = [values - values.mean() for values in ranks]
    scale = float(np.sqrt((centred[0] ** 2).sum() * (centred[1] ** 2).sum()))
    return float((centred[0] * centred[1]).sum()) / scale if scale else float("nan")
