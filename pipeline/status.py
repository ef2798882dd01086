"""What a person sees of a run while it works: one line a round, `runs/<run>/status.json` and `log.json`.

Times live here and in the store's log files, outside everything that is digested.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import outputs
from pipeline.events import Emit, Event
from pipeline.reuse import write_json
from stages.core.progress import say

if TYPE_CHECKING:
    from pipeline.plan import RunPlan
    from pipeline.rounds import Round
    from stages.core.types import Ledger


class Journal:
    """Hears every event of a run, keeps its status file, and passes the event on.

    round: the round being worked on.
    """

    def __init__(self, run: RunPlan, project: Path, emit: Emit) -> None:
        self.run, self.emit = run, emit
        self.folder = project / "runs" / run.name
        self.round = 0
        self._state = "running"
        self._computed = False
        self._spent = self._seconds = 0.0
        self._log: list[dict[str, Any]] = []

    def hear(self, event: Event) -> None:
        """Note an event and pass it on."""
        if event.kind == "stage" and event.status in ("started", "done"):
            self._computed = True
        if event.kind == "run":
            self._state = {"started": "running", "done": "finished", "failed": "stopped"}[event.status]
        # Thousands of cached calls pass in a moment; nobody reads the status file between them.
        if event.status != "cached":
            write_json(
                self.folder / "status.json",
                {
                    "run": self.run.name,
                    "state": self._state,
                    "round": event.round,
                    "rounds": self.run.rounds,
                    "stage": event.stage,
                    "status": event.status,
                    "detail": event.detail,
                    "pid": os.getpid(),
                    "host": socket.gethostname(),
                    "updated": time.time(),
                },
            )
        self.emit(event)

    def finish(self, round_: Round, cost: Ledger) -> None:
        """A round is complete: note its times and, if any of it was computed now, say its line."""
        seconds = {name: one.published.seconds for name, one in round_.artifacts().items()}
        total = sum(seconds.values())
        self._log.append({"round": round_.number, "seconds": seconds, "computed": self._computed})
        line = ""
        if self._computed:
            write_json(self.folder / "log.json", {"host": socket.gethostname(), "rounds": self._log})
            self._spent += cost.equivalents
            self._seconds += total
            rate = self._spent / self._seconds if self._seconds else 0.0
            left = (self.run.rounds - round_.number) * cost.equivalents / rate if rate else 0.0
            line = self._line(round_, rate, left)
            say(f"{self.run.name} {line}")
        status = "done" if self._computed else "cached"
        self._computed = False
        self.hear(Event(kind="round", run=self.run.name, round=round_.number, status=status, detail=line))

    def _line(self, round_: Round, rate: float, left: float) -> str:
        row = outputs.round_row(round_)
        rewards = ", ".join(f"{name} {_short(row[f'reward.{name}'])}" for name in round_.rewards)
        ratio = ""
        if row["ratio_min"] is not None:
            ratio = f"; ratio {row['ratio_min']:.5f} to {row['ratio_max']:.5f}, {row['clip_fraction']:.0%} clipped"
        return (
            f"round {round_.number} of {self.run.rounds}: {rewards}{ratio}; {rate:.0f} evaluations/s, "
            f"{duration(left)} left"
        )


def _short(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"


def duration(seconds: float) -> str:
    """90 → "2 min"."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
