"""Two runs side by side: what differs in what they were told and made of, and what differs in what came out.

Differences are the second minus the first, paired on prompts and initial noises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from stages.evaluate.sheet import png_bytes, thumbnail
from stages.report.canvas import Picture
from stages.report.figures import training, validated, validation, wall_time
from stages.report.kinds import FEW_PROMPTS, tags_of
from stages.report.reader import Evaluation, Results, Run
from stages.report.statistics import Bootstrap, Interval, paired
from stages.report.table import NOTHING, Cell, Column, Row, Table, difference_cell
from stages.report.tables import columns, origin, setting

KINDS = {
    "setting": "settings", "code": "code of stages", "library": "library versions", "scorer": "identities of scorers",
    "weights": "weights",
}  # fmt: skip


@dataclass(frozen=True)
class Side:
    """One of the two. start: digest of the base policy's weights. made: stage → {code, versions} of its last round, by
    its manifest; empty where that is gone."""

    run: Run
    evaluation: Evaluation
    start: str
    made: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.run.name


@dataclass(frozen=True)
class Pair:
    """One prompt and noise under both. differences: scorer → reward of the second minus the first; None: unknown."""

    text: str
    prompt: int
    noise: int
    images: tuple[bytes, bytes]
    differences: Mapping[str, float | None]


def together(one: Side, other: Side) -> Results:
    """Both as the report reads results; the first takes the base's place."""
    return Results(one.evaluation, (other.evaluation,), {one.name: one.run, other.name: other.run})


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """`{a: {b: 1}}` → `{"a.b": 1}`; lists are values."""
    if not isinstance(value, Mapping):
        return {name: value}
    parts = [flat(one, f"{name}.{key}" if name else str(key)) for key, one in value.items()]
    return {key: one for part in parts for key, one in part.items()}


def facts(side: Side) -> dict[tuple[str, str], str]:
    """(kind, what) → value: everything that could have made a difference, settings first."""
    info = side.run.info
    found = {("setting", key): _short(one) for key, one in flat(info["spec"]).items() if key != "name"}
    for stage, made in side.made.items():
        found["code", stage] = str(made["code"])[:12]
        found |= {("library", name): str(version) for name, version in made["versions"].items()}
    for name, entry in side.evaluation.summary["scorers"].items():
        found |= {("scorer", f"{name}.{key}"): _short(one)[:20] for key, one in entry["identity"].items()}
    found["weights", "base policy"] = side.start[:8]
    found["weights", "evaluated policy"] = side.evaluation.weights
    return found


def _short(value: Any) -> str:
    return "[" + ", ".join(map(str, value)) + "]" if isinstance(value, list | tuple) else str(value)


def differing(one: Side, other: Side) -> Table:
    """Settings, code, libraries, scorers and weights that are not the same."""
    mine, theirs = facts(one), facts(other)
    keys = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
    rows = [
        Row((Cell(kind), Cell(what), *(Cell(known.get((kind, what), NOTHING)) for known in (mine, theirs))))
        for kind, what in keys
    ]
    gone = [side.name for side in (one, other) if not side.made]
    same = {kind: sum(key[0] == kind for key in mine if mine[key] == theirs.get(key)) for kind, _ in mine}
    notes = [
        "Only what differs is listed; a dash: not there. The same in both: "
        + ", ".join(f"{KINDS[kind]} ({count})" for kind, count in same.items() if count) + ".",
        *(f"{name}: its rounds are not on this machine, so code and libraries are unknown." for name in gone),
    ]  # fmt: skip
    head = (Column("kind"), Column("what"), Column(one.name), Column(other.name))
    return Table("settings", "What differs", head, tuple(rows), tuple(notes))


