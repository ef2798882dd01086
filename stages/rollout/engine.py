"""The engine: a forest of trees (one per prompt of a shard) in, every state the update and the scorers need out.

A pool of ready nodes feeds batches of exactly `max_batch` rows whatever prompt, step, member or stride a row belongs
to; each row carries its own σ. The node with the longest way to a leaf goes first (optimal for unit-time forests),
ties by creation, so the order is a pure function of the trees. A row's bits do not depend on its neighbours because
every forward has the same shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.core.errors import GateError
from stages.core.noise import normal
from stages.rollout.tree import EDGE, LEAF, NODE, FrozenTree

if TYPE_CHECKING:
    import torch

# velocity(x [B, *latent], time [B], prompt index [B]) -> v [B, *latent]
Velocity = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor"], "torch.Tensor"]


@dataclass(frozen=True)
class Noise:
    """The noise streams of one round for latents of one shape."""

    seed: int
    round_: int
    shape: tuple[int, ...]

    def __call__(self, prompt: int, purpose: str, path: Sequence[int]) -> np.ndarray:
        return normal(
            self.shape, seed=self.seed, round_=self.round_, prompt=prompt, purpose=purpose, path=path
        )  # fmt: skip


@dataclass(frozen=True)
class Forest:
    """Trees of several prompts as one set of tables: ids are offset, and every row names its prompt (row id)."""

    prompts: np.ndarray
    nodes: dict[str, np.ndarray]
    edges: dict[str, np.ndarray]
    leaves: dict[str, np.ndarray]
    paths: list[tuple[int, ...]]
    height: np.ndarray
    index: np.ndarray  # [nodes] position of the node's prompt in `prompts`

    @staticmethod
    def of(trees: Sequence[FrozenTree], prompts: Sequence[int]) -> Forest:
        """Join the trees, one per prompt, in order."""
        sizes = [len(tree.paths) for tree in trees]
        offsets = np.concatenate([[0], np.cumsum(sizes)])[:-1]

        def join(tables: list[dict[str, np.ndarray]], names: Sequence[str]) -> dict[str, np.ndarray]:
            joined = {}
            for name in names:
                columns = [table[name] for table in tables]
                if name in ("parent", "child", "history", "node"):
                    columns = [np.where(c >= 0, c + o, c).astype(np.int64) for c, o in zip(columns, offsets)]
                joined[name] = np.concatenate(columns)
            lengths = [len(table[names[0]]) for table in tables]
            joined["prompt"] = np.repeat(np.asarray(prompts, np.int64), lengths)
            return joined

        return Forest(
            prompts=np.asarray(prompts, np.int64),
            nodes=join([tree.nodes for tree in trees], NODE),
            edges=join([tree.edges for tree in trees], EDGE),
            leaves=join([tree.leaves for tree in trees], LEAF),
            paths=[path for tree in trees for path in tree.paths],
            height=np.concatenate([tree.height for tree in trees]),
            index=np.repeat(np.arange(len(trees)), sizes),
        )


@dataclass(frozen=True)
class RolloutShard:
    """A finished forest: its tables, and the states someone will read.

    parent_*: nodes with recorded edges, their state and behaviour velocity [Q, *latent]
    next_*: recorded edges and the states they drew [R, *latent]
    leaf_*: distinct leaf nodes and their latents [M, *latent]
    """

    forest: Forest
    parent_nodes: np.ndarray
    parent_x: np.ndarray
    parent_v: np.ndarray
    next_edges: np.ndarray
    next_x: np.ndarray
    leaf_nodes: np.ndarray
    leaf_x: np.ndarray
    evaluations: int
    batches: int


class _Pool:
    """States that wait for their evaluation, in one tensor whose rows are reused."""

    def __init__(self, shape: tuple[int, ...], device: Any, capacity: int) -> None:
        import torch

        self.rows = torch.empty((capacity, *shape), dtype=torch.float32, device=device)
        self.free = list(range(capacity - 1, -1, -1))

    def put(self, states: torch.Tensor) -> np.ndarray:
        import torch

        while len(self.free) < len(states):
            old = len(self.rows)
            self.rows = torch.cat([self.rows, torch.empty_like(self.rows)])
            self.free = [*range(2 * old - 1, old - 1, -1), *self.free]
        slots = np.asarray([self.free.pop() for _ in range(len(states))], np.int64)
        self.rows[torch.from_numpy(slots).to(self.rows.device)] = states
        return slots


def run_forest(
    forest: Forest,
    *,
    velocity: Velocity,
    noise: Noise,
    max_batch: int,
    state_dtype: str = "float32",
    device: str = "cpu",
    progress: Callable[[int], Any] | None = None,
) -> RolloutShard:
    """Sample every node of the forest once.

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
    keep = _Keep(forest, shape)
    pool = _Pool(shape, device, 2 * max_batch)
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
        index = torch.from_numpy(forest.index[padded]).to(device)
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
    forest: Forest, taken: np.ndarray, rows: torch.Tensor, x: torch.Tensor, v: torch.Tensor, keep: _Keep, noise: Noise
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
        drawn = [noise(int(forest.prompts[forest.index[n]]), "step", forest.paths[n]) for n in kids]
        out[noisy] += column("std", taken[noisy]) * torch.from_numpy(np.stack(drawn)).to(x.device)
    return out


