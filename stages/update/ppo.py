"""PPO's clipped surrogate on the log-ratios of a Gaussian step, with an optional KL term to the start of the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from stages.core.types import Transition
from stages.update.objective import Memory, Objective, Outcome, PointBatch

if TYPE_CHECKING:
    import torch

KLForm = Literal["flow_grpo", "gaussian", "velocity"]


@dataclass(frozen=True)
class PPO(Objective):
    """ℓ = max(−A·ρ, −A·clip(ρ, 1 − clip_range, 1 + clip_range)) + kl_coef·KL, ρ = exp(log ρ).

    clip_range: 1e-4 in DDPO, DanceGRPO, MixGRPO and G²RPO; it belongs to the dimension-averaged log-ratio.
    log_ratio: `mean` over the latent dimensions; `token_sum`, one ratio per token, summed over its channels, averaged
        in the loss with advantage A·weight_token (SGA-Flow-GRPO); `cps`, the mean × 2·std², what is left when the
        released CPS code drops 1/(2·std²) from the log-probability.
    kl_form: `gaussian`, KL of the two transitions per dimension; `flow_grpo`, that times Δ = σ − σ' (the released line
        divides by g² where the variance is g²Δ); `velocity`, mean((v − v_ref)²).
    """

    clip_range: float = 1e-4
    log_ratio: Literal["mean", "token_sum", "cps"] = "mean"
    kl_coef: float = 0.0
    kl_form: KLForm = "flow_grpo"

    @property
    def tolerance(self) -> float:
        # A token's ratio is a sum over its channels, so float32 leaves more of its noise in it than in a mean.
        return min(self.clip_range / 10, 1e-4 if self.log_ratio == "token_sum" else 1e-6)

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def advantage_free(self) -> bool:
        return self.kl_coef > 0

    def evaluate(self, points: PointBatch, memory: Memory) -> Outcome:
        ratios, advantage = self.log_ratios(points), points.advantage
        if self.log_ratio == "token_sum":
            advantage = advantage[:, None].expand_as(ratios)
            if points.token_weight is not None:
                advantage = advantage * points.token_weight
        loss, side = clipped_surrogate(ratios, advantage, self.clip_range)
        per_point = [tensor.flatten(1).mean(1) if tensor.ndim > 1 else tensor for tensor in (loss, ratios, side)]
        return Outcome(per_point[0] + kl_term(points, self.kl_coef, self.kl_form), per_point[1], per_point[2])

    def log_ratios(self, points: PointBatch) -> torch.Tensor:
        """[B], or [B, tokens] for `token_sum`."""
        if self.log_ratio == "token_sum":
            return points.policy.token_log_ratio(points.behaviour, points.sample)
        mean = points.policy.log_ratio(points.behaviour, points.sample)
        return 2 * points.std**2 * mean if self.log_ratio == "cps" else mean


def clipped_surrogate(
    log_ratio: torch.Tensor, advantage: torch.Tensor, clip_range: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's loss and clip side, of the shape of `log_ratio`; the side is ±1 where the clip stops the gradient."""
    import torch

    ratio = log_ratio.exp()
    limited = ratio.clamp(1 - clip_range, 1 + clip_range)
    loss = torch.maximum(-advantage * ratio, -advantage * limited)
    high = (ratio > 1 + clip_range) & (advantage > 0)
    low = (ratio < 1 - clip_range) & (advantage < 0)
    return loss, high.to(ratio.dtype) - low.to(ratio.dtype)


def kl_term(points: PointBatch, coefficient: float, form: KLForm) -> torch.Tensor | float:
    """coefficient · KL to the reference, [B]; exactly 0 without a coefficient.

    Sources: `flow_grpo`, yifan123/flow_grpo train_sd3.py; `velocity`, Flow-Factory and DiffusionNFT.
    """
    if not coefficient:
        return 0.0
    assert points.reference is not None
    if form == "velocity":
        return coefficient * ((points.velocity - points.reference) ** 2).flatten(1).mean(1)
    reference: Transition = points.step(points.reference)
    scale = points.sigma - points.sigma_next if form == "flow_grpo" else 1.0
    return coefficient * scale * points.policy.kl(reference)
