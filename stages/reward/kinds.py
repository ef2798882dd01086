"""Every kind of scorer and its module; imports nothing but what it is asked about.

A scorer is one module of `stages/reward` with

    load(path, batch, device, options) -> Scorer | GroupScorer

and, where they apply,

    Options           frozen dataclass of its knobs; without it `load` is handed None
    WEIGHTS           "needed" (if it says nothing), "optional" or "none": whether it has a path
    DIFFERENTIABLE    True if it can also make maps (`stages.reward.base.DifferentiableScorer`)
    PATHS             options that are paths: what lies there is part of what the scorer is, as its weights are
    probe(options) -> Probe         what it is asked when it is loaded, if not `stages.reward.probe.plain`
    introduce(options) -> dict      of a scorer behind an address: who it is, by one light request

Its imports are light until `load` is called, because settings are checked long before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from importlib import import_module
from types import ModuleType
from typing import Any, Literal

from stages.core.errors import GranularError, nearest
from stages.core.spec import build

# A registry offers these beside each other; a run counts only those it uses as its code.
KINDS: dict[str, str] = {
    "open_clip": "stages.reward.clip",
    "hpsv2": "stages.reward.hps",
    "pickscore": "stages.reward.pickscore",
    "imagereward": "stages.reward.imagereward",
    "aesthetic": "stages.reward.aesthetic",
    "geneval": "stages.reward.geneval",
    "lab_oracle": "stages.reward.oracle",
    "pairwise": "stages.reward.pairwise",
    "callable": "stages.reward.callable",
    "jpeg_size": "stages.reward.jpeg_size",
    "ocr": "stages.reward.ocr",
    "http": "stages.reward.remote",
    "vlm": "stages.reward.vlm",
    "unigenbench": "stages.reward.unigenbench",
}


def module_of(kind: str) -> ModuleType:
    """The module of a kind.

    Raises:
        GranularError: there is no such kind.
    """
    if kind not in KINDS:
        raise GranularError(f"no scorer of kind {kind!r}; {nearest(str(kind), KINDS)}")
    return import_module(KINDS[kind])


def weights(kind: str) -> Literal["needed", "optional", "none"]:
    """Whether a scorer of this kind has a path."""
    return getattr(module_of(kind), "WEIGHTS", "needed")


def differentiable(kind: str) -> bool:
    """Whether a scorer of this kind can make maps."""
    return bool(getattr(module_of(kind), "DIFFERENTIABLE", False))


def option_names(kind: str) -> list[str]:
    """The knobs of a kind."""
    options = getattr(module_of(kind), "Options", None)
    return [] if options is None else [one.name for one in fields(options)]


def options_of(kind: str, values: Mapping[str, Any], where: str = "options") -> Any:
    """The kind's `Options`, None where it has none.

    Raises:
        GranularError: one sentence with the place of an unknown key or a wrong value.
    """
    options = getattr(module_of(kind), "Options", None)
    if options is not None:
        return build(options, values, where)
    for key in values:
        raise GranularError(f"{where}.{key}: unknown key of kind {kind}, which has no options.")
    return None


def checked_options(kind: str, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Every option by name, as plain JSON values: a default written or not gives the same.

    Raises:
        GranularError: as `options_of`.
    """
    made = options_of(kind, values, where)
    return {} if made is None else _plain(asdict(made))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value
