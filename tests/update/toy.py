"""A policy of a few weights and a real rollout under it: everything the advantage and update stages read."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pandas as pd
import torch

from stages.core.noise import generator
from stages.methods import Plan, build
from stages.rollout.engine import run_forest
from stages.rollout.forest import Forest, Noise
from stages.rollout.grid import GridSpec, make_grid
from stages.rollout.store import Rollout

SHAPE = (3, 4)
PROMPTS = (7, 3)


class Net(torch.nn.Module):
    """Two layers that mix state, time and prompt; smooth, so that gradients are easy to compare."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        rng = generator(seed, 0, 0, "toy")

        def weight(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.from_numpy(rng.standard_normal(shape, dtype=np.float32) / shape[0] ** 0.5))

        self.enter, self.leave = weight(6, 8), weight(8, 4)

    def forward(self, x: torch.Tensor, time: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        extra = torch.stack([time, condition], 1)[:, None].expand(-1, x.shape[1], -1)
        return torch.tanh(torch.cat([x, extra], 2) @ self.enter) @ self.leave


@dataclass(frozen=True)
class Conditions:
    """One number per prompt."""

    values: torch.Tensor

    def rows(self, index: torch.Tensor) -> Conditions:
        return Conditions(self.values[index])

    def __len__(self) -> int:
        return len(self.values)


@dataclass
class Policy:
    """The part of a policy that rollout and update use; it counts the rows it evaluates with gradient."""

    module: Net = field(default_factory=Net)
    device: str = "cpu"
    latent_shape: tuple[int, int] = SHAPE
    calls: list[int] = field(default_factory=list)
    spec: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(family="flux", precision="float32"))

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return dict(self.module.named_parameters())

    def weights(self) -> dict[str, torch.Tensor]:
        return self.module.state_dict()

    def load(self, tensors: dict[str, torch.Tensor], where: str) -> None:
        self.module.load_state_dict(dict(tensors), strict=True)

    def velocity(self, x: torch.Tensor, time: torch.Tensor, conditions: Conditions) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.calls.append(len(x))
        return self.module(x, time, conditions.values.to(x.dtype))


def conditions(count: int = len(PROMPTS)) -> Conditions:
    return Conditions(torch.linspace(-1, 1, count))


def roll(
    policy: Policy,
    method: dict,
    *,
    steps: int = 6,
    group: int = 3,
    prompts: tuple[int, ...] = PROMPTS,
    round_: int = 1,
    max_batch: int = 16,
) -> Rollout:
    """A round sampled by the real engine, in the form in which it is read back."""
    made, grid = build(method), make_grid(GridSpec(steps=steps))
    trees = [made.tree(Plan(grid, group, 1, round_, p if made.per_prompt else -1)) for p in prompts]
    known = conditions(len(prompts))

    def velocity(x, time, index):
        return policy.velocity(x, time, known.rows(index)).float()

    forest = Forest.of(trees, prompts)
    shard = run_forest(forest, velocity=velocity, noise=Noise(1, round_, SHAPE), max_batch=max_batch)
    edges, leaves, renoised = (pd.DataFrame(one) for one in (forest.edges, forest.leaves, forest.renoised))
    for name, table in (("edge", edges), ("leaf", leaves), ("edge", renoised)):
        table.insert(0, name, np.arange(len(table)))
    edges.loc[shard.next_edges, "log_prob"] = shard.next_log_prob
    return Rollout(
        prompts=np.asarray(prompts, np.int64),
        nodes=pd.DataFrame(forest.nodes),
        edges=edges,
        leaves=leaves,
        renoised=renoised,
        parent_nodes=shard.parent_nodes,
        parent_x=shard.parent_x,
        parent_v=shard.parent_v,
        next_edges=shard.next_edges,
        next_x=shard.next_x,
        leaf_nodes=shard.leaf_nodes,
        leaf_x=shard.leaf_x,
        attrs={"spec": {"seed": 1, "round_": round_}, "sigmas": list(grid.sigmas)},
    )


def score(rollout: Rollout, seed: int = 0) -> pd.DataFrame:
    """A reward table with one random value per distinct image, as a scorer writes it."""
    rng = generator(seed, 0, 0, "rewards")
    by_node = dict(zip(rollout.leaf_nodes.tolist(), rng.standard_normal(len(rollout.leaf_nodes))))
    return pd.DataFrame(
        {
            "leaf": rollout.leaves["leaf"],
            "prompt": rollout.leaves["prompt"],
            "value": [by_node[node] for node in rollout.leaves["node"]],
            "status": "ok",
            "reason": "",
        }
    )
