"""Published methods, one short file each: a tree, a credit rule and an objective.

A file here is a method: `stages/methods/<name>.py` holds one subclass of `Method`, and a run takes it by that name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from stages.core.errors import GranularError, nearest
from stages.core.spec import build as build_spec
from stages.methods.base import Method, Plan

__all__ = ["METHODS", "Method", "Plan", "build", "sampling_options"]


def _method_in(module: str) -> type[Method]:
    """The one method a file defines: a subclass of `Method` of its own that no other class of the file builds on."""
    own = [
        one for one in vars(import_module(module)).values()
        if isinstance(one, type) and issubclass(one, Method) and one.__module__ == module
    ]  # fmt: skip
    last = [one for one in own if not any(other is not one and issubclass(other, one) for other in own)]
    if len(last) != 1:
        raise GranularError(f"{module}: a method's file defines exactly one subclass of Method, this one {len(last)}.")
    return last[0]


METHODS: dict[str, type[Method]] = {
    file.stem: _method_in(f"{__name__}.{file.stem}")
    for file in sorted(Path(__file__).parent.glob("[a-z]*.py"))
    if file.stem != "base"
}


def sampling_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a method's section that decides what is sampled, defaults written out."""
    method = build(values)
    kept = {name: value for name, value in asdict(method).items() if name not in method.AFTER_SAMPLING}
    return {"name": values["name"], **kept}


def build(values: Mapping[str, Any], where: str = "method") -> Method:
    """The method a section describes: `{name: g2rpo, granularities: [1, 2, 3]}`.

    Raises:
        GranularError: an unknown method or option, with its nearest neighbour.
    """
    options = dict(values)
    name = options.pop("name", None)
    if not isinstance(name, str) or name not in METHODS:
        raise GranularError(f"{where}.name: unknown method {name!r}; {nearest(str(name), METHODS)}")
    return build_spec(METHODS[name], options, where)
