"""Records of a prompt file -> rows of the prompt table. Nothing disappears without a count.

Every line ends in exactly one of three ways: it is kept as one row, it is dropped (and listed), or the file is refused
with the line's number. Which of them is a rule of the clean-up for five kinds of lines (`spec.CleanUp`), asked in this
order: invalid UTF-8, blank, over-long, duplicate, in the test file.

What a person should know of but what changes nothing is *noted*: a BOM, CRLF line ends, surrounding white space taken
off, tabs, non-ASCII characters (accents, quotes, emoji), rows that equal an earlier one but for upper and lower case,
rows that repeat a text with other metadata, rows without a quoted phrase where targets are asked for.
"""

from __future__ import annotations

import json
from collections.abc import Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from stages.prompts.sources import read_records, refuse
from stages.prompts.spec import REASONS, PromptsSpec, Rule
from stages.prompts.targets import quoted_phrase

NOTED = ("bom", "crlf", "stripped", "tabs", "non_ascii", "case_only", "same_text", "no_target")


@dataclass(frozen=True)
class Row:
    """One kept prompt. `tag` is '' where the source has none; `metadata` is every key but the text (tag included)."""

    line: int
    text: str
    tag: str
    metadata: dict[str, Any]

    @property
    def canonical_metadata(self) -> str:
        """The metadata as one JSON string, keys sorted."""
        return json.dumps(self.metadata, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True)
class Source:
    """All rows of a file, and what became of every line.

    found: reason → lines of which it is true, kept ones included. rules: reason → what was done with them. dropped:
    reason → lines that became no row, each listed once: `lines == len(rows) + dropped lines`.
    """

    path: str
    rows: list[Row]
    lines: int
    found: dict[str, list[int]]
    dropped: dict[str, list[int]]
    noted: dict[str, int]
    rules: dict[str, Rule]

    def report(self) -> dict[str, Any]:
        """The same as JSON-like values, without the rows."""
        clean_up = {
            reason: {"rule": self.rules[reason], "count": len(lines), "lines": lines}
            for reason, lines in self.found.items()
        }
        return {
            "path": self.path, "lines": self.lines, "rows": len(self.rows), "clean_up": clean_up, "noted": self.noted,
        }  # fmt: skip

    def sentence(self) -> str:
        """One line for people: `p.txt: 6 lines, 4 rows; blank 1 (drop: line 3); duplicates 0; …`."""
        told = []
        for reason, lines in self.found.items():
            name = reason.replace("_", " ")
            shown = ", ".join(map(str, lines[:3])) + (", …" if len(lines) > 3 else "")
            place = f" ({self.rules[reason]}: line{'s' if len(lines) > 1 else ''} {shown})" if lines else ""
            told.append(f"{name} {len(lines):,}{place}")
        return f"{self.path}: {self.lines:,} lines, {len(self.rows):,} rows; {'; '.join(told)}"


def read_source(
    spec: PromptsSpec, place: Literal["source", "test_source"] = "source", held_out: Set[str] = frozenset()
) -> Source:
    """Read and clean the file that a knob of the spec names.

    held_out: texts of the test prompts, case-folded.

    Raises:
        GranularError: no such file, a line that cannot be one prompt, or one that the clean-up refuses.
    """
    path = Path(getattr(spec, place))
    rules: dict[str, Rule] = {reason: getattr(spec.clean_up, reason) for reason in REASONS}
    noted = dict.fromkeys(NOTED, 0)
    found: dict[str, list[int]] = {reason: [] for reason in REASONS}
    dropped: dict[str, list[int]] = {reason: [] for reason in REASONS}
    rows: list[Row] = []
    lines, seen, texts, folded = 0, set(), set(), set()
    for record in read_records(path, spec, f"prompts.{place}"):
        lines += 1
        row = _row(record.line, record.text.strip(), record.metadata, spec)
        key, text, small = (row.text, row.canonical_metadata), row.text, row.text.casefold()
        noted["bom"] += record.bom
        noted["crlf"] += record.crlf
        noted["stripped"] += bool(text) and text != record.text
        reasons = (
            ("invalid_utf8", record.bad_byte, f"is not valid UTF-8 (byte {record.bad_byte} of the line)"),
            ("blank", not text, "is blank"),
            ("over_long", len(text) > spec.max_chars, f"has {len(text)} characters, more than {spec.max_chars}"),
            ("duplicates", key in seen, "repeats the text and metadata of an earlier line"),
            ("in_test", small in held_out, f"is a test prompt too, in {spec.test_source}"),
        )
        for reason, applies, why in reasons:
            if not applies:
                continue
            found[reason].append(record.line)
            if rules[reason] == "refuse":
                refuse(path, record.line, f"{why}; mend it, or set prompts.clean_up.{reason} to drop or keep")
            if rules[reason] == "drop":
                dropped[reason].append(record.line)
                break
        else:
            noted["case_only"] += text not in texts and small in folded
            noted["same_text"] += text in texts and key not in seen
            noted["tabs"] += "\t" in text
            noted["non_ascii"] += not text.isascii()
            noted["no_target"] += spec.quoted_target and "target" not in row.metadata
            seen.add(key)
            texts.add(text)
            folded.add(small)
            rows.append(row)
    return Source(str(path), rows, lines, found, dropped, noted, rules)


def _row(line: int, text: str, metadata: dict[str, Any], spec: PromptsSpec) -> Row:
    row = Row(line, text, str(metadata.get(spec.tag_column) or ""), metadata)
    if spec.quoted_target and "target" not in metadata and (phrase := quoted_phrase(text)):
        return replace(row, metadata={**metadata, "target": phrase})
    return row
