"""What properties are checked on: a round of the real engine under an analytic velocity, with made-up rewards.

The latents have a dozen numbers, so a round of any method takes well under a second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from stages.advantage.join import apply_policy, scored_leaves, spread
from stages.core.noise import generator
from stages.core.types import Ledger
from stages.methods import Method, Plan
from stages.rollout.buffers import RolloutShard
from stages.rollout.engine import run_forest
from stages.rollout.forest import Forest, Noise
from stages.rollout.grid import GridSpec, make_grid
from stages.rollout.store import Rollout
from stages.rollout.tree import FrozenTree

if TYPE_CHECKING:
    import torch

    from stages.advantage.credit import Credit
    from stages.rollout.grid import Grid

PROMPTS = (7, 3, 5)
WEIGHTS = {"a": 1.0, "b": 0.5}
SHAPE = (3, 4)  # three tokens of four channels
CLAIMS = frozenset({"prompts", "members"})

Rewards = dict[str, pd.DataFrame]
Change = Callable[[np.ndarray, pd.DataFrame], np.ndarray]


def velocity(x: torch.Tensor, time: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
    """[B, *SHAPE], smooth, and different at every state, time and condition."""
    offset = (time + 0.3 * condition).reshape(-1, *([1] * (x.ndim - 1)))
    return (0.7 * x + offset).tanh()


EIGHT = make_grid(GridSpec(steps=8))


@dataclass(frozen=True)
class Sample:
    """One round of a method. claims: which properties beyond the common ones hold (`Method.claims`).

    credit: the rule that is checked, the method's own where nothing else is said.
    """

    method: Method
    group: int = 8
    grid: Grid = EIGHT
    rule: Credit | None = None
    claims: frozenset[str] = CLAIMS

    @property
    def credit(self) -> Credit:
        return self.method.credit if self.rule is None else self.rule

    @property
    def plan(self) -> Plan:
        return Plan(self.grid, self.group, seed=1, round_=1)

    def trees(self) -> list[FrozenTree]:
        """One a prompt, planned anew."""
        method = self.method
        return [
            method.tree(replace(self.plan, prompt=prompt) if method.per_prompt else self.plan) for prompt in PROMPTS
        ]

    @cached_property
    def shard(self) -> RolloutShard:
        """The round as the engine leaves it."""
        forest = Forest.of(self.trees(), PROMPTS)
        return run_forest(
            forest, velocity=velocity, noise=Noise(1, 1, SHAPE), max_batch=256,
            conditions=int(forest.nodes["condition"].max()) + 1,
        )  # fmt: skip

    @cached_property
    def planned(self) -> Ledger:
        return sum((self.method.ledger(tree) for tree in self.trees()), Ledger())

    @cached_property
    def rollout(self) -> Rollout:
        """The same in the form in which it is read back."""
        shard, forest = self.shard, self.shard.forest
        edges, leaves, renoised = (pd.DataFrame(one) for one in (forest.edges, forest.leaves, forest.renoised))
        for name, table in (("edge", edges), ("leaf", leaves), ("edge", renoised)):
            table.insert(0, name, np.arange(len(table)))
        edges.loc[shard.next_edges, "log_prob"] = shard.next_log_prob
        attrs = {
            "spec": {"round_": 1, "seed": 1}, "sigmas": list(self.grid.sigmas), "image_tokens": [1, SHAPE[0]],
        }  # fmt: skip
        return Rollout(
            np.asarray(PROMPTS, np.int64), pd.DataFrame(forest.nodes), edges, leaves, renoised, shard.parent_nodes,
            shard.parent_x, shard.parent_v, shard.next_edges, shard.next_x, shard.leaf_nodes, shard.leaf_x, attrs,
        )  # fmt: skip

    def rewards(self, change: Change = lambda values, leaves: values) -> Rewards:
        """A table per scorer; leaves of one node have one reward. `change` maps values with the table of leaves."""
        leaves, made = self.rollout.leaves, {}
        for seed, scorer in enumerate(WEIGHTS):
            by_node = generator(seed, 0, 0, "rewards").standard_normal(len(self.rollout.nodes))
            values = change(by_node[leaves["node"]], leaves)
            made[scorer] = leaves[["leaf", "prompt"]].assign(value=values, status="ok", reason="")
        return made

    def advantages(self, given: Rewards, failures: str = "stop") -> pd.DataFrame:
        """What the rule makes of rewards, by (prompt, s, member); laying it onto the trained steps must work too."""
        scored = scored_leaves(self.rollout, given, WEIGHTS)
        table = self.credit(apply_policy(scored, failures, 1), self.rollout)
        spread(self.rollout, table, scored.loc[scored["status"] != "ok", "prompt"].unique())
        return table.set_index(["prompt", "s", "member"]).sort_index()
