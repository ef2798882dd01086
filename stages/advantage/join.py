"""Joining: leaves × scorers → the table a credit rule reads, and its result → the recorded edges it is about."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from stages.advantage.credit import GROUP
from stages.core.errors import GateError, GranularError
from stages.core.types import constant

if TYPE_CHECKING:
    from stages.rollout.store import Rollout

KEYS = list(GROUP)
SHOWN = 5


def scored_leaves(rollout: Rollout, rewards: Mapping[str, pd.DataFrame], weights: Mapping[str, float]) -> pd.DataFrame:
    """One row per leaf and scorer: the leaf's columns, occurrence, scorer, weight, reward, status, reason.

    A row that a scorer did not write is `missing`, a value that is not finite is `failed`; neither has a reward.

    Raises:
        GranularError: a reward table that does not belong to this rollout (another leaf, another prompt, a repeat).
    """
    leaves = rollout.leaves[["leaf", "prompt", "s", "member", "stride"]].copy()
    leaves["occurrence"] = leaves.groupby([*KEYS, "stride"], sort=False).cumcount()
    tables = []
    for scorer, weight in weights.items():
        given = rewards[scorer]
        if given["leaf"].duplicated().any():
            leaf = given["leaf"][given["leaf"].duplicated()].iloc[0]
            raise GranularError(f"rewards.{scorer}: leaf {leaf} has more than one row; score the round again.")
        place = pd.Index(leaves["leaf"]).get_indexer(given["leaf"])
        strange = given[(place < 0) | (leaves["prompt"].to_numpy()[place] != given["prompt"].to_numpy())]
        if len(strange):
            row = strange.iloc[0]
            raise GranularError(
                f"rewards.{scorer}: leaf {row['leaf']} of prompt {row['prompt']} is not in this rollout "
                f"({len(strange)} such rows); these rewards belong to another round."
            )
        value = np.full(len(leaves), np.nan)
        status = np.full(len(leaves), "missing", object)
        reason = np.full(len(leaves), "the scorer wrote no row", object)
        value[place] = given["value"]
        status[place] = given["status"].fillna("missing")
        reason[place] = given["reason"].fillna("").where(given["status"].notna(), "the scorer wrote no row")
        for row in np.flatnonzero((status == "ok") & ~np.isfinite(value)):
            status[row], reason[row] = "failed", f"not a finite number: {value[row]}"
        reward = np.where(status == "ok", value, np.nan)
        tables.append(leaves.assign(status=status, reason=reason, scorer=scorer, weight=float(weight), reward=reward))
    return pd.concat(tables, ignore_index=True)


def apply_policy(table: pd.DataFrame, failures: str, round_: int) -> pd.DataFrame:
    """The rows a credit rule may read: all of them, or those of complete members where the policy is `drop`.

    Dropping removes the member (all its strides and scorers) from its own group and from no other.

    Raises:
        GranularError: a reward is missing and the policy is `stop`; the sentence names the rows.
        GateError: a scorer has no reward at all, or one and the same for a whole round of more than one leaf; or
            dropping leaves no member at all.
    """
    bad = table[table["status"] != "ok"]
    if len(bad) and failures == "stop":
        rows = "; ".join(
            f"round {round_} prompt {row.prompt} leaf {row.leaf}, {row.scorer}: {row.status} ({row.reason})"
            for row in bad.head(SHOWN).itertuples()
        )
        more = f"; and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        raise GranularError(
            f"advantage: {len(bad)} of {len(table)} rewards are not there: {rows}{more}; score these rows again, or "
            "set failures: drop."
        )
    for scorer, rows in table.groupby("scorer", sort=False):
        values = rows["reward"].dropna().to_numpy()
        if not len(values):
            raise GateError(f"advantage: round {round_} has no reward at all from scorer '{scorer}'.")
        if len(rows) > 1 and constant(values):
            raise GateError(
                f"advantage: scorer '{scorer}' gave {values[0]:g} to all {len(values)} images of round {round_}; "
                "a constant scorer teaches nothing, so check its weights and its inputs."
            )
    if not len(bad):
        return table
    gone = pd.MultiIndex.from_frame(bad[KEYS]).unique()
    kept = table[~pd.MultiIndex.from_frame(table[KEYS]).isin(gone)].reset_index(drop=True)
    if not len(kept):
        raise GateError(
            f"advantage: every member of round {round_} lacks a reward of some scorer, so nothing is left of the round "
            f"to learn from; {len(bad)} of {len(table)} rewards are not there."
        )
    return kept


def spread(rollout: Rollout, credit: pd.DataFrame, dropped: Collection[int] = ()) -> pd.DataFrame:
    """The credit table laid onto what is trained (recorded edges or re-noised leaves), in order of `edge`.

    A row of the credit for one step (s ≥ 0) pays that prompt, step and member; a row for the whole trajectory (s = −1)
    pays every trained row of its prompt and member. Rows of the credit that nobody trains pay nothing. What is not paid
    because a reward of the prompt is missing gets advantage 0 and `why_zero = "dropped"`.

    dropped: prompts of which members were dropped.

    Raises:
        GranularError: a trained step that no row pays, or that is paid twice over.
        GateError: an advantage is not finite.
    """
    edges = rollout.trained[["edge", *KEYS, "optimizer_step"]].sort_values("edge")
    paid = pd.MultiIndex.from_frame(credit[KEYS].astype(np.int64))
    own = pd.MultiIndex.from_frame(edges[KEYS].astype(np.int64)).isin(paid)
    whole = pd.MultiIndex.from_frame(edges[KEYS].assign(s=-1).astype(np.int64)).isin(paid)
    lost = ~own & ~whole & edges["prompt"].isin(dropped).to_numpy()
    for wrong, what in ((~own & ~whole & ~lost, "nothing"), (own & whole, "two rows of the credit")):
        if wrong.any():
            row = edges[wrong].iloc[0]
            raise GranularError(
                f"advantage: {what} measures the step of prompt {row['prompt']}, s {row['s']}, member {row['member']} "
                f"({int(wrong.sum())} such steps); a trained step needs a reward of its own or of its trajectory."
            )
    edges["measured"] = np.where(own, edges["s"], -1).astype(np.int64)
    payment = credit.rename(columns={"s": "measured"})
    table = edges.merge(payment, on=["prompt", "measured", "member"], how="left", validate="many_to_one")
    table["why_zero"] = table["why_zero"].mask(lost, "dropped")
    for name in ("total", "advantage"):
        table[name] = table[name].mask(lost, 0.0)
    if not np.isfinite(table["advantage"]).all():
        row = table[~np.isfinite(table["advantage"])].iloc[0]
        raise GateError(
            f"advantage: prompt {row['prompt']}, s {row['s']}, member {row['member']} has advantage "
            f"{row['advantage']}; check the rewards of this group."
        )
    parts = sorted(name for name in table if name.startswith(("z.", "r.")))
    order = ["edge", *KEYS, "optimizer_step", *parts, "total", "advantage", "why_zero"]
    return table[order].reset_index(drop=True)
