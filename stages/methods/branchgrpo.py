"""BranchGRPO: the group is the leaves of one tree, and every step is paid what became of the state it led to.

All T steps are stochastic (Dance-SDE, η = 0.3) from one x_T. At the split steps B = (0, 3, 6, 9) every state has two
children, elsewhere one. The draws of siblings have a part in common,

    ξ_b = (ξ_0 + r·η_b)/√(1 + r²),   r = 4                                                          (Eq. 2)

so each is N(0, I) and every leaf has the law of a plain rollout; siblings have covariance I/(1 + r²). Rewards of leaves
are fused upwards, weighted by the probability of the way, and the values of all states of a depth are compared:

    V(n) = Σ_ℓ w_ℓ·R_ℓ,  w_ℓ ∝ exp(β·log p(ℓ | n));    A_d(n) = (V(n) − mean_d)/(std_d + 1e-8)      (Eq. 3, 4; ddof 1)

per reward model and summed. An edge has the advantage of the state it leads to; the loss is PPO's over all edges. After
that, edges may be pruned from the update alone. Width: from the last split on, only edges towards the better sibling
(`parent_top1`) or the best and worst quarter of the leaves (`extremes`) stay. Depth: some steps are not trained.

Source: arXiv 2509.06040v5 (formulas by independent notes); Fredreic1849/BranchGRPO @ffc3c90,
fastvideo/train_branchgrpo_flux.py and its 8-GPU script (T 20, 16 leaves, clip 1e-3, edges in random order, an optimizer
step every 12). As released, the image is the x0_hat of the last evaluated state, and the last edge is trained although
its draw is not seen. Not as released: its siblings draw independently and four times too wide (and are scored with the
plain std), and its fusion is off, or by `edge`. Its depth window moves from (14, …, 17) towards the last split; the
paper's from the last split to the end, which is `prune_shift: 1`.
Evaluations per prompt: Σ_s width(s); with one optimizer step as many parents.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from stages.advantage.credit import Clip, Credit, Step, Total, ZScore
from stages.advantage.fusion import Fusion, PruneWidth
from stages.core.errors import GranularError
from stages.core.types import Ledger
from stages.methods.base import Method, Plan
from stages.rollout.kernels import Kernel
from stages.rollout.tree import FrozenTree, Tree
from stages.update.ppo import PPO


@dataclass(frozen=True, kw_only=True)
class BranchGRPO(Method):
    """Knobs of BranchGRPO; the group is 2^|B|.

    splits: B, grid indices at which every state has two children. branch_noise: r, how far siblings draw apart.
    beta, along: the softmax of the fusion, see `Fusion`.
    optimizer_steps: all trained edges, in random order, are split into this many; 19 are the released 12 edges a step.
    prune_width: see above. prune_steps: grid indices that are not trained in the first round; every `prune_hold` rounds
        they move by `prune_shift`, for as long as all lie between the last split and the end.
    """

    clip_range: Annotated[float, Field(gt=0)] = 1e-3
    eta: Annotated[float, Field(gt=0)] = 0.3
    splits: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] = (0, 3, 6, 9)
    branch_noise: Annotated[float, Field(ge=0.01)] = 4.0
    beta: Annotated[float, Field(ge=0)] = 1.0
    along: Literal["path", "edge"] = "path"
    optimizer_steps: Annotated[int, Field(ge=1)] = 19
    prune_width: Literal["none", "parent_top1", "extremes"] = "none"
    prune_steps: tuple[Annotated[int, Field(ge=0)], ...] = ()
    prune_shift: Literal[-1, 0, 1] = 0
    prune_hold: Annotated[int, Field(ge=1)] = 30

    AFTER_SAMPLING: ClassVar[frozenset[str]] = Method.AFTER_SAMPLING | {"beta", "along", "prune_width"}

    def widths(self, plan: Plan) -> list[int]:
        """Edges of every step."""
        return [2 ** sum(split <= s for split in self.splits) for s in range(plan.grid.steps)]

    def pruned(self, plan: Plan) -> set[int]:
        """Grid indices that the round does not train."""
        if not self.prune_steps:
            return set()
        early, late = max(self.splits) - min(self.prune_steps), plan.grid.steps - 1 - max(self.prune_steps)
        shift = (plan.round_ - 1) // self.prune_hold * self.prune_shift
        return {s + max(min(shift, late), min(early, 0)) for s in self.prune_steps}

    def check(self, plan: Plan) -> None:
        last, leaves = plan.grid.steps - 1, 2 ** len(self.splits)
        if len(set(self.splits)) != len(self.splits) or max(self.splits) >= last:
            raise GranularError(f"method.splits: grid indices 0..{last - 1}, each once, got {list(self.splits)}.")
        if plan.group != leaves:
            raise GranularError(f"group: {len(self.splits)} splits make {leaves} leaves, got group {plan.group}.")
        if self.prune_width == "extremes" and leaves < 4:
            raise GranularError("method.prune_width: extremes needs at least four leaves, so two splits.")
        if max(self.prune_steps, default=0) > last:
            raise GranularError(f"method.prune_steps: grid indices 0..{last}, got {list(self.prune_steps)}.")
        trained = sum(width for s, width in enumerate(self.widths(plan)) if s not in self.pruned(plan))
        if self.optimizer_steps > trained:
            raise GranularError(
                f"method.optimizer_steps: at most one per trained edge, {trained}, got {self.optimizer_steps}."
            )

    def grow(self, tree: Tree, plan: Plan) -> None:
        kernel, last = Kernel("dance_sde", self.eta), plan.grid.steps - 1
        common, pruned, widths = (1 + self.branch_noise**2) ** -0.5, self.pruned(plan), self.widths(plan)
        trained = sum(width for s, width in enumerate(widths) if s not in pruned)
        places = iter(plan.rng("edges").permutation(trained).tolist())
        states = [tree.root()]
        for s, width in enumerate(widths):
            children = []
            for member in range(width):
                at = states[member * len(states) // width]
                step = next(places) * self.optimizer_steps // trained if s not in pruned else 0
                children.append(
                    tree.sde(
                        at, s + 1, kernel, member=member, optimizer_step=step, weight=float(s not in pruned),
                        common=common if width > len(states) else 0.0,
                    )
                )  # fmt: skip
            if s == last:
                for at in states:
                    tree.leaf(tree.ode(at, s + 1))
            states = children

    @property
    def credit(self) -> Credit:
        prune: list[Step] = []
        if self.prune_width != "none":
            prune = [PruneWidth(self.prune_width, max(self.splits))]
        return Credit(
            Fusion(self.beta, self.along),
            ZScore(within=("prompt", "s", "scorer"), ddof=1, eps=1e-8),
            Total(over=("scorer",), rewards=True),
            Clip(self.adv_clip),
            *prune,
        )

    @property
    def claims(self) -> frozenset[str]:
        # Fusion weighs leaves by the likelihood of their draws, which belongs to the draws and stays with them.
        return super().claims - {"members"}

    @property
    def objective(self) -> PPO:
        return PPO(clip_range=self.clip_range)

    def ledger(self, tree: FrozenTree, scorers: int = 0, passes: int = 1) -> Ledger:
        """Which edges are pruned depends on rewards, how many does not (of parents, `extremes` has these at most)."""
        if self.prune_width != "none":
            gone = (tree.edges["s"] >= max(self.splits)) & (tree.edges["member"] % 2 == 1)
            tree = replace(tree, edges=tree.edges | {"weight": np.where(gone, 0.0, tree.edges["weight"])})
        return super().ledger(tree, scorers, passes)
