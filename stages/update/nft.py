"""The negative-aware loss of DiffusionNFT: no likelihood, a contrast of clean estimates at re-noised samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stages.update.objective import Memory, Objective, Outcome, PointBatch
from stages.update.ppo import kl_term

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class NFT(Objective):
    """ℓ = (5/β)·[r·E(v⁺) + (1 − r)·E(v⁻)] + kl_coef·mean((v − v_ref)²) at x = (1 − σ)·x0 + σ·ε.

    v± = (1 ∓ β)·v_old ± β·v_θ; r = clip(A/5, ±1)/2 + ½; E(v) = mean((x0_hat − x0)²)/w with x0_hat = x − σ·v and
    w = mean|x0_hat − x0|, at least 1e-5 and without gradient. The 5 is `adv_clip`.

    v_old are the velocities of the weights that sampled. Where θ is not theirs (after an optimizer step, or where they
    lag behind), r = ½ does have a gradient: both terms then pull v_θ back to v_old. It vanishes only where v_θ = v_old.
    There is no ratio: it is null in the tables.
    """

    beta: float = 1.0
    kl_coef: float = 1e-4
    adv_clip: float = 5.0

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def fresh(self) -> bool:
        return True

    @property
    def advantage_free(self) -> bool:
        return True

    def evaluate(self, points: PointBatch, memory: Memory) -> Outcome:
        r = (points.advantage / self.adv_clip).clamp(-1, 1) / 2 + 0.5
        towards = (1 - self.beta) * points.old + self.beta * points.velocity
        away = (1 + self.beta) * points.old - self.beta * points.velocity
        contrast = r * clean_error(points, towards) + (1 - r) * clean_error(points, away)
        loss = self.adv_clip / self.beta * contrast + kl_term(points, self.kl_coef, "velocity")
        return Outcome(loss, log_ratio=r.new_full(r.shape, float("nan")), clip_side=r.new_zeros(r.shape))


def clean_error(points: PointBatch, velocity: torch.Tensor) -> torch.Tensor:
    """E(v): squared error of the clean estimate over its own mean absolute error, [B]."""
    error = points.x - points.wide(points.sigma) * velocity - points.sample
    weight = error.detach().abs().flatten(1).mean(1).clamp(min=1e-5)
    return error.square().flatten(1).mean(1) / weight
