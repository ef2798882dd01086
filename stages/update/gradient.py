"""The gradient of one optimizer step, tile by tile, with every point's ratio and gradient share written down.

For each tile of parents: one velocity with gradient; per point mean_θ = a·x + κ·v_θ and mean_old = a·x + κ·v_old give
the log-ratio at the stored next state. The loss L = Σ wᵢℓᵢ is differentiated with respect to the velocity only, point
by point, and the parents' sums are then sent back through the network. That is the chain rule, exactly; it needs one
backward per parent and yields ‖∂L/∂v‖ of every point on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from stages.core.errors import GateError
from stages.core.types import Transition
from stages.update.points import Step, Tile, UpdatePoints, name_rows

if TYPE_CHECKING:
    import torch

    from stages.policies.flux import Conditions, FluxPolicy
    from stages.update.objectives import Objective

# What the update measures of every point; arrays of one number per row of the points' table.
MEASURED = ("log_ratio", "ratio", "clip_side", "velocity_grad_norm", "share")


def gradient(
    policy: FluxPolicy,
    points: UpdatePoints,
    step: Step,
    conditions: Conditions,
    objective: Objective,
    update_batch: int,
    measured: dict[str, np.ndarray],
    progress: Callable[[int], Any] | None = None,
) -> float:
    """Put the gradient of one optimizer step's loss into the module's `.grad` and return the loss.

    Raises:
        GateError: a gradient is not finite; the sentence names the rows (of the tile, where no row stands out).
    """
    import torch

    for parameter in policy.module.parameters():
        parameter.grad = None
    loss = 0.0
    for tile in step.tiles:
        v, leaf, per_point = _velocities(policy, points, tile, conditions, update_batch)
        loss += _differentiate(points, tile, per_point, leaf, objective, measured)
        rows = points.table.iloc[tile.points]
        finite = torch.isfinite(per_point.grad).flatten(1).all(1).cpu().numpy()
        if not finite.all():
            raise GateError(f"update: the gradient is not finite at {name_rows(rows[~finite])}; nothing was changed.")
        v.backward(_sum_by_parent(per_point.grad, tile.slots, v, measured, tile.points))
        if not torch.isfinite(total_norm(policy.module.parameters())):
            raise GateError(
                f"update: the weights' gradient is not finite after the rows {name_rows(rows)}; nothing was changed."
            )
        if progress:
            progress(len(tile.parents))
    return loss


def _velocities(
    policy: FluxPolicy, points: UpdatePoints, tile: Tile, conditions: Conditions, update_batch: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """v_θ of the tile's parents with its graph [B, *latent], their states, and a detached leaf row per point."""
    import torch

    x, time, index = inputs(policy, points, tile.parents, update_batch)
    v = policy.velocity(x, time, conditions.rows(index))
    slots = torch.from_numpy(tile.slots).to(v.device)
    return v, x[slots], v.detach()[slots].requires_grad_()


def inputs(
    policy: FluxPolicy, points: UpdatePoints, parents: np.ndarray, rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """States, times and condition rows of parents, padded to exactly `rows` by repeating the first.

    A padded row takes part in the forward and in nothing else, so results do not depend on how full a tile is.
    """
    import torch

    like = next(policy.module.parameters())
    padded = np.concatenate([parents, np.full(rows - len(parents), parents[0])])
    x = torch.from_numpy(points.x[padded]).to(like.device, like.dtype)
    time = torch.from_numpy(points.time[padded]).to(like.device, like.dtype)
    return x, time, torch.from_numpy(points.condition[padded]).to(like.device)


def _differentiate(
    points: UpdatePoints,
    tile: Tile,
    velocity: torch.Tensor,
    x: torch.Tensor,
    objective: Objective,
    measured: dict[str, np.ndarray],
) -> float:
    """Fill `velocity.grad` with ∂(wᵢℓᵢ)/∂v for every point of the tile; return Σ wᵢℓᵢ."""
    import torch

    table = points.table.iloc[tile.points]

    def column(name: str) -> torch.Tensor:
        return torch.from_numpy(np.array(table[name], np.float64)).to(x.device, x.dtype)

    def wide(name: str) -> torch.Tensor:
        return column(name).reshape(-1, *([1] * (x.ndim - 1)))

    old = torch.from_numpy(points.v[table["parent"].to_numpy()]).to(x.device, x.dtype)
    sample = torch.from_numpy(points.next_x[table["next"].to_numpy()]).to(x.device, x.dtype)
    std = column("std")
    behaviour = Transition(wide("a") * x + wide("kappa") * old, std)
    log_ratio = Transition(wide("a") * x + wide("kappa") * velocity, std).log_ratio(behaviour, sample)
    loss = (column("weight") * objective.loss(log_ratio, column("advantage"))).sum()
    loss.backward()
    log_ratio = log_ratio.detach()
    measured["log_ratio"][tile.points] = log_ratio.cpu().numpy()
    measured["ratio"][tile.points] = log_ratio.exp().cpu().numpy()
    measured["clip_side"][tile.points] = objective.clipped(log_ratio, column("advantage")).cpu().numpy()
    return float(loss.detach())


def _sum_by_parent(
    grad: torch.Tensor, slots: np.ndarray, v: torch.Tensor, measured: dict[str, np.ndarray], points: np.ndarray
) -> torch.Tensor:
    """[B, *latent] sums of the points' gradients, and each point's norm and share of its parent's sum.

    Children are added one after the other, in their order: `index_add_` would add in any order on a GPU.
    """
    import torch

    total = torch.zeros_like(v)
    rank = pd.Series(slots).groupby(slots).cumcount().to_numpy()
    for turn in range(int(rank.max()) + 1):
        rows = np.flatnonzero(rank == turn)
        total[torch.from_numpy(slots[rows]).to(v.device)] += grad[torch.from_numpy(rows).to(v.device)]
    parent = total[torch.from_numpy(slots).to(v.device)].flatten(1).double()
    flat = grad.flatten(1).double()
    length = (parent**2).sum(1)
    share = torch.where(length > 0, (flat * parent).sum(1) / length, torch.zeros_like(length))
    measured["velocity_grad_norm"][points] = flat.norm(dim=1).cpu().numpy()
    measured["share"][points] = share.cpu().numpy()
    return total


def total_norm(parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """Euclidean norm of the gradient of all parameters."""
    import torch

    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(grads, foreach=False)
