"""GRPO-Guard: Flow-GRPO with ratios whose mean and spread are the same at every step, so that the clip works.

The dimension-averaged log-ratio ℓ has a mean below 0 (samples with A > 0 hardly ever reach the upper clip) and a
spread ∝ |κ|/std that grows 26-fold from the noisy to the clean end (10 steps, η 0.7). RatioNorm removes both,

    ρ = exp(std_s·(ℓ + mean((mean_θ − mean_old)²)/(2·std_s²))) = exp(mean(ε·(mean_θ − mean_old))),  std_s = g·√Δ

and the loss of a step is divided by Δ = σ − σ', which evens out the gradients of the steps. The KL term, if any, is not
divided. Tree and credit are Flow-GRPO's.

Source: arXiv 2510.22319; scripts/train_sd3_GRPO_Guard.py of yifan123/flow_grpo (in zhtmike/flow_grpo). Flow-Factory
omits 1/Δ: `inverse_delta: false`.
Readings: clip 2e-6 is verl-omni's; no KL by default, since the paper wants to do without a heavy one.
Evaluations per prompt: as Flow-GRPO, G·T.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from stages.methods.flow_grpo import FlowGRPO
from stages.update.calibrated import Calibrated


@dataclass(frozen=True, kw_only=True)
class GRPOGuard(FlowGRPO):
    """Knobs of GRPO-Guard, beyond those of Flow-GRPO.

    inverse_delta: whether a step's loss is divided by Δ.
    """

    clip_range: Annotated[float, Field(gt=0)] = 2e-6
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    inverse_delta: bool = True

    AFTER_SAMPLING: ClassVar[frozenset[str]] = FlowGRPO.AFTER_SAMPLING | {"inverse_delta"}

    @property
    def objective(self) -> Calibrated:
        weight = "inverse_delta" if self.inverse_delta else "none"
        return Calibrated(calibration="ratio_norm", step_weight=weight, **self.loss_options)
