"""Curves of a run as small text files, which `dvc plots` can read and compare between revisions.

data/curves/rounds/<run>.csv        one row a round: figures of docs/metrics.md
data/curves/validation/<run>.csv    round, and the mean of every scorer, `validation.<scorer>`

granular plots                      the drawings of dvc.yaml's `plots`, into one page that needs no network
"""

from __future__ import annotations

import html
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import outputs
from stages.core.errors import GranularError
from stages.core.publish import write_text

if TYPE_CHECKING:
    from pipeline.rounds import RunResult


def write(result: RunResult, curves: Path) -> None:
    """Both files of a run; equal runs give equal bytes."""
    import pandas as pd

    name = f"{result.run.name}.csv"
    write_text(curves / "rounds" / name, outputs.rounds_table(result).to_csv(index=False, lineterminator="\n"))
    rows = [{"round": n, **outputs.validation_row(one)} for n, one in sorted(result.validations.items())]
    table = pd.DataFrame(rows, columns=None if rows else ["round"])
    write_text(curves / "validation" / name, table.to_csv(index=False, lineterminator="\n"))


def draw(revisions: Sequence[str], out: Path) -> int:
    """Write a page with the project's plots, revisions beside each other; returns how many there are.

    revisions: commits, branches, tags or experiments; none stands for the last commit and the files as they are.
    DVC's own page loads its drawing library from a server, so the drawings are made here, as SVG.

    Raises:
        GranularError: DVC knows no such revision, nothing to draw, or the drawing library is not installed.
    """
    try:
        import vl_convert
    except ImportError:
        raise GranularError(
            "plots: vl-convert-python is not installed; install it with pip install '.[tracking]', or look at "
            "reports/index.html, which has the curves too."
        ) from None
    command = [sys.executable, "-m", "dvc", "plots", "diff", *revisions, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[0].removeprefix("ERROR: ")
        raise GranularError(f"dvc plots diff: {said}")
    drawn = [
        (name, vl_convert.vegalite_to_svg(one["content"]))
        for name, plots in json.loads(done.stdout)["data"].items()
        for one in plots
        if one["type"] == "vega" and _points(one["content"])
    ]
    if not drawn:
        raise GranularError("plots: there is nothing to draw yet; `dvc repro` makes the curves of data/curves.")
    title = " · ".join(revisions) or "last commit · files as they are"
    body = "\n".join(f"<h2>{html.escape(name)}</h2>\n{picture}" for name, picture in drawn)
    style = "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem}svg{max-width:100%}"
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Curves</title><style>{style}</style>'
    write_text(out, f"{head}\n<h1>Curves: {html.escape(title)}</h1>\n{body}\n</html>\n")
    return len(drawn)


def _points(content: dict[str, Any]) -> bool:
    return bool(content.get("data", {}).get("values"))
