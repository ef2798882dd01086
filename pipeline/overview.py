"""`granular status`: every run at a glance, read from the files that runs leave behind."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from pipeline.doctor import size
from pipeline.evaluations import EVALUATIONS, STUDY, finished_runs
from pipeline.params import Params
from pipeline.run_sections import BASE
from pipeline.status import duration
from pipeline.variations import RUNS, find, known
from stages.core.errors import GranularError
from stages.core.spec import read_json


def lines(params: Params) -> list[str]:
    """One line a run, then where the bytes are."""
    rows = [("run", "rounds", "state", "policy", "evaluated")]
    delivered = {*finished_runs(), *finished_runs(STUDY / "runs")}
    homes = (EVALUATIONS, STUDY / "evaluations")
    evaluated = {summary.parent.name for home in homes for summary in home.glob("*/summary.json")}
    rows.append((BASE, "-", "-", "-", _yes(BASE in evaluated)))
    started = [name for name in (*params.presets, *params.study) if (RUNS / name).is_dir()]
    for name in [*params.runs, *started, *known(params)]:
        done = len(list((RUNS / name / "rounds").glob("[0-9]*/manifest.json")))
        try:
            planned = str(find(params, name).rounds)
        except GranularError:
            planned = "?"  # its plan needs the prompt table, or no longer fits the file
        rows.append((name, f"{done}/{planned}", state(name), _yes(name in delivered), _yes(name in evaluated)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    store = Path(os.environ.get("GRANULAR_STORE") or ".granular/store")
    used = sum(file.stat().st_size for file in store.rglob("*") if file.is_file() and not file.is_symlink())
    return [*table, "", f"store: {store}, {size(used)}"]


def state(name: str) -> str:
    """What a run was doing when it last wrote its status file, and whether it still does."""
    file = RUNS / name / "status.json"
    if not file.is_file():
        return "not started"
    now = read_json(file)
    ago = f"{duration(max(time.time() - now['updated'], 0))} ago"
    if now["state"] != "running":
        return f"{now['state']} {ago}"
    if now["host"] == socket.gethostname() and not Path(f"/proc/{now['pid']}").exists():
        return f"ended without a word {ago}"
    return f"round {now['round']}: {now['stage'] or 'working'}, {ago}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
