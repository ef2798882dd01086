"""λ-Controlled GRPO: Flow-GRPO whose ratios are calibrated by the measured path variance of every step.

OUR READING: the paper's exact formulas (its LambdaNorm-T and its budget rule) are not public; what follows puts the
ingredients it names together. One number per step, the path variance

    V = ‖mean_θ − mean_old‖²/std² = (κ/std)²·‖v_θ − v_old‖²        (the paper's λ_k)

fixes the law of the log-ratio: over all D dimensions N(−V/2, V) under the behaviour, so the dimension-averaged ℓ is
N(−V/(2D), V/D²), and importance weights keep a share e^{−V} of the samples effective. With V̄_s, a running mean of V,

    cal_s  = min(cal_max, (clip_range/deviations)·D/√V̄_s)       `deviations` predicted std fit into the clip
    damp_s = min(1, −ln(retention)/V̄_s)                         damps where fewer effective samples are predicted
    loss   = damp_s·max(−Aρ, −A·clip(ρ, 1 ± clip_range)),   ρ = exp(cal_s·(ℓ + V/(2D)))

Tree and credit are Flow-GRPO's. Sanity: at D = 65,536, retention 0.5 is a std of ℓ of 1.3e-5, the order of the clip
ranges in use. GRPO-Guard is cal_s = std_s with weight 1/Δ instead of damp_s.

Source: arXiv 2609.22041 (abstract and public notes; no code).
Readings: deviations 2 (1 would clip 32% of the samples, 2 clips 5%), retention 0.5, decay, clip 1e-5 and no KL are not
public. V̄_s comes from earlier optimizer steps of this or another round, never from the batch at hand, so a loss does
not depend on the tiling; a round's first optimizer step, where V = 0, is not counted and uses the last V̄_s. With
`optimizer_steps: 1` nothing is ever off-policy, V̄ stays unknown and cal = damp = 1.
Evaluations per prompt: as Flow-GRPO, G·T.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from stages.methods.flow_grpo import FlowGRPO
from stages.update.calibrated import Calibrated


@dataclass(frozen=True, kw_only=True)
class LambdaGRPO(FlowGRPO):
    """Knobs of λ-Controlled GRPO, beyond those of Flow-GRPO.

    deviations: predicted standard deviations of the log-ratio that fit into the clip. cal_max: bound of cal_s; `null`:
    none; 1 never amplifies. retention: q, the predicted share of effective samples below which a step is damped.
    decay: of the running mean V̄_s, per off-policy optimizer step.
    """

    clip_range: Annotated[float, Field(gt=0)] = 1e-5
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    deviations: Annotated[float, Field(gt=0)] = 2.0
    cal_max: Annotated[float, Field(gt=0)] | None = None
    retention: Annotated[float, Field(gt=0, lt=1)] = 0.5
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.9

    AFTER_SAMPLING: ClassVar[frozenset[str]] = FlowGRPO.AFTER_SAMPLING | {
        *("deviations", "cal_max", "retention", "decay")
    }

    @property
    def objective(self) -> Calibrated:
        return Calibrated(
            calibration="lambda_norm",
            step_weight="damp",
            deviations=self.deviations,
            cal_max=math.inf if self.cal_max is None else self.cal_max,
            retention=self.retention,
            decay=self.decay,
            **self.loss_options,
        )
