"""Study 2: is it granularity, or just more images of every branch?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.plan import RunPlan
from pipeline.studies import answers
from pipeline.studies.base import Answer, Arm, Results, Size, Study
from stages.study.conclusion import Comparison
from stages.study.intervals import difference

LARGEST = 8  # times the lab's group


def arms(run: RunPlan) -> Sequence[Arm]:
    granular = {"name": "g2rpo", "granularities": [1, 2, 3]}
    group = equal_group(run, granular, {"name": "g2rpo", "granularities": [1]})
    return (
        Arm("granular", "Λ = {1, 2, 3}", {"method": granular}),
        Arm(
            "stochastic",
            "three stochastic completions",
            {"method": {"name": "g2rpo", "granularities": [1, 1, 1], "completion": "sde"}},
        ),
        Arm("group", f"G = {group}, Λ = {{1}}", {"method": {"name": "g2rpo", "granularities": [1]}, "group": group}),
        Arm("single", "Λ = {1}", {"method": {"name": "g2rpo", "granularities": [1]}}),
    )


def equal_group(run: RunPlan, one: dict[str, Any], other: dict[str, Any]) -> int:
    """The group with which a round of the other method costs as much as a round of one."""
    from stages.methods import Plan, build
    from stages.rollout.grid import make_grid

    grid = make_grid(run.grid)

    def cost(method: dict[str, Any], group: int) -> int:
        made = build(method)
        return made.ledger(made.tree(Plan(grid, group))).equivalents

    wanted = cost(one, run.group)
    return min(range(run.group, LARGEST * run.group + 1), key=lambda group: abs(cost(other, group) - wanted))


def answer(results: Results) -> Answer:
    steps = int(results.base["steps"].iloc[0])
    table = results.gained(steps)
    comparisons = tuple(
        Comparison(
            results.label("granular"), results.label(other), answers.REWARD, difference(table, "granular", other),
            "at equal model evaluations", other != "single",
        )
        for other in ("stochastic", "group", "single")
    )  # fmt: skip
    picture = answers.figure(results, steps, "granularity", "Where more images of a branch come from")
    return Answer(comparisons, picture, answers.table(results, steps), answers.NOTES)


STUDY = Study(
    name="granularity",
    title="Granularity or more evaluations",
    question="Is it granularity that helps G²RPO, or only that every branch is judged by more images?",
    design=(
        "All arms spend one budget of model evaluations. Λ = {1, 2, 3} judges a branch by three ODE completions of "
        "different strides; the first control by three completions of stride 1 with fresh noise (deterministic ones "
        "would repeat exactly); the second by one completion, with a group so large that a round costs the same; the "
        "last is plain Λ = {1}, with more rounds.",
    ),
    arms=arms,
    answer=answer,
    size=Size(seeds=5, budget=72_000),
)
