"""The advantage stage: every recorded edge of a round gets one number from the rewards of the leaves it led to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from stages.advantage.join import KEYS, apply_policy, scored_leaves, spread
from stages.advantage.spec import AdvantageSpec
from stages.advantage.tokens import token_rows
from stages.core.errors import GranularError
from stages.core.publish import write_text

if TYPE_CHECKING:
    from stages.advantage.credit import Credit
    from stages.core.resident import Resident
    from stages.rollout.store import Rollout


def advantages(
    rollout: Rollout,
    rewards: Mapping[str, pd.DataFrame],
    weights: Mapping[str, float],
    credit: Credit,
    failures: str = "stop",
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The advantages table of a round and its summary; see `stages.advantage.join` for what is refused.

    rewards: scorer → table (leaf, prompt, value, status, reason). weights: scorer → weight.
    """
    round_ = int(rollout.attrs["spec"]["round_"])
    scored = scored_leaves(rollout, rewards, weights)
    usable = apply_policy(scored, failures, round_)
    lost = scored.loc[scored["status"] != "ok", "prompt"].unique()
    table = spread(rollout, credit(usable, rollout), lost)
    compared = usable[usable["member"] >= 0]  # the estimate of a state that the group shares is no group
    groups = compared.groupby(["prompt", "s", "stride", "occurrence", "scorer"])["reward"]
    summary = {
        "round": round_,
        "edges": len(table),
        "advantage_std": float(table["advantage"].std(ddof=0)),
        "clipped_advantages": int((table["advantage"] != table["total"]).sum()),
        "zero_advantages": int((table["advantage"] == 0).sum()),
        "groups": int(groups.ngroups),
        "constant_groups": int((groups.max() == groups.min()).sum()),
        "dropped_members": len(scored[KEYS].drop_duplicates()) - len(usable[KEYS].drop_duplicates()),
        "scorers": {
            scorer: {
                "weight": float(weights[scorer]),
                "ok": int((rows["status"] == "ok").sum()),
                "failed": int((rows["status"] == "failed").sum()),
                "missing": int((rows["status"] == "missing").sum()),
                "mean": float(rows["reward"].mean()),
                "std": float(rows["reward"].std(ddof=0)),
            }
            for scorer, rows in scored.groupby("scorer", sort=False)
        },
        "rank_correlation": rank_correlation(usable),
    }
    return table, summary


def rank_correlation(table: pd.DataFrame) -> dict[str, dict[str, float | None]]:
    """How much granularities agree: scorer → "λ/λ'" → Spearman correlation of rewards within groups, pooled.

    Ranks are centred in each (prompt, s) group, so differences between prompts do not count. None where no group has
    two different rewards. Empty for a single stride.
    """
    result: dict[str, dict[str, float | None]] = {}
    first = table[table["occurrence"] == 0]
    strides = sorted(int(stride) for stride in first["stride"].unique())
    for scorer, rows in first.groupby("scorer", sort=False) if len(strides) > 1 else ():
        wide = rows.pivot(index=KEYS, columns="stride", values="reward").dropna()
        groups = wide.groupby(level=["prompt", "s"]).ngroup().to_numpy()
        ranks = {stride: _centred_ranks(groups, wide[stride].to_numpy()) for stride in strides}
        result[str(scorer)] = {}
        for one, two in combinations(strides, 2):
            scale = float(np.sqrt((ranks[one] ** 2).sum() * (ranks[two] ** 2).sum()))
            result[str(scorer)][f"{one}/{two}"] = float((ranks[one] * ranks[two]).sum()) / scale if scale else None
    return result


def _centred_ranks(groups: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The rank of each value in its group (the mean one where values tie), minus the group's mean rank."""
    order = np.lexsort((values, groups))
    new_group = np.diff(groups[order], prepend=-1) != 0
    new_value = new_group | (np.diff(values[order], prepend=np.nan) != 0)

    def mean_place(new: np.ndarray) -> np.ndarray:
        block = np.cumsum(new) - 1
        return (np.bincount(block, np.arange(len(block))) / np.bincount(block))[block]

    ranks = np.empty(len(values))
    ranks[order] = mean_place(new_value) - mean_place(new_group)
    return ranks


def run(inputs: Mapping[str, Path], spec: AdvantageSpec, resident: Resident, out: Path) -> None:
    """Turn a round's rewards into advantages.

    inputs: rollout, and `rewards.<scorer>` for every scorer of the spec (folders of those stages).
    Writes `advantages.parquet` and `summary.json`; for a method that weighs tokens also `tokens.npy`, float32
    [images, tokens], and a column `token_row` that names the row of every trained one.
    """
    from stages.methods import build

    for scorer in spec.rewards:
        if f"rewards.{scorer}" not in inputs:
            raise GranularError(
                f"advantage: rewards.{scorer} has weight {spec.rewards[scorer]:g} but is not an input; "
                f"got {', '.join(sorted(inputs))}."
            )
    rollout = resident.rollout(inputs["rollout"], latents=False)
    rewards = {scorer: pd.read_parquet(inputs[f"rewards.{scorer}"] / "rewards.parquet") for scorer in spec.rewards}
    method = build(spec.method)
    table, summary = advantages(rollout, rewards, spec.rewards, method.credit, spec.failures)
    if method.token_credit is not None:
        rows, columns = rollout.attrs["image_tokens"]
        maps = {scorer: _maps(inputs, scorer) for scorer in method.token_credit.scorers}
        weights = method.token_credit(maps, (rows, columns))
        table["token_row"] = token_rows(rollout, table)
        summary["token_weight"] = {"mean": float(weights.mean()), "min": float(weights.min())}
        np.save(out / "tokens.npy", weights)
    table.to_parquet(out / "advantages.parquet", index=False)
    write_text(out / "summary.json", json.dumps(summary, indent=1) + "\n")


def _maps(inputs: Mapping[str, Path], scorer: str) -> np.ndarray:
    """The maps that a scorer made of a rollout's images, [images, H, W], not read before they are needed."""
    folder = inputs.get(f"rewards.{scorer}")
    if folder is None or not (folder / "maps.npy").is_file():
        raise GranularError(
            f"advantage: the method weighs tokens by the maps of scorer '{scorer}', but its rewards hold no maps.npy; "
            "have it among the rewards (its weight may be 0) and score the round with maps."
        )
    return np.load(folder / "maps.npy", mmap_mode="r")
