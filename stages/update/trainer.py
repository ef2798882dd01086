"""The trainer: a round's update points become AdamW steps, and the gates that refuse steps nobody can trust."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from stages.core.errors import GateError, GranularError
from stages.update.gradient import MEASURED, gradient, inputs, total_norm
from stages.update.points import Step, UpdatePoints, name_rows
from stages.update.world import ALONE, World

if TYPE_CHECKING:
    import torch

    from stages.policies.base import Policy
    from stages.policies.conditions import Conditions
    from stages.update.objective import Memory, Objective
    from stages.update.spec import OptimizerSpec
    from stages.update.state import Moments


@dataclass(frozen=True)
class Trained:
    """What an update did.

    transitions: one row per point: edge, prompt, s, member, optimizer_step, advantage, log_ratio, ratio, clip_side,
        path_variance, weight, velocity_grad_norm ‖∂L/∂v‖, share (of the parent's gradient, ⟨g, Σg⟩/‖Σg‖²; a parent's
        shares sum to 1). Ratios are null where the optimizer step was skipped, or where the objective has none.
    steps: one record per optimizer step. param_change: ‖θ_end − θ_start‖. moments: AdamW's state afterwards.
    memory: what the objective remembers.
    """

    transitions: pd.DataFrame
    steps: list[dict[str, Any]]
    param_change: float
    moments: Moments
    memory: dict[str, Any]


def train(
    policy: Policy,
    points: UpdatePoints,
    conditions: Conditions,
    *,
    objective: Objective,
    optimizer: OptimizerSpec,
    moments: Moments,
    update_batch: int,
    max_batch: int,
    memory: Memory | None = None,
    progress: Callable[[int], Any] | None = None,
    world: World = ALONE,
) -> Trained:
    """Run a round's optimizer steps on `policy.module`, in place.

    conditions: one row per prompt of the round. moments: AdamW's state before, empty at the start. max_batch: rows of
    the sampler's forwards, in whose shape the change is looked for. memory: what the objective remembers of earlier
    rounds. progress: called with parents done. world: the processes that share the work.

    Steps whose advantages are all exactly 0 are skipped (no decay, no moments) and recorded, unless the objective
    learns from such points too.

    Raises:
        GateError: the first ratio is not 1, a gradient is not finite, no weight changed, or the sampler does not see
            the change; the weights are then those from before.
    """
    import torch

    parameters = policy.parameters()
    before = _copies(parameters)
    adam = make_adamw(parameters, optimizer, moments)
    measured = {name: np.zeros(len(points.table)) for name in MEASURED}
    records = []
    executed = 0
    remembered = dict(memory or {})
    try:
        seen = _probe(policy, points, conditions, max_batch)
        for step in points.steps(update_batch):
            if not (objective.advantage_free or points.table["advantage"].to_numpy()[step.points].any()):
                measured["log_ratio"][step.points] = measured["ratio"][step.points] = np.nan
                records.append(_record(points, step, measured, skipped=True))
                if progress:
                    progress(step.parents)
            else:
                loss = gradient(
                    policy, points, step, conditions, objective, update_batch, measured, remembered, progress, world
                )
                if executed == 0 and objective.tolerance is not None:
                    _check_first_ratio(points, step, measured["log_ratio"], objective.tolerance)
                norm = total_norm(parameters.values())
                torch.nn.utils.clip_grads_with_norm_(
                    parameters.values(), optimizer.max_grad_norm, norm, foreach=False
                )  # fmt: skip
                old = _copies(parameters) if executed else before
                adam.step()
                numbers = {"loss": loss, "grad_norm": float(norm), "param_change": _distance(parameters, old)}
                records.append(_record(points, step, measured, lr=optimizer.lr, **numbers))
                seen_now = _rows(points, measured).iloc[step.points].assign(updates=executed)
                remembered = objective.remember(remembered, seen_now)
                executed += 1
        records += _left_out(points, {record["optimizer_step"] for record in records})
        records.sort(key=lambda record: record["optimizer_step"])
        change = _distance(parameters, before)
        if executed:
            _check_change(change, bool((seen == _probe(policy, points, conditions, max_batch)).all()), optimizer.lr)
    except BaseException:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(before[name])
        raise
    finally:
        adam.zero_grad(set_to_none=True)
    after = {name: dict(adam.state[parameter]) for name, parameter in parameters.items() if parameter in adam.state}
    return Trained(_rows(points, measured), records, change, after, remembered)


def _rows(points: UpdatePoints, measured: Mapping[str, np.ndarray]) -> pd.DataFrame:
    """Points and what was measured of them, as `transitions.parquet` holds them."""
    kept = ["edge", "prompt", "s", "member", "optimizer_step", "advantage", "weight"]
    return points.table[kept].assign(**{name: measured[name].copy() for name in MEASURED})


def make_adamw(parameters: Mapping[str, torch.nn.Parameter], spec: OptimizerSpec, moments: Moments) -> Any:
    """AdamW over the parameters in the order of the model, continued from `moments` (which it then owns).

    One parameter after the other (`foreach=False`): the arithmetic of a parameter then depends on no other one.
    """
    import torch

    knobs = {"lr": spec.lr, "betas": spec.betas, "eps": spec.eps, "weight_decay": spec.weight_decay}
    if spec.bits == 8:
        adam = _adamw8bit(list(parameters.values()), knobs)
    else:
        adam = torch.optim.AdamW(list(parameters.values()), **knobs, foreach=False, fused=False)
    for name, parts in moments.items():
        # Of the 8-bit optimizer the step counter is a plain number.
        adam.state[parameters[name]] = {
            part: int(value) if spec.bits == 8 and part == "step" else value for part, value in parts.items()
        }
    return adam


def _adamw8bit(parameters: list[torch.nn.Parameter], knobs: Mapping[str, Any]) -> Any:
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError:
        raise GranularError(
            "optimizer.bits 8 needs bitsandbytes; install it with `pip install 'granular[quant]'`."
        ) from None
    return AdamW8bit(parameters, **knobs)


def _probe(policy: Policy, points: UpdatePoints, conditions: Conditions, max_batch: int) -> torch.Tensor:
    """The velocities of some parents, evaluated as the sampler evaluates them."""
    import torch

    x, time, index = inputs(policy, points, np.arange(len(points.x))[:max_batch], max_batch)
    with torch.no_grad():
        return policy.velocity(x, time, conditions.rows(index))


def _check_first_ratio(points: UpdatePoints, step: Step, log_ratio: np.ndarray, tolerance: float) -> None:
    """Before the first optimizer step the policy is the behaviour, so every ratio is 1."""
    # Near 1 a float32 ratio has steps of 1e-7; its logarithm resolves what small clip ranges ask for.
    away = np.abs(np.expm1(log_ratio[step.points]))
    wrong = ~(away <= tolerance)  # NaN is wrong too
    if wrong.any():
        order = np.argsort(-np.nan_to_num(away, nan=np.inf), kind="stable")[: int(wrong.sum())]
        rows = points.table.iloc[step.points[order]]
        raise GateError(
            f"update: before the first optimizer step {int(wrong.sum())} of {len(wrong)} ratios differ from 1 by more "
            f"than {tolerance:g} (worst {np.nanmax(away, initial=0):.3g}) at {name_rows(rows)}; the update does not "
            "see the policy that sampled."
        )


def _check_change(change: float, unseen: bool, lr: float) -> None:
    if change == 0:
        raise GateError(f"update: the optimizer steps changed no weight at lr {lr:g}; raise optimizer.lr.")
    if unseen:
        raise GateError(
            f"update: weights changed by {change:.3g} but the sampler's velocities did not; the sampler does not use "
            "the trained weights."
        )


def _record(
    points: UpdatePoints, step: Step, measured: Mapping[str, np.ndarray], skipped: bool = False, **numbers: float
) -> dict[str, Any]:
    ratio = measured["ratio"][step.points]
    measures = (("ratio_mean", ratio.mean), ("ratio_min", ratio.min), ("ratio_max", ratio.max))
    record: dict[str, Any] = {
        "optimizer_step": step.number,
        "skipped": skipped,
        "points": len(step.points),
        "parents": step.parents,
        "zero_advantages": int((points.table["advantage"].to_numpy()[step.points] == 0).sum())
        + points.left_out.get(step.number, 0),
    }
    if not skipped:
        record |= {
            # An objective may have no ratio.
            **{name: None if np.isnan(ratio).any() else float(measure()) for name, measure in measures},
            "clip_fraction": float(np.abs(measured["clip_side"][step.points]).mean()),
            **numbers,
        }
    return record


def _left_out(points: UpdatePoints, done: set[int]) -> list[dict[str, Any]]:
    """Records of optimizer steps of which every point left the update: skipped, like those without an advantage."""
    return [
        {"optimizer_step": number, "skipped": True, "points": 0, "parents": 0, "zero_advantages": count}
        for number, count in points.left_out.items()
        if number not in done
    ]


def _copies(parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def _distance(parameters: Mapping[str, torch.nn.Parameter], old: Mapping[str, torch.Tensor]) -> float:
    """‖θ − θ_old‖ over all parameters, summed in float64 over their tensors."""
    import torch

    shifts = torch._foreach_sub([p.detach() for p in parameters.values()], [old[name] for name in parameters])
    return float(torch.stack(torch._foreach_norm(shifts)).double().square().sum()) ** 0.5
