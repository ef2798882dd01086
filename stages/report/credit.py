"""Advantages and gains by trained step, from a run's tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd


def by_step(folder: Path) -> pd.DataFrame:
    """s, count, std, zero and gain of a run folder's advantages; see `stages.report.reader.Run`."""
    import pyarrow.parquet as pq

    known = set(pq.read_schema(folder / "advantages.parquet").names)
    wanted = [name for name in ("round", "prompt", "s", "member", "advantage") if name in known]
    table = pd.read_parquet(folder / "advantages.parquet", columns=wanted)
    table["zero"] = table["advantage"] == 0
    grouped = table.groupby("s", sort=True)
    found = pd.DataFrame(
        {"std": grouped["advantage"].std(ddof=0), "zero": grouped["zero"].mean(), "count": grouped.size()}
    )
    rewards = folder / "rewards.parquet"
    if "member" in known and rewards.is_file() and "member" in pq.read_schema(rewards).names:
        found["gain"] = gains(
            table, pd.read_parquet(rewards, columns=["round", "scorer", "prompt", "s", "member", "value"])
        )
    else:
        found["gain"] = np.nan
    return found.reset_index()


def gains(advantages: pd.DataFrame, rewards: pd.DataFrame) -> pd.Series:
    """s → mean reward behind positive advantages minus that behind negative ones, in standard deviations.

    advantages: round, prompt, s, member, advantage, one row a trained transition. rewards: round, scorer, prompt, s,
    member, value, one row a leaf and scorer. A transition's reward is the mean over the leaves that branched off at its
    step; where leaves estimate states, over those of the state it leads to; where they belong to whole trajectories
    (s = -1), over those of its trajectory. Each scorer's rewards are standardised within a round, then averaged.
    """
    by_round = rewards.groupby(["round", "scorer"])["value"]
    spread = by_round.transform("std", ddof=0).replace(0.0, np.nan)
    leaves = rewards.assign(z=(rewards["value"] - by_round.transform("mean")) / spread).dropna(subset=["z"])
    trajectory = ["round", "prompt", "member"]
    if (leaves["member"] < 0).any():
        leaves = leaves.assign(s=leaves["s"] - 1)  # states, the first of them before any step
    keys = [*trajectory, "s"] if (leaves["s"] >= 0).any() else trajectory
    reward = leaves.groupby(keys)["z"].mean().reset_index()
    joined = advantages.merge(reward, on=keys, how="inner")
    sides = joined[joined["advantage"] != 0].assign(side=lambda rows: np.sign(rows["advantage"]))
    means = sides.groupby(["s", "side"])["z"].mean().unstack("side").reindex(columns=[1.0, -1.0])
    return means[1.0] - means[-1.0]
