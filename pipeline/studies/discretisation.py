"""Study 6: policies trained on few steps, sampled with far fewer and far more."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from pipeline.plan import RunPlan
from pipeline.studies import answers
from pipeline.studies.base import Answer, Arm, Results, Size, Study
from stages.study import pictures
from stages.study.conclusion import Comparison
from stages.study.intervals import difference, over_seeds


def arms(run: RunPlan) -> Sequence[Arm]:
    return (
        Arm("granular", "G²RPO, Λ = {1, 2, 3}", {"method": {"name": "g2rpo", "granularities": [1, 2, 3]}}),
        Arm("single", "G²RPO, Λ = {1}", {"method": {"name": "g2rpo", "granularities": [1]}}),
        Arm("dancegrpo", "DanceGRPO", {"method": {"name": "dancegrpo", "optimizer_steps": 1}}),
    )


def answer(results: Results) -> Answer:
    grids = sorted(int(steps) for steps in results.base["steps"].unique())
    tables = {steps: results.gained(steps) for steps in grids}
    comparisons = tuple(
        Comparison(
            results.label("granular"), results.label(other), answers.REWARD,
            difference(tables[steps], "granular", other), f"with {steps} sampling steps",
            other == "single" and steps in (grids[0], grids[-1]),
        )
        for steps in grids
        for other in ("single", "dancegrpo")
    )  # fmt: skip
    found = {(arm.key, steps): over_seeds(tables[steps].loc[arm.key]) for arm in results.arms for steps in grids}
    series = {
        arm.label: [
            (float(steps), one.mean, one.low, one.high) for steps in grids for one in [found[arm.key, steps]]
        ]
        for arm in results.arms
    }  # fmt: skip
    trained = results.plans["granular"].grid.steps
    caption = (
        f"Gain over the base policy sampled with the same number of steps; trained with {trained} steps, "
        f"{results.scores['seed'].nunique()} seeds each, 95 % intervals."
    )
    picture = pictures.lines(
        "discretisation", {"gain by sampling steps": series}, "sampling steps", f"gain in {answers.REWARD}", caption,
        "Gain by sampling steps", logarithmic=True,
    )  # fmt: skip
    rows = [
        {"arm": results.label(key), "steps": steps, "gain": one.mean, "low": one.low, "high": one.high}
        for (key, steps), one in found.items()
    ]
    notes = (*answers.NOTES, "Rewards are in standard deviations of the base's images with the same number of steps.")
    return Answer(comparisons, picture, pd.DataFrame(rows), notes)


STUDY = Study(
    name="discretisation",
    title="Extreme discretisation at test time",
    question="Does training at several granularities help where images are sampled with very few or very many steps?",
    design=(
        "Policies are trained on the lab's grid and sampled by the ODE on others, from the same noise; gains are over "
        "the base policy on the same grid.",
    ),
    arms=arms,
    answer=answer,
    size=Size(seeds=4, budget=60_000, steps=(4, 6, 10, 16, 20, 50), noises=2),
)
