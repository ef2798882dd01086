"""The first push of a round in velocity space: what an optimizer step would be told before any network is asked.

At the behaviour's own weights every ratio is 1, and the derivative of the loss with respect to the velocity of a parent
state needs nothing but what the rollout stored (x, v, x'). For PPO it is, per point,

    −w·A·∂logρ/∂v = −w·A·κ·(x' − mean)/(std²·D)

with weight w, κ and std of the step and D latent dimensions; a parent's is the sum over its points.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from stages.core.errors import GranularError
from stages.update.gradient import point_batch

if TYPE_CHECKING:
    from stages.update.objective import Memory, Objective
    from stages.update.points import UpdatePoints

ROWS = 256  # points at a time: a FLUX latent at 720² has 130,000 numbers


def velocity_direction(points: UpdatePoints, objective: Objective, memory: Memory | None = None) -> np.ndarray:
    """−∂L/∂v at v = v_old, float64 [parents, *latent], summed over the points of every parent and over the round's
    optimizer steps. A KL term is left out: it knows no advantage, and is 0 at the start.

    Raises:
        GranularError: the objective reads velocities that no rollout stores.
    """
    import torch

    if objective.fresh or objective.with_gradient > 1:
        raise GranularError("the objective reads velocities that a rollout does not store, so it needs the network")
    if objective.needs_reference:
        objective = replace(objective, kl_coef=0.0)  # type: ignore[call-arg]
    total = np.zeros(points.x.shape, np.float64)
    parents = points.table["parent"].to_numpy()
    weights = points.table["weight"].to_numpy(np.float64)
    for start in range(0, len(points.table), ROWS):
        rows = np.arange(start, min(start + ROWS, len(points.table)))
        x = torch.from_numpy(points.x[parents[rows]])
        velocity = torch.from_numpy(points.v[parents[rows]]).clone().requires_grad_()
        loss = objective.evaluate(point_batch(points, rows, x, velocity, ()), memory or {}).loss
        (torch.from_numpy(weights[rows]).to(loss.dtype) * loss).sum().backward()
        assert velocity.grad is not None
        np.add.at(total, parents[rows], -velocity.grad.double().numpy())
    return total
