"""What an objective is: from update points and their velocities to a loss per point.

An objective is a pure function of tensors with one row per point; weights are applied outside, already normalised over
the whole optimizer step, so the gradient is Σ wᵢ∇ℓᵢ whatever the tiling. It is differentiated with respect to the
velocity (and what `walk` adds), never with respect to weights: the network's part is the same for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from stages.core.types import Transition

if TYPE_CHECKING:
    import pandas as pd
    import torch

# What a method remembers between optimizer steps and rounds: JSON, saved with the policy.
Memory = Mapping[str, Any]
# (y [B, *latent], σ [B]) -> velocity with gradient at the tile's own prompts
VelocityAt = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]


@dataclass(frozen=True)
class PointBatch:
    """Some update points, one row each; tensors in one floating type.

    x: [B, *latent] the parent's state. velocity: v_θ(x), the leaf of the differentiation. old: the behaviour's
    velocity there. sample: the state that was drawn (re-noised points: the clean latent x0).
    reference: velocity of the policy the run started from, where the objective asks for it.
    further: what `Objective.walk` returned for the point's parent, leaves of the differentiation too.
    s: [B] grid index, int64. sigma, sigma_next: [B] the step's noise levels (re-noised points: σ and 0).
    a, kappa, std: [B] of its kernel, mean = a·x + κ·v (re-noised points: NaN). advantage: [B].
    token_weight: [B, tokens] or None, weights of a token-wise advantage.
    """

    x: torch.Tensor
    velocity: torch.Tensor
    old: torch.Tensor
    sample: torch.Tensor
    s: torch.Tensor
    sigma: torch.Tensor
    sigma_next: torch.Tensor
    a: torch.Tensor
    kappa: torch.Tensor
    std: torch.Tensor
    advantage: torch.Tensor
    token_weight: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    further: tuple[torch.Tensor, ...] = ()

    def wide(self, column: torch.Tensor) -> torch.Tensor:
        """[B] → [B, 1, …], to be multiplied with latents."""
        return column.reshape(-1, *([1] * (self.x.ndim - 1)))

    def step(self, velocity: torch.Tensor) -> Transition:
        """The transition that a velocity at x stands for."""
        return Transition(self.wide(self.a) * self.x + self.wide(self.kappa) * velocity, self.std)

    @cached_property
    def policy(self) -> Transition:
        """The transition under the weights being trained."""
        return self.step(self.velocity)

    @cached_property
    def behaviour(self) -> Transition:
        """The transition that was sampled from."""
        return self.step(self.old)

    @cached_property
    def path_variance(self) -> torch.Tensor:
        """V = ‖mean − mean_old‖²/std², [B]: the full log-ratio is N(−V/2, V) under the behaviour."""
        shift = (self.policy.mean - self.behaviour.mean).detach() / self.wide(self.std)
        return (shift**2).flatten(1).sum(1)


@dataclass(frozen=True)
class Outcome:
    """loss: [B]. log_ratio: [B] log ρ as the surrogate sees it (mean over tokens where it is token-wise).

    clip_side: [B] +1 where the upper clip stops the gradient, −1 where the lower one does, 0 elsewhere; between them
    where only some tokens of a point are stopped.
    """

    loss: torch.Tensor
    log_ratio: torch.Tensor
    clip_side: torch.Tensor


@dataclass(frozen=True)
class Objective:
    """Base of objectives; a subclass overrides `evaluate` and what it needs of the rest."""

    @property
    def tolerance(self) -> float | None:
        """Bound of |ρ − 1| at the round's first optimizer step (gate); None where there is no ratio."""
        return None

    @property
    def needs_reference(self) -> bool:
        """Whether `PointBatch.reference` is read."""
        return False

    @property
    def fresh(self) -> bool:
        """Whether `old` is evaluated again, by the behaviour's weights at the prompt's own condition, before the
        first optimizer step: where nothing was stored (re-noised points), or under another condition."""
        return False

    @property
    def advantage_free(self) -> bool:
        """Whether points of advantage 0 have a gradient too (a KL term, say), so that no step may be skipped."""
        return False

    @property
    def with_gradient(self) -> int:
        """Velocity evaluations with gradient per parent."""
        return 1

    @property
    def frozen(self) -> int:
        """Velocity evaluations without gradient per parent and round."""
        return int(self.needs_reference) + int(self.fresh)

    def walk(
        self, velocity: VelocityAt, x: torch.Tensor, v: torch.Tensor, sigma: torch.Tensor, sigma_next: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """States and velocities reached from a parent with the graph kept, each [B, *latent]; by default none.

        x, v, sigma, sigma_next: the tile's parents, their velocity with graph, and the noise levels of their step (one
        per parent: an objective that walks needs trees whose recorded edges of a parent end at one level).
        """
        return ()

    def evaluate(self, points: PointBatch, memory: Memory) -> Outcome:
        """The loss of every point."""
        raise NotImplementedError

    def remember(self, memory: Memory, measured: pd.DataFrame) -> dict[str, Any]:
        """What is known after an optimizer step: `measured` has its points, one row each (columns of
        `transitions.parquet`: s, member, log_ratio, path_variance, …) and `updates`, the optimizer steps that the round
        had taken before (0: the policy was still the behaviour)."""
        return dict(memory)
