"""Study 1: G²RPO against DanceGRPO and MixGRPO at equal model evaluations, and at equal wall time."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.plan import RunPlan
from pipeline.studies import answers
from pipeline.studies.base import LONGER, Answer, Arm, Results, Size, Study
from stages.study.conclusion import Comparison
from stages.study.intervals import difference

OTHERS = ("dancegrpo", "mixgrpo")


def arms(run: RunPlan) -> Sequence[Arm]:
    return (
        Arm("g2rpo", "G²RPO", {"method": {"name": "g2rpo"}}),
        Arm("dancegrpo", "DanceGRPO", {"method": {"name": "dancegrpo", "optimizer_steps": 1}}),
        Arm("mixgrpo", "MixGRPO", {"method": {"name": "mixgrpo", "window": 2, "hold": 8}}),
    )


def answer(results: Results) -> Answer:
    steps = int(results.base["steps"].iloc[0])
    table = results.gained(steps)
    comparisons = tuple(
        Comparison(
            "G²RPO", results.label(other), answers.REWARD, difference(table, f"g2rpo{end}", f"{other}{end}"), context
        )
        for end, context in (("", "at equal model evaluations"), (LONGER, "at equal wall time"))
        for other in OTHERS
    )
    data = answers.table(results, steps)
    data.insert(1, "equal", ["wall time" if arm.key.endswith(LONGER) else "evaluations" for arm in results.arms])
    picture = answers.figure(
        results, steps, "equal-compute", "Gain at equal model evaluations", [arm.key for arm in arms_of(results)]
    )
    notes = (
        *answers.NOTES,
        "Equal wall time: faster arms are trained on, up to the time that the slowest arm took on this machine.",
    )
    return Answer(comparisons, picture, data, notes)


def arms_of(results: Results) -> list[Arm]:
    """The arms at equal evaluations."""
    return [arm for arm in results.arms if not arm.key.endswith(LONGER)]


STUDY = Study(
    name="equal-compute",
    title="Equal compute",
    question="Does G²RPO beat DanceGRPO and MixGRPO when all spend the same number of model evaluations, or time?",
    design=(
        "Every arm trains as many whole rounds as one budget of model evaluations pays for, a gradient evaluation "
        "counting 3; G²RPO scores more images a round, so it gets fewer rounds.",
    ),
    arms=arms,
    answer=answer,
    size=Size(seeds=5),
    wall_time=True,
)
