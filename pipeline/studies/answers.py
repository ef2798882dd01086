"""What several studies have in common: the gain of every arm over the base, as rows of a table and of a figure."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from pipeline.studies.base import Results
from stages.report.canvas import Picture
from stages.report.statistics import Interval
from stages.study import pictures
from stages.study.intervals import over_seeds

REWARD = "training reward"


def gains(results: Results, steps: int, keys: Sequence[str] | None = None) -> dict[str, tuple[Interval, list[float]]]:
    """Arm → interval of its gain over the base policy, and the gain of every seed."""
    table = results.gained(steps)
    return {
        key: (over_seeds(table.loc[key]), table.loc[key].mean(axis=1).tolist())
        for key in keys or [arm.key for arm in results.arms]
    }


def table(results: Results, steps: int) -> pd.DataFrame:
    """A row an arm: what it cost and what it gained."""
    rows = []
    for key, (interval, _) in gains(results, steps).items():
        cost = results.costs.loc[key]
        rows.append(
            {
                "arm": results.label(key), "rounds": int(cost["rounds"]), "evaluations": int(cost["evaluations"]),
                "seconds": round(float(cost["seconds"]), 1), "gain": interval.mean, "low": interval.low,
                "high": interval.high,
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def figure(results: Results, steps: int, name: str, title: str, seeds_of: Sequence[str] | None = None) -> Picture:
    """Gains of the arms with intervals and seeds."""
    found = gains(results, steps, seeds_of)
    rows = [(results.label(key), interval, seeds) for key, (interval, seeds) in found.items()]
    count = len(rows[0][2])
    caption = (
        f"Gain over the base policy on the same prompts and noise, in standard deviations of the base's images; 95 % "
        f"intervals over {count} training seeds and {rows[0][1].prompts} prompts, a cross where they include 0, and a "
        "bar for every seed."
    )
    return pictures.arms(name, title, rows, f"gain in {REWARD}", caption)


NOTES = (
    "Training reward: the scorers that are trained on, each in standard deviations of the base policy's images and "
    "weighted as in training. A gain of 0 is the base policy.",
    "An interval covers the luck of a training seed (Student's t over seeds) and the choice of prompts. It is not "
    "adjusted for the number of comparisons on the page.",
    "The lab is a toy of 32 × 32 pixels: it says how the methods differ here, not how they rank on FLUX.1-dev.",
)
