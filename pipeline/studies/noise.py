"""Study 4: how much noise a trained step should have."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.plan import RunPlan
from pipeline.studies import answers
from pipeline.studies.base import Answer, Arm, Results, Size, Study
from stages.study import pictures
from stages.study.conclusion import Comparison
from stages.study.intervals import difference

LEVELS = (0.3, 0.5, 0.7, 0.9, 1.2)
PUBLISHED = 0.7


def arms(run: RunPlan) -> Sequence[Arm]:
    return tuple(
        Arm(f"eta-{eta:g}", f"η = {eta:g}", {"method": {"name": "g2rpo", "granularities": [1, 2, 3], "eta": eta}})
        for eta in LEVELS
    )


def answer(results: Results) -> Answer:
    steps = int(results.base["steps"].iloc[0])
    table = results.gained(steps)
    comparisons = tuple(
        Comparison(
            f"η = {eta:g}", f"η = {PUBLISHED:g}", answers.REWARD,
            difference(table, f"eta-{eta:g}", f"eta-{PUBLISHED:g}"),
        )
        for eta in LEVELS
        if eta != PUBLISHED
    )  # fmt: skip
    found = answers.gains(results, steps)
    points = [
        (eta, one.mean, one.low, one.high) for eta in LEVELS for one, _ in [found[f"eta-{eta:g}"]]
    ]  # fmt: skip
    caption = (
        f"Gain over the base policy by noise level, {len(found[f'eta-{PUBLISHED:g}'][1])} seeds each, 95 % intervals."
    )
    picture = pictures.lines(
        "noise", {"G²RPO, Λ = {1, 2, 3}": {"gain": points}}, "noise level η", f"gain in {answers.REWARD}", caption,
        "Gain by noise level",
    )  # fmt: skip
    return Answer(comparisons, picture, answers.table(results, steps), answers.NOTES)


STUDY = Study(
    name="noise",
    title="Noise level",
    question="Which noise level η of the trained step is best for G²RPO?",
    design=(
        f"G²RPO with Λ = {{1, 2, 3}} at η = {', '.join(f'{eta:g}' for eta in LEVELS)}, all else equal; every level is "
        f"compared with the published one, {PUBLISHED:g}.",
    ),
    arms=arms,
    answer=answer,
    size=Size(seeds=4, budget=60_000),
)
