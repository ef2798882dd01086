"""DenseGRPO: every step is paid its own gain of reward, and every step has its own noise level.

All steps are Flow-SDE from an x_T of each member's own; every state x_s, s = 0..T−1, is completed by the ODE on the
base grid and scored, R_s, and R_T is the reward of the sample. The dense reward of step s and its advantage are

    ΔR_s = R_{s+1} − R_s,    A_s = (ΔR_s − mean)/(std + 1e-4) over the group, for each step by itself,  clipped

The noise rate g_s = η_s·√(σ/(1−σ)) of a step is calibrated between rounds: where the round's positive and negative
ΔR_s are about equally many, |n⁺ − n⁻| ≤ ε_1·(n⁺ + n⁻), there is room to explore and η_s rises by ε_2; elsewhere it
falls by ε_2. Only noise levels are remembered, so the tree has one shape. Loss: Flow-GRPO's PPO and KL on the first T−1
steps, two optimizer steps per round; members whose every advantage is 0 are dropped. Leaves carry s = the index of the
estimated state. With equal η_s this is TP-GRPO without turning points.

Source: arXiv 2601.20218 (ICLR 2026); no code is released. What is not stated there is that of Flow-GRPO (arXiv
2505.05470). Open readings: ε_1, ε_2 and the range of η_s; that ε_2 moves η_s and not g_s, whose scale differs by a
factor of ten between steps; that ε_1 is a share, so that it does not depend on the size of a round; that the untrained
last step keeps η.
Evaluations per prompt: G·[T + Σ_{s=0}^{T−1} (T−1−s)]; G·(T−1) parents in the update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from stages.advantage.credit import Clip, Combine, Credit, Total
from stages.advantage.gains import Gains
from stages.core.errors import GranularError
from stages.methods.base import Plan
from stages.methods.flow_grpo import FlowFamily
from stages.rollout.kernels import Kernel
from stages.rollout.tree import Tree

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class DenseGRPO(FlowFamily):
    """Knobs of DenseGRPO; the others are those of `FlowFamily`.

    eta: noise level of every step in the first round. eta_range: levels never leave this range.
    imbalance: ε_1, up to which share of the dense rewards the two signs may differ in number to count as equal.
    eta_step: ε_2, how far a level moves per round; 0 keeps all levels at `eta`.
    same_latent: whether a group shares x_T.
    """

    eta_range: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] = (0.1, 1.0)
    imbalance: Annotated[float, Field(ge=0, le=1)] = 0.1
    eta_step: Annotated[float, Field(ge=0)] = 0.02
    same_latent: bool = False
    global_std: bool = False

    AFTER_SAMPLING: ClassVar[frozenset[str]] = FlowFamily.AFTER_SAMPLING | {"imbalance", "eta_step"}

    def check(self, plan: Plan) -> None:
        super().check(plan)
        low, high = self.eta_range
        if not low <= self.eta <= high:
            raise GranularError(f"method.eta_range: [{low:g}, {high:g}] must hold method.eta, {self.eta:g}.")
        if self.kernel == "cps" and high > 1:
            raise GranularError(f"method.eta_range: the noise level of kernel cps is at most 1, got {high:g}.")

    def grow(self, tree: Tree, plan: Plan) -> None:
        steps, levels = plan.grid.steps, plan.memory.get("eta", {})
        kernels = [Kernel(self.kernel, levels.get(str(s), self.eta)) for s in range(steps)]
        roots = [tree.root()] * plan.group if self.same_latent else [tree.root(i) for i in range(plan.group)]
        for root in dict.fromkeys(roots):
            tree.complete(root, range(steps), s=0)
        for member, at in enumerate(roots):
            step = plan.optimizer_step(member, self.optimizer_steps)
            for s in range(steps):
                at = tree.sde(at, s + 1, kernels[s], member=member, record=s < steps - 1, optimizer_step=step)
                tree.complete(at, range(s + 1, steps), s=s + 1)

    def remember(self, memory: Mapping[str, Any], advantages: pd.DataFrame) -> dict[str, Any]:
        levels = dict(memory.get("eta", {}))
        gains = [name for name in advantages if name.startswith("r.")]
        for s, rows in advantages.groupby("s"):
            positive, negative = int((rows[gains] > 0).to_numpy().sum()), int((rows[gains] < 0).to_numpy().sum())
            if positive + negative:
                equal = abs(positive - negative) <= self.imbalance * (positive + negative)
                level = levels.get(str(s), self.eta) + (self.eta_step if equal else -self.eta_step)
                # Rounded because 0.7 + 0.02 − 0.02 is not 0.7.
                levels[str(s)] = round(min(max(level, self.eta_range[0]), self.eta_range[1]), 9)
        return {**memory, "eta": levels}

    @property
    def credit(self) -> Credit:
        normalised = self.standardise("prompt", "s")
        return Credit(Combine(), Gains(), normalised, Total(over=("scorer",), rewards=True), Clip(self.adv_clip))
