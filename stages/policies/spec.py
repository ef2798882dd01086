"""The policy's knobs (section `policy` of params.yaml)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field


@dataclass(frozen=True, kw_only=True)
class PolicySpec:
    """Which model is aligned, and how it is evaluated.

    family: the adapter in `stages/policies`.
    base: folder in diffusers layout (`FluxPipeline.save_pretrained`); the start of training and the KL reference.
    height, width: image size in pixels.
    guidance: embedded guidance of a guidance-distilled model (FLUX.1-dev: 3.5).
    device: `cpu`, `cuda`, `cuda:1`, …
    threads: CPU threads of a worker; part of what makes results bit-equal. 0 leaves torch's own choice.
    """

    family: Literal["flux"] = "flux"
    base: str
    height: Annotated[int, Field(ge=8)] = 32
    width: Annotated[int, Field(ge=8)] = 32
    guidance: Annotated[float, Field(ge=0)] = 3.5
    device: Annotated[str, Field(pattern=r"^(cpu|mps|cuda(:\d+)?)$")] = "cpu"
    threads: Annotated[int, Field(ge=0)] = 2
