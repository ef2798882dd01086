"""The gradient of one optimizer step, tile by tile, with every point's ratio and gradient share written down.

For each tile of parents: one velocity with gradient (and what the objective walks on to from there). The loss
L = Σ wᵢℓᵢ is differentiated with respect to these tensors only, point by point, and the parents' sums are then sent
back through the network. That is the chain rule, exactly; it needs one backward per parent and yields ‖∂L/∂v‖ of every
point on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from stages.core.errors import GateError
from stages.update.objective import Memory, Objective, PointBatch
from stages.update.points import Step, Tile, UpdatePoints, name_rows
from stages.update.world import ALONE, World

if TYPE_CHECKING:
    import torch

    from stages.policies.base import Policy
    from stages.policies.conditions import Conditions

# What the update measures of every point; arrays of one number per row of the points' table.
MEASURED = ("log_ratio", "ratio", "clip_side", "path_variance", "velocity_grad_norm", "share")


def gradient(
    policy: Policy,
    points: UpdatePoints,
    step: Step,
    conditions: Conditions,
    objective: Objective,
    update_batch: int,
    measured: dict[str, np.ndarray],
    memory: Memory | None = None,
    progress: Callable[[int], Any] | None = None,
    world: World = ALONE,
) -> float:
    """Put the gradient of one optimizer step's loss into the module's `.grad` and return the loss.

    Each process of the world takes some tiles; gradient, loss and what is measured are then the same in all of them.

    Raises:
        GateError: a gradient is not finite; the sentence names the rows (of the tile, where no row stands out).
    """
    import torch

    parameters = list(policy.parameters().values())
    for parameter in parameters:
        parameter.grad = None
    problem, loss = None, 0.0
    try:
        for tile in world.share(step.tiles):
            loss += _tile(policy, points, tile, conditions, objective, update_batch, measured, memory or {}, parameters)
            if progress:
                progress(len(tile.parents))
    except Exception as error:
        problem = error
    world.agree(problem)
    if world.size > 1:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        world.add([parameter.grad for parameter in parameters])
        mine, total = [measured[name][step.points] for name in MEASURED], np.array([loss])
        world.add_arrays([*mine, total], policy.device)
        for name, values in zip(MEASURED, mine):
            measured[name][step.points] = values
        loss = float(total[0])
    return loss


def _tile(
    policy: Policy,
    points: UpdatePoints,
    tile: Tile,
    conditions: Conditions,
    objective: Objective,
    update_batch: int,
    measured: dict[str, np.ndarray],
    memory: Memory,
    parameters: Sequence[torch.nn.Parameter],
) -> float:
    """Add one tile's part to the gradient; returns its part of the loss."""
    import torch

    reached, batch = _reached(policy, points, tile, conditions, objective, update_batch)
    leaves = (batch.velocity, *batch.further)
    loss = _differentiate(points, tile, batch, objective, memory, measured)
    rows = points.table.iloc[tile.points]
    # A point may not depend on all that was walked to.
    grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    finite = torch.stack([torch.isfinite(grad).flatten(1).all(1) for grad in grads]).all(0).cpu().numpy()
    if not finite.all():
        raise GateError(f"update: the gradient is not finite at {name_rows(rows[~finite])}; nothing was changed.")
    sums = [_sum_by_parent(grad, tile.slots, like) for grad, like in zip(grads, reached)]
    _measure_shares(grads, sums, tile, measured)
    torch.autograd.backward(reached, sums)
    if not torch.isfinite(total_norm(parameters)):
        raise GateError(
            f"update: the weights' gradient is not finite after the rows {name_rows(rows)}; nothing was changed."
        )
    return loss


