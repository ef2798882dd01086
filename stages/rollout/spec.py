"""What a rollout stage is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from stages.policies.spec import PolicySpec
from stages.rollout.grid import GridSpec


@dataclass(frozen=True, kw_only=True)
class SamplerSpec:
    """How velocities are evaluated (section `sampler` of params.yaml).

    max_batch: rows of every no-gradient forward, always exactly this many (short batches are padded): a row's bits
        then do not depend on what shares its batch.
    prompts_per_shard: prompts whose trees share batches, one file per array and shard; the unit of distribution.
    state_dtype: precision in which every state is stored and continued.
    """

    max_batch: Annotated[int, Field(ge=1)] = 64
    prompts_per_shard: Annotated[int, Field(ge=1)] = 24
    state_dtype: Literal["float32", "float16"] = "float32"


@dataclass(frozen=True, kw_only=True)
class RolloutSpec:
    """One round's sampling, completely determined.

    seed, round_: name the noise streams. prompts: row ids in the order of the round's plan.
    method: name and options of the method (see `stages.methods.build`).
    """

    seed: int
    round_: int
    prompts: tuple[int, ...]
    method: dict[str, Any]
    group: Annotated[int, Field(ge=2)]
    grid: GridSpec
    policy: PolicySpec
    sampler: SamplerSpec
