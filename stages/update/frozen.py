"""Velocities that an update reads and does not train: those of the run's start, or of the behaviour again.

The weights in the module are exchanged for a moment and put back bit for bit, so no second model is held in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from stages.update.gradient import inputs
from stages.update.world import ALONE, World

if TYPE_CHECKING:
    import torch

    from stages.policies.base import Policy
    from stages.policies.conditions import Conditions
    from stages.update.points import UpdatePoints


def frozen_velocities(
    policy: Policy,
    points: UpdatePoints,
    conditions: Conditions,
    max_batch: int,
    weights: Mapping[str, torch.Tensor] | None,
    world: World = ALONE,
) -> np.ndarray:
    """v(x) of all parents under `weights` (None: those in the module), float32 [Q, *latent], without gradient.

    Evaluated in batches of exactly `max_batch` rows, each by one process of the world.
    """
    import torch

    own = {name: tensor.detach().clone() for name, tensor in policy.weights().items()} if weights else None
    v = np.zeros(points.x.shape, np.float32)
    try:
        if weights:
            policy.load(weights, "frozen weights")
        with torch.no_grad():
            for start in world.share(range(0, len(points.x), max_batch)):
                rows = np.arange(start, min(start + max_batch, len(points.x)))
                x, time, index = inputs(policy, points, rows, max_batch)
                v[rows] = policy.velocity(x, time, conditions.rows(index))[: len(rows)].float().cpu().numpy()
    finally:
        if own:
            policy.load(own, "own weights")
    world.add_arrays([v], policy.device)
    return v
