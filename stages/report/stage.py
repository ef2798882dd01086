"""The report stage: tables, figures, page and flat metrics, from files only."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from stages.report import figures, page, tables
from stages.report.findings import findings, headline
from stages.report.reader import read
from stages.report.spec import ReportSpec
from stages.report.statistics import Bootstrap, Interval

if TYPE_CHECKING:
    from stages.core.resident import Resident

OUTPUTS = ("index.html", "metrics.json", "tables", "figures")


def run(inputs: Mapping[str, Path], spec: ReportSpec, resident: Resident | None, out: Path) -> None:
    """Write the report.

    inputs: evaluations, runs (folders with one folder a policy), reference (folder of published tables).
    Writes index.html, metrics.json, tables/*.{md,csv}, figures/*.png.

    Raises:
        GranularError: an evaluation is missing, or evaluations cannot be compared.
    """
    results = read(inputs["evaluations"], inputs["runs"], spec.runs)
    bootstrap = Bootstrap(spec.bootstrap, spec.seed)
    found = tables.scores(results, bootstrap)
    paired = tables.pairs(results, bootstrap)
    ours = [tables.main(results, found, spec.bootstrap)]
    if paired:
        ours.append(tables.comparisons(results, paired))
    if by_tag := tables.tags(results, bootstrap):
        ours.append(by_tag)
    if results.runs:
        ours.append(tables.cost(results))
    reference = [tables.published(inputs["reference"] / "table1.csv")]
    pictures = figures.draw_all(results, bootstrap)
    for table in (*ours, *reference):
        table.write(out / "tables")
    for picture in pictures:
        picture.write(out / "figures")
    sentence = headline(results, found)
    html = page.render(sentence, findings(results, found, paired, bootstrap), ours, reference, pictures, results)
    (out / "index.html").write_text(html, encoding="utf-8")
    numbers = metrics(found, tables.costs(results), by_tag, tables.joint(results, bootstrap))
    (out / "metrics.json").write_text(json.dumps(numbers, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def metrics(
    found: Mapping[tuple[str, str], tables.Score],
    costs: Mapping[str, Mapping[str, int]],
    by_tag: tables.Table | None,
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
    if by_tag is not None and by_tag.data is not None:
        for row in by_tag.data.itertuples():
            numbers[f"{row.policy}.correct.{row.tag}"] = float(row.correct)
    # Six digits: what is beyond them may differ between processors.
    known = {name: value for name, value in numbers.items() if math.isfinite(value)}
    return {name: value if isinstance(value, int) else float(f"{value:.6g}") for name, value in known.items()}
