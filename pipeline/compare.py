"""`granular compare A B`: two finished runs on one self-contained page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.evaluations import EVALUATIONS, delivered_to
from pipeline.params import Params
from pipeline.run_sections import BASE
from pipeline.variations import RUNS, known
from stages.core.errors import GranularError, nearest
from stages.core.publish import write_text
from stages.core.spec import read_json
from stages.report.compare import Side, render
from stages.report.reader import comparable, read_evaluation, read_run
from stages.report.statistics import Bootstrap

COMPARED = Path("reports/compare")


def side(params: Params, name: str) -> Side:
    """One run or variation with everything it left.

    Raises:
        GranularError: no such run, or it was not finished or not evaluated; with the command that does it.
    """
    if name == BASE:
        raise GranularError("base: the policy before training is no run; `granular report` compares every run with it.")
    names = [*params.all_runs, *known(params)]
    runs = delivered_to(params, name)
    if not (runs / name / "run.json").is_file():
        if name not in names:
            raise GranularError(f"{name}: no such run, and no variation of that name; {nearest(name, names)}")
        raise GranularError(f"{name}: not finished, {runs / name} has no run.json; run `granular align {name}`.")
    evaluation = (EVALUATIONS if runs == Path("data/runs") else runs.parent / "evaluations") / name
    if not (evaluation / "summary.json").is_file():
        raise GranularError(f"{name}: not evaluated, {evaluation} is not there; run `granular evaluate {name}`.")
    start = str(read_json(runs / name / "policy" / "state.json")["base"])
    run = read_run(runs / name, runs.parent / "times")
    return Side(run, read_evaluation(evaluation), start, last_made(name))


def last_made(name: str) -> dict[str, dict[str, Any]]:
    """Stage → code and library versions of a run's last round here; empty where its rounds are not here."""
    manifests = sorted((RUNS / name / "rounds").glob("[0-9]*/manifest.json"))
    return dict(read_json(manifests[-1])["stages"]) if manifests else {}


def compare(params: Params, one: str, other: str, out: Path | None = None) -> Path:
    """Write the page and return where it is.

    Raises:
        GranularError: nothing to compare, or evaluations that did not measure the same.
    """
    if one == other:
        raise GranularError(f"{one}: compared with itself; name two runs.")
    first, second = side(params, one), side(params, other)
    comparable(EVALUATIONS, first.evaluation, second.evaluation)
    target = out or COMPARED / f"{one}-{other}.html"
    if target.is_dir():
        raise GranularError(
            f"--out {target}: a folder; name the file to write, as in {target / f'{one}-{other}.html'}."
        )
    write_text(target, render(first, second, Bootstrap(params.report.bootstrap, params.report.seed)))
    return target
