"""Objectives: from a log-ratio and an advantage to a loss per trained transition.

Each is a pure function of tensors of one row per transition; weights are applied outside, already normalised over
the whole optimizer step, so the gradient is Σ wᵢ∇ℓᵢ whatever the tiling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Objective(Protocol):
    """A per-transition loss. `tolerance` bounds |ratio − 1| at the first optimizer step (gate)."""

    @property
    def tolerance(self) -> float: ...

    def loss(self, log_ratio: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor: ...

    def clipped(self, log_ratio: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class PPO:
    """ℓ = max(−A·ρ, −A·clip(ρ, 1 − clip_range, 1 + clip_range)), ρ = exp(log ρ).

    clip_range: 1e-4 in DDPO, DanceGRPO, MixGRPO and G²RPO; it belongs to the dimension-averaged log-ratio.
    """

    clip_range: float = 1e-4

    @property
    def tolerance(self) -> float:
        return min(self.clip_range / 10, 1e-6)

    def loss(self, log_ratio: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
        import torch

        ratio = log_ratio.exp()
        limited = ratio.clamp(1 - self.clip_range, 1 + self.clip_range)
        return torch.maximum(-advantage * ratio, -advantage * limited)

    def clipped(self, log_ratio: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
        """[B] int8: +1 where the upper clip stops the gradient, −1 where the lower one does, 0 elsewhere."""
        import torch

        ratio = log_ratio.exp()
        high = (ratio > 1 + self.clip_range) & (advantage > 0)
        low = (ratio < 1 - self.clip_range) & (advantage < 0)
        return high.to(torch.int8) - low.to(torch.int8)
