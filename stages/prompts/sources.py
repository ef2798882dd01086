"""Prompt files: text, JSON lines or Parquet -> rows. Nothing disappears without a count.

Every line (or Parquet row) ends in exactly one of three ways:

    kept      one row of the prompt table
    dropped   blank, an exact duplicate of an earlier row (same text and metadata), or over-long; listed by line
    refused   the whole file is refused, with the line number: invalid UTF-8, a NUL, a carriage return inside a line,
              broken JSON, a line without a prompt

What a person should know of but what changes nothing is *noted*: a BOM, CRLF line ends, surrounding white space taken
off, tabs, non-ASCII characters (accents, quotes, emoji), rows that equal an earlier one but for upper and lower case,
rows that repeat a text with other metadata. Tabs, quotes, emoji and inner white space stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from stages.core.errors import GranularError

DROPPED = ("blank", "duplicates", "over_long")
NOTED = ("bom", "crlf", "stripped", "tabs", "non_ascii", "case_only", "same_text")
TEXT_KEYS = ("prompt", "text")  # in order of preference
_BOM = "\ufeff"

# (line number from 1, raw text, metadata)
Record = tuple[int, str, dict[str, Any]]


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
    """All rows of a source, and what became of every line: `lines == len(rows) + dropped lines`."""

    rows: list[Row]
    lines: int
    dropped: dict[str, list[int]]
    noted: dict[str, int]


def read_source(source: str, max_chars: int) -> Source:
    """Read a prompt file.

    Raises:
        GranularError: no such file, another ending, or a line that cannot be one prompt.
    """
    noted = dict.fromkeys(NOTED, 0)
    dropped: dict[str, list[int]] = {reason: [] for reason in DROPPED}
    rows: list[Row] = []
    lines, seen, texts, folded = 0, set(), set(), set()
    for line, raw, metadata in _records(source, noted):
        lines += 1
        text = raw.strip()
        noted["stripped"] += bool(text) and text != raw
        row = Row(line, text, str(metadata.get("tag") or ""), metadata)
        if not text:
            dropped["blank"].append(line)
            continue
        if len(text) > max_chars:
            dropped["over_long"].append(line)
            continue
        key = (text, row.canonical_metadata)
        if key in seen:
            dropped["duplicates"].append(line)
            continue
        if text in texts:
            noted["same_text"] += 1
        elif text.casefold() in folded:
            noted["case_only"] += 1
        seen.add(key)
        texts.add(text)
        folded.add(text.casefold())
        noted["tabs"] += "\t" in text
        noted["non_ascii"] += not text.isascii()
        rows.append(row)
    return Source(rows, lines, dropped, noted)


def _records(source: str, noted: dict[str, int]) -> Iterator[Record]:
    path = Path(source)
    readers = {".txt": _txt, ".jsonl": _jsonl, ".parquet": _parquet}
    if path.suffix not in readers:
        raise GranularError(f"prompts.source: '{source}' is no file ending in {', '.join(sorted(readers))}.")
    if not path.is_file():
        raise GranularError(f"prompts.source: no such file: {path}.")
    return readers[path.suffix](path, noted)


def _txt(path: Path, noted: dict[str, int]) -> Iterator[Record]:
    for line, text in _lines(path, noted):
        yield line, text, {}


def _jsonl(path: Path, noted: dict[str, int]) -> Iterator[Record]:
    for line, text in _lines(path, noted):
        if not text.strip():
            yield line, "", {}
            continue
        try:
            value = json.loads(text, parse_constant=_no_constant)
        except ValueError as error:
            _refuse(path, line, f"is not valid JSON ({error})")
        if not isinstance(value, dict):
            _refuse(path, line, f"holds a JSON {type(value).__name__}, expected an object with a 'prompt'")
        yield _from_keys(path, line, value)


def _parquet(path: Path, noted: dict[str, int]) -> Iterator[Record]:
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    if not set(TEXT_KEYS) & set(table.column_names):
        raise GranularError(
            f"{path}: no column 'prompt' or 'text'; it has {', '.join(table.column_names) or 'no columns'}."
        )
    for line, value in enumerate(table.to_pylist(), 1):
        # Parquet tables give every row every column: an absent key comes back as a null.
        filled = {key: item for key, item in value.items() if item is not None}
        if not set(TEXT_KEYS) & set(filled):
            yield line, "", {}
            continue
        yield _from_keys(path, line, filled)


def _from_keys(path: Path | str, line: int, value: dict[str, Any]) -> Record:
    """A record from named values: the first of `prompt`, `text` is the prompt, all other keys are metadata."""
    key = next((name for name in TEXT_KEYS if name in value), None)
    if key is None:
        _refuse(path, line, f"has no 'prompt' or 'text' key; its keys are {', '.join(map(str, value)) or 'none'}")
    text = value[key]
    if not isinstance(text, str):
        _refuse(path, line, f"'{key}' is {type(text).__name__}, expected a string")
    metadata = {name: item for name, item in value.items() if name != key}
    _check_text(path, line, text)
    try:
        json.dumps(metadata, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        _refuse(path, line, f"has metadata that cannot be kept as JSON ({error})")
    return line, text, metadata


def _lines(path: Path, noted: dict[str, int]) -> Iterator[tuple[int, str]]:
    """Lines of a UTF-8 file, split at line feeds only (U+0085 and U+2028 occur inside prompts)."""
    parts = path.read_bytes().split(b"\n")
    if not parts[-1]:
        parts.pop()  # the end of the last line, not a line of its own
    for line, raw in enumerate(parts, 1):
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            _refuse(path, line, f"is not valid UTF-8 (byte {error.start + 1} of the line); convert the file to UTF-8")
        if text.startswith(_BOM):  # also where files that had one were joined
            noted["bom"] += 1
            text = text.removeprefix(_BOM)
        if text.endswith("\r"):
            noted["crlf"] += 1
            text = text.removesuffix("\r")
        _check_text(path, line, text)
        yield line, text


def _check_text(path: Path | str, line: int, text: str) -> None:
    if "\0" in text:
        _refuse(path, line, "holds a NUL character; the file is probably UTF-16, convert it to UTF-8")
    if "\r" in text:
        _refuse(path, line, "holds a carriage return inside the line; convert line ends to line feeds")
    try:
        text.encode()
    except UnicodeEncodeError:
        _refuse(path, line, "holds half of a surrogate pair (an escape such as \\ud83d without its partner)")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _refuse(path: Path | str, line: int, why: str) -> NoReturn:
    raise GranularError(f"{path}, line {line}: {why}.")
