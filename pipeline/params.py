"""params.yaml → checked specs: everything a person can get wrong is found here, before any work.

Sections are plain mappings for the classes that own the knobs. A run is `align` (the defaults) with `runs.<name>` laid
over it; `--set key=value` lays one more key over that. A mistake is one sentence that names the place as written.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.overrides import PLACES, override, place_of
from pipeline.plan import Past, RunPlan, rounds_within
from pipeline.run_sections import (
    RunSection,
    checked_name,
    read_runs,
    refuse_twins,
    refuse_unknown_keys,
    section_of,
)
from stages.core.errors import GranularError, nearest
from stages.core.spec import build, read_yaml
from stages.policies.spec import PolicySpec
from stages.prompts.spec import PromptsSpec
from stages.report.spec import ReportSpec
from stages.reward.spec import ScorerSpec, scorer_spec
from stages.rollout.grid import GridSpec
from stages.rollout.spec import SamplerSpec

PARAMS = Path("params.yaml")
PROMPTS, EMBEDDINGS = Path("data/prompts"), Path("data/embeddings")


@dataclass(frozen=True, kw_only=True)
class EvaluateSection:
    """How finished policies are compared.

    split: which prompts. prompts: how many of them. noises: images per prompt, the same for every policy.
    steps, shift: the sampler's grid. images: prompts whose images are kept as pictures.
    more_steps: other numbers of sampling steps, scored too, each from the first `more_noises` noises.
    """

    split: Literal["test", "validation"] = "test"
    prompts: Annotated[int, Field(ge=1)] = 96
    noises: Annotated[int, Field(ge=1)] = 8
    steps: Annotated[int, Field(ge=2, le=1000)] = 16
    shift: Annotated[float, Field(gt=0)] = 3.0
    images: Annotated[int, Field(ge=1)] = 12
    more_steps: tuple[Annotated[int, Field(ge=2, le=1000)], ...] = ()
    more_noises: Annotated[int, Field(ge=1)] = 2

    def __post_init__(self) -> None:
        if len({self.steps, *self.more_steps}) <= len(self.more_steps):
            raise ValueError(f"more_steps are others than the evaluation's own {self.steps}, each once")
        if self.more_steps and self.more_noises > self.noises:
            raise ValueError(f"more_noises are the first of the {self.noises} noises, so at most as many")


@dataclass(frozen=True, kw_only=True)
class TrackSection:
    """Where curves of runs are shown (pipeline/tracking.py); no result depends on it and no stage runs again for it.

    to: `tensorboard` writes files; `wandb` (Weights & Biases) sends to its server, or with WANDB_MODE=offline keeps
        files to send later. project, tags: of Weights & Biases; WANDB_PROJECT in the environment goes before.
    """

    to: Literal["none", "tensorboard", "wandb"] = "none"
    project: Annotated[str, Field(min_length=1)] = "granular"
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Params:
    """A checked params.yaml.

    runs: those of the graph (`dvc repro`). presets: published settings to start from. study: the runs of `make study`.
    raw: what was written, the ground that `--set` lays its keys on.
    """

    seed: int
    prompts: PromptsSpec
    policy: PolicySpec
    sampler: SamplerSpec
    scorers: Mapping[str, ScorerSpec]
    runs: Mapping[str, RunSection]
    presets: Mapping[str, RunSection]
    study: Mapping[str, RunSection]
    evaluate: EvaluateSection
    report: ReportSpec
    track: TrackSection
    raw: Mapping[str, Any] = field(repr=False)

    @property
    def all_runs(self) -> dict[str, RunSection]:
        """Every run that can be planned and aligned by name."""
        return {**self.runs, **self.presets, **self.study}


# Fields that a run's section and its plan have in common.
_SHARED = sorted({one.name for one in fields(RunSection)} & {one.name for one in fields(RunPlan)} - {"rounds"})
_KEYS = tuple(one.name for one in fields(RunSection))
_SECTIONS = (
    *("seed", "prompts", "policy", "sampler", "scorers", "align", "runs", "presets", "study", "evaluate", "report"),
    "track",
)


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
        place_of(raw, run)
    for text in sets:
        override(raw, text, run, _SECTIONS, _KEYS)
    _refuse_unknown_sections(raw)
    seed = raw.get("seed", 42)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise GranularError(f"seed: expected a whole number from 0 on (got {seed!r}).")
    policy = build(PolicySpec, section_of(raw, "policy"), "policy")
    scorers = {
        checked_name(name, f"scorers.{name}"): scorer_spec(values, f"scorers.{name}")
        for name, values in section_of(raw, "scorers").items()
    }
    defaults = section_of(raw, "align")
    refuse_unknown_keys(RunSection, defaults, "align")
    known = {place: read_runs(raw, place, defaults, scorers) for place in PLACES}
    refuse_twins(known)
    runs = known["runs",]
    prompts = build(PromptsSpec, section_of(raw, "prompts"), "prompts")
    evaluation = build(EvaluateSection, section_of(raw, "evaluate"), "evaluate")
    for place, ours in known.items():
        _check_splits(prompts, evaluation, ours, defaults, ".".join(place))
    return Params(
        seed=seed,
        prompts=prompts,
        policy=policy,
        sampler=build(SamplerSpec, section_of(raw, "sampler"), "sampler"),
        scorers=scorers,
        runs=runs,
        presets=known["presets",],
        study=known["study", "runs"],
        evaluate=evaluation,
        report=build(ReportSpec, section_of(raw, "report"), "report"),
        track=build(TrackSection, section_of(raw, "track"), "track"),
        raw=raw,
    )


def resolve_run(
    params: Params,
    name: str,
    sets: Sequence[str] = (),
    seed: int | None = None,
    label: str | None = None,
    past: Past | None = None,
) -> RunPlan:
    """One run, ready to be planned or computed.

    Args:
        params: the checked file.
        name: a run of it.
        sets: `key=value` overrides, see `load_params`.
        seed: takes the place of `seed`.
        label: what the result is called; `name` where nothing else is said.
        past: rounds it takes over from another run, which count in its budget.

    Raises:
        GranularError: no such run, a mistaken override, or a budget that does not pay for one round.
    """
    params = parse(params.raw, sets, name)
    section = params.all_runs[name]
    run = RunPlan(
        name=checked_name(label or name, "--name"),
        seed=params.seed if seed is None else seed,
        rounds=section.rounds or 1,
        scorers=dict(params.scorers),
        policy=params.policy,
        sampler=params.sampler,
        prompts=PROMPTS,
        embeddings=EMBEDDINGS,
        evaluation=GridSpec(steps=params.evaluate.steps, shift=params.evaluate.shift),
        past=past,
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
        for key, other in spec.more_paths.items():
            if not Path(other).exists():
                raise GranularError(f"scorers.{name}.{key}: {other} is not there; put it there or fix the path.")


def _check_splits(
    prompts: PromptsSpec,
    evaluation: EvaluateSection,
    runs: Mapping[str, RunSection],
    defaults: Mapping[str, Any],
    place: str,
) -> None:
    """Held-out prompts that are asked for are held out: said now, and not after the training before an evaluation."""
    held_out = {"test": prompts.test, "validation": prompts.validation}
    asked = [("evaluate.prompts", evaluation.prompts, evaluation.split)]
    below = defaults.get("validate")
    for name, run in runs.items():
        inherited = isinstance(below, Mapping) and below.get("prompts") == run.validate.prompts
        where = "align" if inherited else f"{place}.{name}"
        if run.validate.every:
            asked.append((f"{where}.validate.prompts", run.validate.prompts, "validation"))
    for place, count, split in asked:
        # None: every row of a file that nobody has read yet; the evaluation itself says how many there are.
        most = held_out[split]
        if most is not None and count > most:
            raise GranularError(f"{place}: at most {most}, as prompts.{split} holds out, got {count}.")


def _refuse_unknown_sections(raw: Mapping[str, Any]) -> None:
    for key in raw:
        if key not in _SECTIONS:
            raise GranularError(f"{key}: unknown section; {nearest(str(key), _SECTIONS)}")
