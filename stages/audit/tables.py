"""The tables of an audit: rewards by image, and by trained step what it was paid, why, and what the update did with it.

Nothing is rounded and nothing is made up: columns that the stages stored keep their values; those added here are sums,
differences and comparisons of stored ones, each said below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from stages.advantage.join import scored_leaves
from stages.audit.read import StoredRound

if TYPE_CHECKING:
    from stages.rollout.store import Rollout

UPDATE = ("weight", "log_ratio", "ratio", "clip_side", "velocity_grad_norm", "share")


@dataclass(frozen=True)
class Tables:
    """images: one row per leaf: leaf, image (decoded once, whatever leaves show it), prompt, s, member, stride,
        occurrence, and by scorer `reward.<scorer>`, `status.<scorer>`, `reason.<scorer>`.
    members: one row per trained step, in order of `edge`: all of `advantages.parquet`; clipped (advantage ≠ total by
        the clip); `at.<stride>` = Σ weight·z over scorers at one stride, where there are several; disagreement, the
        largest minus the smallest of these, and flips, whether their signs differ; failures (rewards that are not
        there among its images); entered (has a row in `transitions.parquet`), and that row.
    leaves: edge → the leaves that measure the step, in order of stride.
    prompts: one row per prompt: counts of what one looks for, and the largest |advantage|.
    steps: one row per trained step s: counts, variance (ddof 0) of advantages, share of clipped update points.
    """

    images: pd.DataFrame
    members: pd.DataFrame
    leaves: dict[int, list[int]]
    prompts: pd.DataFrame
    steps: pd.DataFrame

    @property
    def failures(self) -> pd.DataFrame:
        """One row per reward that is not there: leaf, prompt, s, member, stride, scorer, status, reason."""
        keys = ["leaf", "prompt", "s", "member", "stride"]
        parts = []
        for name in self.images:
            if name.startswith("status."):
                scorer = name.partition(".")[2]
                bad = self.images[self.images[name] != "ok"]
                part = bad[keys].assign(scorer=scorer, status=bad[name], reason=bad[f"reason.{scorer}"])
                parts.append(part)
        return pd.concat(parts).sort_values(["leaf", "scorer"], ignore_index=True)


def tables(stored: StoredRound) -> Tables:
    """Join a round's tables."""
    images = image_table(stored)
    leaves = leaves_of(stored.rollout)
    members = member_table(stored, images, leaves)
    return Tables(images, members, leaves, prompt_table(stored, members), step_table(members))


def image_table(stored: StoredRound) -> pd.DataFrame:
    """See `Tables.images`."""
    scored = scored_leaves(stored.rollout, stored.rewards, dict(stored.credit.rewards))
    keys = ["leaf", "prompt", "s", "member", "stride", "occurrence"]
    table = scored.drop_duplicates("leaf")[keys].reset_index(drop=True)
    node = stored.rollout.leaves.set_index("leaf")["node"].loc[table["leaf"]]
    table.insert(1, "image", pd.Index(stored.rollout.leaf_nodes).get_indexer(node))
    for scorer, rows in scored.groupby("scorer", sort=False):
        rows = rows.set_index("leaf").loc[table["leaf"]]
        for name in ("reward", "status", "reason"):
            table[f"{name}.{scorer}"] = rows[name].to_numpy()
    return table


def leaves_of(rollout: Rollout) -> dict[int, list[int]]:
    """Trained row → the leaves that measure it.

    Those below the edge that carry its step; where none does, those below it of the earliest step (−1: whole
    trajectories; for gains, the estimate right after the step); where the edge leads to no image (BranchGRPO's last),
    those of its prompt and member. Of a re-noised leaf, the leaf itself.
    """
    leaves = rollout.leaves
    if len(rollout.renoised):
        by_node = leaves.groupby("node")["leaf"].apply(list).to_dict()
        return {int(row.edge): by_node.get(row.node, []) for row in rollout.renoised.itertuples()}
    recorded = rollout.edges[rollout.edges["recorded"]]
    edge_into = np.full(len(rollout.nodes), -1)
    edge_into[recorded["child"]] = recorded["edge"]
    parent = rollout.nodes["parent"].to_numpy()
    node, below = leaves["node"].to_numpy().copy(), []
    while (node >= 0).any():
        edge = np.where(node >= 0, edge_into[node], -1)
        below += [pd.DataFrame({"edge": edge, "leaf": leaves["leaf"], "at": leaves["s"], "stride": leaves["stride"]})]
        node = np.where(node >= 0, parent[node], -1)
    table = pd.concat(below)
    table = table[table["edge"] >= 0].merge(recorded[["edge", "s"]], on="edge")
    table["order"] = np.where(table["at"] == table["s"], -2, table["at"])
    table = table[table["order"] == table.groupby("edge")["order"].transform("min")]
    table = table.sort_values(["edge", "stride", "leaf"])
    found = table.groupby("edge")["leaf"].apply(list).to_dict()
    members = leaves.groupby(["prompt", "member"])["leaf"].apply(list).to_dict()
    return {
        int(row.edge): [int(one) for one in found.get(row.edge, members.get((row.prompt, row.member), []))]
        for row in recorded.itertuples()
    }


