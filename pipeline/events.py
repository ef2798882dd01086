"""What a run says while it works: small events to whoever listens (Prefect, a status file, a curve, a test)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a run.

    kind: what it is about: one stage call, a whole round, or the run. round: counted from 1 (0 is the start).
    stage: `rollout`, `reward.<scorer>`, `advantage`, `update`, `evaluate`; empty for rounds and runs.
    status: `cached` means the result was found, so no work was done. detail: one line for a person, or empty.
    seconds: how long the work took, by the store's log; 0 where nothing was done.
    figures: of a whole round, what it measured, by the names of docs/metrics.md; None where it measured nothing.
    pictures: of a round that was validated, the folder of that evaluation (`images.npz`, `rewards.parquet`).
    """

    kind: Literal["stage", "round", "run"]
    run: str
    round: int
    stage: str = ""
    status: Literal["started", "done", "cached", "failed"]
    detail: str = ""
    seconds: float = 0.0
    figures: Mapping[str, Any] = field(default_factory=dict)
    pictures: str = ""


Emit = Callable[[Event], None]


def to_all(*listeners: Emit) -> Emit:
    """One listener that passes every event on to several, in order."""

    def emit(event: Event) -> None:
        for one in listeners:
            one(event)

    return emit
