"""All properties of one method, or of one credit rule, with a verdict each."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from stages.advantage.outside import credit_of
from stages.checks import credit, method
from stages.checks.sample import CLAIMS, Sample
from stages.core import outside
from stages.core.errors import GranularError
from stages.methods import METHODS, Method, build
from stages.rollout.grid import GridSpec, make_grid

# Steps and samples of a group: the lab's, and those of papers.
SIZES = ((8, 8), (16, 16), (10, 24), (10, 48))


@dataclass(frozen=True)
class Verdict:
    """name: the property, as a phrase. wrong: why it does not hold, empty where it does. skipped: it is not claimed."""

    name: str
    wrong: str = ""
    skipped: bool = False


def subject(target: str, on: str) -> Sample:
    """What is checked: a method by its name or file, or a function `my.py:fn` as the credit rule of method `on`.

    Raises:
        GranularError: no such thing, or a method with a knob that has no default.
    """
    if ":" in target:
        path, name = outside.split(target, "check-method")
        claims = getattr(outside.attribute(path, name), "claims", CLAIMS)
        return replace(fitting(build({"name": on})), rule=credit_of(path, name), claims=_known(target, claims))
    if not outside.is_file(target) and target not in METHODS:
        raise GranularError(f"{target}: give a method's file, FILE.py:FUNCTION for a credit rule, or a method's name.")
    if outside.is_file(target):
        outside.source(Path(target))
    made = build({"name": target}, target)
    return replace(fitting(made), claims=_known(target, made.claims))


def fitting(method: Method) -> Sample:
    """A round of a method in one of the usual sizes, the first that its options fit.

    Raises:
        GranularError: none of them does; the sentence is the method's own.
    """
    refused = GranularError("unreachable")
    for steps, group in SIZES:
        sample = Sample(method, group, make_grid(GridSpec(steps=steps)))
        try:
            method.check(sample.plan)
            return sample
        except GranularError as error:
            refused = refused if steps != SIZES[0][0] else error
    raise refused


def _known(target: str, claims: object) -> frozenset[str]:
    if not isinstance(claims, (set, frozenset, tuple, list)) or not set(claims) <= set(credit.CLAIMED):
        raise GranularError(f"{target}: claims are some of {', '.join(sorted(credit.CLAIMED))}, got {claims!r}.")
    return frozenset(claims)


def verdicts(sample: Sample) -> Iterator[Verdict]:
    """One property after the other; whatever a method raises is its failure, and the next one is tried."""
    own = sample.rule is None
    checks = [
        *(method.TREE if own else ()),
        *credit.COMMON,
        *(credit.OF_METHODS if own else ()),
        *(check for claim in sorted(credit.CLAIMED) if claim in sample.claims for check in credit.CLAIMED[claim]),
        *(method.OBJECTIVE if own else ()),
    ]
    for check in checks:
        wrong = ""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                check(sample)
        except GranularError as error:
            wrong = str(error)
        except Exception as error:
            wrong = f"raised {outside.told(error)}"
        yield Verdict(_phrase(check.__name__), wrong)
    for claim in sorted(set(credit.CLAIMED) - sample.claims):
        for check in credit.CLAIMED[claim]:
            yield Verdict(_phrase(check.__name__), skipped=True)


def _phrase(name: str) -> str:
    return name.replace("_", " ")