class _Keep:
    """The states that outlive their evaluation: recorded parents and children, leaves, and solver history."""

    def __init__(self, forest: Forest, shape: tuple[int, ...]) -> None:
        edges = forest.edges
        self.next_edges = np.flatnonzero(edges["recorded"])
        self.parent_nodes = np.unique(edges["parent"][self.next_edges])
        self.leaf_nodes = np.unique(forest.leaves["node"])
        count = len(forest.paths)
        self.place = {
            "parent": _places(self.parent_nodes, count),
            "next": _places(edges["child"][self.next_edges], count),
            "leaf": _places(self.leaf_nodes, count),
        }
        self.parent_x = np.empty((len(self.parent_nodes), *shape), np.float32)
        self.parent_v = np.empty_like(self.parent_x)
        self.next_x = np.empty((len(self.next_edges), *shape), np.float32)
        self.leaf_x = np.empty((len(self.leaf_nodes), *shape), np.float32)
        used = edges["history"][edges["history"] >= 0]
        self.uses = np.bincount(used, minlength=count)
        self.past: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def states(self, ids: np.ndarray, states: torch.Tensor) -> None:
        for name, target in (("next", self.next_x), ("leaf", self.leaf_x)):
            places = self.place[name][ids]
            rows = np.flatnonzero(places >= 0)
            if len(rows):
                target[places[rows]] = states[rows].cpu().numpy()

    def evaluated(self, ids: np.ndarray, x: torch.Tensor, v: torch.Tensor) -> None:
        places = self.place["parent"][ids]
        rows = np.flatnonzero(places >= 0)
        if len(rows):
            self.parent_x[places[rows]] = x[rows].cpu().numpy()
            self.parent_v[places[rows]] = v[rows].cpu().numpy()
        for row in np.flatnonzero(self.uses[ids] > 0):
            self.past[int(ids[row])] = (x[row].clone(), v[row].clone())

    def history(self, ids: np.ndarray, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        pairs = [self.past[int(node)] for node in ids]
        for node in ids.tolist():
            self.uses[node] -= 1
            if self.uses[node] == 0:
                del self.past[node]
        return torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs])

    def shard(self, forest: Forest, evaluations: int, batches: int) -> RolloutShard:
        return RolloutShard(
            forest=forest,
            parent_nodes=self.parent_nodes,
            parent_x=self.parent_x,
            parent_v=self.parent_v,
            next_edges=self.next_edges,
            next_x=self.next_x,
            leaf_nodes=self.leaf_nodes,
            leaf_x=self.leaf_x,
            evaluations=evaluations,
            batches=batches,
        )


def _places(ids: np.ndarray, count: int) -> np.ndarray:
    places = np.full(count, -1, np.int64)
    places[ids] = np.arange(len(ids))
    return places


def _name_bad(forest: Forest, ids: np.ndarray, v: torch.Tensor) -> str:
    import torch

    bad = ids[(~torch.isfinite(v).flatten(1).all(1)).cpu().numpy()]
    rows = ", ".join(f"prompt {forest.prompts[forest.index[n]]} at σ={forest.nodes['sigma'][n]:.4f}" for n in bad[:3])
    return f"rollout: the model's velocity is not finite for {len(bad)} state(s): {rows}."
