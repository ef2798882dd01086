"""The engine: a forest of trees (one per prompt of a shard) in, every state the update and the scorers need out.

A pool of ready nodes feeds batches of exactly `max_batch` rows whatever prompt, step, member or stride a row belongs
to; each row carries its own σ. The node with the longest way to a leaf goes first (optimal for unit-time forests),
ties by creation, so the order is a pure function of the trees. A row's bits do not depend on its neighbours because
every forward has the same shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.core.errors import GateError
from stages.rollout.buffers import Keep, Pool, RolloutShard
from stages.rollout.forest import Forest, Noise

if TYPE_CHECKING:
    import torch

# velocity(x [B, *latent], time [B], condition row [B]) -> v [B, *latent]. A condition row is the prompt's position in
# the forest, times the conditions of a prompt, plus the node's condition; with one condition each, the position.
Velocity = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor"], "torch.Tensor"]


def run_forest(
    forest: Forest,
    *,
    velocity: Velocity,
    noise: Noise,
    max_batch: int,
    conditions: int = 1,
    state_dtype: str = "float32",
    device: str = "cpu",
    progress: Callable[[int], Any] | None = None,
) -> RolloutShard:
    """Sample every node of the forest once.

    conditions: rows of conditions that `velocity` knows of every prompt.
    progress: called with the number of evaluations done in each batch.

    Raises:
        GateError: a velocity is not finite; the sentence names prompt and noise level.
    """
    import torch

    nodes, edges = forest.nodes, forest.edges
    shape = noise.shape
    round_state = _rounder(state_dtype)
    order = np.argsort(edges["parent"], kind="stable")
    degree = np.bincount(edges["parent"], minlength=len(forest.paths))
    first = np.concatenate([[0], np.cumsum(degree)])
    keep = Keep(forest, shape)
    pool = Pool(shape, device, 2 * max_batch)
    slot = np.full(len(forest.paths), -1, np.int64)
    ready: list[list[int]] = [[] for _ in range(int(forest.height.max()) + 1)]

    def settle(ids: np.ndarray, states: torch.Tensor) -> None:
        """File new states: what is kept, what waits for evaluation."""
        keep.states(ids, states)
        waiting = nodes["evaluated"][ids]
        if waiting.any():
            chosen = states if waiting.all() else states[torch.from_numpy(waiting).to(states.device)]
            slot[ids[waiting]] = pool.put(chosen)
            for node in ids[waiting].tolist():
                ready[forest.height[node]].append(node)

    roots = np.flatnonzero(nodes["parent"] < 0)
    draws = [noise(int(forest.prompts[forest.index[n]]), "root", forest.paths[n]) for n in roots]
    settle(roots, round_state(torch.from_numpy(np.stack(draws)).to(device)))

    level, evaluations, batches = len(ready) - 1, 0, 0
    while level >= 0:
        batch: list[int] = []
        look = level
        while look >= 0 and len(batch) < max_batch:
            take = max_batch - len(batch)
            batch += ready[look][:take]
            del ready[look][:take]
            look -= 1
        while level >= 0 and not ready[level]:
            level -= 1
        if not batch:
            continue
        ids = np.asarray(batch)
        padded = np.concatenate([ids, np.full(max_batch - len(ids), ids[0])])
        x = pool.rows[torch.from_numpy(slot[padded]).to(device)]
        time = torch.from_numpy(nodes["time"][padded].astype(np.float32)).to(device)
        index = torch.from_numpy(forest.index[padded] * conditions + nodes["condition"][padded]).to(device)
        with torch.no_grad():
            v = velocity(x, time, index)[: len(ids)]
        x = x[: len(ids)]
        if not torch.isfinite(v).all():
            raise GateError(_name_bad(forest, ids, v))
        keep.evaluated(ids, x, v)
        pool.free.extend(slot[ids].tolist())
        rows = np.repeat(np.arange(len(ids)), degree[ids])
        taken = order[_ranges(first[ids], degree[ids])]
        children = round_state(_step(forest, taken, torch.from_numpy(rows).to(device), x, v, keep, noise))
        kids = edges["child"][taken]
        settle(kids, children)
        # New nodes are always lower than the batch's highest, but may be higher than the cursor.
        level = max(level, int(forest.height[kids].max()))
        evaluations, batches = evaluations + len(ids), batches + 1
        if progress:
            progress(len(ids))
    return keep.shard(forest, evaluations, batches)


def _rounder(state_dtype: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Rounding happens when a node is created: what is stored is what every later step sees."""
    import torch

    if state_dtype == "float32":
        return lambda x: x
    half = getattr(torch, state_dtype)
    return lambda x: x.to(half).to(torch.float32)


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The concatenation of [start, start + count) for every pair."""
    total = int(counts.sum())
    shift = np.repeat(starts - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts)
    return shift + np.arange(total)


def _step(
    forest: Forest, taken: np.ndarray, rows: torch.Tensor, x: torch.Tensor, v: torch.Tensor, keep: Keep, noise: Noise
) -> torch.Tensor:  # fmt: skip
    """x' = a·x + κ·v (+ a_h·x_h + κ_h·v_h of the history node) + std·ε for the taken edges."""
    import torch

    edges = forest.edges

    def column(name: str, which: np.ndarray = taken) -> torch.Tensor:
        values = torch.from_numpy(edges[name][which].astype(np.float32)).to(x.device)
        return values.reshape(-1, *([1] * (x.ndim - 1)))

    out = column("a") * x[rows] + column("kappa") * v[rows]
    past = np.flatnonzero(edges["history"][taken] >= 0)
    if len(past):
        x_old, v_old = keep.history(edges["history"][taken[past]], x.device)
        out[past] += column("a_history", taken[past]) * x_old + column("kappa_history", taken[past]) * v_old
    noisy = np.flatnonzero(edges["std"][taken] > 0)
    if len(noisy):
        kids = edges["child"][taken[noisy]]
        drawn = np.stack([noise(int(forest.prompts[forest.index[n]]), "step", forest.paths[n]) for n in kids])
        for row in np.flatnonzero(edges["common"][taken[noisy]] > 0):
            drawn[row] = _with_common(forest, int(taken[noisy[row]]), drawn[row], noise)
        keep.drawn(kids, edges["std"][taken[noisy]], drawn)
        out[noisy] += column("std", taken[noisy]) * torch.from_numpy(drawn).to(x.device)
    return out


def _with_common(forest: Forest, edge: int, own: np.ndarray, noise: Noise) -> np.ndarray:
    """w·ξ + √(1 − w²)·ξ_i: the draw of an edge whose siblings share ξ."""
    parent, share = int(forest.edges["parent"][edge]), float(forest.edges["common"][edge])
    common = noise(int(forest.prompts[forest.index[parent]]), "common", forest.paths[parent])
    return np.float32(share) * common + np.float32(math.sqrt(1 - share**2)) * own


def _name_bad(forest: Forest, ids: np.ndarray, v: torch.Tensor) -> str:
    import torch

    bad = ids[(~torch.isfinite(v).flatten(1).all(1)).cpu().numpy()]
    rows = ", ".join(f"prompt {forest.prompts[forest.index[n]]} at σ={forest.nodes['sigma'][n]:.4f}" for n in bad[:3])
    return f"rollout: the model's velocity is not finite for {len(bad)} state(s): {rows}."
