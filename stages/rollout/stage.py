"""The rollout stage: plan the trees of a round, run the engine shard by shard, store what later stages need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.core.progress import bar
from stages.core.types import Ledger
from stages.methods import Plan, build
from stages.rollout import store
from stages.rollout.buffers import RolloutShard
from stages.rollout.conditions import BlendedConditions, blended
from stages.rollout.engine import run_forest
from stages.rollout.forest import Forest, Noise
from stages.rollout.grid import make_grid
from stages.rollout.spec import RolloutSpec, SamplerSpec
from stages.rollout.tree import FrozenTree
from stages.update.state import read_state

if TYPE_CHECKING:
    from stages.core.resident import Resident
    from stages.policies.base import Policy
    from stages.policies.conditions import Conditions


def plan_trees(spec: RolloutSpec, memory: Mapping[str, Any] | None = None) -> list[FrozenTree]:
    """One tree per prompt of the round; prompts share the object where the method plans them alike.

    memory: what the method remembers of earlier rounds; it may move noise levels, never the shape of a tree.
    """
    method = build(spec.method)
    plan = Plan(make_grid(spec.grid), spec.group, spec.seed, spec.round_, memory=memory or {})
    if not method.per_prompt:
        return [method.tree(plan)] * len(spec.prompts)
    return [method.tree(replace(plan, prompt=prompt)) for prompt in spec.prompts]


def sample(
    trees: Sequence[FrozenTree],
    prompts: Sequence[int],
    *,
    policy: Policy,
    conditions: Conditions | BlendedConditions,
    noise: Noise,
    sampler: SamplerSpec,
    label: str,
) -> list[RolloutShard]:
    """Run the trees of `prompts` (with one row of `conditions` each) in shards of `prompts_per_shard`."""
    shards = []
    total = sum(int(tree.nodes["evaluated"].sum()) for tree in trees)
    with bar(total, label, "evaluations") as progress:
        for start in range(0, len(prompts), sampler.prompts_per_shard):
            chosen = slice(start, start + sampler.prompts_per_shard)
            forest = Forest.of(trees[chosen], prompts[chosen])
            rows = conditions[chosen]

            def velocity(x, time, index, rows=rows):  # type: ignore[no-untyped-def]
                return policy.velocity(x, time, rows.at(index, time))

            shards.append(
                run_forest(
                    forest,
                    velocity=velocity,
                    noise=noise,
                    max_batch=sampler.max_batch,
                    conditions=conditions.per_prompt,
                    state_dtype=sampler.state_dtype,
                    device=policy.device,
                    progress=progress.update,
                )
            )
    return shards


def run(inputs: Mapping[str, Path], spec: RolloutSpec, resident: Resident, out: Path) -> dict[str, str]:
    """Sample a round.

    inputs: prompts, embeddings (folders of those stages), base (pipeline folder), policy (policy state folder).
    Writes `rollouts.zarr`; returns the digests of its parts.
    """
    policy = resident.policy(spec.policy, inputs["base"])
    state = read_state(inputs["policy"], spec.policy)
    resident.make_room(policy, "module")
    resident.use(policy, inputs["policy"], state.sampler)
    conditions = resident.conditions(policy, inputs["embeddings"], spec.prompts)
    perturb = build(spec.method).conditions
    if perturb is not None:
        conditions = blended(perturb, conditions, spec, inputs, resident)
    trees = plan_trees(spec, state.memory["plan"])
    shards = sample(
        trees,
        spec.prompts,
        policy=policy,
        conditions=conditions,
        noise=Noise(spec.seed, spec.round_, policy.latent_shape),
        sampler=spec.sampler,
        label=f"round {spec.round_} rollout",
    )
    planned = sum((tree.ledger() for tree in trees), Ledger())
    counted = sum(shard.evaluations for shard in shards)
    if counted != planned.evaluations:
        raise AssertionError(f"planned {planned.evaluations} evaluations, the engine did {counted}")
    described = asdict(spec)
    # Where the base lies is not part of what was sampled.
    described["policy"].pop("base")
    rollout, digests = store.write_round(
        out / store.NAME,
        shards,
        {
            "spec": described,
            "sigmas": make_grid(spec.grid).sigmas,
            "latent_dims": policy.latent_dims,
            "image_tokens": policy.image_tokens,
            "shards": len(shards),
            "ledger": asdict(planned),
        },
        spec.sampler.state_dtype,
        policy.latent_dims,
    )
    resident.wrote(out, rollout)
    return digests
