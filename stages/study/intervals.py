"""Intervals over training seeds and prompts, and of rank correlations.

A study compares trainings, so its unit is the training seed, not only the prompt: a difference that three seeds do not
agree on is not shown, however many prompts it was measured on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd

from stages.advantage.compare import spearman
from stages.core.noise import generator
from stages.report.statistics import LEVEL, Interval


def over_seeds(values: pd.DataFrame) -> Interval:
    """95 % interval of the mean of `values` (rows: training seeds, columns: prompts).

    half-width² = (t·s/√n)² + (z·v/√P)², s the standard deviation of n seeds' means and t Student's quantile of n − 1
    degrees of freedom; v that of P prompts' means and z the normal quantile. Both parts count the other's noise as
    well, so the interval is rather too wide than too narrow. NaN limits with fewer than two seeds.
    """
    from scipy.stats import norm, t

    table = np.asarray(values, np.float64)
    seeds, prompts = table.shape
    mean = float(table.mean())
    if seeds < 2:
        return Interval(mean, math.nan, math.nan, prompts)
    tail = 1 - (1 - LEVEL) / 2
    by_seed = t.ppf(tail, seeds - 1) * table.mean(1).std(ddof=1) / math.sqrt(seeds)
    by_prompt = norm.ppf(tail) * table.mean(0).std(ddof=1) / math.sqrt(prompts) if prompts > 1 else 0.0
    half = math.hypot(by_seed, by_prompt)
    return Interval(mean, mean - half, mean + half, prompts)


def training_reward(scores: pd.DataFrame, base: pd.DataFrame, weights: Mapping[str, float]) -> pd.DataFrame:
    """Σ_m w_m·(value − mean_m)/std_m of every (arm, seed, prompt): rows arm and seed, columns prompt.

    scores: arm, seed, prompt, noise, scorer, value. base: the same of the untrained policy, which gives mean and std.
    """
    total: pd.DataFrame | None = None
    for scorer, weight in weights.items():
        images = base.loc[base["scorer"] == scorer, "value"]
        scale = float(images.std(ddof=0)) or 1.0
        rows = scores[scores["scorer"] == scorer]
        table = rows.pivot_table(index=["arm", "seed"], columns="prompt", values="value", aggfunc="mean")
        part = weight * (table - float(images.mean())) / scale
        total = part if total is None else total + part
    assert total is not None
    return total


def difference(table: pd.DataFrame, one: str, other: str) -> Interval:
    """Arm `one` − arm `other`, paired on training seed and prompt."""
    return over_seeds(table.loc[one] - table.loc[other])


RESAMPLES = 2000


def rank_agreement(units: pd.Series, one: np.ndarray, two: np.ndarray, seed: int = 0) -> tuple[Interval, np.ndarray]:
    """Spearman's correlation of two columns with its percentile interval, and all its resamples.

    units: what is resampled, one entry a row: steps of one prompt are not independent, prompts are.
    """
    groups = [np.asarray(rows) for rows in units.groupby(units.to_numpy(), sort=True).indices.values()]
    rng = generator(seed, 0, -1, "study/agreement", (len(groups),))
    found = spearman(one, two)
    drawn = []
    for _ in range(RESAMPLES):
        rows = np.concatenate([groups[i] for i in rng.integers(0, len(groups), len(groups))])
        drawn.append(spearman(one[rows], two[rows]))
    resamples = np.asarray(drawn)
    return percentiles(found, resamples, len(groups)), resamples


def percentiles(mean: float, resamples: np.ndarray, units: int) -> Interval:
    """The 95 % percentile interval; NaN limits where a resample has no value at all or there is one unit."""
    good = resamples[~np.isnan(resamples)]
    if units < 2 or not len(good):
        return Interval(mean, math.nan, math.nan, units)
    tail = 50 * (1 - LEVEL)
    low, high = np.percentile(good, [tail, 100 - tail])
    return Interval(mean, float(low), float(high), units)
