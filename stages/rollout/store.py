"""The latent store: one Zarr group per shard, one file per array, a `complete` flag written last.

    rollouts.zarr/            attrs: schema, spec, sigmas, latent_dims, image_tokens
      shard-0000/             attrs: complete; opens in xarray with named dimensions
        nodes_<column> [node]   edges_<column> [edge]   leaves_<column> [leaf]   prompt [prompt]
        renoised_<column> [point]
        parent_node [parent]   parent_x, parent_v [parent, *latent]
        next_edge, next_log_prob [next]   next_x [next, *latent]
        leaf_node [image]      leaf_x [image, *latent]

States are stored in the precision in which they were continued, velocities in float32 (rounding the stored velocity
would move the first ratio away from 1). A missing shard reads as fill values in Zarr, hence the flag.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from stages.core import digest
from stages.core.errors import GranularError
from stages.core.zarr_files import write_array, write_group
from stages.rollout.buffers import RolloutShard
from stages.rollout.tree import EDGE, LEAF, NODE, RENOISED

SCHEMA = 2
NAME = "rollouts.zarr"


@dataclass(frozen=True)
class Rollout:
    """A whole round as read back, shards concatenated in order; ids are global over the round.

    prompts: [P] row ids in plan order. nodes (index = node id), edges (column `edge` = id), leaves (column `leaf` =
    id), renoised (column `edge` = row number, so that all trained rows are named alike): the columns of
    `stages.rollout.tree` plus `prompt`; edges also have `log_prob`, of the draw under the sampling policy (NaN where
    nothing was recorded).
    parent_nodes [Q], parent_x, parent_v [Q, *latent]; next_edges [R], next_x [R, *latent]; leaf_nodes [M],
    leaf_x [M, *latent]: float32. attrs: spec, sigmas, latent_dims, image_tokens (rows and columns of the tokens that
    cover an image).
    """

    prompts: np.ndarray
    nodes: pd.DataFrame
    edges: pd.DataFrame
    leaves: pd.DataFrame
    renoised: pd.DataFrame
    parent_nodes: np.ndarray
    parent_x: np.ndarray
    parent_v: np.ndarray
    next_edges: np.ndarray
    next_x: np.ndarray
    leaf_nodes: np.ndarray
    leaf_x: np.ndarray
    attrs: dict[str, Any]

    @property
    def trained(self) -> pd.DataFrame:
        """What the update learns from: recorded edges, or re-noised leaves where the method trains on these."""
        return self.renoised if len(self.renoised) else self.edges[self.edges["recorded"]]


def write_round(
    path: Path, shards: Sequence[RolloutShard], attrs: Mapping[str, Any], state_dtype: str, dims: tuple[str, ...]
) -> tuple[Rollout, dict[str, str]]:
    """Write a whole round; returns it as it reads back, and the digest of every part of it (`stages.core.digest`)."""
    attrs = create(path, attrs)
    parts = [write_shard(path, number, shard, state_dtype, dims) for number, shard in enumerate(shards)]
    digests = {"zarr.json": digest.of_json(attrs)}
    for number, part in enumerate(parts):
        digests[f"{_name(number)}/zarr.json"] = digest.of_json({"complete": True})
        for name, (array, names) in part.items():
            digests[f"{_name(number)}/{name}"] = digest.of_arrays({"/".join(names): array})
    rollout = _join([{name: array for name, (array, _) in part.items()} for part in parts], attrs)
    return rollout, {f"{path.name}/{place}": value for place, value in digests.items()}


def create(path: Path, attrs: Mapping[str, Any]) -> dict[str, Any]:
    """An empty store; attrs must be JSON, and are returned as they read back."""
    values = {"schema": SCHEMA, **json.loads(json.dumps(attrs))}
    write_group(path, values)
    return values


def _name(number: int) -> str:
    return f"shard-{number:04d}"


def write_shard(
    path: Path, number: int, shard: RolloutShard, state_dtype: str, dims: tuple[str, ...]
) -> dict[str, tuple[np.ndarray, tuple[str, ...]]]:
    """One shard's group; its `complete` flag is the last thing written. Returns its arrays with their dimensions."""
    group = path / _name(number)
    write_group(group, {"complete": False})
    written = {}

    def put(name: str, array: np.ndarray, *names: str) -> None:
        # Latents are mostly noise and do not compress.
        write_array(group / name, array, names, compress=len(names) == 1)
        written[name] = (array, names)

    forest = shard.forest
    put("prompt", forest.prompts, "prompt")
    for table, columns, dim in (
        ("nodes", forest.nodes, "node"),
        ("edges", forest.edges, "edge"),
        ("leaves", forest.leaves, "leaf"),
        ("renoised", forest.renoised, "point"),
    ):
        for name, values in columns.items():
            put(f"{table}_{name}", values, dim)
    put("parent_node", shard.parent_nodes, "parent")
    put("parent_x", shard.parent_x.astype(state_dtype, copy=False), "parent", *dims)
    put("parent_v", shard.parent_v, "parent", *dims)
    put("next_edge", shard.next_edges, "next")
    put("next_log_prob", shard.next_log_prob, "next")
    put("next_x", shard.next_x.astype(state_dtype, copy=False), "next", *dims)
    put("leaf_node", shard.leaf_nodes, "image")
    put("leaf_x", shard.leaf_x.astype(state_dtype, copy=False), "image", *dims)
    write_group(group, {"complete": True})
    return written


