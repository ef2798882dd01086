"""DanceGRPO: all steps stochastic with constant noise, a random subset of them trained.

Every step is Dance-SDE with g = η, so std = η·√Δ; the image is the x0_hat of the last evaluated state, so the last
noise is never drawn. One x_T per prompt is shared by the group. The group's z-score (ddof 1, +1e-8) of the image's
reward, per reward model and summed, is the advantage of all its trained steps. Per sample a random
⌊fraction·(T−1)⌋ of the first T−1 steps is trained.

Source: arXiv 2505.07818; XueZeyue/DanceGRPO @15cc71d, fastvideo/train_grpo_flux.py and its 16-GPU FLUX script
(η 0.3, fraction 0.6, 12 samples in 3 optimizer steps of 4, clip 1e-4). G²RPO's text describes it differently
(Flow-SDE with η 0.7, the first half trained): `variant: as_in_g2rpo`.
Evaluations per prompt: 1 + G·(T−1), the root being shared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from stages.advantage.credit import Clip, Credit, Total, ZScore
from stages.core.errors import GranularError
from stages.methods.base import Method, Plan, refuse_steps
from stages.rollout.kernels import Kernel
from stages.rollout.tree import Tree
from stages.update.ppo import PPO


@dataclass(frozen=True, kw_only=True)
class DanceGRPO(Method):
    """Knobs of DanceGRPO.

    variant: `repo` as released; `as_in_g2rpo` as G²RPO's paper describes its baseline.
    eta: noise level; `null` takes the variant's own, 0.3 or 0.7.
    fraction: share of the first T−1 steps trained per sample (`repo`).
    steps: trained grid indices of every sample (`as_in_g2rpo`); `null` is the first half.
    optimizer_steps: the group is split into this many optimizer steps per round, by member.
    """

    variant: Literal["repo", "as_in_g2rpo"] = "repo"
    eta: Annotated[float, Field(gt=0)] | None = None
    fraction: Annotated[float, Field(gt=0, le=1)] = 0.6
    steps: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    optimizer_steps: Annotated[int, Field(ge=1)] = 3

    @property
    def per_prompt(self) -> bool:
        return self.variant == "repo"

    @property
    def kernel(self) -> Kernel:
        """Of every step but the last."""
        if self.variant == "repo":
            return Kernel("dance_sde", self.eta or 0.3)
        return Kernel("flow_sde", self.eta or 0.7)

    def check(self, plan: Plan) -> None:
        refuse_steps(self.optimizer_steps, plan.group)
        if self.steps is not None and self.variant == "repo":
            raise GranularError("method.steps: variant repo draws its steps at random; give variant as_in_g2rpo.")
        if self.steps is not None and not (self.steps and max(self.steps) <= plan.grid.steps - 2):
            raise GranularError(
                f"method.steps: a trained step starts at one of grid indices 0..{plan.grid.steps - 2} of a "
                f"{plan.grid.steps}-step grid, got {list(self.steps)}."
            )
        if self.variant == "repo" and int(self.fraction * (plan.grid.steps - 1)) < 1:
            raise GranularError(f"method.fraction: {self.fraction} of {plan.grid.steps - 1} steps trains none of them.")

    def grow(self, tree: Tree, plan: Plan) -> None:
        last = plan.grid.steps - 1
        rng = plan.rng("trained-steps")
        root = tree.root()
        for member in range(plan.group):
            if self.variant == "repo":
                trained = set(rng.permutation(last)[: int(self.fraction * last)].tolist())
            else:
                trained = set(range(plan.grid.steps // 2)) if self.steps is None else set(self.steps)
            step = plan.optimizer_step(member, self.optimizer_steps)
            at = root
            for s in range(last):
                at = tree.sde(at, s + 1, self.kernel, member=member, record=s in trained, optimizer_step=step)
            tree.leaf(tree.ode(at, plan.grid.steps))

    @property
    def credit(self) -> Credit:
        return Credit(
            ZScore(within=("prompt", "scorer"), ddof=1, eps=1e-8), Total(over=("scorer",)), Clip(self.adv_clip)
        )

    @property
    def objective(self) -> PPO:
        return PPO(clip_range=self.clip_range)
