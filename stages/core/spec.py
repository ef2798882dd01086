"""From a mapping a person wrote to a frozen dataclass: unknown keys, wrong types and bad ranges are refused.

A knob lives beside the class it configures (a plain frozen dataclass whose fields may carry pydantic constraints,
`Annotated[int, Field(ge=2)]`). This module turns a section of `params.yaml` into such a class, with one sentence
for every mistake.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from stages.core.errors import GranularError, nearest

T = TypeVar("T")


@cache
def _adapter(kind: type) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def build(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    """`kind(**values)`, validated; `where` is the dotted place shown in messages (`runs.g2rpo.method`).

    Raises:
        GranularError: one sentence: an unknown key with its nearest neighbour, a wrong type, a value out of range.
    """
    from pydantic import ValidationError

    if not isinstance(values, Mapping):
        raise GranularError(f"{where}: expected a section of keys, got {values!r}.")
    _refuse_unknown(kind, values, where)
    try:
        # As strict JSON: lists may become tuples and 1 a float, but "8" is no number and `true` no 1.
        return _adapter(kind).validate_json(json.dumps(dict(values), allow_nan=False), strict=True)
    except (TypeError, ValueError) as error:
        if not isinstance(error, ValidationError):
            raise GranularError(f"{where}: a value is not a finite number, text, list or section ({error}).") from None
        first = error.errors()[0]
        raise _sentence(first, where) from None


def _sentence(first: Any, where: str) -> GranularError:
    """One of pydantic's findings as ours."""
    place = ".".join([where, *(str(part) for part in first["loc"])])
    if first["type"] == "missing":
        return GranularError(f"{place}: is required but missing.")
    message = (first["msg"][0].lower() + first["msg"][1:]).removeprefix("value error, ")
    message = message.replace("input should be a dictionary or an instance of", "expected the keys of")
    for theirs, ours in ((" after validation", ""), ("dictionary", "section"), ("input should", "should")):
        message = message.replace(theirs, ours)
    return GranularError(f"{place}: {message} (got {first['input']!r}).")


def _refuse_unknown(kind: type, values: Mapping[str, Any], where: str) -> None:
    import typing

    hints = typing.get_type_hints(kind)
    names = {field.name for field in fields(kind) if field.init}  # type: ignore[arg-type]
    for key, value in values.items():
        if key not in names:
            raise GranularError(f"{where}.{key}: unknown key; {nearest(str(key), names)}")
        inner = hints.get(key)
        named = typing.get_origin(inner) in (dict, Mapping)  # name -> section, such as `scorers`
        sections = value if named and isinstance(value, Mapping) else {"": value}
        for option in (inner, *typing.get_args(inner)):
            for name, section in sections.items():
                if is_dataclass(option) and isinstance(section, Mapping):
                    place = ".".join(part for part in (where, str(key), str(name)) if part)
                    _refuse_unknown(option, section, place)  # type: ignore[arg-type]


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML 1.2 file as plain Python values (so `1e-5` is a float, as it is for DVC)."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    if not path.is_file():
        raise GranularError(f"{path}: no such file; run from the project folder or name another file.")
    try:
        data = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise GranularError(f"{path}: not UTF-8 (byte {error.start + 1}); convert the file to UTF-8.") from None
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark else ""
        problem = " ".join(str(getattr(error, "problem", error)).split()).rstrip(".")
        raise GranularError(f"{path}: not valid YAML{line}: {problem}.") from None
    if data is not None and not isinstance(data, dict):
        raise GranularError(f"{path}: expected sections of keys, got a {type(data).__name__}.")
    return data or {}


def read_json(path: Path) -> Any:
    """A JSON file, or one sentence about why not."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise GranularError(f"{path}: no such file.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise GranularError(f"{path}: not valid JSON ({error}).") from None
