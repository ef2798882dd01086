"""Stepwise-Flow-GRPO: a clean estimate of every visited state is scored, and a step is paid the gain it causes.

One x_T is shared by the G trajectories of a prompt; every step s = 0..T−1 is stochastic. Each state x_s is taken to a
clean image by T' Euler steps of equal Δσ = σ_s/T' (T' = 1 is Tweedie's x0_hat) and scored, r_s; r_T is the reward of
the sample itself. The gain of step s and its advantage are

    gain_s = r_{s+1} − r_s,    A_s = (gain_s − mean)/(std + 1e-4),  clipped to ±adv_clip,

with mean and std (population) over all G·T gains of the prompt, so that early steps, which gain most, stay large.
Loss: PPO clip and KL of Flow-GRPO, two optimizer steps per round. Leaves carry s = the index of the estimated state.

Kernels: `flow_sde` (η 0.7), the main comparison; `ddim_*`, the DDIM-style step of Sec. 5.5,
x' = (1−σ')·x0_hat + √(σ'² − std²)·x1_hat + std·ε. Its schedule is printed as std = a·σ'·√(1−σ) (`ddim_literal`), which
is 0 at σ = 1 although the text calls it largest there (`ddim_intent`, std = a·σ'·√σ). A step without noise is an ODE
step and is not trained: the first one of `ddim_literal`, and the last one of all `ddim_*`.

Source: arXiv 2603.28718 (CVPR 2026), as summarised publicly; no code is released. T' = 5 and the joint statistics are
the paper's; group, η, clip, KL, eps and adv_clip are those of Flow-GRPO (arXiv 2505.05470), on which it builds.
Open readings: sub-steps are uniform in σ; the tiny last step is not trained, as in Flow-GRPO, while its gain counts.
Evaluations per prompt: T' + G·(T−1)·T' with shared noise; G·(T−2) parents in the update, and x_T once per optimizer
step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from stages.advantage.credit import Clip, Combine, Credit, Total
from stages.advantage.gains import Gains
from stages.core.errors import GranularError
from stages.methods.base import Plan
from stages.methods.flow_grpo import FlowFamily
from stages.rollout.kernels import Kernel
from stages.rollout.tree import Member, Tree


@dataclass(frozen=True, kw_only=True)
class StepwiseFlowGRPO(FlowFamily):
    """Knobs of Stepwise-Flow-GRPO; the others are those of `FlowFamily`.

    substeps: T' ≥ 1, evaluations behind one estimate; `grid` walks the remaining base steps instead.
    kernel, eta: how a step draws, and its noise level (the `a` of the DDIM-style kernels).
    same_latent: one x_T for the group, or one of its own for every member.
    normalise: one mean and std for all gains of the prompt, or (worse in the paper) one per step.
    last_step: whether the step to the image is `trained`; if not, its gain is `counted` in the joint statistics or
        `left_out` of them.
    """

    substeps: Annotated[int, Field(ge=1)] | Literal["grid"] = 5
    kernel: Literal["flow_sde", "ddim_intent", "ddim_literal", "ddim_sigma", "ddim_sigma_clamped"] = "flow_sde"
    same_latent: bool = True
    normalise: Literal["joint", "per_step"] = "joint"
    last_step: Literal["trained", "counted", "left_out"] = "counted"
    global_std: bool = False
    zero_groups: Literal["keep", "drop"] = "keep"

    AFTER_SAMPLING: ClassVar[frozenset[str]] = FlowFamily.AFTER_SAMPLING | {"normalise"}

    def check(self, plan: Plan) -> None:
        super().check(plan)
        if self.last_step == "trained" and not self.std(plan, plan.grid.steps - 1):
            raise GranularError(
                f"method.last_step: the last step of kernel {self.kernel} has no noise and cannot be trained; "
                "use counted or left_out."
            )

    def std(self, plan: Plan, s: int) -> float:
        """Noise of step s."""
        sigmas = plan.grid.sigmas
        return Kernel(self.kernel, self.eta).coefficients(sigmas[s], sigmas[s + 1], sigmas[1]).std

    def grow(self, tree: Tree, plan: Plan) -> None:
        last = plan.grid.steps - 1
        kernel = Kernel(self.kernel, self.eta)
        states = [tree.root()] * plan.group if self.same_latent else [tree.root(i) for i in range(plan.group)]
        for s in range(last + 1):
            self._estimate(tree, states, s, plan)
            noisy = self.std(plan, s) > 0
            record = s < last or self.last_step == "trained"
            for i, at in enumerate(states):
                step = plan.optimizer_step(i, self.optimizer_steps)
                if noisy:
                    states[i] = tree.sde(at, s + 1, kernel, member=i, record=record, optimizer_step=step)
                else:
                    states[i] = tree.ode(at, s + 1)
        self._estimate(tree, states, last + 1, plan)

    def _estimate(self, tree: Tree, states: list[Member], s: int, plan: Plan) -> None:
        """A leaf for every distinct state of step s."""
        sigma = plan.grid.sigmas[s]
        for at in dict.fromkeys(states):
            if self.substeps == "grid" or sigma == 0:
                tree.complete(at, range(s, plan.grid.steps), s=s)
                continue
            for left in range(self.substeps - 1, 0, -1):
                at = tree.ode_to(at, sigma * left / self.substeps)
            tree.leaf(tree.ode(at, plan.grid.steps), s=s)

    @property
    def credit(self) -> Credit:
        gains = Gains(count_last=self.last_step != "left_out")
        normalised = self.standardise("prompt") if self.normalise == "joint" else self.standardise("prompt", "s")
        return Credit(Combine(), gains, normalised, Total(over=("scorer",), rewards=True), Clip(self.adv_clip))