def member_table(stored: StoredRound, images: pd.DataFrame, leaves: dict[int, list[int]]) -> pd.DataFrame:
    """See `Tables.members`."""
    table = stored.advantages.sort_values("edge", ignore_index=True)
    table = table.drop(columns="token_row", errors="ignore")
    table["clipped"] = (table["advantage"] != table["total"]) & ~table["why_zero"].isin(["dropped", "pruned"])
    strides = stride_sums(table, stored.weights)
    table = table.join(strides)
    if len(strides.columns) > 1:
        table["disagreement"] = strides.max(axis=1) - strides.min(axis=1)
        table["flips"] = (strides.max(axis=1) > 0) & (strides.min(axis=1) < 0)
    bad = sum((images[name] != "ok").astype(int) for name in images if name.startswith("status."))
    bad = pd.Series(np.asarray(bad), index=images["leaf"])
    table["failures"] = [int(bad.loc[leaves.get(int(edge), [])].sum()) for edge in table["edge"]]
    kept = stored.transitions[["edge", *(name for name in UPDATE if name in stored.transitions)]]
    table = table.merge(kept, on="edge", how="left", validate="one_to_one")
    table["entered"] = table["edge"].isin(stored.transitions["edge"])
    return table


def stride_sums(table: pd.DataFrame, weights: dict[str, float]) -> pd.DataFrame:
    """`at.<stride>`: what each granularity alone says; no columns where there are no two of them."""
    parts: dict[str, list[tuple[float, str]]] = {}
    for name in table:
        if name.startswith("z."):
            scorer, _, stride = name[2:].rpartition(".")
            parts.setdefault(stride, []).append((weights.get(scorer, 1.0), name))
    if len(parts) < 2:
        return pd.DataFrame(index=table.index)
    sums = {
        f"at.{stride}": sum(weight * table[name] for weight, name in columns)
        for stride, columns in sorted(parts.items(), key=lambda one: (len(one[0]), one[0]))
    }
    return pd.DataFrame(sums, index=table.index)


def prompt_table(stored: StoredRound, members: pd.DataFrame) -> pd.DataFrame:
    """See `Tables.prompts`."""
    groups = members.assign(
        flips=members.get("flips", False), size=members["advantage"].abs(), zero=members["advantage"] == 0
    ).groupby("prompt")
    table = groups.agg(
        steps=("edge", "size"), failures=("failures", "sum"), flips=("flips", "sum"), clipped=("clipped", "sum"),
        zero=("zero", "sum"), entered=("entered", "sum"), largest=("size", "max"),
    )  # fmt: skip
    table = table.reindex(stored.rollout.prompts)
    table.insert(0, "text", [stored.texts[int(prompt)] for prompt in table.index])
    return table.rename_axis("prompt").reset_index()


def step_table(members: pd.DataFrame) -> pd.DataFrame:
    """See `Tables.steps`."""
    side = members["clip_side"].abs() if "clip_side" in members else np.nan
    groups = members.assign(side=side, flips=members.get("flips", False)).groupby("s")
    table = groups.agg(
        points=("edge", "size"),
        entered=("entered", "sum"),
        variance=("advantage", lambda one: float(one.var(ddof=0))),
        clipped_advantages=("clipped", "sum"),
        flips=("flips", "sum"),
        clip_fraction=("side", "mean"),
    )
    return table.reset_index()


def ranked_images(stored: StoredRound) -> pd.DataFrame:
    """Distinct images, best first by Σ weight·(reward − mean)/std over the round: node, leaf, prompt, total, image."""
    from stages.sheet.stage import ranked

    values = {
        name: table.set_index("leaf")["value"].astype(float).where(table.set_index("leaf")["status"] == "ok")
        for name, table in stored.rewards.items()
    }
    table = ranked(stored.rollout.leaves, values, dict(stored.credit.rewards))
    return table.assign(image=pd.Index(stored.rollout.leaf_nodes).get_indexer(table["node"]))


def interest(prompts: pd.DataFrame, first: int | None = None) -> list[int]:
    """Prompts in the order in which a reader would want them: the named one, failures, disagreement, size."""
    keys: list[Any] = ["asked", "failures", "flips", "largest"]
    table = prompts.assign(asked=prompts["prompt"] == first)
    return [int(one) for one in table.sort_values(keys, ascending=False, kind="stable")["prompt"]]
