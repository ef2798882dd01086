"""What a run says while it works: small events to whoever listens (Prefect, a status file, a test)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a run.

    kind: what it is about: one stage call, a whole round, or the run. round: counted from 1 (0 is the start).
    stage: `rollout`, `reward.<scorer>`, `advantage`, `update`, `evaluate`; empty for rounds and runs.
    status: `cached` means the result was found, so no work was done. detail: one line for a person, or empty.
    """

    kind: Literal["stage", "round", "run"]
    run: str
    round: int
    stage: str = ""
    status: Literal["started", "done", "cached", "failed"]
    detail: str = ""


Emit = Callable[[Event], None]
