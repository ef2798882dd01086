"""What a round's sheet shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from stages.policies.spec import PolicySpec


@dataclass(frozen=True, kw_only=True)
class SheetSpec:
    """One round's sheet.

    policy: whose decoder makes images of latents. rewards: trained scorer → weight, which rank the images.
    images: how many of the best, and as many of the worst. round_: its number, counted from 1.
    """

    policy: PolicySpec
    rewards: dict[str, float]
    images: Annotated[int, Field(ge=1)] = 4
    round_: int = 0
