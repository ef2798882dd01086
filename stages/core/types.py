"""Types that cross stage boundaries; each one removes a class of known bugs."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    import torch

Status = Literal["ok", "failed", "missing"]


@dataclass(frozen=True)
class Transition:
    """The Gaussian a stochastic step draws from: x' ~ N(mean, std²·I), for every kernel.

    `std` is *the* standard deviation of the draw. Log-ratio, KL and calibration are derived from this pair and
    re-implemented nowhere, so no kernel can forget its normalisation.

    mean: tensor [B, *latent], float32 or float64
    std: tensor [B], > 0 for a transition that is trained
    """

    mean: torch.Tensor
    std: torch.Tensor

    def _per_row(self) -> torch.Tensor:
        return self.std.reshape(-1, *([1] * (self.mean.ndim - 1))).to(self.mean.dtype)

    def log_prob(self, sample: torch.Tensor) -> torch.Tensor:
        """Mean over the latent dimensions of log N(sample; mean, std²), [B] (the mean, not the sum: DDPO's habit)."""
        std = self._per_row()
        quadratic = -((sample - self.mean) ** 2) / (2 * std**2)
        return (quadratic - std.log() - 0.5 * math.log(2 * math.pi)).flatten(1).mean(1)

    def log_ratio(self, behaviour: Transition, sample: torch.Tensor) -> torch.Tensor:
        """log ρ = log_prob(self) − log_prob(behaviour) at `sample`, [B], both with the behaviour's std.

        Computed as mean(ε·d − d²/2), d = (mean − mean_old)/std, ε = (sample − mean_old)/std: the same number as the
        difference of the two log-probs, without subtracting two large ones (exact 0 where the means agree).
        """
        return self._log_ratios(behaviour, sample).flatten(1).mean(1)

    def token_log_ratio(self, behaviour: Transition, sample: torch.Tensor) -> torch.Tensor:
        """The same summed over each token's channels, [B, tokens], for packed latents [B, tokens, channels]."""
        return self._log_ratios(behaviour, sample).sum(-1)

    def _log_ratios(self, behaviour: Transition, sample: torch.Tensor) -> torch.Tensor:
        std = behaviour._per_row()
        shift = (self.mean - behaviour.mean) / std
        noise = (sample - behaviour.mean) / std
        return noise * shift - 0.5 * shift**2

    def kl(self, other: Transition) -> torch.Tensor:
        """KL(self ‖ other) per latent dimension, [B], for equal std: mean((mean − mean_other)²)/(2·std²)."""
        return (((self.mean - other.mean) / self._per_row()) ** 2).flatten(1).mean(1) / 2


@dataclass(frozen=True)
class Reward:
    """What a scorer says of one image: a value, or the reason why there is none. A failure is never a number.

    parts: named sub-scores. reply: the words of a judge that answers in words, as they came, whatever became of them.
    """

    value: float | None
    status: Status = "ok"
    reason: str = ""
    parts: tuple[tuple[str, float], ...] = ()
    reply: str = ""

    def __post_init__(self) -> None:
        if self.status == "ok" and (self.value is None or not math.isfinite(self.value)):
            object.__setattr__(self, "status", "failed")
            object.__setattr__(self, "reason", self.reason or f"not a finite number: {self.value!r}")
            object.__setattr__(self, "value", None)
        elif self.status != "ok" and self.value is not None:
            raise ValueError(f"a {self.status} reward carries no value, got {self.value!r}")

    @staticmethod
    def failed(reason: str, reply: str = "") -> Reward:
        return Reward(None, "failed", reason, reply=reply)


@dataclass(frozen=True)
class Ledger:
    """What a piece of work costs, counted, not timed.

    evaluations: velocity evaluations without gradient (one node, one evaluation)
    passes: transformer passes behind them (twice as many where guidance needs two)
    images: images decoded
    scores: images scored, summed over scorers
    parents: distinct states trained at, per optimizer step
    points: update points: trained transitions and re-noised leaves
    with_gradient: velocity evaluations with gradient (one per parent, more where an objective walks on from it)
    frozen: velocity evaluations of the update without gradient (reference policy, behaviour evaluated again)
    optimizer_steps: AdamW steps
    """

    evaluations: int = 0
    passes: int = 0
    images: int = 0
    scores: int = 0
    parents: int = 0
    points: int = 0
    with_gradient: int = 0
    frozen: int = 0
    optimizer_steps: int = 0

    # A forward costs 1, the backward pass about 2 more.
    GRADIENT_COST = 3

    @property
    def equivalents(self) -> int:
        """Model evaluations with a gradient evaluation counted as three: the unit of a run's budget."""
        return self.evaluations + self.frozen + self.GRADIENT_COST * self.with_gradient

    def __add__(self, other: Ledger) -> Ledger:
        return Ledger(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(Ledger)})


def constant(values: np.ndarray) -> bool:
    """Whether a group carries no preference: max == min, exactly (a small std is not enough, nor needed)."""
    return bool(values.size == 0 or values.max() == values.min())
