"""Runs as params.yaml writes them: defaults below, a run's own keys above, each mistake named where it was written."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.overrides import merge, runs_at
from pipeline.plan import ValidateSpec
from pipeline.retention import RetentionSpec
from stages.core.errors import GranularError, nearest
from stages.core.spec import build
from stages.reward.spec import ScorerSpec
from stages.rollout.grid import GridSpec
from stages.update.spec import OptimizerSpec

BASE = "base"  # the name of the policy before any training, where evaluations are named
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """One run: `align` with `runs.<name>` laid over it.

    method: name and options (stages/methods). rewards: scorer → weight.
    budget: model evaluations, one with gradient counting 3 (`Ledger.equivalents`); the run has as many whole rounds
        as it pays for. rounds: the number of rounds instead; exactly one of the two is given.
    prompts_per_round, group: P prompts with G samples each (per trained step for branching methods).
    ema, update_batch: see UpdateSpec. failures: see AdvantageSpec.
    """

    method: dict[str, Any]
    rewards: Annotated[dict[str, Annotated[float, Field(allow_inf_nan=False)]], Field(min_length=1)]
    budget: Annotated[int, Field(ge=1)] | None = None
    rounds: Annotated[int, Field(ge=1)] | None = None
    prompts_per_round: Annotated[int, Field(ge=1)] = 24
    group: Annotated[int, Field(ge=2)]
    grid: GridSpec = field(default_factory=GridSpec)
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    ema: Annotated[float, Field(ge=0, lt=1)] = 0.9
    update_batch: Annotated[int, Field(ge=1)] = 64
    failures: Literal["stop", "drop"] = "stop"
    validate: ValidateSpec = field(default_factory=ValidateSpec)
    retention: RetentionSpec = field(default_factory=RetentionSpec)


def section_of(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    values = raw.get(name)
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise GranularError(f"{name}: expected a section of keys, got {values!r}.")
    return values


def checked_name(name: Any, where: str) -> str:
    """Names become folders and stages of the graph."""
    if not NAME.fullmatch(str(name)):
        raise GranularError(f"{where}: a name has letters, digits, '_', '-' and '.' and begins with a letter or digit.")
    return str(name)


def refuse_unknown_keys(kind: type, values: Mapping[str, Any], where: str) -> None:
    """Top-level keys only; what lies deeper is checked where the whole run is built."""
    names = {one.name for one in fields(kind)}
    for key in values:
        if key not in names:
            raise GranularError(f"{where}.{key}: unknown key; {nearest(str(key), names)}")


def read_runs(
    raw: Mapping[str, Any], place: tuple[str, ...], defaults: Mapping[str, Any], scorers: Mapping[str, ScorerSpec]
) -> dict[str, RunSection]:
    """The runs of one place of the file; those of the study have its own keys between `align` and themselves."""
    where = ".".join(place)
    written = runs_at(raw, place)
    if len(place) > 1:
        own = {key: value for key, value in section_of(raw, place[0]).items() if key != place[1]}
        refuse_unknown_keys(RunSection, own, place[0])
        defaults = merge(defaults, own)
    for name in written:
        checked_name(name, f"{where}.{name}")
        if "." in name:
            raise GranularError(f"{where}.{name}: a run of the file has no '.' in its name; it separates keys.")
        if name == BASE:
            raise GranularError(f"{where}.{BASE}: this name stands for the policy before training; choose another one.")
    return {
        name: _build_run(f"{where}.{name}", defaults, {} if values is None else values, scorers)
        for name, values in written.items()
    }


def refuse_twins(known: Mapping[tuple[str, ...], Mapping[str, RunSection]]) -> None:
    """A name stands for one run of the file."""
    seen: dict[str, str] = {}
    for place, runs in known.items():
        for name in runs:
            if name in seen:
                raise GranularError(
                    f"{'.'.join(place)}.{name}: {seen[name]} has a run of that name; choose another one."
                )
            seen[name] = ".".join(place)


def _build_run(where: str, defaults: Mapping, values: Any, scorers: Mapping[str, ScorerSpec]) -> RunSection:
    if not isinstance(values, Mapping):
        raise GranularError(f"{where}: expected a section of keys, got {values!r}.")
    refuse_unknown_keys(RunSection, values, where)
    merged = merge(defaults, values)
    try:
        section = build(RunSection, merged, where)
        _check_run(section, where, scorers)
    except GranularError as error:
        raise GranularError(_as_written(str(error), where, values, defaults)) from None
    return section


def _as_written(sentence: str, where: str, values: Mapping, defaults: Mapping) -> str:
    """The sentence with the place where the person wrote the value: `align.group` where the run inherits it."""
    match = re.match(rf"{re.escape(where)}\.([\w.]+)", sentence)
    if match and not _reaches(values, match[1].split(".")) and _reaches(defaults, match[1].split(".")):
        return "align" + sentence[len(where) :]
    return sentence


def _reaches(values: Any, keys: Sequence[str]) -> bool:
    for key in keys:
        if not isinstance(values, Mapping):
            return True  # an index into a list or a part of a value: the value itself was written here
        if key not in values:
            return False
        values = values[key]
    return True


def _check_run(section: RunSection, where: str, scorers: Mapping[str, ScorerSpec]) -> None:
    from stages.methods import Plan
    from stages.methods import build as build_method
    from stages.rollout.grid import make_grid

    if (section.budget is None) == (section.rounds is None):
        given = "neither" if section.budget is None else "both"
        raise GranularError(f"{where}: give exactly one of budget and rounds, not {given}.")
    for name in section.rewards:
        if name not in scorers:
            raise GranularError(f"{where}.rewards.{name}: no such scorer; {nearest(name, scorers)}")
    method = build_method(section.method, f"{where}.method")
    grid = make_grid(section.grid)
    try:
        method.check(Plan(grid, section.group))
    except GranularError as error:
        raise GranularError(f"{where}.{error}") from None
    judged = [name for name in section.rewards if scorers[name].kind == "pairwise"]
    if judged:
        leaves = method.tree(Plan(grid, section.group)).leaves
        groups = Counter(zip(leaves["s"].tolist(), leaves["stride"].tolist()))
        if min(groups.values()) < 2:
            alone = min(groups, key=groups.__getitem__)[0]
            raise GranularError(
                f"{where}.rewards.{judged[0]}: a win rate needs at least two images to compare, and the method scores "
                f"one alone (of state {alone}, which the group shares); choose a scorer that judges images alone."
            )
    for name in method.token_credit.scorers if method.token_credit else ():
        if name not in section.rewards:
            raise GranularError(
                f"{where}.rewards: the method weighs tokens by the maps of scorer '{name}', so it must be among the "
                "rewards; its weight may be 0."
            )
        if not scorers[name].differentiable:
            raise GranularError(
                f"{where}.method: scorer '{name}' is of kind {scorers[name].kind}, which has no gradient, so the "
                "method cannot weigh tokens by its maps."
            )
