"""Tables by kind of prompt: the dimensions of a benchmark (Table 5), and correct images by GenEval tag."""

from __future__ import annotations

import pandas as pd

from stages.report import published
from stages.report.published import Reference, method_label
from stages.report.reader import Results
from stages.report.scores import Entry, entries, oracle, pooled
from stages.report.statistics import Bootstrap
from stages.report.table import NOTHING, Cell, Column, Row, Table, mean_cell
from stages.report.tables import KEYS, SAMPLE, keys, origin, row, sample, setting, small_line

TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
# Sub-scores of a judge that asks by dimension → column of the published table.
DIMENSIONS = {
    "style": "style", "world_knowledge": "world_knowledge", "attribute": "attribute", "action": "action",
    "relationship": "relation", "compound": "compound", "grammar": "grammar", "logical_reasoning": "logic",
    "layout": "layout", "text": "text",
}  # fmt: skip
# Below this many prompts a percentile interval says more about the resampling than about the policy.
FEW_PROMPTS = 8


def tags_of(results: Results) -> list[str]:
    """Kinds of prompts: GenEval's in its order, then others."""
    present = set(results.base.rewards["tag"])
    return [tag for tag in TAGS if tag in present] + sorted(present - set(TAGS))


def by_tag(
    results: Results, entry: Entry, scorer: str, value: str, bootstrap: Bootstrap, scale: float, digits: int
) -> list[Cell]:
    """One cell a tag, and one for all prompts; no interval where a tag has few prompts."""
    base, cells = results.base.of(scorer), []
    for tag in (*tags_of(results), None):
        tables = [policy.of(scorer) for policy in entry.policies]
        start = base
        if tag is not None:
            tables = [table[table["tag"] == tag] for table in tables]
            start = base[base["tag"] == tag]
        tables = [table.assign(shown=table[value] * scale) for table in tables]
        start = start.assign(shown=start[value] * scale)
        mean, difference = pooled(tables, start if entry.runs else None, bootstrap, "shown")
        few = difference is not None and difference.prompts < FEW_PROMPTS
        cells.append(mean_cell(mean, None if few else difference, digits))
    return cells


def tag_columns(results: Results, note: str = "") -> tuple[Column, ...]:
    """Their columns: how many prompts each has."""
    rows = results.base.rewards
    counts = [int(rows.loc[rows["tag"] == tag, "prompt"].nunique()) for tag in tags_of(results)]
    named = [*zip(tags_of(results), counts), ("all", rows["prompt"].nunique())]
    return tuple(Column(tag, origin(results), f"{count} prompt{'s' * (count > 1)}{note}") for tag, count in named)


def dimensions(results: Results, reference: Reference, bootstrap: Bootstrap) -> Table | None:
    """Table 5: the ten dimensions of a judge that asked for them; without one, an exact judge's score by tag."""
    judge = _by_dimension(results)
    if judge is not None:
        ours = [name for name in DIMENSIONS if f"sub.{name}" in results.base.of(judge)]
        head = tuple(Column(name.replace("_", " "), origin(results), "%") for name in ours)
        what = (
            f"Columns measured here: share of test points passed, judged by {judge}, in %; points are counted, not "
            "images. "
        )
    else:
        judge = oracle(results)
        if judge is None:
            return None
        head = tag_columns(results)
        what = (
            f"No judge of the ten dimensions was evaluated, so the columns measured here are the mean score of {judge} "
            f"(0 to 1) by kind of prompt. No interval under {FEW_PROMPTS} prompts. "
        )
    rows, beside = [], []
    for entry in entries(results):
        theirs = reference.find(method=method_label(entry))
        beside.append(theirs)
        if _by_dimension(results):
            cells = [_dimension(results, entry, judge, name, bootstrap) for name in ours]
        else:
            cells = by_tag(results, entry, judge, "value", bootstrap, 1, 3)
        whole = [*keys(entry), *sample(entry), *cells, *reference.cells(theirs)]
        rows.append(row(results, entry, whole, sources=reference.source(theirs)))
    for one in reference.rows:
        if one not in beside:
            cells = [Cell(NOTHING), Cell(one["method"]), Cell(one["train_reward"] or NOTHING)]
            cells += [Cell(NOTHING)] * (len(SAMPLE) + len(head))
            rows.append(Row((*cells, *reference.cells(one)), sources=reference.source(one)))
    notes = (
        what + small_line(bootstrap),
        setting(results.base),
        published.LEGEND.replace("HPS = HPS-v2.1, PS = PickScore, IR = ImageReward, UR = UnifiedReward.",
                                 "UniGenBench++, in %; a dash is a number that could not be read."),
    )  # fmt: skip
    return Table(
        "table5", "Table 5: dimensions of what a prompt asks for", (*KEYS, *SAMPLE, *head, *reference.columns),
        tuple(rows), notes,
    )  # fmt: skip


