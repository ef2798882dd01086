"""Published methods, one short file each: a tree, a credit rule and an objective.

A file here is a method: `stages/methods/<name>.py` holds one subclass of `Method`, and a run takes it by that name. A
file anywhere else is one by its path, `{name: ./my.py}`; and `credit: ./my.py:fn` beside a method's options puts a
function of one's own in the place of its credit rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from importlib import import_module
from pathlib import Path
from typing import Any

from stages.advantage.credit import Credit
from stages.advantage.outside import credit_of
from stages.core import outside
from stages.core.errors import GranularError, nearest
from stages.core.spec import build as build_spec
from stages.methods.base import Method, Plan

__all__ = ["METHODS", "Method", "Plan", "build", "credit_file", "method_class", "sampling_options"]


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


def method_class(name: Any, where: str = "method") -> type[Method]:
    """The class behind a name of the registry, or in a file of one's own.

    Raises:
        GranularError: no such method, with the nearest; or a file that is none.
    """
    if isinstance(name, str) and outside.is_file(name):
        module = outside.load(Path(name))
        try:
            return _method_in(module.__name__)
        except GranularError:
            raise GranularError(
                f"{name}: a method's file defines exactly one subclass of stages.methods.base.Method; for a credit "
                f"rule alone, name its function, as in {name}:credit."
            ) from None
    if not isinstance(name, str) or name not in METHODS:
        raise GranularError(f"{where}.name: unknown method {name!r}; {nearest(str(name), METHODS)}")
    return METHODS[name]


def credit_file(values: Mapping[str, Any], where: str = "method") -> tuple[Path, str] | None:
    """File and function that a section puts in the place of the method's credit rule."""
    text = values.get("credit")
    if text is None:
        return None
    if not isinstance(text, str):
        raise GranularError(f"{where}.credit: expected FILE.py:FUNCTION, got {text!r}.")
    return outside.split(text, f"{where}.credit")


def sampling_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a method's section that decides what is sampled, defaults written out."""
    method = build({key: value for key, value in values.items() if key != "credit"})
    kept = {name: value for name, value in asdict(method).items() if name not in method.AFTER_SAMPLING}
    return {"name": values["name"], **kept}


def build(values: Mapping[str, Any], where: str = "method") -> Method:
    """The method a section describes: `{name: g2rpo, granularities: [1, 2, 3]}`.

    Raises:
        GranularError: an unknown method or option, with its nearest neighbour; a file that cannot be loaded.
    """
    options = dict(values)
    own = credit_file(options, where)
    options.pop("credit", None)
    kind = method_class(options.pop("name", None), where)
    method = build_spec(kind, options, where)
    return method if own is None else _with_credit(method, credit_of(*own))


def _with_credit(method: Method, credit: Credit) -> Method:
    """The same method with another rule from rewards to advantages."""
    kind = type(type(method).__name__, (type(method),), {"credit": property(lambda self: credit)})
    return kind(**{one.name: getattr(method, one.name) for one in fields(method)})
