"""What a method is: three answers, each a pure function of the plan.

tree:      which states are visited, which steps are stochastic and trained, what is scored, and which optimizer
           step of the round trains which transition
credit:    how rewards of leaves become the advantage of each trained transition
objective: how advantages and likelihood ratios become a loss
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from stages.advantage.credit import Credit
from stages.core.errors import GranularError
from stages.core.noise import generator
from stages.core.types import Ledger
from stages.rollout.grid import Grid
from stages.rollout.tree import FrozenTree, Tree
from stages.update.objective import Objective

if TYPE_CHECKING:
    import pandas as pd

    from stages.advantage.tokens import TokenCredit
    from stages.rollout.perturb import PerturbSpec


@dataclass(frozen=True)
class Plan:
    """What a method may know when it plans a tree: never a reward, never a device, never another prompt.

    grid: the noise levels. group: G, samples per prompt (per trained step for branching methods).
    seed, round_: the run's seed and the round, counted from 1. prompt: row id (−1 when one tree serves all).
    memory: what the method remembers of earlier rounds (`Method.remember`), empty before the first.
    """

    grid: Grid
    group: int
    seed: int = 0
    round_: int = 1
    prompt: int = -1
    memory: Mapping[str, Any] = field(default_factory=dict)

    def rng(self, purpose: str) -> np.random.Generator:
        """Random choices of the plan; the same for every prompt where `prompt` is −1."""
        return generator(self.seed, self.round_, self.prompt, f"plan/{purpose}")

    def optimizer_step(self, member: int, count: int) -> int:
        """Which of `count` optimizer steps trains a member: the group is split evenly, in order."""
        return member * count // self.group


@dataclass(frozen=True, kw_only=True)
class Method:
    """Base of all methods; a subclass adds its knobs as fields and overrides the three answers.

    clip_range: PPO clip of the ratio. adv_clip: clip of the advantage, ±5 in every released code.
    """

    clip_range: Annotated[float, Field(gt=0)] = 1e-4
    adv_clip: Annotated[float, Field(gt=0)] = 5.0

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

    @property
    def claims(self) -> frozenset[str]:
        """Which properties hold beyond the common ones (`stages.checks.credit`): `prompts`, groups lie within a prompt;
        `members`, members of a group are alike; `scale`, the scale of rewards does not matter."""
        return frozenset({"prompts", "members"})

    # What few methods need beyond the three answers.

    @property
    def zero_groups(self) -> Literal["keep", "drop"]:
        """Whether members whose every advantage is 0 stay in the normalisation of an optimizer step."""
        return "keep"

    @property
    def conditions(self) -> PerturbSpec | None:
        """How the further conditions of a prompt are made, for trees whose roots have `condition` > 0."""
        return None

    @property
    def token_credit(self) -> TokenCredit | None:
        """How maps of differentiable scorers become weights of tokens; None where advantages are scalars."""
        return None

    def behaviour_decay(self, optimizer_steps: int) -> float | None:
        """Decay d of the weights that sample, old ← d·old + (1 − d)·θ after a round that ends at this many optimizer
        steps; None: the trained weights sample."""
        return None

    def remember(self, memory: Mapping[str, Any], advantages: pd.DataFrame) -> dict[str, Any]:
        """What later rounds plan with: the memory after a round, from its table of advantages; JSON."""
        return dict(memory)

    def tree(self, plan: Plan) -> FrozenTree:
        """One prompt's tree."""
        self.check(plan)
        tree = Tree(plan.grid)
        self.grow(tree, plan)
        return tree.freeze()

    def ledger(self, tree: FrozenTree, scorers: int = 0, passes: int = 1) -> Ledger:
        """What one prompt costs, the update included."""
        objective = self.objective
        return tree.ledger(scorers, passes, with_gradient=objective.with_gradient, frozen=objective.frozen)


def refuse_cps(kernel: str, eta: float) -> None:
    """Beyond η = 1 the noise of CPS falls again, and then changes its sign."""
    if kernel == "cps" and eta > 1:
        raise GranularError(f"method.eta: CPS has noise σ'·sin(ηπ/2), so η is at most 1, got {eta}.")


def refuse_steps(optimizer_steps: int, group: int) -> None:
    """More optimizer steps than members cannot share a group out."""
    if optimizer_steps > group:
        raise GranularError(f"method.optimizer_steps: at most one per member, {group}, got {optimizer_steps}.")
