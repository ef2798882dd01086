"""What a method is: three answers, each a pure function of the plan.

tree:      which states are visited, which steps are stochastic and trained, what is scored, and which optimizer
           step of the round trains which transition
credit:    how rewards of leaves become the advantage of each trained transition
objective: how advantages and likelihood ratios become a loss
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from stages.advantage.credit import Credit
from stages.core.errors import GranularError
from stages.core.noise import generator
from stages.rollout.grid import Grid
from stages.rollout.tree import FrozenTree, Tree
from stages.update.objectives import Objective


@dataclass(frozen=True)
class Plan:
    """What a method may know when it plans a tree: never a reward, never a device, never another prompt.

    grid: the noise levels. group: G, samples per prompt (per trained step for branching methods).
    seed, round_: the run's seed and the round, counted from 1. prompt: row id (−1 when one tree serves all).
    """

    grid: Grid
    group: int
    seed: int = 0
    round_: int = 1
    prompt: int = -1

    def rng(self, purpose: str) -> np.random.Generator:
        """Random choices of the plan; the same for every prompt where `prompt` is −1."""
        return generator(self.seed, self.round_, self.prompt, f"plan/{purpose}")


@dataclass(frozen=True, kw_only=True)
class Method:
    """Base of all methods; a subclass adds its knobs as fields and overrides the three answers."""

    # Options that no tree depends on: changing one re-uses every rollout that was sampled.
    AFTER_SAMPLING: ClassVar[frozenset[str]] = frozenset({"clip_range", "adv_clip"})

    @property
    def per_prompt(self) -> bool:
        """Whether trees differ between the prompts of a round (random steps per sample, say)."""
        return False

    def grow(self, tree: Tree, plan: Plan) -> None:
        """Add the method's nodes, edges and leaves to an empty tree."""
        raise GranularError(f"{type(self).__name__} defines no tree.")

    @property
    def credit(self) -> Credit:
        """From rewards to advantages."""
        raise GranularError(f"{type(self).__name__} defines no credit rule.")

    @property
    def objective(self) -> Objective:
        """From advantages to a loss."""
        raise GranularError(f"{type(self).__name__} defines no objective.")

    def check(self, plan: Plan) -> None:
        """Refuse knobs that do not fit the grid or the group, in one sentence, before any work."""

    def tree(self, plan: Plan) -> FrozenTree:
        """One prompt's tree."""
        self.check(plan)
        tree = Tree(plan.grid)
        self.grow(tree, plan)
        return tree.freeze()
