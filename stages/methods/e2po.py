"""E²PO: a group is sampled under slightly different text embeddings, and trained under the prompt's own.

Per prompt K_c conditions × G_n noises, one pooled group of K_c·G_n: condition 0 is the prompt itself, the others are
neighbours of its embedding, found in stage 1 (`stages/rollout/perturb.py`), that fade into it below σ = 1
(`stages/rollout/conditions.py`). Noise n is shared by all conditions, so they differ in nothing but the embedding. The
image is scored against the original prompt. Sampler, credit and loss are DiffusionNFT's (`nft.py`), with every sample's
condition replaced by the prompt's own.

    (G_n, K_c) = (4, 12) high exploration, (2, 4) efficient, (8, 3) preference: {noises: 4, perturb: {conditions: 12}}

Source: arXiv 2605.15803 (ICML 2026), read through third-party notes; no code is public. Its λ_div, μ, ε_ins, f, σ_init
and the recipe of stage 1 are not public either. Open readings: T5 is perturbed too, and stands for its text by the mean
of its outputs; noises are shared across conditions; the group is standardised as in DiffusionNFT.
`surrogate: grpo` is an extension and not in the paper: all steps but the last are Flow-SDE steps under C_i, trained by
PPO under the prompt's own condition, where the old velocities are evaluated again: likelihoods under C_i would put all
ratios outside the clip.
Evaluations per prompt: K_c·G_n·T; K_c·G_n·(T − 1) update points, each one evaluation with gradient and two without.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from stages.core.errors import GranularError
from stages.methods.base import Plan
from stages.methods.nft import DiffusionNFT
from stages.rollout.kernels import Kernel
from stages.rollout.perturb import PerturbSpec
from stages.rollout.tree import Member, Tree
from stages.update.objective import Objective
from stages.update.ppo import PPO


@dataclass(frozen=True, kw_only=True)
class E2PO(DiffusionNFT):
    """Knobs of E²PO beside those of DiffusionNFT; the run's `group` is K_c·G_n.

    noises: G_n, initial noises per condition. perturb: K_c, and how the conditions are made.
    surrogate: `nft` (the paper), or `grpo`, which then uses `clip_range`, `kl_coef` and `eta`, Flow-SDE's noise level.
    """

    noises: Annotated[int, Field(ge=1)] = 4
    perturb: PerturbSpec = field(default_factory=PerturbSpec)
    surrogate: Literal["nft", "grpo"] = "nft"
    eta: Annotated[float, Field(gt=0)] = 0.7

    @property
    def conditions(self) -> PerturbSpec:
        return self.perturb

    def check(self, plan: Plan) -> None:
        super().check(plan)
        conditions = self.perturb.conditions
        if plan.group != conditions * self.noises:
            raise GranularError(
                f"group: E²PO's group is method.perturb.conditions × method.noises = {conditions} × {self.noises} = "
                f"{conditions * self.noises}, got {plan.group}."
            )

    def grow(self, tree: Tree, plan: Plan) -> None:
        for noise in range(self.noises):
            for condition in range(self.perturb.conditions):
                # Noise by noise, so that several optimizer steps each see all conditions.
                root = tree.root(noise * self.perturb.conditions + condition, condition, noise)
                (self.sample if self.surrogate == "nft" else self.explore)(tree, plan, root)

    def explore(self, tree: Tree, plan: Plan, at: Member) -> None:
        """One stochastic trajectory, all steps but the last trained, and its leaf (the extension)."""
        kernel, last = Kernel("flow_sde", self.eta), plan.grid.steps - 1
        for s in range(last):
            step = plan.optimizer_step(at.member, self.optimizer_steps)
            at = tree.sde(at, s + 1, kernel, optimizer_step=step)
        tree.leaf(tree.ode(at, plan.grid.steps))

    @property
    def objective(self) -> Objective:
        if self.surrogate == "nft":
            return super().objective
        return OwnConditionPPO(clip_range=self.clip_range, kl_coef=self.kl_coef, kl_form="velocity")

    def behaviour_decay(self, optimizer_steps: int) -> float | None:
        return super().behaviour_decay(optimizer_steps) if self.surrogate == "nft" else None


@dataclass(frozen=True)
class OwnConditionPPO(PPO):
    """PPO whose old likelihoods are those of the prompt's own condition, not of the one that sampled."""

    @property
    def fresh(self) -> bool:
        return True
