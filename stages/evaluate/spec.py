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
    more_steps: other numbers of sampling steps to score as well, each from the first `more_noises` noises; none by
        default. They say how a policy trained on few steps does on fewer and on more.
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
    more_steps: tuple[Annotated[int, Field(ge=2, le=1000)], ...] = ()
    more_noises: Annotated[int, Field(ge=1)] = 2

    def __post_init__(self) -> None:
        if len({self.grid.steps, *self.more_steps}) <= len(self.more_steps):
            raise ValueError(f"more_steps are others than the evaluation's own {self.grid.steps}, each once")
        if self.more_steps and self.more_noises > self.noises:
            raise ValueError(f"more_noises are the first of the evaluation's {self.noises} noises, so at most as many")
        if len(set(self.prompts)) != len(self.prompts):
            raise ValueError("every prompt is evaluated once, so row ids must not repeat")
        if not self.scorers:
            raise ValueError("at least one scorer is needed")
        for name, scorer in self.scorers.items():
            if scorer.kind == "pairwise":
                raise ValueError(f"scorer '{name}' compares images of one policy, so it says nothing about the policy")
