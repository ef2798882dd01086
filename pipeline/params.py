"""params.yaml → checked specs: everything a person can get wrong is found here, before any work.

Sections are plain mappings for the classes that own the knobs. A run is `align` (the defaults) with `runs.<name>` laid
over it; `--set key=value` lays one more key over that. A mistake is one sentence that names the place as written.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.overrides import known_run, merge, override
from pipeline.plan import RunPlan, ValidateSpec, rounds_within
from pipeline.retention import RetentionSpec
from stages.core.errors import GranularError, nearest
from stages.core.spec import build, read_yaml
from stages.policies.spec import PolicySpec
from stages.prompts.spec import PromptsSpec
from stages.report.spec import ReportSpec
from stages.reward.spec import ScorerSpec
from stages.rollout.grid import GridSpec
from stages.rollout.spec import SamplerSpec
from stages.update.spec import OptimizerSpec

PARAMS = Path("params.yaml")
BASE = "base"  # the name of the policy before any training, where evaluations are named
PROMPTS, EMBEDDINGS = Path("data/prompts"), Path("data/embeddings")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


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


@dataclass(frozen=True, kw_only=True)
class EvaluateSection:
    """How finished policies are compared.

    split: which prompts. prompts: how many of them. noises: images per prompt, the same for every policy.
    steps, shift: the sampler's grid. images: prompts whose images are kept as pictures.
    """

    split: Literal["test", "validation"] = "test"
    prompts: Annotated[int, Field(ge=1)] = 96
    noises: Annotated[int, Field(ge=1)] = 8
    steps: Annotated[int, Field(ge=2, le=1000)] = 16
    shift: Annotated[float, Field(gt=0)] = 3.0
    images: Annotated[int, Field(ge=1)] = 12


@dataclass(frozen=True, kw_only=True)
class Params:
    """A checked params.yaml. `raw` is what was written, the ground that `--set` lays its keys on."""

    seed: int
    prompts: PromptsSpec
    policy: PolicySpec
    sampler: SamplerSpec
    scorers: Mapping[str, ScorerSpec]
    runs: Mapping[str, RunSection]
    evaluate: EvaluateSection
    report: ReportSpec
    raw: Mapping[str, Any] = field(repr=False)


# Fields that a run's section and its plan have in common.
_SHARED = sorted({one.name for one in fields(RunSection)} & {one.name for one in fields(RunPlan)} - {"rounds"})
_KEYS = tuple(one.name for one in fields(RunSection))
_SECTIONS = ("seed", "prompts", "policy", "sampler", "scorers", "align", "runs", "evaluate", "report")


def load_params(path: Path = PARAMS, sets: Sequence[str] = (), run: str | None = None) -> Params:
    """Read and check params.yaml.

    Args:
        path: the file.
        sets: `key=value` overrides. The key is dotted, absolute (`policy.device`) or relative to the run; the value
            is YAML.
        run: the run that relative keys belong to.
    """
    return parse(read_yaml(path), sets, run)


def parse(raw: Mapping[str, Any], sets: Sequence[str] = (), run: str | None = None) -> Params:
    """The same from a mapping that was read already."""
    raw = copy.deepcopy(dict(raw))
    _refuse_unknown_sections(raw)
    if run is not None:
        known_run(raw, run)
    for text in sets:
        override(raw, text, run, _SECTIONS, _KEYS)
    _refuse_unknown_sections(raw)
    seed = raw.get("seed", 42)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise GranularError(f"seed: expected a whole number from 0 on (got {seed!r}).")
    policy = build(PolicySpec, _section(raw, "policy"), "policy")
    scorers = {
        _checked_name(name, f"scorers.{name}"): build(ScorerSpec, values, f"scorers.{name}")
        for name, values in _section(raw, "scorers").items()
    }
    defaults = _section(raw, "align")
    _refuse_unknown_keys(RunSection, defaults, "align")
    runs = {
        _checked_name(name, f"runs.{name}"): _build_run(str(name), defaults, {} if values is None else values, scorers)
        for name, values in _section(raw, "runs").items()
    }
    dotted = next((name for name in runs if "." in name), None)
    if dotted:
        raise GranularError(f"runs.{dotted}: a run of the file has no '.' in its name; it separates keys.")
    if BASE in runs:
        raise GranularError(f"runs.{BASE}: this name stands for the policy before training; choose another one.")
    prompts = build(PromptsSpec, _section(raw, "prompts"), "prompts")
    evaluation = build(EvaluateSection, _section(raw, "evaluate"), "evaluate")
    _check_splits(prompts, evaluation, runs, defaults)
    return Params(
        seed=seed,
        prompts=prompts,
        policy=policy,
        sampler=build(SamplerSpec, _section(raw, "sampler"), "sampler"),
        scorers=scorers,
        runs=runs,
        evaluate=evaluation,
        report=build(ReportSpec, _section(raw, "report"), "report"),
        raw=raw,
    )


def resolve_run(
    params: Params, name: str, sets: Sequence[str] = (), seed: int | None = None, label: str | None = None
) -> RunPlan:
    """One run, ready to be planned or computed.

    Args:
        params: the checked file.
        name: a run of it.
        sets: `key=value` overrides, see `load_params`.
        seed: takes the place of `seed`.
        label: what the result is called; `name` where nothing else is said.

    Raises:
        GranularError: no such run, a mistaken override, or a budget that does not pay for one round.
    """
    params = parse(params.raw, sets, name)
    section = params.runs[name]
    run = RunPlan(
        name=_checked_name(label or name, "--name"),
        seed=params.seed if seed is None else seed,
        rounds=section.rounds or 1,
        scorers=dict(params.scorers),
        policy=params.policy,
        sampler=params.sampler,
        prompts=PROMPTS,
        embeddings=EMBEDDINGS,
        evaluation=GridSpec(steps=params.evaluate.steps, shift=params.evaluate.shift),
        **{key: getattr(section, key) for key in _SHARED},
    )
    if section.budget is not None:
        run = replace(run, rounds=rounds_within(run, section.budget))
    return run


def require_weights(params_policy: PolicySpec, scorers: Mapping[str, ScorerSpec]) -> None:
    """Every folder and file of weights is there; says so before minutes are spent on something else."""
    if not (Path(params_policy.base) / "model_index.json").is_file():
        raise GranularError(
            f"policy.base: {params_policy.base} is no folder in diffusers layout (it has no model_index.json); "
            "save one there with DiffusionPipeline.save_pretrained, or name another."
        )
    for name, spec in scorers.items():
        path = getattr(spec, "path", None)
        if path is not None and not Path(path).exists():
            raise GranularError(f"scorers.{name}.path: {path} is not there; put the weights there or fix the path.")


def _check_splits(
    prompts: PromptsSpec, evaluation: EvaluateSection, runs: Mapping[str, RunSection], defaults: Mapping[str, Any]
) -> None:
    """Held-out prompts that are asked for are held out: said now, and not after the training before an evaluation."""
    held_out = {"test": prompts.test, "validation": prompts.validation}
    asked = [("evaluate.prompts", evaluation.prompts, evaluation.split)]
    below = defaults.get("validate")
    for name, run in runs.items():
        inherited = isinstance(below, Mapping) and below.get("prompts") == run.validate.prompts
        where = "align" if inherited else f"runs.{name}"
        if run.validate.every:
            asked.append((f"{where}.validate.prompts", run.validate.prompts, "validation"))
    for place, count, split in asked:
        if count > held_out[split]:
            raise GranularError(f"{place}: at most {held_out[split]}, as prompts.{split} holds out, got {count}.")


def _refuse_unknown_sections(raw: Mapping[str, Any]) -> None:
    for key in raw:
        if key not in _SECTIONS:
            raise GranularError(f"{key}: unknown section; {nearest(str(key), _SECTIONS)}")


def _section(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    values = raw.get(name)
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise GranularError(f"{name}: expected a section of keys, got {values!r}.")
    return values


def _checked_name(name: Any, where: str) -> str:
    """Names become folders and stages of the graph."""
    if not _NAME.fullmatch(str(name)):
        raise GranularError(f"{where}: a name has letters, digits, '_', '-' and '.' and begins with a letter or digit.")
    return str(name)


def _refuse_unknown_keys(kind: type, values: Mapping[str, Any], where: str) -> None:
    """Top-level keys only; what lies deeper is checked where the whole run is built."""
    names = {one.name for one in fields(kind)}
    for key in values:
        if key not in names:
            raise GranularError(f"{where}.{key}: unknown key; {nearest(str(key), names)}")


def _build_run(name: str, defaults: Mapping, values: Any, scorers: Mapping[str, ScorerSpec]) -> RunSection:
    where = f"runs.{name}"
    if not isinstance(values, Mapping):
        raise GranularError(f"{where}: expected a section of keys, got {values!r}.")
    _refuse_unknown_keys(RunSection, values, where)
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
