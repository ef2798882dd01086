"""Prompt files: text, JSON lines or Parquet -> records, one for each line (or Parquet row).

A line that cannot be one prompt whatever the clean-up says refuses the whole file, with its number: a NUL, a carriage
return inside the line, broken JSON, a line without a prompt. Tabs, quotes, emoji and inner white space stay as they
are. What a record's text is worth (blank, duplicate, …) is decided in `cleaning.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from stages.core.errors import GranularError
from stages.prompts.spec import PromptsSpec

TEXT_KEYS = ("prompt", "text")  # in order of preference
_BOM = "\ufeff"


@dataclass(frozen=True)
class Record:
    """One line as read. line: its number from 1. bad_byte: place of the first byte in it that is no UTF-8, from 1 (0:
    none); such bytes are U+FFFD in `text`. bom, crlf: whether the line had one."""

    line: int
    text: str
    metadata: dict[str, Any]
    bad_byte: int = 0
    bom: bool = False
    crlf: bool = False


def read_records(path: Path, spec: PromptsSpec, place: str) -> Iterator[Record]:
    """The lines of a prompt file in order; `place` is the knob that names the file.

    Raises:
        GranularError: no such file, another ending, or a line that cannot be one prompt.
    """
    readers = {".txt": _txt, ".jsonl": _jsonl, ".parquet": _parquet}
    if path.suffix not in readers:
        raise GranularError(f"{place}: '{path}' is no file ending in {', '.join(sorted(readers))}.")
    if not path.is_file():
        raise GranularError(f"{place}: no such file: {path}.")
    for record in readers[path.suffix](path, spec):
        if not _passed_over(record, spec):
            _check_text(path, record.line, record.text)
        yield record


def _passed_over(record: Record, spec: PromptsSpec) -> bool:
    """Whether nobody will read the record's text, so that it need not make sense."""
    return bool(record.bad_byte) and spec.clean_up.invalid_utf8 != "keep"


def _txt(path: Path, spec: PromptsSpec) -> Iterator[Record]:
    yield from _lines(path)


def _jsonl(path: Path, spec: PromptsSpec) -> Iterator[Record]:
    for record in _lines(path):
        if _passed_over(record, spec) or not record.text.strip():
            yield record
            continue
        try:
            value = json.loads(record.text, parse_constant=_no_constant)
        except ValueError as error:
            refuse(path, record.line, f"is not valid JSON ({error})")
        if not isinstance(value, dict):
            refuse(path, record.line, f"holds a JSON {type(value).__name__}, expected an object with a 'prompt'")
        text, metadata = _named(path, record.line, value, spec)
        yield Record(record.line, text, metadata, record.bad_byte, record.bom, record.crlf)


def _parquet(path: Path, spec: PromptsSpec) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    keys = _text_keys(spec)
    try:
        table = pq.read_table(path)
    except pa.ArrowInvalid as error:
        raise GranularError(f"{path}: cannot be read as Parquet ({error}).") from None
    if not set(keys) & set(table.column_names):
        names = " or ".join(f"'{key}'" for key in keys)
        raise GranularError(f"{path}: no column {names}; it has {', '.join(table.column_names) or 'no columns'}.")
    for place, name in enumerate(table.column_names):
        # As bytes, so that a text that is no UTF-8 costs its row alone and not the file.
        if name in keys and _is_text(table.schema.field(name).type):
            table = table.set_column(place, name, table[name].cast(pa.large_string()).cast(pa.large_binary()))
    try:
        rows = table.to_pylist()
    except UnicodeDecodeError as error:
        raise GranularError(f"{path}: a column beside the prompt is not valid UTF-8 ({error}).") from None
    for line, row in enumerate(rows, 1):
        # Parquet tables give every row every column: an absent key comes back as a null.
        value = {key: item for key, item in row.items() if item is not None}
        bad_byte = 0
        for key in keys:
            if isinstance(value.get(key), bytes):
                value[key], bad = _decoded(value[key])
                bad_byte = bad_byte or bad
        text, metadata = _named(path, line, value, spec) if set(keys) & set(value) else ("", {})
        yield Record(line, text, metadata, bad_byte)


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _text_keys(spec: PromptsSpec) -> tuple[str, ...]:
    return TEXT_KEYS if spec.text_column is None else (spec.text_column,)


def _named(path: Path, line: int, value: dict[str, Any], spec: PromptsSpec) -> tuple[str, dict[str, Any]]:
    """Text and metadata of named values: the first text key there is the prompt, all other keys are metadata."""
    keys = _text_keys(spec)
    key = next((name for name in keys if name in value), None)
    if key is None:
        names = " or ".join(f"'{name}'" for name in keys)
        refuse(path, line, f"has no {names} key; its keys are {', '.join(map(str, value)) or 'none'}")
    text = value[key]
    if not isinstance(text, str):
        refuse(path, line, f"'{key}' is {type(text).__name__}, expected a string")
    metadata = {name: item for name, item in value.items() if name != key}
    try:
        json.dumps(metadata, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        refuse(path, line, f"has metadata that cannot be kept as JSON ({error})")
    return text, metadata


def _lines(path: Path) -> Iterator[Record]:
    """Lines of a file, split at line feeds only (U+0085 and U+2028 occur inside prompts)."""
    parts = path.read_bytes().split(b"\n")
    if not parts[-1]:
        parts.pop()  # the end of the last line, not a line of its own
    for line, raw in enumerate(parts, 1):
        text, bad_byte = _decoded(raw)
        bom, crlf = text.startswith(_BOM), text.endswith("\r")  # a BOM also where files that had one were joined
        yield Record(line, text.removeprefix(_BOM).removesuffix("\r"), {}, bad_byte, bom, crlf)


def _decoded(raw: bytes) -> tuple[str, int]:
    """A text, and the place of its first byte that is no UTF-8, from 1 (0: none)."""
    try:
        return raw.decode("utf-8"), 0
    except UnicodeDecodeError as error:
        return raw.decode("utf-8", errors="replace"), error.start + 1


def _check_text(path: Path, line: int, text: str) -> None:
    if "\0" in text:
        refuse(path, line, "holds a NUL character; the file is probably UTF-16, convert it to UTF-8")
    if "\r" in text:
        refuse(path, line, "holds a carriage return inside the line; convert line ends to line feeds")
    try:
        text.encode()
    except UnicodeEncodeError:
        refuse(path, line, "holds half of a surrogate pair (an escape such as \\ud83d without its partner)")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def refuse(path: Path, line: int, why: str) -> NoReturn:
    """Refuse a file for one of its lines."""
    raise GranularError(f"{path}, line {line}: {why}.")
