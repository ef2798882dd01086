"""The prompts stage: a source becomes `prompts.parquet` (row id, text, tag, metadata, split) and `report.json`.

Row ids, never texts, identify prompts from here on. They are positions in the source after dropping.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from stages.core.errors import GranularError
from stages.prompts.sources import Row, read_source
from stages.prompts.spec import PromptsSpec

if TYPE_CHECKING:
    import pandas as pd

SPLITS = ("train", "validation", "test")


def run(spec: PromptsSpec, out: Path) -> None:
    """Write `prompts.parquet` and `report.json` into the folder `out`."""
    import pandas as pd

    source = read_source(spec.source, spec.max_chars)
    if not source.rows:
        raise GranularError(f"prompts.source: '{spec.source}' holds no prompt in {source.lines} lines.")
    splits = assign_splits(source.rows, test=spec.test, validation=spec.validation)
    table = pd.DataFrame(
        {
            "id": pd.Series(range(len(source.rows)), dtype="int64"),
            "text": [row.text for row in source.rows],
            "tag": [row.tag for row in source.rows],
            "metadata": [row.canonical_metadata for row in source.rows],
            "split": splits,
        }
    )
    table.to_parquet(out / "prompts.parquet", index=False)
    report = {
        "source": spec.source,
        "lines": source.lines,
        "kept": len(source.rows),
        **{reason: len(lines) for reason, lines in source.dropped.items()},
        "noted": source.noted,
        "split": {name: splits.count(name) for name in SPLITS},
        "tags": {tag: int(n) for tag, n in sorted(table["tag"].value_counts().items())},
        "dropped_lines": source.dropped,
    }
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def read_prompts(folder: Path) -> pd.DataFrame:
    """The prompt table of a finished prompts stage; row position == `id`, so `.loc[ids]` selects by id.

    Columns: id int64, text, tag, metadata (JSON string), split (train | validation | test).
    """
    import pandas as pd

    path = Path(folder) / "prompts.parquet"
    if not path.is_file():
        raise GranularError(f"{path}: no prompt table there; run the prompts stage first.")
    return pd.read_parquet(path)


def assign_splits(rows: list[Row], *, test: int, validation: int) -> list[str]:
    """The split of every row, [len(rows)].

    Each tag gives its proportional share (largest remainder). Within a tag, rows rank by a digest of their text, so
    adding rows hardly moves the others. Rows whose texts are equal but for case rank together and are never divided
    between splits; where such a family does not fit the number left, the next one that does is taken.

    Raises:
        GranularError: nothing would be left to train on, or the numbers cannot be met without dividing a family.
    """
    if test + validation >= len(rows):
        raise GranularError(
            f"prompts.test + prompts.validation: {test} + {validation} leave nothing to train on out of {len(rows)}."
        )
    by_tag: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        by_tag.setdefault(row.tag, []).append(index)
    splits = ["train"] * len(rows)
    for name, wanted in (("test", test), ("validation", validation)):
        free = {tag: [i for i in members if splits[i] == "train"] for tag, members in by_tag.items()}
        for tag, share in _shares({tag: len(by_tag[tag]) for tag in by_tag}, wanted).items():
            for index in _take(rows, free[tag], share):
                splits[index] = name
        found = splits.count(name)
        if found != wanted:
            raise GranularError(
                f"prompts.{name}: {wanted} rows cannot be held out without dividing prompts that differ only in "
                f"case; {found} can."
            )
    return splits


def _shares(sizes: dict[str, int], total: int) -> dict[str, int]:
    """`total` divided over tags in proportion to `sizes`; largest remainders get the odd ones, ties by name."""
    exact = {tag: total * size / sum(sizes.values()) for tag, size in sizes.items()}
    shares = {tag: int(value) for tag, value in exact.items()}
    by_remainder = sorted(exact, key=lambda tag: (shares[tag] - exact[tag], tag))
    for tag in by_remainder[: total - sum(shares.values())]:
        shares[tag] += 1
    return shares


def _take(rows: list[Row], members: list[int], wanted: int) -> list[int]:
    families: dict[str, list[int]] = {}
    for index in members:
        families.setdefault(rows[index].text.casefold(), []).append(index)
    ranked = sorted(families, key=lambda text: hashlib.sha256(text.encode()).hexdigest())
    taken: list[int] = []
    for text in ranked:
        if len(taken) + len(families[text]) <= wanted:
            taken += families[text]
    return taken
