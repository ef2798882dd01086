"""Further conditions of a prompt: embeddings near its own, that fade into it while the noise falls (E²PO).

Condition 0 is the prompt itself. With γ(σ) = clip((σ − (1 − f))/f, 0, 1), condition c at noise level σ is
γ·C_c + (1 − γ)·C_0: wholly perturbed at σ = 1, the prompt itself below σ = 1 − f.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

if TYPE_CHECKING:
    import torch

    from stages.core.resident import Resident
    from stages.policies.flux import Conditions
    from stages.rollout.spec import RolloutSpec


@dataclass(frozen=True, kw_only=True)
class PerturbSpec:
    """How a prompt's K_c conditions are made.

    conditions: K_c, the prompt's own included.
    """

    conditions: Annotated[int, Field(ge=2)]
    blend: Annotated[float, Field(gt=0, le=1)] = 0.5
    source: Literal["learned", "random"] = "learned"


@dataclass(frozen=True)
class BlendedConditions:
    """K_c rows per prompt, prompt by prompt; row p·K_c + c is condition c of prompt p."""

    conditions: Conditions
    per_prompt: int
    blend: float

    def __getitem__(self, prompts: slice) -> BlendedConditions:
        raise NotImplementedError

    def at(self, index: torch.Tensor, time: torch.Tensor) -> Conditions:
        raise NotImplementedError


def blended(
    spec: PerturbSpec, conditions: Conditions, rollout: RolloutSpec, inputs: Mapping[str, Path], resident: Resident
) -> BlendedConditions:
    raise NotImplementedError
