"""What an advantage stage is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field


@dataclass(frozen=True, kw_only=True)
class AdvantageSpec:
    """How rewards become advantages.

    method: name and options of the method, whose credit rule is applied (see `stages.methods.build`).
    rewards: weight of every scorer. In methods that standardise each reward (G²RPO, DanceGRPO, MixGRPO) it multiplies
        the standardised ones, in those that sum rewards first (`Combine`: Flow-GRPO's family) the raw ones. The stage
        reads exactly these scorers.
    failures: what an image without a reward does. `stop`: an error that names the rows. `drop`: the member leaves its
        group, which is standardised without it; the member's own advantage is 0.
    """

    method: dict[str, Any]
    rewards: Annotated[dict[str, Annotated[float, Field(allow_inf_nan=False)]], Field(min_length=1)]
    failures: Literal["stop", "drop"] = "stop"
