"""What the report stage is asked to do (section `report` of params.yaml)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field


@dataclass(frozen=True, kw_only=True)
class ReportSpec:
    """The report's knobs.

    bootstrap: resamples behind every interval; 10000 settles a 95 % percentile limit to about a hundredth of the
        interval's width.
    seed: names the stream of resampled prompts, the same one for every comparison.
    runs: which runs to report, in this order; empty stands for all runs of params.yaml, so that variations beside
        them (`granular align --seeds`, `--name`) are reported only when they are named.
    """

    bootstrap: Annotated[int, Field(ge=200, le=200_000)] = 10_000
    seed: int = 42
    runs: tuple[str, ...] = ()
