"""What an update stage is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from stages.policies.spec import PolicySpec
from stages.rollout.grid import GridSpec
from stages.rollout.spec import SamplerSpec


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """AdamW's knobs; the defaults are those of the released G²RPO trainer.

    lr: learning rate, constant over the run. betas: decay of the two moments. weight_decay: decoupled. eps: added to
        the root of the second moment.
    max_grad_norm: the gradient of an optimizer step is scaled down to at most this Euclidean norm.
    bits: of the moments; 8 is bitsandbytes' blockwise AdamW (arXiv 2110.02861), a quarter of the memory.
    """

    lr: Annotated[float, Field(gt=0)] = 2e-6
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    weight_decay: Annotated[float, Field(ge=0)] = 1e-4
    eps: Annotated[float, Field(gt=0)] = 1e-8
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    bits: Literal[32, 8] = 32


@dataclass(frozen=True, kw_only=True)
class UpdateSpec:
    """One round's update, completely determined.

    method: name and options of the method, whose objective is minimised (see `stages.methods.build`).
    ema: decay d per round of the averaged weights, ema ← d·ema + (1 − d)·θ; 0 keeps a copy of θ.
    update_batch: parent states of every forward with gradient, always exactly this many (short ones are padded).
    grid: the noise levels of the run; a rollout sampled on other ones is refused.
    policy, sampler: how velocities are evaluated. round_: the round that is learned from, counted from 1.
    """

    method: dict[str, Any]
    optimizer: OptimizerSpec
    ema: Annotated[float, Field(ge=0, lt=1)]
    update_batch: Annotated[int, Field(ge=1)]
    grid: GridSpec
    policy: PolicySpec
    sampler: SamplerSpec
    round_: Annotated[int, Field(ge=1)]
