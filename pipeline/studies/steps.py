"""Study 3: which steps to train, for noise at every step of a trajectory and for noise at a single one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.plan import RunPlan
from pipeline.studies import answers
from pipeline.studies.base import Answer, Arm, Results, Size, Study
from stages.study.conclusion import Comparison
from stages.study.intervals import difference

PARTS = ("first third", "middle third", "last third", "all steps")
NOISES: dict[str, dict[str, Any]] = {
    "broadcast": {"name": "dancegrpo", "variant": "as_in_g2rpo", "optimizer_steps": 1},
    "singular": {"name": "g2rpo", "granularities": [1], "update": "B"},
}


def arms(run: RunPlan) -> Sequence[Arm]:
    """The last step has no noise that could be trained, so a grid of T steps has T − 1 of them."""
    every = range(run.grid.steps - 1)
    parts = [*(part.tolist() for part in np.array_split(every, 3)), list(every)]
    return tuple(
        Arm(f"{noise}-{i}", f"{noise}, {name} (steps {part[0]}–{part[-1]})", {"method": {**method, "steps": part}})
        for noise, method in NOISES.items()
        for i, (name, part) in enumerate(zip(PARTS, parts))
        if part
    )


def answer(results: Results) -> Answer:
    steps = int(results.base["steps"].iloc[0])
    table = results.gained(steps)
    known = {arm.key for arm in results.arms}
    comparisons = tuple(
        Comparison(
            f"the {PARTS[i]}", "all steps", answers.REWARD, difference(table, f"{noise}-{i}", f"{noise}-3"),
            f"with {noise} noise",
        )
        for noise in NOISES
        for i in range(3)
        if f"{noise}-{i}" in known
    )  # fmt: skip
    picture = answers.figure(results, steps, "steps", "Gain by the steps that are trained")
    return Answer(comparisons, picture, answers.table(results, steps), answers.NOTES)


STUDY = Study(
    name="steps",
    title="Which steps",
    question="Which steps are worth training: the noisy ones, the clean ones, or all of them?",
    design=(
        "Broadcast noise: every step is stochastic and one reward pays all trained steps (DanceGRPO as G²RPO's paper "
        "describes it). Singular noise: one stochastic step at a time, completed by the ODE (G²RPO with Λ = {1}, one "
        "optimizer step a round). Each trains a third of the steps, or all, at one budget of model evaluations.",
    ),
    arms=arms,
    answer=answer,
    size=Size(seeds=4, budget=36_000),
)
