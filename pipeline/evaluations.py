"""Evaluations of finished policies: `data/evaluations/<name>`, where a name is a run or `base`.

All of them use the same prompts, the same initial noises and every scorer of the project, so their tables can be
compared row by row. An evaluation depends on the policy a run delivered, not on how it came about.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.params import EMBEDDINGS, PROMPTS, Params, require_weights
from pipeline.plan import evaluators, read_split
from pipeline.run_sections import BASE
from stages.core.errors import GranularError, nearest
from stages.core.publish import scratch_beside
from stages.core.resident import Resident
from stages.core.spec import read_json
from stages.evaluate import stage
from stages.evaluate.spec import EvaluateSpec
from stages.rollout.grid import GridSpec

RUNS, EVALUATIONS = Path("data/runs"), Path("data/evaluations")
# Runs of the study lie apart: they are no part of the graph that `dvc repro` knows.
STUDY = Path("data/study")


def delivered_to(params: Params, run: str) -> Path:
    """The folder of results that a run of the file, or a variation of one, belongs to."""
    kept = Path("runs") / run / "variation.json"
    of = read_json(kept)["run"] if run not in params.all_runs and kept.is_file() else run
    return STUDY / "runs" if of in params.study else RUNS


def finished_runs(runs: Path = RUNS) -> list[str]:
    """Runs that delivered a policy."""
    names = (state.parent.parent.name for state in runs.glob("*/policy/state.json"))
    # A killed run may have left a half-written folder, whose name begins with a dot.
    return sorted(name for name in names if not name.startswith("."))


def evaluate(params: Params, name: str, resident: Resident, evaluations: Path | None = None) -> Path:
    """Evaluate one policy; returns the folder, which lies in `evaluations` (by default where the run belongs).

    Raises:
        GranularError: no such policy, weights that are not there, or more prompts than the split has.
    """
    require_weights(params.policy, params.scorers)
    inputs = {"base": Path(params.policy.base), "prompts": PROMPTS, "embeddings": EMBEDDINGS}
    runs = delivered_to(params, name)
    evaluations = evaluations or (EVALUATIONS if runs == RUNS else runs.parent / "evaluations")
    if name != BASE:
        known = finished_runs(runs)
        if name not in known:
            raise GranularError(f"{name}: no finished run of that name; {nearest(name, [BASE, *known])}")
        inputs["policy"] = runs / name / "policy"
    scorers = evaluators(dict(params.scorers))
    inputs |= {f"scorer.{one}": Path(spec.path) for one, spec in scorers.items() if spec.path}
    with scratch_beside(evaluations / name) as out:
        stage.run(inputs, evaluation_spec(params, name), resident, out)
    return evaluations / name


def evaluation_spec(params: Params, name: str) -> EvaluateSpec:
    """The spec of an evaluation; only the weights differ between two of them."""
    section = params.evaluate
    ids = read_split(PROMPTS, section.split)
    if section.prompts > len(ids):
        raise GranularError(
            f"evaluate.prompts: at most {len(ids)}, the size of the {section.split} split, got {section.prompts}."
        )
    return EvaluateSpec(
        seed=params.seed,
        # Spread over the split, which is ordered by kind.
        prompts=tuple(ids[i * len(ids) // section.prompts] for i in range(section.prompts)),
        noises=section.noises,
        grid=GridSpec(steps=section.steps, shift=section.shift),
        # What a run delivers are its averaged weights, under the name a diffusers pipeline looks for.
        which="base" if name == BASE else "train",
        policy=params.policy,
        sampler=params.sampler,
        scorers=evaluators(dict(params.scorers)),
        images=section.images,
        more_steps=section.more_steps,
        more_noises=section.more_noises,
    )
