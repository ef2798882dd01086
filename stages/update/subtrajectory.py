"""Pave-GRPO's objective: a drawn state is re-scored as the end of finer walks from the same parent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stages.core.types import Transition
from stages.rollout.kernels import Kernel
from stages.update.objective import Memory, Objective, Outcome, PointBatch, VelocityAt

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SubTrajectory(Objective):
    """ℓ = −A·[exp(log p_1 − sg(log p_1)) + (1/|N|)·Σ_{n∈N} exp(log p_n − sg(log p_n))], on-policy and without a clip.

    p_1 is the transition that was drawn from. p_n is what `kernel` draws in the last of n equal sub-steps from σ to σ',
    the first n−1 of which are Euler steps of the weights being trained.

    segments: N, each > 1. kernel: the one that drew the state.
    Source: Bujiazi/GRPO-Series, src/method_pavegrpo.py.
    """

    segments: tuple[int, ...]
    kernel: Kernel

    @property
    def tolerance(self) -> float:
        return 1e-6

    @property
    def with_gradient(self) -> int:
        return 1 + sum(n - 1 for n in self.segments)

    def walk(
        self, velocity: VelocityAt, x: torch.Tensor, v: torch.Tensor, sigma: torch.Tensor, sigma_next: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """y_{n−1} and v(y_{n−1}) for every n, in order; v(y_0) is the parent's own."""
        reached: list[torch.Tensor] = []
        for n in self.segments:
            h = (sigma_next - sigma) / n
            y, at = x, v
            for m in range(1, n):
                y = y + h.reshape(-1, *([1] * (x.ndim - 1))) * at
                at = velocity(y, sigma + m * h)
            reached += [y, at]
        return tuple(reached)

    def evaluate(self, points: PointBatch, memory: Memory) -> Outcome:
        direct = points.policy.log_ratio(points.behaviour, points.sample)
        terms = [points.policy.log_prob(points.sample)]
        for i, n in enumerate(self.segments):
            last = self._last(points, n, *points.further[2 * i : 2 * i + 2])
            terms.append(last.log_prob(points.sample))
        ratios = [(term - term.detach()).exp() for term in terms]
        finer = sum(ratios[1:]) / max(len(self.segments), 1)
        return Outcome(-points.advantage * (ratios[0] + finer), direct, points.advantage.new_zeros(len(direct)))

    def _last(self, points: PointBatch, n: int, y: torch.Tensor, v: torch.Tensor) -> Transition:
        """The transition of the last of n sub-steps, from (y, v)."""
        steps = []
        for sigma, after in zip(points.sigma.tolist(), points.sigma_next.tolist()):
            start = after + (sigma - after) / n
            # It starts below 1, so the kernels' stand-in for σ = 1 is never read.
            steps.append(self.kernel.coefficients(start, after, start))
        a, kappa, std = (
            points.sigma.new_tensor([getattr(one, name) for one in steps]) for name in ("a", "kappa", "std")
        )
        return Transition(points.wide(a) * y + points.wide(kappa) * v, std)
