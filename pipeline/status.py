"""What a run leaves for whoever watches it: one line a round, `runs/<run>/status.json` and `runs/<run>/log.jsonl`.

    status.json     the present: state, round, stage, rate, when it will be done, last rewards, alarms; its date of
                    change is a heartbeat while the run lives
    log.jsonl       the past: one JSON object per event that was work, appended
                    {time, run, round, stage, event, seconds, host, pid, message} and, of rounds, figures

Times live here and in the store's log files, outside everything that is digested.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import outputs
from pipeline.alarms import alarms
from pipeline.events import Emit, Event
from pipeline.reuse import write_json
from stages.core.progress import say

if TYPE_CHECKING:
    from pipeline.artifacts import Artifact
    from pipeline.plan import RunPlan
    from pipeline.rounds import Round
    from stages.core.types import Ledger

HEARTBEAT = 30.0  # seconds


class Journal:
    """Hears every event of a run, keeps its status file and its log, and passes the event on.

    round: the round being worked on.
    """

    def __init__(self, run: RunPlan, project: Path, emit: Emit) -> None:
        self.run, self.emit = run, emit
        self.folder = project / "runs" / run.name
        self.round = 0
        self._state = "running"
        self._computed = False
        self._spent = self._seconds = 0.0
        self._rows: list[Mapping[str, Any]] = []
        self._now: dict[str, Any] = {"rate": None, "rounds_per_hour": None, "eta": None, "rewards": {}, "alarms": []}
        self._born = process_started(os.getpid())

    def hear(self, event: Event) -> None:
        """Note an event and pass it on."""
        if event.kind == "stage" and event.status in ("started", "done"):
            self._computed = True
        if event.kind == "run":
            self._state = {"started": "running", "done": "finished", "failed": "stopped"}[event.status]
            if self._state != "running":
                self._now["eta"] = None
        # Thousands of cached calls pass in a moment; nobody reads the status file between them.
        if event.status != "cached":
            self._note(event)
        self.emit(event)

    def _note(self, event: Event) -> None:
        own = {"run": self.run.name, "round": event.round, "stage": event.stage}
        place = {"pid": os.getpid(), "host": socket.gethostname()}
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"), **own,
            "event": f"{event.kind} {event.status}", "seconds": event.seconds, **place, "message": event.detail,
        }  # fmt: skip
        if event.figures:
            line["figures"] = dict(event.figures)
        self.folder.mkdir(parents=True, exist_ok=True)
        # One write of a whole line: a reader, or a second writer, never meets half of it.
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(line, ensure_ascii=False) + "\n")
        status = {"state": self._state, "rounds": self.run.rounds, "status": event.status, "detail": event.detail}
        now = {"updated": time.time(), "pid_started": self._born, **self._now}
        write_json(self.folder / "status.json", {**own, **place, **status, **now})

    def start(self, validation: Artifact | None) -> None:
        """The policy before training was validated, if the run validates at all: the first point of its curves."""
        if validation is not None:
            figures = outputs.validation_row(validation)
            self._rows.append({"round": 0, **figures})
            self.hear(
                Event(
                    kind="round", run=self.run.name, round=0, status="done" if self._computed else "cached",
                    figures=figures, pictures=str(validation.published.folder),
                )
            )  # fmt: skip
        self._computed = False

    def finish(self, round_: Round, cost: Ledger, validation: Artifact | None) -> None:
        """A round is complete: note its times and figures and, if any of it was computed now, say its line."""
        total = sum(one.published.seconds for one in round_.artifacts().values())
        row = outputs.round_row(round_)
        figures = {name: value for name, value in row.items() if name != "round"}
        figures |= {"seconds": total, "groups": outputs.groups(round_)}
        if validation is not None:
            figures |= outputs.validation_row(validation)
        self._rows.append({"round": round_.number, **figures})
        self._now["rewards"] = {name: row[f"reward.{name}"] for name in round_.rewards}
        self._now["alarms"] = alarms(self._rows, self.run.rewards)
        line = ""
        if self._computed:
            self._spent += cost.equivalents
            self._seconds += total
            rate = self._spent / self._seconds if self._seconds else 0.0
            left = (self.run.rounds - round_.number) * cost.equivalents / rate if rate else 0.0
            self._now |= {"rate": rate, "eta": time.time() + left}
            self._now["rounds_per_hour"] = 3600 * rate / cost.equivalents if cost.equivalents else None
            line = self._line(round_.number, row, rate, left)
            say(f"{self.run.name} {line}")
            for alarm in self._now["alarms"]:
                say(f"{self.run.name} round {round_.number}: look at this: {alarm}")
        event = Event(
            kind="round", run=self.run.name, round=round_.number, status="done" if self._computed else "cached",
            detail=line, seconds=total, figures=figures,
            pictures="" if validation is None else str(validation.published.folder),
        )  # fmt: skip
        self._computed = False
        self.hear(event)

    def _line(self, number: int, row: Mapping[str, Any], rate: float, left: float) -> str:
        rewards = ", ".join(f"{name} {_short(value)}" for name, value in self._now["rewards"].items())
        ratio = ""
        if row["ratio_min"] is not None:
            ratio = f"; ratio {row['ratio_min']:.5f} to {row['ratio_max']:.5f}, {row['clip_fraction']:.0%} clipped"
        return f"round {number} of {self.run.rounds}: {rewards}{ratio}; {rate:.0f} evaluations/s, {duration(left)} left"

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Touch the status file now and then: on a shared disk, another host sees by its date that the run lives."""
        over = threading.Event()

        def beat() -> None:
            while not over.wait(HEARTBEAT):
                with suppress(OSError):
                    os.utime(self.folder / "status.json")

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def process_started(pid: int) -> float | None:
    """When a process of this host began (seconds since 1970), None where there is none: tells it from a later one
    that was given the same number."""
    import psutil

    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return None


def _short(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"


def duration(seconds: float) -> str:
    """90 → "2 min"."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
