"""What an evaluation is asked to do (section `evaluate` of params.yaml, and `validate` inside a run)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from stages.policies.spec import PolicySpec
from stages.reward.spec import ScorerSpec
from stages.rollout.grid import GridSpec
from stages.rollout.spec import SamplerSpec


@dataclass(frozen=True, kw_only=True)
class EvaluateSpec:
    """One evaluation, completely determined.

    seed: names the initial noises, which do not depend on the policy: all policies start from the same ones.
    prompts: row ids, each once. noises: images per prompt.
    grid: the sampler's own steps and shift, usually finer than in training; the sampler is always the pure ODE.
    which: weights of the policy state: `ema` (what a run delivers), `train`, or `base`, the untrained policy, which
        needs no policy state at all.
    scorers: every scorer by name, trained on or not.
    images: prompts whose images are kept as pictures, spread evenly over `prompts`; of each the first 4 noises.
    """

    seed: int
    prompts: Annotated[tuple[int, ...], Field(min_length=1)]
    noises: Annotated[int, Field(ge=1)]
    grid: GridSpec
    which: Literal["ema", "train", "base"]
    policy: PolicySpec
    sampler: SamplerSpec
    scorers: dict[str, ScorerSpec]
    images: Annotated[int, Field(ge=1)] = 12

    def __post_init__(self) -> None:
        if len(set(self.prompts)) != len(self.prompts):
            raise ValueError("every prompt is evaluated once, so row ids must not repeat")
        if not self.scorers:
            raise ValueError("at least one scorer is needed")
        for name, scorer in self.scorers.items():
            if scorer.kind == "pairwise":
                raise ValueError(f"scorer '{name}' compares images of one policy, so it says nothing about the policy")