def _by_dimension(results: Results) -> str | None:
    """The scorer whose sub-scores are dimensions."""
    found = [f"sub.{name}" for name in DIMENSIONS if f"sub.{name}" in results.base.rewards]
    if not found:
        return None
    rows = results.base.rewards
    asked = rows.loc[rows[found].notna().any(axis=1), "scorer"].unique()
    return str(asked[0]) if len(asked) else None


def _dimension(results: Results, entry: Entry, judge: str, name: str, bootstrap: Bootstrap) -> Cell:
    """Σ share · points / Σ points over the images that have any."""
    base = results.base.of(judge)
    points = base.get(f"sub.points.{name}")
    # One point an image where the judge does not count them.
    average = 1.0 if points is None else float(points[base[f"sub.{name}"].notna()].mean())

    def shown(rows: pd.DataFrame) -> pd.DataFrame:
        weight = 1.0 if points is None else rows[f"sub.points.{name}"] / average
        return rows.assign(shown=100 * rows[f"sub.{name}"] * weight)

    tables = [shown(policy.of(judge)) for policy in entry.policies]
    mean, difference = pooled(tables, shown(base) if entry.runs else None, bootstrap, "shown")
    return mean_cell(mean, difference, 2)


def geneval(results: Results, reference: Reference, bootstrap: Bootstrap) -> Table | None:
    """Share of correct images by GenEval tag, as an exact judge sees it; beside it, published overall scores."""
    judge = oracle(results)
    if judge is None:
        return None
    head = (*KEYS, Column("published setting"), *SAMPLE, *tag_columns(results, ", % correct"), *reference.columns)
    rows = []
    for entry in entries(results):
        cells = [*keys(entry), Cell(NOTHING), *sample(entry)]
        cells += [*by_tag(results, entry, judge, "sub.correct", bootstrap, 100, 1), *reference.cells(None)]
        rows.append(row(results, entry, cells))
    for one in reference.rows:
        how = ", ".join(
            [f"guidance {one['guidance']}"] * bool(one["guidance"]) + [one["compute"]] * bool(one["compute"])
        )
        cells = [Cell(NOTHING), Cell(one["method"]), Cell(one["reward"]), Cell(how)]
        cells += [Cell(NOTHING)] * (len(SAMPLE) + len(tags_of(results)) + 1)
        rows.append(Row((*cells, *reference.cells(one)), sources=reference.source(one)))
    notes = (
        f"Columns measured here: share of images in which every clause of the prompt holds, judged by {judge}, in %; "
        f"small: percentage points. No interval under {FEW_PROMPTS} prompts: too few to say. " + small_line(bootstrap),
        setting(results.base),
        "Published column: overall GenEval (0 to 1) from arXiv 2603.28718, measured by its authors on SD3.5-Medium "
        "with a detector; scores by tag were not to be had. A dash: reported to diverge.",
    )
    return Table("geneval", "GenEval: correct images by kind of prompt", head, tuple(rows), notes)