def _reached(
    policy: Policy, points: UpdatePoints, tile: Tile, conditions: Conditions, objective: Objective, rows: int
) -> tuple[list[torch.Tensor], PointBatch]:  # fmt: skip
    """What the tile's points depend on: tensors [B, *latent] with their graph, v_θ first; and the points as a batch
    whose velocity and further tensors are detached leaves."""
    import torch

    x, time, index = inputs(policy, points, tile.parents, rows)
    told = conditions.rows(index)
    v = policy.velocity(x, time, told)
    table = points.table.iloc[tile.points]
    first = np.unique(tile.slots, return_index=True)[1]

    def levels(name: str) -> torch.Tensor:
        ours = table[name].to_numpy(np.float64)[first]
        filled = np.concatenate([ours, np.full(rows - len(ours), ours[0])])
        return torch.from_numpy(filled).to(x.device, x.dtype)

    def velocity(y: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        times = [points.grid_time(float(one)) for one in sigma]
        return policy.velocity(y, torch.tensor(times, dtype=x.dtype, device=x.device), told)

    further = objective.walk(velocity, x, v, levels("sigma"), levels("sigma_next"))
    slots = torch.from_numpy(tile.slots).to(x.device)
    leaves = [tensor.detach()[slots].requires_grad_() for tensor in (v, *further)]
    return [v, *further], point_batch(points, tile.points, x[slots], leaves[0], tuple(leaves[1:]))


def point_batch(
    points: UpdatePoints, rows: np.ndarray, x: torch.Tensor, velocity: torch.Tensor, further: tuple[torch.Tensor, ...]
) -> PointBatch:
    """Rows of the points' table as tensors beside their states and velocities."""
    import torch

    table = points.table.iloc[rows]

    def column(name: str) -> torch.Tensor:
        return torch.from_numpy(np.array(table[name], np.float64)).to(x.device, x.dtype)

    def states(array: np.ndarray | None, name: str) -> Any:
        return None if array is None else torch.from_numpy(array[table[name].to_numpy()]).to(x.device, x.dtype)

    return PointBatch(
        x=x,
        velocity=velocity,
        old=states(points.v, "parent"),
        sample=states(points.next_x, "next"),
        s=torch.from_numpy(table["s"].to_numpy(np.int64)).to(x.device),
        **{name: column(name) for name in ("sigma", "sigma_next", "a", "kappa", "std", "advantage")},
        token_weight=states(points.tokens, "token_row"),
        reference=states(points.reference, "parent"),
        further=further,
    )


def inputs(
    policy: Policy, points: UpdatePoints, parents: np.ndarray, rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """States, times and condition rows of parents, padded to exactly `rows` by repeating the first.

    A padded row takes part in the forward and in nothing else, so results do not depend on how full a tile is.
    """
    import torch

    like = next(iter(policy.parameters().values()))  # master weights
    padded = np.concatenate([parents, np.full(rows - len(parents), parents[0])])
    x = torch.from_numpy(points.x[padded]).to(like.device, like.dtype)
    time = torch.from_numpy(points.time[padded]).to(like.device, like.dtype)
    return x, time, torch.from_numpy(points.condition[padded]).to(like.device)


def _differentiate(
    points: UpdatePoints,
    tile: Tile,
    batch: PointBatch,
    objective: Objective,
    memory: Memory,
    measured: dict[str, np.ndarray],
) -> float:
    """Fill the `.grad` of the batch's leaves with ∂(wᵢℓᵢ) for every point of the tile; return Σ wᵢℓᵢ."""
    import torch

    weight = torch.from_numpy(np.array(points.table["weight"].iloc[tile.points], np.float64))
    outcome = objective.evaluate(batch, memory)
    loss = (weight.to(batch.x.device, batch.x.dtype) * outcome.loss).sum()
    loss.backward()
    log_ratio = outcome.log_ratio.detach()
    for name, values in (
        ("log_ratio", log_ratio),
        ("ratio", log_ratio.exp()),
        ("clip_side", outcome.clip_side),
        ("path_variance", batch.path_variance),
    ):
        measured[name][tile.points] = values.cpu().numpy()
    return float(loss.detach())


def _sum_by_parent(grad: torch.Tensor, slots: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """[B, *latent] sums of the points' gradients.

    Children are added one after the other, in their order: `index_add_` would add in any order on a GPU.
    """
    import torch

    total = torch.zeros_like(like)
    rank = pd.Series(slots).groupby(slots).cumcount().to_numpy()
    for turn in range(int(rank.max()) + 1):
        rows = np.flatnonzero(rank == turn)
        total[torch.from_numpy(slots[rows]).to(like.device)] += grad[torch.from_numpy(rows).to(like.device)]
    return total


def _measure_shares(
    grads: list[torch.Tensor], sums: list[torch.Tensor], tile: Tile, measured: dict[str, np.ndarray]
) -> None:
    """Each point's ‖∂L/∂v‖ (over all tensors it depends on) and its share of its parent's sum."""
    import torch

    slots = torch.from_numpy(tile.slots).to(grads[0].device)
    flat = torch.cat([grad.flatten(1) for grad in grads], 1).double()
    parent = torch.cat([total.flatten(1) for total in sums], 1)[slots].double()
    length = (parent**2).sum(1)
    share = torch.where(length > 0, (flat * parent).sum(1) / length, torch.zeros_like(length))
    measured["velocity_grad_norm"][tile.points] = flat.norm(dim=1).cpu().numpy()
    measured["share"][tile.points] = share.cpu().numpy()


def total_norm(parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """Euclidean norm of the gradient of all parameters."""
    import torch

    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(grads, foreach=False)
