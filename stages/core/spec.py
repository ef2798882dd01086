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
        return _adapter(kind).validate_python(dict(values), strict=None)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join([where, *(str(part) for part in first["loc"])])
        given = "" if first["type"] == "missing" else f" (got {first['input']!r})"
        message = first["msg"][0].lower() + first["msg"][1:]
        message = "is required but missing" if first["type"] == "missing" else message
        raise GranularError(f"{place}: {message.removeprefix('value error, ')}{given}.") from None


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
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark else ""
        raise GranularError(f"{path}: not valid YAML{line}: {getattr(error, 'problem', error)}.") from None
    return data or {}


def read_json(path: Path) -> Any:
    """A JSON file, or one sentence about why not."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise GranularError(f"{path}: no such file.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise GranularError(f"{path}: not valid JSON ({error}).") from None
