"""The engine's memory: states that wait for their evaluation, and states that outlive it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.rollout.forest import Forest

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RolloutShard:
    """A finished forest: its tables, and the states someone will read.

    parent_*: nodes with recorded edges, their state and behaviour velocity [Q, *latent]
    next_*: recorded edges, the states they drew [R, *latent] and the log-probabilities of the draws under the sampling
        policy [R], mean over the latent dimensions
    leaf_*: distinct leaf nodes and their latents [M, *latent]
    """

    forest: Forest
    parent_nodes: np.ndarray
    parent_x: np.ndarray
    parent_v: np.ndarray
    next_edges: np.ndarray
    next_x: np.ndarray
    next_log_prob: np.ndarray
    leaf_nodes: np.ndarray
    leaf_x: np.ndarray
    evaluations: int
    batches: int


class Pool:
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


class Keep:
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
        self.next_log_prob = np.full(len(self.next_edges), np.nan)
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

    def drawn(self, ids: np.ndarray, std: np.ndarray, noise: np.ndarray) -> None:
        """log N(x'; mean, std²), mean over dimensions, of recorded draws x' = mean + std·noise."""
        places = self.place["next"][ids]
        rows = np.flatnonzero(places >= 0)
        squares = (noise[rows].astype(np.float64) ** 2).mean(axis=tuple(range(1, noise.ndim)))
        self.next_log_prob[places[rows]] = -squares / 2 - np.log(std[rows]) - 0.5 * math.log(2 * math.pi)

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
            next_log_prob=self.next_log_prob,
            leaf_nodes=self.leaf_nodes,
            leaf_x=self.leaf_x,
            evaluations=evaluations,
            batches=batches,
        )


def _places(ids: np.ndarray, count: int) -> np.ndarray:
    places = np.full(count, -1, np.int64)
    places[ids] = np.arange(len(ids))
    return places
