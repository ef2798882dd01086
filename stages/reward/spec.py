"""The knobs of scorers (section `scorers` of params.yaml) and of the reward stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from stages.policies.spec import PolicySpec


@dataclass(frozen=True, kw_only=True)
class ScorerSpec:
    """Which reward model, and how it is run.

    kind: the scorer's file in `stages/reward`: `open_clip` (any CLIP, raw cosine), `hpsv2`, `lab_oracle`; `pairwise`
        is the win rate of an image in its group under a judge, which is a model of one of the other kinds.
    path: folder with the weights (hpsv2: or the checkpoint file itself), of a pairwise scorer those of its judge; the
        oracle has none.
    batch: images of every forward, always exactly this many (short batches are padded), so that a score does not
        depend on what is scored beside it. 64 fills a GPU with ViT-H at 224 pixels and is quick on a CPU with the
        lab's models.
    judge: kind of model that compares two images (`pairwise`). margin: scores at most this far apart are a tie, in the
        judge's own unit (cosine for the CLIP kinds).
    """

    kind: Literal["open_clip", "hpsv2", "lab_oracle", "pairwise"]
    path: str | None = None
    batch: Annotated[int, Field(ge=1)] = 64
    judge: Literal["open_clip", "hpsv2", "lab_oracle"] | None = None
    margin: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0

    def __post_init__(self) -> None:
        if self.kind == "pairwise" and self.judge is None:
            raise ValueError("a pairwise scorer needs a judge: open_clip, hpsv2 or lab_oracle")
        if self.kind != "pairwise" and (self.judge or self.margin):
            raise ValueError(f"judge and margin belong to a pairwise scorer, this one is of kind {self.kind}")
        if (self.path is None) != (self.model == "lab_oracle"):
            raise ValueError(
                "a lab_oracle has no weights, so no path"
                if self.model == "lab_oracle"
                else f"a scorer of kind {self.model} needs a path, the folder with its weights"
            )

    @property
    def model(self) -> str:
        """The kind of what is loaded: of a pairwise scorer, its judge's."""
        return self.judge or self.kind

    @property
    def differentiable(self) -> bool:
        """Whether it can make maps, see `stages.reward.base.DifferentiableScorer`."""
        return self.kind in ("open_clip", "hpsv2")


@dataclass(frozen=True, kw_only=True)
class RewardSpec:
    """One scorer over one rollout.

    policy: how leaves are decoded, and which device is used. maps: whether the scorer also says how strongly its reward
    answers to each pixel, for a method that weighs tokens by it.
    """

    name: str
    scorer: ScorerSpec
    policy: PolicySpec
    maps: bool = False

    def __post_init__(self) -> None:
        if self.maps and not self.scorer.differentiable:
            raise ValueError(f"a scorer of kind {self.scorer.kind} has no gradient, so it makes no maps")