LATENTS = ("parent_x", "parent_v", "next_x", "leaf_x")


def read_rollout(path: Path, latents: bool = True) -> Rollout:
    """Read a finished round; with `latents=False` its tables only (the four arrays of latents are then empty).

    Raises:
        GranularError: no store there, another schema, a shard that was never finished, or latents asked for that
            retention has evicted.
    """
    import zarr

    try:
        root = zarr.open_group(str(path), mode="r")
    except FileNotFoundError:
        raise GranularError(f"{path}: no rollout store there.") from None
    attrs = dict(root.attrs)
    if attrs.get("schema") != SCHEMA:
        raise GranularError(f"{path}: rollout schema {attrs.get('schema')}, this version reads {SCHEMA}.")
    names = sorted(root.group_keys())
    if len(names) != attrs.get("shards", len(names)):
        raise GranularError(f"{path}: {len(names)} of {attrs['shards']} shards are there; run the rollout again.")
    parts = []
    for name in names:
        group = root[name]
        if not group.attrs.get("complete"):
            raise GranularError(f"{path}: {name} was never finished; run the rollout again.")
        arrays = dict(group.arrays())
        if latents:
            _refuse_evicted(path / name)
        parts.append({key: array[...] for key, array in arrays.items() if latents or key not in LATENTS})
        if latents:
            # An array that another run evicts while it is read reads as zeros.
            _refuse_evicted(path / name)
    return _join(parts, attrs)


def _refuse_evicted(shard: Path) -> None:
    if gone := [key for key in LATENTS if not (shard / key).is_dir()]:
        raise GranularError(
            f"{shard.parent}: {shard.name} no longer holds {', '.join(gone)} (evicted by retention; its tables "
            "remain); a stage that reads them makes them again, or raise retention.latents_rounds."
        )


def _join(parts: list[dict[str, np.ndarray]], attrs: dict[str, Any]) -> Rollout:
    nodes = np.cumsum([0, *(len(p["nodes_parent"]) for p in parts)])
    edges = np.cumsum([0, *(len(p["edges_parent"]) for p in parts)])

    def column(name: str, offsets: np.ndarray | None = None) -> np.ndarray:
        arrays = [p[name] for p in parts]
        if offsets is not None:
            arrays = [np.where(a >= 0, a + o, a) for a, o in zip(arrays, offsets)]
        return np.concatenate(arrays)

    def table(prefix: str, columns: tuple[str, ...]) -> pd.DataFrame:
        by_node = ("parent", "child", "history", "node")
        return pd.DataFrame(
            {name: column(f"{prefix}_{name}", nodes if name in by_node else None) for name in (*columns, "prompt")}
        )

    def states(name: str) -> np.ndarray:
        if name not in parts[0]:
            return np.zeros((0,), np.float32)
        return column(name).astype(np.float32, copy=False)

    edge_table, leaf_table, renoised = table("edges", EDGE), table("leaves", LEAF), table("renoised", RENOISED)
    for name, one in (("edge", edge_table), ("leaf", leaf_table), ("edge", renoised)):
        one.insert(0, name, np.arange(len(one)))
    next_edges = column("next_edge", edges)
    edge_table.loc[next_edges, "log_prob"] = column("next_log_prob")
    return Rollout(
        prompts=column("prompt"),
        nodes=table("nodes", NODE),
        edges=edge_table,
        leaves=leaf_table,
        renoised=renoised,
        parent_nodes=column("parent_node", nodes),
        parent_x=states("parent_x"),
        parent_v=states("parent_v"),
        next_edges=next_edges,
        next_x=states("next_x"),
        leaf_nodes=column("leaf_node", nodes),
        leaf_x=states("leaf_x"),
        attrs=attrs,
    )
