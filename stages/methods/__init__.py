"""Published methods, one short file each: a tree, a credit rule and an objective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from stages.core.errors import GranularError, nearest
from stages.core.spec import build as build_spec
from stages.methods.base import Method, Plan
from stages.methods.dancegrpo import DanceGRPO
from stages.methods.densegrpo import DenseGRPO
from stages.methods.g2rpo import G2RPO
from stages.methods.mixgrpo import MixGRPO
from stages.methods.stepwise import StepwiseFlowGRPO
from stages.methods.tp_grpo import TPGRPO

METHODS: dict[str, type[Method]] = {
    "g2rpo": G2RPO,
    "dancegrpo": DanceGRPO,
    "mixgrpo": MixGRPO,
    "stepwise": StepwiseFlowGRPO,
    "tp_grpo": TPGRPO,
    "densegrpo": DenseGRPO,
}

__all__ = ["METHODS", "Method", "Plan", "build", "sampling_options"]


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
