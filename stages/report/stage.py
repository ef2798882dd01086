"""The report stage: tables, figures, page and flat metrics, from files only."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from stages.report import figures, kinds, page, published, tables
from stages.report.findings import findings, headline
from stages.report.reader import Results, read
from stages.report.scores import Score, costs, joint, pairs, scores
from stages.report.spec import ReportSpec
from stages.report.statistics import Bootstrap, Interval
from stages.report.table import Table

if TYPE_CHECKING:
    from stages.core.resident import Resident

OUTPUTS = ("index.html", "metrics.json", "tables", "figures")


def run(inputs: Mapping[str, Path], spec: ReportSpec, resident: Resident | None, out: Path) -> None:
    """Write the report.

    inputs: evaluations, runs (folders with one folder a policy), reference (folder of published tables), times (how
        long each run took; may be absent).
    Writes index.html, metrics.json, tables/*.{md,csv,tex}, figures/*.png.

    Raises:
        GranularError: an evaluation is missing, or evaluations cannot be compared.
    """
    results = read(inputs["evaluations"], inputs["runs"], spec.runs, times=inputs.get("times"))
    bootstrap = Bootstrap(spec.bootstrap, spec.seed)
    found, paired = scores(results, bootstrap), pairs(results, bootstrap)
    made = every_table(results, inputs["reference"], paired, bootstrap)
    pictures = figures.draw_all(results, bootstrap)
    for table in made:
        table.write(out / "tables")
    for picture in pictures:
        picture.write(out / "figures")
    sentence = headline(results, found)
    html = page.render(sentence, findings(results, found, paired, bootstrap), made, pictures, results)
    (out / "index.html").write_text(html, encoding="utf-8")
    correct = next((table for table in made if table.name == "geneval"), None)
    numbers = metrics(found, costs(results), correct, joint(results, bootstrap))
    (out / "metrics.json").write_text(json.dumps(numbers, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def every_table(
    results: Results, reference: Path, paired: Mapping[tuple[str, str, str], Interval], bootstrap: Bootstrap
) -> list[Table]:
    """Every table that there is something for, in the order of the page."""

    def of_paper(number: int) -> published.Reference:
        return published.read(reference, f"table{number}", published.EVALUATORS)

    made: list[Table | None] = [tables.methods(results, of_paper(1), bootstrap)]
    if paired:
        made.append(tables.comparisons(results, paired))
    made += [
        tables.granularities(results, of_paper(2), bootstrap),
        tables.steps(results, of_paper(3), bootstrap),
        kinds.dimensions(
            results, published.read(reference, "table5", ("overall", *kinds.DIMENSIONS.values())), bootstrap
        ),
        kinds.geneval(results, published.read(reference, "geneval", ("GenEval",), published.SD3), bootstrap),
    ]
    if results.runs:
        made.append(tables.cost(results))
    return [table for table in made if table is not None]


def metrics(
    found: Mapping[tuple[str, str], Score],
    costs: Mapping[str, Mapping[str, int]],
    correct: Table | None,
    joint: Mapping[str, Interval],
) -> dict[str, float | int]:
    """Flat numbers for `dvc metrics`: `<policy>.<scorer>.mean`, `.difference`, `.low`, `.high`, `<run>.images`, …"""
    numbers: dict[str, float | int] = {}
    for name, interval in joint.items():
        numbers |= {
            f"{name}.joint.difference": interval.mean,
            f"{name}.joint.low": interval.low,
            f"{name}.joint.high": interval.high,
        }
    for (policy, scorer), score in found.items():
        numbers[f"{policy}.{scorer}.mean"] = score.mean
        if score.difference:
            numbers[f"{policy}.{scorer}.difference"] = score.difference.mean
            numbers[f"{policy}.{scorer}.low"] = score.difference.low
            numbers[f"{policy}.{scorer}.high"] = score.difference.high
    for name, row in costs.items():
        for key, value in row.items():
            numbers[f"{name}.{key}"] = value
    if correct is not None:
        ours = correct.data().query("prompts.notna()")
        for policy, tag, share in zip(ours["policy"], ours["column"], ours["value"]):
            numbers[f"{policy}.correct.{tag}"] = float(share) / 100
    # Six digits: what is beyond them may differ between processors.
    known = {name: value for name, value in numbers.items() if math.isfinite(value)}
    return {name: value if isinstance(value, int) else float(f"{value:.6g}") for name, value in known.items()}
