"""The update stage: a round's transitions and advantages become the next policy state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from stages.core.errors import GranularError
from stages.core.progress import bar
from stages.core.publish import write_text
from stages.update.points import gather
from stages.update.spec import UpdateSpec
from stages.update.world import join, own_device

if TYPE_CHECKING:
    import torch

    from stages.core.resident import Resident
    from stages.policies.base import Policy
    from stages.update.objective import Objective
    from stages.update.state import Moments, PolicyState, Which
    from stages.update.trainer import Trained


def run(inputs: Mapping[str, Path], spec: UpdateSpec, resident: Resident, out: Path) -> dict[str, str]:
    """Learn from one round.

    inputs: rollout, advantage, policy (state folder before), base, embeddings.
    Writes `policy/` (state folder after), `transitions.parquet` (`trainer.Trained.transitions`, and the parts of each
    advantage) and `update.json`; returns the digests of the tensors.

    Raises:
        GranularError: the policy state is of another kind, base or round. GateError: see `stages.update.trainer`.
    """
    from stages.methods import build
    from stages.rollout.grid import make_grid
    from stages.update import state as states
    from stages.update.frozen import frozen_velocities
    from stages.update.trainer import train

    world = join(spec.policy.device)
    policy = resident.policy(replace(spec.policy, device=own_device(spec.policy.device)), inputs["base"])
    base = states.base_digest(policy, resident.memory)
    before = states.read_state(inputs["policy"], spec.policy, base)
    rollout = resident.rollout(inputs["rollout"])
    sampled = int(rollout.attrs["spec"]["round_"])
    if before.round != spec.round_ - 1 or sampled != spec.round_:
        raise GranularError(
            f"update: round {spec.round_} needs its own rollout and the policy after round {spec.round_ - 1}, got the "
            f"rollout of round {sampled} and the policy after round {before.round}."
        )
    resident.make_room(policy, "module")
    resident.use(policy, inputs["policy"], "train")
    moments, ema = _memory(resident, policy, inputs["policy"], before)
    method = build(spec.method)
    objective = method.objective
    advantages = pd.read_parquet(inputs["advantage"] / "advantages.parquet")
    tokens = inputs["advantage"] / "tokens.npy"
    points = gather(
        rollout,
        advantages,
        make_grid(spec.grid),
        tokens=np.load(tokens) if tokens.is_file() else None,
        zero_groups=method.zero_groups,
    )
    conditions = resident.conditions(policy, inputs["embeddings"], rollout.prompts.tolist())
    behaviour = None
    if method.behaviour_decay(before.optimizer_steps) is not None:
        behaviour = _behaviour(policy, inputs["policy"], before)
    again = recomputes(spec)
    rows = spec.update_batch if again else spec.sampler.max_batch
    if objective.fresh or again:
        points = replace(points, v=frozen_velocities(policy, points, conditions, rows, behaviour, world))
    if objective.needs_reference:
        reference = frozen_velocities(policy, points, conditions, rows, policy.start(), world)
        points = replace(points, reference=reference)
    parents = sum(step.parents for step in points.steps(spec.update_batch))
    resident.holds(policy, None)  # until the new state has a digest, nobody can name the weights in memory
    with bar(parents, f"round {spec.round_} update", "parents") as progress:
        result = train(
            policy,
            points,
            conditions,
            objective=objective,
            optimizer=spec.optimizer,
            moments=moments,
            update_batch=spec.update_batch,
            max_batch=spec.sampler.max_batch,
            memory=before.memory["objective"],
            progress=progress.update,
            world=world,
        )
    average(ema, policy.weights(), spec.ema)
    frozen = frozen_evaluations(objective, spec) * len(points.x)
    numbers = summary(result, spec.round_, objective.with_gradient, frozen)
    steps = before.optimizer_steps + numbers["ledger"]["optimizer_steps"]
    if behaviour is not None:
        average(behaviour, policy.weights(), method.behaviour_decay(steps) or 0.0)
    (out / "policy").mkdir()  # every process writes a folder of its own; they are the same
    after = states.save(
        policy,
        out / "policy",
        ema=ema,
        moments=result.moments,
        round_=spec.round_,
        steps=steps,
        base=base,
        behaviour=behaviour,
        memory={"plan": method.remember(before.memory["plan"], advantages), "objective": result.memory},
    )
    with_parts(result.transitions, advantages).to_parquet(out / "transitions.parquet", index=False)
    write_text(out / "update.json", json.dumps(numbers, indent=1) + "\n")
    world.same(after.digests["train"])
    resident.holds(policy, after.digests["train"])
    resident.memory["trainer"] = (_key(policy, after), result.moments, ema)
    where = states.files(policy.kind)
    return {f"policy/{where[which]}": value for which, value in after.digests.items()}


def with_parts(transitions: pd.DataFrame, advantages: pd.DataFrame) -> pd.DataFrame:
    """Transitions with the parts of their advantages by scorer and stride, `z.<scorer>.<stride>`."""
    parts = [name for name in advantages if name.startswith("z.")]
    return transitions.merge(advantages[["edge", *parts]], on="edge", how="left", validate="one_to_one")


def recomputes(spec: UpdateSpec) -> bool:
    """Whether old velocities are evaluated again in the update's batch shape.

    In bfloat16 another batch shape moves a velocity by far more than a ratio may be off 1; in float32 by 2e-7.
    """
    return spec.policy.precision != "float32" and spec.update_batch != spec.sampler.max_batch


def frozen_evaluations(objective: Objective, spec: UpdateSpec) -> int:
    """Velocities without gradient per parent."""
    return objective.frozen + (recomputes(spec) and not objective.fresh)


def average(ema: dict[str, torch.Tensor], weights: Mapping[str, torch.Tensor], decay: float) -> None:
    """ema ← decay·ema + (1 − decay)·θ, in place; tensors that are not floating are copied."""
    for name, tensor in weights.items():
        if tensor.is_floating_point():
            ema[name].mul_(decay).add_(tensor.detach(), alpha=1 - decay)
        else:
            ema[name].copy_(tensor)


def summary(result: Trained, round_: int, with_gradient: int = 1, frozen: int = 0) -> dict[str, Any]:
    """`update.json`: totals over the optimizer steps that were taken, the ledger, and one record per step.

    with_gradient: velocity evaluations per parent. frozen: velocities evaluated without gradient.
    loss: mean over steps. ratio_min, ratio_max, grad_norm (before clipping): extremes over steps. param_change:
    ‖θ_after − θ_before‖ over the whole update.
    """
    taken = [step for step in result.steps if not step["skipped"]]
    count = sum(step["points"] for step in taken)
    rated = [step for step in taken if step["ratio_mean"] is not None]
    ratios = sum(step["ratio_mean"] * step["points"] for step in rated)
    total: dict[str, Any] = {
        "steps": len(taken),
        "skipped_steps": len(result.steps) - len(taken),
        "points": count,
        "parents": sum(step["parents"] for step in taken),
        "zero_advantages": sum(step["zero_advantages"] for step in result.steps),
        "param_change": result.param_change,
        "loss": sum(step["loss"] for step in taken) / len(taken) if taken else None,
        "ratio_mean": ratios / count if rated else None,
        "ratio_min": min((step["ratio_min"] for step in rated), default=None),
        "ratio_max": max((step["ratio_max"] for step in rated), default=None),
        "clip_fraction": sum(step["clip_fraction"] * step["points"] for step in taken) / count if taken else None,
        "grad_norm": max((step["grad_norm"] for step in taken), default=None),
        "lr": taken[0]["lr"] if taken else None,
    }
    ledger = {
        "parents": total["parents"],
        "points": count,
        "with_gradient": with_gradient * total["parents"],
        "frozen": frozen,
        "optimizer_steps": len(taken),
    }
    return {"round": round_, "total": total, "ledger": ledger, "steps": result.steps}


def _key(policy: Policy, state: PolicyState) -> tuple[Any, ...]:
    return (id(policy), *sorted(state.digests.items()))


def _behaviour(policy: Policy, folder: Path, state: PolicyState) -> dict[str, torch.Tensor]:
    """The weights that sampled: those of the state where they lag behind the trained ones, else a copy of these."""
    weights = policy.weights()
    if state.sampler == "train":
        return {name: tensor.detach().clone() for name, tensor in weights.items()}
    return _beside(policy, folder, "behaviour")


def _beside(policy: Policy, folder: Path, which: Which) -> dict[str, torch.Tensor]:
    """Another set of a state's weights, like those in the model."""
    from stages.policies.loading import match
    from stages.update.state import read_weights

    weights, kept = policy.weights(), read_weights(policy, folder, which)
    match(weights, kept, f"{folder} ({which})")
    return {name: kept[name].to(weights[name]) for name in weights}


def _memory(
    resident: Resident, policy: Policy, folder: Path, state: PolicyState
) -> tuple[Moments, dict[str, torch.Tensor]]:
    """AdamW's moments and the averaged weights of a state: from memory where they still are, else from its files.

    They are taken out of memory because the update changes them in place: after a failure they are read again.
    """
    from stages.update.state import load_moments

    key, *kept = resident.memory.pop("trainer", (None,))
    if key == _key(policy, state):
        return kept[0], kept[1]
    if state.round == 0:
        return {}, {name: tensor.detach().clone() for name, tensor in policy.weights().items()}
    return load_moments(policy, folder), _beside(policy, folder, "ema")
