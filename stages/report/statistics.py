"""Intervals by the bootstrap over prompts: prompts are resampled, noises are averaged within a prompt first.

Noises of one prompt are not independent of each other, prompts are; so the prompt is the unit that is resampled.
Comparisons are paired: both policies saw the same prompts and the same initial noise, and what is resampled is the
prompt's *difference*, which removes the (large) spread between easy and hard prompts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pandas as pd

from stages.core.noise import generator

LEVEL = 0.95
Verdict = Literal["higher", "lower", "not shown"]


@dataclass(frozen=True)
class Interval:
    """A mean over `prompts` prompts with its 95 % percentile interval (NaN limits where fewer than 2 prompts)."""

    mean: float
    low: float
    high: float
    prompts: int

    @property
    def verdict(self) -> Verdict:
        """`higher` or `lower` than 0 if the whole interval is, else `not shown`."""
        if self.low > 0:
            return "higher"
        if self.high < 0:
            return "lower"
        return "not shown"


@dataclass(frozen=True)
class Bootstrap:
    """Resamples of prompts, drawn once for each number of prompts, so that equal inputs give equal intervals."""

    resamples: int
    seed: int
    _weights: dict[int, np.ndarray] = field(default_factory=dict, compare=False, repr=False)

    def weights(self, prompts: int) -> np.ndarray:
        """[resamples, prompts] share of each prompt in each resample; rows sum to 1."""
        if prompts not in self._weights:
            rng = generator(self.seed, 0, -1, "report/bootstrap", (prompts,))
            drawn = rng.integers(0, prompts, (self.resamples, prompts))
            drawn += prompts * np.arange(self.resamples)[:, None]
            counts = np.bincount(drawn.ravel(), minlength=prompts * self.resamples)
            self._weights[prompts] = counts.reshape(self.resamples, prompts) / prompts
        return self._weights[prompts]

    def bands(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Mean, low and high [columns] of `values` [prompts, columns], resampling its rows."""
        values = np.asarray(values, np.float64)
        mean = values.mean(0)
        if len(values) < 2:
            return mean, np.full_like(mean, np.nan), np.full_like(mean, np.nan)
        # Centred first: a resample of equal values then has exactly their mean, without rounding.
        means = self.weights(len(values)) @ (values - mean) + mean
        tail = 50 * (1 - LEVEL)
        low, high = np.percentile(means, [tail, 100 - tail], axis=0)
        return mean, low, high

    def interval(self, values: np.ndarray | pd.Series) -> Interval:
        """The interval of the mean of one value per prompt."""
        column = np.asarray(values, np.float64)
        if not len(column):
            return Interval(math.nan, math.nan, math.nan, 0)
        mean, low, high = self.bands(column[:, None])
        return Interval(float(mean[0]), float(low[0]), float(high[0]), len(column))


def per_prompt(rows: pd.DataFrame, value: str = "value") -> pd.Series:
    """Mean over noises for each prompt (index: prompt, rising); rows without a value count for nothing."""
    return rows.dropna(subset=[value]).groupby("prompt", sort=True)[value].mean()


def paired(rows: pd.DataFrame, base: pd.DataFrame, value: str = "value") -> pd.Series:
    """Per prompt, the mean over noises of `rows` − `base`, over the (prompt, noise) pairs that have both values."""
    keys = ["prompt", "noise"]
    if len(rows) == len(base) and np.array_equal(rows[keys].to_numpy(), base[keys].to_numpy()):
        # Row by row, as evaluations of one setting are: no need to look for pairs.
        return per_prompt(
            rows[["prompt"]].assign(difference=rows[value].to_numpy() - base[value].to_numpy()), "difference"
        )
    both = rows[[*keys, value]].merge(base[[*keys, value]], on=keys, suffixes=("", "_base"), validate="1:1")
    return per_prompt(both.assign(difference=both[value] - both[f"{value}_base"]), "difference")
