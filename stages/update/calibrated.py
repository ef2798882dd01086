"""PPO on calibrated log-ratios: what GRPO-Guard and λ-Controlled GRPO change between the log-ratio and the clip.

Under the behaviour, the dimension-averaged log-ratio ℓ of a Gaussian step is N(−V/(2D), V/D²) with the path variance
V = ‖mean_θ − mean_old‖²/std² over D latent dimensions. Its mean lies below 0 and its spread differs from step to step,
so one clip range cannot fit all steps. Here

    ρ = exp(cal_s·(ℓ + V/(2D))),    loss = w_s·max(−A·ρ, −A·clip(ρ, 1 ± clip_range)) + kl_coef·KL.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from stages.update.objective import Memory, Outcome, PointBatch
from stages.update.ppo import PPO, clipped_surrogate, kl_term

if TYPE_CHECKING:
    import pandas as pd
    import torch


@dataclass(frozen=True)
class Calibrated(PPO):
    """PPO with a mean correction, a scale cal_s of the log-ratio and a weight w_s of the step's loss.

    centred: whether V/(2D) is added. It keeps its graph, as released: what is left is the mean of ε·d, linear in v_θ.
    calibration: cal_s. `none`: 1. `ratio_norm`: std_s (GRPO-Guard). `lambda_norm`: clip_range·D/(deviations·√V̄_s), so
        that `deviations` predicted standard deviations of the log-ratio fit into the clip.
    step_weight: w_s. `none`: 1. `inverse_delta`: 1/(σ − σ') (GRPO-Guard). `damp`: min(1, −ln(retention)/V̄_s), which
        only acts where the predicted share of effective samples, e^{−V}, falls below `retention`.
    cal_max: bound of cal_s in `lambda_norm`; 1 never amplifies.
    decay: V̄_s ← decay·V̄_s + (1 − decay)·mean V_s after every optimizer step that was off-policy; V̄_s ≥ `FLOOR`. A
        step s that was never measured has cal_s = w_s = 1.
    """

    centred: bool = True
    calibration: Literal["none", "ratio_norm", "lambda_norm"] = "none"
    step_weight: Literal["none", "inverse_delta", "damp"] = "none"
    deviations: float = 2.0
    retention: float = 0.5
    cal_max: float = math.inf
    decay: float = 0.9

    FLOOR = 1e-12

    @property
    def tolerance(self) -> float:
        # `lambda_norm` stretches the log-ratio, and rounding with it, to the clip range, whatever that is.
        return self.clip_range / 10 if self.calibration == "lambda_norm" else super().tolerance

    def evaluate(self, points: PointBatch, memory: Memory) -> Outcome:
        log_ratio = self.log_ratios(points)
        if self.centred:
            log_ratio = log_ratio + points.policy.kl(points.behaviour)  # per dimension and of equal std: V/(2D)
        log_ratio = self.scale(points, memory) * log_ratio
        loss, side = clipped_surrogate(log_ratio, points.advantage, self.clip_range)
        loss = self.weight(points, memory) * loss + kl_term(points, self.kl_coef, self.kl_form)
        return Outcome(loss, log_ratio, side)

    def scale(self, points: PointBatch, memory: Memory) -> torch.Tensor | float:
        """cal_s, [B] or 1."""
        import torch

        if self.calibration == "none":
            return 1.0
        if self.calibration == "ratio_norm":
            return points.std
        known = expected_variance(points, memory)
        fit = self.clip_range / self.deviations * points.x[0].numel() / known.clamp(min=self.FLOOR).sqrt()
        return torch.where(known.isnan(), 1.0, fit.clamp(max=self.cal_max))

    def weight(self, points: PointBatch, memory: Memory) -> torch.Tensor | float:
        """w_s, [B] or 1."""
        import torch

        if self.step_weight == "none":
            return 1.0
        if self.step_weight == "inverse_delta":
            return 1 / (points.sigma - points.sigma_next)
        known = expected_variance(points, memory)
        damp = (-math.log(self.retention) / known.clamp(min=self.FLOOR)).clamp(max=1)
        return torch.where(known.isnan(), 1.0, damp)

    def remember(self, memory: Memory, measured: pd.DataFrame) -> dict[str, Any]:
        if self.calibration != "lambda_norm" and self.step_weight != "damp":
            return dict(memory)
        known = dict(memory.get("path_variance", {}))
        # The first optimizer step of a round is on-policy: its V is rounding noise and would only drag the mean down.
        for s, rows in measured[measured["updates"] > 0].groupby("s"):
            new = float(rows["path_variance"].mean())
            old = known.get(str(s), new)
            known[str(s)] = self.decay * old + (1 - self.decay) * new
        return {**memory, "path_variance": known}


def expected_variance(points: PointBatch, memory: Memory) -> torch.Tensor:
    """[B] V̄_s of every point's step; NaN where nothing was measured yet."""
    import torch

    known = memory.get("path_variance", {})
    return torch.tensor([known.get(str(s), math.nan) for s in points.s.tolist()], dtype=points.x.dtype).to(
        points.x.device
    )
