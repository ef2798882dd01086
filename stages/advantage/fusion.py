"""Credit in a branching tree: rewards of leaves are fused upwards into values of states, and few edges may be kept.

A leaf and the last edge on its way agree in `member`; an edge's own member counts the edges of its step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from stages.rollout.store import Rollout

EDGE = ["prompt", "s", "member", "parent", "child", "log_prob"]


@dataclass(frozen=True)
class Fusion:
    """From one row per leaf to one row per recorded edge: `reward` is the value of the state the edge leads to.

    The value of a state n is the mean of its leaves' rewards, weighted by how probable they were from there:
    V(n) = Σ_ℓ w_ℓ·R_ℓ, w_ℓ ∝ exp(β·Σ_{e on n→ℓ} log p_e) (BranchGRPO, Eq. 3), with log p_e the stored log-probability
    of the draw, mean over the latent dimensions. In large latents that mean hardly varies, and β = 1 comes close to
    β = 0, the plain mean.

    beta: β ≥ 0. along: `path` as above; `edge` weighs only the children of a state against each other, level by level,
        V(n) = Σ_c softmax_c(β·log p_{n→c})·V(c), as the released code does.
    """

    beta: float = 1.0
    along: Literal["path", "edge"] = "path"

    def __call__(self, table: pd.DataFrame, rollout: Rollout | None = None) -> pd.DataFrame:
        assert rollout is not None
        edges = rollout.edges.loc[rollout.edges["recorded"], EDGE]
        steps = sorted(edges["s"].unique(), reverse=True)
        leaves = table[["prompt", "member", "scorer", "weight", "reward"]].assign(mass=0.0)
        levels = [edges[edges["s"] == steps[0]].merge(leaves, on=["prompt", "member"])]
        for s in steps[1:]:
            levels.append(edges[edges["s"] == s].merge(self._values(levels[-1]), on="child"))
        return pd.concat(levels, ignore_index=True).assign(stride=1, occurrence=0)

    def _values(self, level: pd.DataFrame) -> pd.DataFrame:
        """Of the states that the edges of one step leave: child (the state), scorer, weight, reward (V) and mass.

        mass: log Σ exp(β·log p) over a state's leaves, what V weighs in the softmax above it; 0 where that ignores it.
        """
        keys = ["parent", "scorer"]
        level = level.assign(score=self.beta * level["log_prob"] + level["mass"])
        level["highest"] = level.groupby(keys)["score"].transform("max")
        level["share"] = np.exp(level["score"] - level["highest"])
        # Averaging the differences to one child leaves equal rewards exactly equal.
        level["base"] = level.groupby(keys)["reward"].transform("first")
        level["part"] = level["share"] * (level["reward"] - level["base"])
        groups = level.groupby(keys, sort=False)
        values = groups[["weight", "highest", "base"]].first().join(groups[["share", "part"]].sum()).reset_index()
        mass = values["highest"] + np.log(values["share"]) if self.along == "path" else 0.0
        values = values.assign(child=values["parent"], reward=values["base"] + values["part"] / values["share"])
        return values.assign(mass=mass)[["child", "scorer", "weight", "reward", "mass"]]


@dataclass(frozen=True)
class PruneWidth:
    """From step `since` on, that of the last split in two, only edges towards half of the leaves are kept.

    The others get advantage 0 and `why_zero = "pruned"`, and leave the update. A leaf is as good as its last edge's
    total.

    keep: `parent_top1`, of every pair of siblings the better one; `extremes`, the best and the worst quarter.
    """

    keep: Literal["parent_top1", "extremes"]
    since: int

    def __call__(self, table: pd.DataFrame, rollout: Rollout | None = None) -> pd.DataFrame:
        last = table[table["s"] == table["s"].max()].sort_values(["prompt", "total", "member"])
        if self.keep == "parent_top1":
            kept = last.groupby(["prompt", last["member"] // 2]).tail(1)
        else:
            ranks, count = last.groupby("prompt").cumcount(), last.groupby("prompt")["member"].transform("size")
            kept = last[(ranks < count // 4) | (ranks >= count - count // 4)]
        keys = [pd.MultiIndex.from_frame(one[["prompt", "member"]]) for one in (table, kept)]
        pruned = (table["s"] >= self.since) & ~keys[0].isin(keys[1])
        return table.assign(
            advantage=table["advantage"].mask(pruned, 0.0), why_zero=table["why_zero"].mask(pruned, "pruned")
        )