def by_kind(one: Side, other: Side, bootstrap: Bootstrap) -> tuple[Table, dict[str, Interval]]:
    """Paired differences per scorer, over all prompts and for each kind of prompt; and those over all by scorer."""
    results = together(one, other)
    rows, whole = [], {}
    for tag in (None, *tags_of(results)):
        cells, prompts = [], 0
        for scorer in results.scorers:
            tables = [side.evaluation.of(scorer) for side in (other, one)]
            if tag is not None:
                tables = [table[table["tag"] == tag] for table in tables]
            interval = bootstrap.interval(paired(*tables))
            prompts = max(prompts, tables[0]["prompt"].nunique())
            if tag is None:
                whole[scorer] = interval
            if 0 < interval.prompts < FEW_PROMPTS:
                interval = Interval(interval.mean, float("nan"), float("nan"), interval.prompts)
            cells.append(difference_cell(interval) if interval.prompts else Cell(NOTHING))
        named = Cell(tag or "all prompts")
        seeds = tuple(int(side.run.info["spec"]["seed"]) for side in (one, other))
        sources = {origin(results): f"data/evaluations: {one.name} (weights {one.evaluation.weights}); "
                                    f"{other.name} (weights {other.evaluation.weights})"}  # fmt: skip
        noises = int(one.evaluation.summary["noises"])
        rows.append(Row((named, Cell(f"{prompts}×{noises}"), *cells), prompts, noises, seeds, sources))
    notes = (
        f"{other.name} − {one.name}, paired on prompts and initial noise, 95 % interval (bootstrap over prompts, "
        f"{bootstrap.resamples} resamples); ▲ higher, ▼ lower, · not shown. No interval under {FEW_PROMPTS} prompts. "
        "Intervals are not adjusted for the number of comparisons.",
        setting(one.evaluation),
    )
    head = (Column("prompts"), Column("n"), *columns(results))
    return Table("differences", f"{other.name} − {one.name}", head, tuple(rows), notes), whole


def image_pairs(one: Side, other: Side) -> list[Pair]:
    """Every kept image of both, from one noise; the worst regression first, by the mean of the rewards that both were
    trained on, each in standard deviations of the first's images (of all rewards where they share none)."""
    a, b = one.evaluation, other.evaluation
    scorers = list(a.summary["scorers"])
    shared = [name for name in scorers if name in one.run.trained & other.run.trained] or scorers
    known: dict[str, pd.Series] = {}
    for scorer in scorers:
        both = [side.of(scorer).set_index(["prompt", "noise"])["value"] for side in (b, a)]
        known[scorer] = both[0] - both[1]
    spread = {name: float(a.of(name)["value"].std(ddof=0)) or 1.0 for name in shared}
    found = []
    for row, (prompt, text) in enumerate(zip(a.prompt.tolist(), a.text.tolist())):
        for noise in range(a.images.shape[1]):
            values = {name: float(one_.get((prompt, noise), np.nan)) for name, one_ in known.items()}
            differences = {name: None if np.isnan(value) else value for name, value in values.items()}
            images = (_png(a.images[row, noise]), _png(b.images[row, noise]))
            found.append(Pair(str(text), int(prompt), noise, images, differences))

    def worst(pair: Pair) -> float:
        parts = [pair.differences[name] for name in shared]
        return sum(part / spread[name] for part, name in zip(parts, shared) if part is not None)

    return sorted(found, key=lambda pair: (worst(pair), pair.prompt, pair.noise))


def _png(image: np.ndarray) -> bytes:
    from PIL import Image

    side = max(image.shape[:2])
    return png_bytes(Image.fromarray(image if side <= 96 else thumbnail(image)))


def figures(one: Side, other: Side, bootstrap: Bootstrap) -> list[Picture]:
    """Curves on evaluations and on time, and the training reward."""
    results = together(one, other)
    made: list[Picture | None] = []
    if validated(results):
        made += [validation(results, bootstrap), wall_time(results, bootstrap)]
    return [picture for picture in (*made, training(results)) if picture is not None]


def sentence(one: Side, other: Side, whole: Mapping[str, Interval]) -> str:
    """What the intervals over all prompts say."""
    groups: dict[str, list[str]] = {"higher": [], "lower": [], "not shown": []}
    for scorer, interval in whole.items():
        groups[interval.verdict].append(scorer)
    words = (
        ("higher", "is higher under"),
        ("lower", "is lower under"),
        ("not shown", "shows neither more nor less under"),
    )
    parts = [f"{other.name} {word} {_and(groups[key])}" for key, word in words if groups[key]]
    return (
        "; ".join([parts[0], *(part.removeprefix(f"{other.name} ") for part in parts[1:])]) + f", against {one.name}."
    )


def _and(words: Sequence[str]) -> str:
    return ", ".join(words[:-1]) + " and " + words[-1] if len(words) > 1 else words[0]


def render(one: Side, other: Side, bootstrap: Bootstrap) -> str:
    """The page's HTML."""
    from stages.report.page import fill

    table, whole = by_kind(one, other, bootstrap)
    pairs = image_pairs(one, other)
    return fill(
        "compare.html",
        one=one,
        other=other,
        headline=sentence(one, other, whole),
        settings=differing(one, other),
        differences=table,
        pictures=figures(one, other, bootstrap),
        pairs=pairs,
        scorers=list(whole),
        places=[
            ("settings", "What differs"),
            ("differences", "Differences"),
            ("curves", "Curves"),
            ("images", "Images"),
        ],
    )
