"""`granular audit` and `granular explain`: where a run's rounds lie, who decodes their images, where pages go.

runs/<run>/audit/round-0003.html    one round, whole
runs/<run>/audit/index.html         the run: curves and alarms
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.alarms import alarms
from stages.core.errors import GranularError
from stages.core.progress import bar
from stages.core.publish import write_text
from stages.core.spec import build, read_json

if TYPE_CHECKING:
    from stages.audit.explain import Explanation
    from stages.audit.pictures import Decode
    from stages.audit.read import StoredRound

RUNS = Path("runs")
UPDATE = ("loss", "ratio_min", "ratio_max", "clip_fraction", "grad_norm", "param_change")
ADVANTAGE = ("advantage_std", "clipped_advantages", "constant_groups", "groups")


def audit(run: str, number: int | None, prompt: int | None) -> Path:
    """Write the page of a round (by default the last one that is finished) and the run's overview; returns the page.

    Raises:
        GranularError: no such run, round or prompt.
    """
    from stages.audit.page import round_page, run_page

    done = finished(run)
    stored = read(run, done[-1] if number is None and done else number or 1)
    if prompt is not None and prompt not in stored.texts:
        there = ", ".join(map(str, sorted(stored.texts)))
        raise GranularError(f"{run} round {stored.number}: prompt {prompt} was not in it; there are {there}.")
    folder = RUNS / run / "audit"
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / f"round-{stored.number:04d}.html"
    with bar(len(stored.rollout.leaf_nodes), f"round {stored.number} images", "images") as progress:
        decode, why = images(run, stored, progress.update)
        html = round_page(stored, decode, prompt, why)
    write_text(page, html)
    rows = figures(run, done)
    weights = dict(stored.credit.rewards)
    found = {row["round"]: alarms(rows[: i + 1], weights) for i, row in enumerate(rows) if row["round"]}
    pages = sorted(int(one.stem.rpartition("-")[2]) for one in folder.glob("round-*.html"))
    write_text(folder / "index.html", run_page(run, rows, found, pages))
    return page


def explain(run: str, number: int, prompt: int, s: int, member: int) -> Explanation:
    """How one advantage came about; see `stages.audit.explain`."""
    from stages.audit.explain import explain as explained

    return explained(read(run, number), prompt, s, member)


def finished(run: str) -> list[int]:
    """Rounds of a run that are whole."""
    return sorted(int(one.parent.name) for one in (RUNS / run / "rounds").glob("[0-9]*/manifest.json"))


def read(run: str, number: int) -> StoredRound:
    """A finished round."""
    from granular import load_round
    from stages.audit.read import read_round

    return read_round(run, number, load_round(run, number).folder)


def images(run: str, stored: StoredRound, done: Callable[[int], Any]) -> tuple[Decode | None, str]:
    """Who decodes a round's images, or why nobody can. Latents that retention evicted are made again first.

    done: called with images decoded.
    """
    from stages.audit.read import request
    from stages.core.resident import Resident
    from stages.policies.spec import PolicySpec

    rollout = stored.folder / "rollouts.zarr"
    if not any(rollout.glob("*/leaf_x")):
        try:
            _make_again(run, stored.number)
        except GranularError as error:
            return None, f"the latents of this round were evicted, and cannot be made again: {error}"
    asked = request(stored.folder, "rollouts.zarr")
    # The rollout's own settings leave out what does not change its numbers; the scorers' name all of the policy.
    scorer = next(iter(stored.rewards))
    spec = build(PolicySpec, request(stored.folder, f"rewards/{scorer}.parquet")["spec"]["policy"], "policy")
    resident = Resident()
    latents = resident.rollout(rollout.resolve().parent).leaf_x
    policy = resident.policy(spec, Path(asked["inputs"]["base"]))

    def decode(rows: Sequence[int]) -> np.ndarray:
        decoded = resident.some_images(policy, rollout.resolve().parent, latents, list(rows))
        done(len(rows))
        return decoded

    return decode, ""


def _make_again(run: str, number: int) -> None:
    from pipeline.params import load_params
    from pipeline.reuse import Store
    from pipeline.variations import find
    from pipeline.whatif import stored_rounds

    for one, _ in stored_rounds(find(load_params(), run), range(number, number + 1), Store()):
        one.rollout.folder(("rollouts.zarr",))


def figures(run: str, rounds: Sequence[int]) -> list[dict[str, Any]]:
    """One row a round, from the files of its stages, validations from the run's log; row 0 is the start."""
    from stages.audit.read import beside

    validated = _validations(RUNS / run / "log.jsonl")
    rows: list[dict[str, Any]] = [{"round": 0, **validated[0]}] if 0 in validated else []
    for number in rounds:
        folder = RUNS / run / "rounds" / f"{number:04d}"
        row: dict[str, Any] = {"round": number}
        for table in sorted((folder / "rewards").glob("*.parquet")):
            name = f"rewards/{table.name}"
            row[f"reward.{table.stem}"] = read_json(beside(folder, name) / "summary.json")["mean"]
        summary = read_json(beside(folder, "advantages.parquet") / "summary.json")
        total = read_json(folder / "update.json")["total"]
        row |= {name: summary.get(name) for name in ADVANTAGE} | {name: total.get(name) for name in UPDATE}
        rows.append(row | validated.get(number, {}))
    return rows


def _validations(log: Path) -> dict[int, dict[str, float]]:
    """Round → `validation.<scorer>`, as the run's log says them last."""
    found: dict[int, dict[str, float]] = {}
    with suppress(FileNotFoundError):
        for line in log.read_text(encoding="utf-8").splitlines():
            try:
                event = json.loads(line)
            except json.JSONDecodeError:  # a killed process may have written half of its last line
                continue
            told = {k: v for k, v in event.get("figures", {}).items() if k.startswith("validation.")}
            if event["event"] == "round done" and told:
                found[event["round"]] = told
    return found


def show(page: Path) -> bool:
    """Open a page in the reader's browser, where there is one and a screen; returns whether it did."""
    import webbrowser

    if sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return False  # a browser in the terminal would take it over
    with suppress(webbrowser.Error, OSError):
        return webbrowser.open(page.resolve().as_uri())
    return False
