"""Study 7: how well a method's per-step advantage ranks what steps were really worth."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from pipeline.plan import RunPlan
from pipeline.studies.base import Answer, Arm, Results, Size, Study
from stages.advantage.compare import spearman
from stages.report.statistics import Interval
from stages.study import pictures
from stages.study.conclusion import Comparison
from stages.study.intervals import percentiles, rank_agreement

MEASURE = "rank correlation with the true step effect"
REFERENCE = "dancegrpo"


def arms(run: RunPlan) -> Sequence[Arm]:
    methods = (
        ("dancegrpo", "DanceGRPO", {"name": "dancegrpo"}),
        ("flow_grpo", "Flow-GRPO", {"name": "flow_grpo"}),
        ("mixgrpo", "MixGRPO", {"name": "mixgrpo", "window": 2}),
        ("single", "G²RPO, Λ = {1}", {"name": "g2rpo", "granularities": [1]}),
        ("granular", "G²RPO, Λ = {1, 2, 3}", {"name": "g2rpo", "granularities": [1, 2, 3]}),
        ("stepwise", "Stepwise-Flow-GRPO", {"name": "stepwise"}),
        ("densegrpo", "DenseGRPO", {"name": "densegrpo"}),
    )
    steps = {"optimizer_steps": 1}
    return tuple(
        Arm(key, label, {"method": {**method, **({} if method["name"] == "g2rpo" else steps)}})
        for key, label, method in methods
    )


def answer(results: Results) -> Answer:
    agreements: dict[str, tuple[Interval, np.ndarray]] = {}
    seeds: dict[str, list[float]] = {}
    rows = []
    for arm in results.arms:
        ours = results.effects[results.effects["arm"] == arm.key].reset_index(drop=True)
        units = ours["seed"].astype(str) + "/" + ours["prompt"].astype(str)
        columns = ours["advantage"].to_numpy(), ours["effect"].to_numpy()
        agreements[arm.key] = rank_agreement(units, *columns)
        seeds[arm.key] = [spearman(*(column[one.index] for column in columns)) for _, one in ours.groupby("seed")]
        interval = agreements[arm.key][0]
        rows.append(
            {"arm": arm.label, "steps": len(ours), MEASURE: interval.mean, "low": interval.low, "high": interval.high}
        )
    comparisons = [
        Comparison(arm.label, "", MEASURE, agreements[arm.key][0], decisive=False) for arm in results.arms
    ]  # fmt: skip
    for arm in results.arms:
        if arm.key != REFERENCE:
            comparisons.append(
                Comparison(
                    arm.label, results.label(REFERENCE), MEASURE,
                    _difference(agreements[arm.key], agreements[REFERENCE]),
                )
            )  # fmt: skip
    shown = [(arm.label, agreements[arm.key][0], seeds[arm.key]) for arm in results.arms]
    caption = (
        "Spearman's correlation of advantages with the true effect of the step, 95 % intervals by resampling prompts, "
        "a cross where they include 0, and a bar for every seed."
    )
    picture = pictures.arms("credit-quality", "What advantages know about steps", shown, MEASURE, caption)
    completions = "Flow-SDE with η = 0.7 up to the last step, which is the ODE"
    notes = (
        "True effect of a step x → x': mean reward of many completions from x' minus that of as many from x, each "
        f"scorer in standard deviations of the round's images, weighted as in training. Completions: {completions}, "
        "so that the rest of a trajectory is the noisy policy that all methods train, not the ODE by which some judge.",
        "A truth from a finite number of completions is noisy, which lowers every correlation alike; methods train "
        "different steps, so part of a difference is which steps they look at.",
        "Steps of one prompt depend on each other, so prompts are resampled, those of each seed on their own.",
    )
    return Answer(tuple(comparisons), picture, pd.DataFrame(rows), notes)


def _difference(one: tuple[Interval, np.ndarray], other: tuple[Interval, np.ndarray]) -> Interval:
    """Of two correlations of different steps, each resampled by itself."""
    return percentiles(one[0].mean - other[0].mean, one[1] - other[1], min(one[0].prompts, other[0].prompts))


STUDY = Study(
    name="credit-quality",
    title="Credit quality",
    question="How well does each method's per-step advantage rank what a step was really worth?",
    design=(
        "One round of every method under the base policy, nothing is trained. Of each prompt some trained steps are "
        "drawn at random and completed many times, from the state before and from the state after.",
    ),
    arms=arms,
    answer=answer,
    size=Size(seeds=3),
    trains=False,
)
