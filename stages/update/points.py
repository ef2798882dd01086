"""Update points: recorded edges with their advantages, grouped so that every parent is evaluated once.

A round is a list of optimizer steps; a step is a list of tiles; a tile holds at most `update_batch` parent states and
all their points of that step. Weights sum to 1 over an optimizer step, so the gradient is Σ wᵢ∇ℓᵢ whatever the tiling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from stages.core.errors import GateError, GranularError

if TYPE_CHECKING:
    from stages.rollout.store import Rollout

COLUMNS = ("edge", "prompt", "s", "member", "optimizer_step", "a", "kappa", "std", "weight", "advantage")


@dataclass(frozen=True)
class UpdatePoints:
    """The trained transitions of a round, sorted by (optimizer step, parent, edge).

    table: one row per point: edge, prompt, s, member, optimizer_step, a, kappa, std (of its step), weight (Σ = 1 over
        the optimizer step), advantage, parent and next (rows of the arrays below).
    x, v: [Q, *latent] parents' states and the behaviour's velocities there. time: [Q] what the model is told.
    condition: [Q] position of the parent's prompt among the round's prompts. next_x: [R, *latent] the states drawn.
    """

    table: pd.DataFrame
    x: np.ndarray
    v: np.ndarray
    time: np.ndarray
    condition: np.ndarray
    next_x: np.ndarray

    def steps(self, update_batch: int) -> list[Step]:
        """The optimizer steps in order, each cut into tiles of at most `update_batch` parents."""
        result = []
        for number, rows in self.table.groupby("optimizer_step", sort=True).indices.items():
            parents, slots = np.unique(self.table["parent"].to_numpy()[rows], return_inverse=True)
            tiles = []
            for start in range(0, len(parents), update_batch):
                inside = (slots >= start) & (slots < start + update_batch)
                tiles.append(Tile(parents[start : start + update_batch], rows[inside], slots[inside] - start))
            result.append(Step(int(number), rows, len(parents), tuple(tiles)))
        return result


@dataclass(frozen=True)
class Tile:
    """Parents that share one forward: `parents` [≤ B] rows of x; `points` rows of the table; `slots` their parents'
    positions in the tile."""

    parents: np.ndarray
    points: np.ndarray
    slots: np.ndarray


@dataclass(frozen=True)
class Step:
    """One optimizer step: its `number`, rows of its `points`, count of `parents`, and the `tiles`."""

    number: int
    points: np.ndarray
    parents: int
    tiles: tuple[Tile, ...]


def gather(rollout: Rollout, advantages: pd.DataFrame, sigmas: Sequence[float]) -> UpdatePoints:
    """Join a round's recorded edges with their advantages and normalise the weights.

    Points whose advantage is 0 stay in the normalisation: a constant group makes the step smaller, not its
    neighbours' share larger.

    Raises:
        GateError: the rollout's noise levels are not `sigmas`, or something stored is not finite.
        GranularError: advantages and recorded edges are not the same rows.
    """
    edges = rollout.edges[rollout.edges["recorded"]]
    _check_grid(rollout, edges, sigmas)
    if sorted(advantages["edge"]) != sorted(edges["edge"]):
        raise GranularError(
            f"update: {len(advantages)} advantages for {len(edges)} recorded edges of round "
            f"{rollout.attrs['spec']['round_']}, or of other edges; make the advantages from this rollout."
        )
    table = edges.merge(advantages[["edge", "advantage"]], on="edge", validate="one_to_one")
    if (table["history"] >= 0).any() or not (table["std"] > 0).all():
        raise GranularError("update: a recorded edge must be a first-order stochastic step (std > 0).")
    table["parent"] = _positions(rollout.parent_nodes, table["parent"].to_numpy(), "parent state")
    table["next"] = _positions(rollout.next_edges, table["edge"].to_numpy(), "next state")
    table = table.sort_values(["optimizer_step", "parent", "edge"], ignore_index=True)
    table["weight"] = table["weight"] / table.groupby("optimizer_step")["weight"].transform("sum")
    nodes = rollout.nodes.iloc[rollout.parent_nodes]
    points = UpdatePoints(
        table=table[[*COLUMNS, "parent", "next"]],
        x=rollout.parent_x,
        v=rollout.parent_v,
        time=nodes["time"].to_numpy(np.float64, copy=True),
        condition=_positions(rollout.prompts, nodes["prompt"].to_numpy(), "prompt"),
        next_x=rollout.next_x,
    )
    _check_finite(points)
    return points


def name_rows(table: pd.DataFrame, limit: int = 5) -> str:
    """Rows as a person reads them: `prompt 3, s 0, member 7; …`."""
    rows = "; ".join(
        f"prompt {prompt}, s {s}, member {member}"
        for prompt, s, member in table[["prompt", "s", "member"]].head(limit).itertuples(index=False)
    )
    return rows + (f"; and {len(table) - limit} more" if len(table) > limit else "")


def _positions(ids: np.ndarray, wanted: np.ndarray, what: str) -> np.ndarray:
    """Position of every wanted id in `ids` (any order)."""
    order = np.argsort(ids, kind="stable")
    found = np.searchsorted(ids, wanted, sorter=order).clip(max=max(len(ids) - 1, 0))
    places = order[found] if len(ids) else np.zeros(0, np.int64)
    if len(places) != len(wanted) or (ids[places] != wanted).any():
        raise GranularError(f"update: the rollout lacks a {what} that a recorded edge needs; sample the round again.")
    return places


def _check_grid(rollout: Rollout, edges: pd.DataFrame, sigmas: Sequence[float]) -> None:
    stored = [float(sigma) for sigma in rollout.attrs["sigmas"]]
    if stored != [float(sigma) for sigma in sigmas]:
        raise GateError(
            f"update: the rollout was sampled at σ = {[round(s, 4) for s in stored]}, this run uses "
            f"{[round(float(s), 4) for s in sigmas]}; sample the round again."
        )
    used = rollout.nodes["sigma"].to_numpy()[edges["parent"].to_numpy()]
    if (used != np.asarray(stored)[edges["s"].to_numpy()]).any():
        raise GateError("update: the rollout's states and its σ table disagree; sample the round again.")


def _check_finite(points: UpdatePoints) -> None:
    table = points.table
    for name, array, rows in (
        ("parent state", points.x, table["parent"]),
        ("stored velocity", points.v, table["parent"]),
        ("next state", points.next_x, table["next"]),
        ("advantage", table["advantage"].to_numpy(), np.arange(len(table))),
        ("weight", table["weight"].to_numpy(), np.arange(len(table))),
    ):
        good = np.isfinite(array).reshape(len(array), -1).all(1)[rows]
        if not good.all():
            raise GateError(f"update: the {name} is not finite at {name_rows(table[~good])}.")
