"""`granular status`: every run at a glance, from the files that runs leave behind, whichever process computes them."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.doctor import size
from pipeline.evaluations import EVALUATIONS, STUDY, finished_runs
from pipeline.params import Params
from pipeline.run_sections import BASE
from pipeline.status import HEARTBEAT, duration, process_started
from pipeline.variations import RUNS, find, known
from stages.core.errors import GranularError
from stages.core.spec import read_json

if TYPE_CHECKING:
    from rich.console import RenderableType

COLUMNS = ("run", "rounds", "state", "rate", "left", "last rewards", "policy", "evaluated")
SILENT = 4 * HEARTBEAT  # seconds without a heartbeat after which a run on another host counts as gone
REFRESH = 2.0  # seconds between two looks of --watch


@dataclass(frozen=True)
class Line:
    """One run. rounds: done/planned. rate: evaluations and rounds by time. left: until its last round. alarms: what a
    person should look at. The rest is words; "-" where there is nothing to say."""

    run: str
    rounds: str
    state: str
    rate: str = "-"
    left: str = "-"
    rewards: str = "-"
    policy: str = "-"
    evaluated: str = "-"
    alarms: tuple[str, ...] = ()

    @property
    def cells(self) -> tuple[str, ...]:
        """In the order of COLUMNS."""
        return (self.run, self.rounds, self.state, self.rate, self.left, self.rewards, self.policy, self.evaluated)


def runs(params: Params) -> list[Line]:
    """The base policy, the runs of the graph, and every other run that was started here."""
    delivered = {*finished_runs(), *finished_runs(STUDY / "runs")}
    homes = (EVALUATIONS, STUDY / "evaluations")
    evaluated = {summary.parent.name for home in homes for summary in home.glob("*/summary.json")}
    lines = [Line(BASE, "-", "-", evaluated=_yes(BASE in evaluated))]
    started = [name for name in (*params.presets, *params.study) if (RUNS / name).is_dir()]
    for name in [*params.runs, *started, *known(params)]:
        done = len(list((RUNS / name / "rounds").glob("[0-9]*/manifest.json")))
        try:
            planned = str(find(params, name).rounds)
        except GranularError:
            planned = "?"  # its plan needs the prompt table, or no longer fits the file
        here = {"policy": _yes(name in delivered), "evaluated": _yes(name in evaluated)}
        lines.append(Line(name, f"{done}/{planned}", **{**_now(name), **here}))
    return lines


def _now(name: str) -> dict[str, Any]:
    """What a run's status file says at this moment."""
    file = RUNS / name / "status.json"
    if not file.is_file():
        return {"state": "not started"}
    now = read_json(file)
    said: dict[str, Any] = {"state": state(now, file.stat().st_mtime)}
    rewards = now.get("rewards") or {}
    if rewards:
        said["rewards"] = ", ".join(f"{one} {'none' if v is None else f'{v:.4f}'}" for one, v in rewards.items())
    if now.get("rate"):
        said["rate"] = f"{now['rate']:.0f} evaluations/s, {now['rounds_per_hour']:.1f} rounds/h"
    if now.get("eta") and now["state"] == "running" and not _gone(now, file.stat().st_mtime):
        said["left"] = duration(max(now["eta"] - time.time(), 0))
    return {**said, "alarms": tuple(now.get("alarms") or ())}


def state(now: dict[str, Any], touched: float) -> str:
    """What a run was doing when it last wrote its status file, and whether it still does.

    now: the file's content. touched: its date of change, the run's heartbeat.
    """
    ago = f"{duration(max(time.time() - now['updated'], 0))} ago"
    if now["state"] == "stopped" and now["detail"]:
        return f"stopped {ago}: {now['detail']}"
    if now["state"] != "running":
        return f"{now['state']} {ago}"
    if _gone(now, touched):
        where = "" if now["host"] == socket.gethostname() else f" on {now['host']}"
        return f"gone{where}: its process ended without a word {duration(max(time.time() - touched, 0))} ago"
    return f"round {now['round']}: {now['stage'] or 'working'}, since {duration(max(time.time() - now['updated'], 0))}"


def _gone(now: dict[str, Any], touched: float) -> bool:
    if now["host"] != socket.gethostname():
        return time.time() - touched > SILENT
    born = process_started(now["pid"])
    return born is None or abs(born - (now.get("pid_started") or born)) > 1


def store_line() -> str:
    """Where the round store is and how large (a walk over all its files)."""
    store = Path(os.environ.get("GRANULAR_STORE") or ".granular/store")
    used = 0
    for folder, _, files in os.walk(store):
        for name in files:
            try:
                used += os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue  # evicted while we look
    return f"store: {store}, {size(used)}"


def lines(params: Params) -> list[str]:
    """Plain text: one line a run, the alarms, and where the bytes are."""
    found = runs(params)
    rows = [COLUMNS, *(one.cells for one in found)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return [*table, "", *alarm_lines(found), store_line()]


def alarm_lines(found: list[Line]) -> list[str]:
    """One line an alarm."""
    return [f"look at {one.run}: {alarm}" for one in found for alarm in one.alarms]


def watch(params: Params) -> None:
    """The table again every two seconds, until Ctrl-C. The store's size is left out, it takes a walk."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    def picture() -> RenderableType:
        found = runs(params)
        table = Table(*COLUMNS, box=None, pad_edge=False)
        for one in found:
            # Text, because a name or a sentence may hold what rich takes for markup.
            table.add_row(*(Text(cell) for cell in one.cells))
        stamp = Text(f"{time.strftime('%H:%M:%S')}, Ctrl-C leaves", style="dim")
        return Group(table, *(Text(line, style="bold") for line in alarm_lines(found)), stamp)

    # One process sleeps most of the time; the run it watches keeps the cores.
    with Live(picture(), console=Console(), auto_refresh=False) as live:
        try:
            while True:
                time.sleep(REFRESH)
                live.update(picture(), refresh=True)
        except KeyboardInterrupt:
            return


def _yes(value: bool) -> str:
    return "yes" if value else "no"
