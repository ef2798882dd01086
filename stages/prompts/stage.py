"""The prompts stage: prompt files become `prompts.parquet` (row id, text, tag, metadata, split) and `report.json`.

Row ids, never texts, identify prompts from here on. They are positions in the cleaned source, followed by the test
prompts where these have a file of their own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stages.core.errors import GranularError
from stages.prompts.cleaning import Row, Source, read_source
from stages.prompts.spec import PromptsSpec

if TYPE_CHECKING:
    import pandas as pd

SPLITS = ("train", "validation", "test")


def run(spec: PromptsSpec, out: Path) -> list[Source]:
    """Write `prompts.parquet` and `report.json` into the folder `out`; returns what became of every line."""
    import pandas as pd

    tests = _filled(read_source(spec, "test_source"), "test_source") if spec.own_test else None
    held_out = frozenset(row.text.casefold() for row in tests.rows) if tests else frozenset()
    source = _filled(read_source(spec, "source", held_out), "source")
    if tests is None:
        rows = source.rows
        splits = assign_splits(rows, test=spec.test or 0, validation=spec.validation)
    else:
        chosen = _chosen_tests(tests, spec.test)
        rows = source.rows + chosen
        splits = assign_splits(source.rows, test=0, validation=spec.validation) + ["test"] * len(chosen)
    table = pd.DataFrame(
        {
            "id": pd.Series(range(len(rows)), dtype="int64"),
            "text": [row.text for row in rows],
            "tag": [row.tag for row in rows],
            "metadata": [row.canonical_metadata for row in rows],
            "split": splits,
        }
    )
    table.to_parquet(out / "prompts.parquet", index=False)
    report = {
        "source": source.report(),
        "test_source": tests and {**tests.report(), "unused": len(tests.rows) - splits.count("test")},
        "rows": len(rows),
        "split": {name: splits.count(name) for name in SPLITS},
        "tags": {tag: int(n) for tag, n in sorted(table["tag"].value_counts().items())},
    }
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return [source, *([tests] if tests else [])]


def _filled(source: Source, place: str) -> Source:
    if not source.rows:
        raise GranularError(f"prompts.{place}: '{source.path}' holds no prompt in {source.lines} lines.")
    return source


def _chosen_tests(tests: Source, wanted: int | None) -> list[Row]:
    """`wanted` rows of a test file of its own, in the file's order; None: all."""
    if wanted is None:
        return tests.rows
    if wanted > len(tests.rows):
        raise GranularError(
            f"prompts.test: at most {len(tests.rows)}, the rows of {tests.path}, got {wanted}; null takes all of them."
        )
    return [tests.rows[index] for index in sorted(_held_out(tests.rows, range(len(tests.rows)), wanted, "test"))]


def read_prompts(folder: Path) -> pd.DataFrame:
    """The prompt table of a finished prompts stage; row position == `id`, so `.loc[ids]` selects by id.

    Columns: id int64, text, tag, metadata (JSON string), split (train | validation | test).
    """
    import pandas as pd

    path = Path(folder) / "prompts.parquet"
    if not path.is_file():
        raise GranularError(f"{path}: no prompt table there; run the prompts stage first.")
    return pd.read_parquet(path)


def assign_splits(rows: Sequence[Row], *, test: int, validation: int) -> list[str]:
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
    splits = ["train"] * len(rows)
    for name, wanted in (("test", test), ("validation", validation)):
        free = [index for index, split in enumerate(splits) if split == "train"]
        for index in _held_out(rows, free, wanted, name):
            splits[index] = name
    return splits


def _held_out(rows: Sequence[Row], free: Sequence[int], wanted: int, name: str) -> list[int]:
    """`wanted` of the `free` rows; every tag gives its share by the number of all its rows."""
    members: dict[str, list[int]] = {row.tag: [] for row in rows}
    for index in free:
        members[rows[index].tag].append(index)
    sizes = dict.fromkeys(members, 0)
    for row in rows:
        sizes[row.tag] += 1
    shares = _shares(sizes, wanted)
    found = [index for tag, share in shares.items() for index in _take(rows, members[tag], share)]
    if len(found) != wanted:
        raise GranularError(
            f"prompts.{name}: {wanted} rows cannot be held out without dividing prompts that differ only in "
            f"case; {len(found)} can."
        )
    return found


def _shares(sizes: Mapping[str, int], total: int) -> dict[str, int]:
    """`total` divided over tags in proportion to `sizes`; largest remainders get the odd ones, ties by name."""
    exact = {tag: total * size / sum(sizes.values()) for tag, size in sizes.items()}
    shares = {tag: int(value) for tag, value in exact.items()}
    by_remainder = sorted(exact, key=lambda tag: (shares[tag] - exact[tag], tag))
    for tag in by_remainder[: total - sum(shares.values())]:
        shares[tag] += 1
    return shares


def _take(rows: Sequence[Row], members: Sequence[int], wanted: int) -> list[int]:
    families: dict[str, list[int]] = {}
    for index in members:
        families.setdefault(rows[index].text.casefold(), []).append(index)
    ranked = sorted(families, key=lambda text: hashlib.sha256(text.encode()).hexdigest())
    taken: list[int] = []
    for text in ranked:
        if len(taken) + len(families[text]) <= wanted:
            taken += families[text]
    return taken
