"""What an effect stage is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from stages.policies.spec import PolicySpec
from stages.reward.spec import ScorerSpec
from stages.rollout.grid import GridSpec
from stages.rollout.spec import SamplerSpec


@dataclass(frozen=True, kw_only=True)
class EffectSpec:
    """Which steps are measured, and how.

    seed: names the choice of steps and the noise of completions. per_prompt: trained steps of a prompt, at random.
    completions: images from each state. eta: noise level of Flow-SDE, by which a state is completed to the last step;
        that one is the ODE, whose noise nobody would see through.
    grid: that of the rollout. scorers: every one that judges.
    """

    seed: int
    per_prompt: Annotated[int, Field(ge=1)]
    completions: Annotated[int, Field(ge=2)]
    eta: Annotated[float, Field(gt=0)] = 0.7
    grid: GridSpec
    policy: PolicySpec
    sampler: SamplerSpec
    scorers: dict[str, ScorerSpec]
