"""The knobs of scorers (section `scorers` of params.yaml) and of the reward stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from stages.policies.spec import PolicySpec


@dataclass(frozen=True, kw_only=True)
class ScorerSpec:
    """Which reward model, and how it is run.

    kind: the scorer's file in `stages/reward`: `open_clip` (any CLIP, raw cosine), `hpsv2`, `lab_oracle`.
    path: folder with the weights (hpsv2: or the checkpoint file itself); the oracle has none.
    batch: images of every forward, always exactly this many (short batches are padded), so that a score does not
        depend on what is scored beside it. 64 fills a GPU with ViT-H at 224 pixels and is quick on a CPU with the
        lab's models.
    """

    kind: Literal["open_clip", "hpsv2", "lab_oracle"]
    path: str | None = None
    batch: Annotated[int, Field(ge=1)] = 64

    def __post_init__(self) -> None:
        if (self.path is None) != (self.kind == "lab_oracle"):
            raise ValueError(
                "a lab_oracle has no weights, so no path"
                if self.kind == "lab_oracle"
                else f"a scorer of kind {self.kind} needs a path, the folder with its weights"
            )


@dataclass(frozen=True, kw_only=True)
class RewardSpec:
    """One scorer over one rollout. `policy` says how leaves are decoded, and which device is used."""

    name: str
    scorer: ScorerSpec
    policy: PolicySpec
