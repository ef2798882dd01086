"""Update points: recorded edges or re-noised leaves with their advantages; every parent is evaluated once.

A round is a list of optimizer steps; a step is a list of tiles; a tile holds at most `update_batch` parent states and
all their points of that step. Weights sum to 1 over an optimizer step, so the gradient is Σ wᵢ∇ℓᵢ whatever the tiling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd

from stages.core.errors import GateError, GranularError
from stages.core.noise import normal

if TYPE_CHECKING:
    from stages.rollout.grid import Grid
    from stages.rollout.store import Rollout

COLUMNS = (
    *("edge", "prompt", "s", "member", "optimizer_step", "sigma", "sigma_next", "a", "kappa", "std"),
    *("weight", "advantage", "token_row"),
)


@dataclass(frozen=True)
class UpdatePoints:
    """The update points of a round, sorted by (optimizer step, parent, edge).

    table: one row per point: edge, prompt, s, member, optimizer_step, sigma, sigma_next, a, kappa, std (of its step),
        weight (Σ = 1 over the optimizer step), advantage, token_row (row of `tokens`, −1 without), parent and next
        (rows of the arrays below). Of a re-noised leaf, `edge` is the row of the round's renoised table, sigma_next 0
        and a, kappa, std NaN.
    x, v: [Q, *latent] parents' states and the behaviour's velocities there (NaN until evaluated, for re-noised leaves).
    time: [Q] what the model is told. condition: [Q] position of the parent's prompt among the round's prompts.
    next_x: [R, *latent] the states drawn, or the clean leaves. reference: [Q, *latent] velocities of the run's start.
    tokens: [M, tokens] weights of token-wise advantages. left_out: optimizer step → points without any advantage that
    left the update (`zero_groups: drop`). grid_time: σ → what the model is told, off the grid too.
    """

    table: pd.DataFrame
    x: np.ndarray
    v: np.ndarray
    time: np.ndarray
    condition: np.ndarray
    next_x: np.ndarray
    grid_time: Callable[[float], float]
    left_out: Mapping[int, int] = field(default_factory=dict)
    reference: np.ndarray | None = None
    tokens: np.ndarray | None = None

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


def gather(
    rollout: Rollout,
    advantages: pd.DataFrame,
    grid: Grid,
    *,
    tokens: np.ndarray | None = None,
    zero_groups: Literal["keep", "drop"] = "keep",
) -> UpdatePoints:
    """Join a round's trained rows with their advantages and normalise the weights.

    Rows of weight 0, and those whose advantage is `pruned`, are no points: that makes an update cheaper, not smaller.
    zero_groups: what points of members whose every advantage is 0 do. `keep`: they stay in the normalisation, so a
        constant group makes the step smaller, not its neighbours' share larger. `drop`: they leave the update.
    Points of a member whose reward is missing (`dropped`) keep their share of the normalisation and weigh nothing:
    some objectives would learn from an advantage of 0 too.

    Raises:
        GateError: the rollout's noise levels are not the grid's, or something stored is not finite.
        GranularError: advantages and trained rows are not the same.
    """
    _check_sigmas(rollout, grid)
    rows = rollout.trained
    if sorted(advantages["edge"]) != sorted(rows["edge"]):
        raise GranularError(
            f"update: {len(advantages)} advantages for {len(rows)} trained rows of round "
            f"{rollout.attrs['spec']['round_']}, or of other ones; make the advantages from this rollout."
        )
    wanted = [name for name in ("edge", "advantage", "token_row", "why_zero") if name in advantages]
    table = rows.merge(advantages[wanted], on="edge", validate="one_to_one")
    table = table[table["weight"] > 0]
    if "why_zero" in table:
        table = table[table["why_zero"] != "pruned"]
    if "token_row" not in table:
        table["token_row"] = -1
    left_out: dict[int, int] = {}
    if zero_groups == "drop":
        some = table.groupby(["prompt", "member"])["advantage"].transform(lambda one: (one != 0).any())
        left_out = table.loc[~some, "optimizer_step"].value_counts().sort_index().to_dict()
        table = table[some]
    points = _renoised(rollout, table, grid) if len(rollout.renoised) else _edges(rollout, table, grid)
    points = replace(points, tokens=tokens, left_out={int(step): int(count) for step, count in left_out.items()})
    _check_finite(points)
    return points


def _edges(rollout: Rollout, table: pd.DataFrame, grid: Grid) -> UpdatePoints:
    """Points at recorded edges: state, velocity and next state are those of the rollout."""
    if (table["history"] >= 0).any() or not (table["std"] > 0).all():
        raise GranularError("update: a recorded edge must be a first-order stochastic step (std > 0).")
    sigma = rollout.nodes["sigma"].to_numpy()
    on_grid = sigma[table["parent"]] == np.asarray(grid.sigmas)[table["s"]]
    if not on_grid.all():
        raise GateError("update: the rollout's states and its σ table disagree; sample the round again.")
    table = table.assign(
        sigma=sigma[table["parent"]],
        sigma_next=sigma[table["child"]],
        parent=_positions(rollout.parent_nodes, table["parent"].to_numpy(), "parent state"),
        next=_positions(rollout.next_edges, table["edge"].to_numpy(), "next state"),
    )
    nodes = rollout.nodes.iloc[rollout.parent_nodes]
    return UpdatePoints(
        table=_sorted(table),
        x=rollout.parent_x,
        v=rollout.parent_v,
        time=nodes["time"].to_numpy(np.float64, copy=True),
        condition=_positions(rollout.prompts, nodes["prompt"].to_numpy(), "prompt"),
        next_x=rollout.next_x,
        grid_time=grid.time,
    )


def _renoised(rollout: Rollout, table: pd.DataFrame, grid: Grid) -> UpdatePoints:
    """Points at leaves brought back to a noise level: x = (1 − σ)·x0 + σ·ε, ε named by (prompt, member, s)."""
    spec = rollout.attrs["spec"]
    leaf = _positions(rollout.leaf_nodes, table["node"].to_numpy(), "leaf latent")
    x = np.empty((len(table), *rollout.leaf_x.shape[1:]), np.float32)
    names = table[["prompt", "member", "s", "sigma"]].itertuples(index=False)
    for row, (prompt, member, s, sigma) in enumerate(names):
        noise = normal(
            x.shape[1:], seed=spec["seed"], round_=spec["round_"], prompt=prompt, purpose="renoise", path=(member, s)
        )  # fmt: skip
        x[row] = np.float32(1 - sigma) * rollout.leaf_x[leaf[row]] + np.float32(sigma) * noise
    nothing = {name: np.nan for name in ("a", "kappa", "std")}
    return UpdatePoints(
        table=_sorted(table.assign(sigma_next=0.0, **nothing, parent=np.arange(len(table)), next=leaf)),
        x=x,
        v=np.full_like(x, np.nan),
        time=table["time"].to_numpy(np.float64, copy=True),
        condition=_positions(rollout.prompts, table["prompt"].to_numpy(), "prompt"),
        next_x=rollout.leaf_x,
        grid_time=grid.time,
    )


def _sorted(table: pd.DataFrame) -> pd.DataFrame:
    """In the order of the update, weights normalised over each optimizer step."""
    table = table.sort_values(["optimizer_step", "parent", "edge"], ignore_index=True)
    table["weight"] = table["weight"] / table.groupby("optimizer_step")["weight"].transform("sum")
    if "why_zero" in table:
        table["weight"] = table["weight"].mask(table["why_zero"] == "dropped", 0.0)
    return table[[*COLUMNS, "parent", "next"]]


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


def _check_sigmas(rollout: Rollout, grid: Grid) -> None:
    stored = [float(sigma) for sigma in rollout.attrs["sigmas"]]
    if stored != [float(sigma) for sigma in grid.sigmas]:
        raise GateError(
            f"update: the rollout was sampled at σ = {[round(s, 4) for s in stored]}, this run uses "
            f"{[round(float(s), 4) for s in grid.sigmas]}; sample the round again."
        )


def _check_finite(points: UpdatePoints) -> None:
    table = points.table
    for name, array, rows in (
        ("parent state", points.x, table["parent"]),
        ("stored velocity", points.v, table["parent"]),
        ("next state", points.next_x, table["next"]),
        ("advantage", table["advantage"].to_numpy(), np.arange(len(table))),
        ("weight", table["weight"].to_numpy(), np.arange(len(table))),
    ):
        if name == "stored velocity" and table["std"].isna().any():
            continue  # re-noised leaves: nothing was stored, it is evaluated before the first step
        good = np.isfinite(array).all(axis=tuple(range(1, array.ndim)))[rows]
        if not good.all():
            raise GateError(f"update: the {name} is not finite at {name_rows(table[~good])}.")
