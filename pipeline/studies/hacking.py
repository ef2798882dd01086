"""Study 5: is one scorer hacked sooner than two? Evaluators that nobody trains on watch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from pipeline.plan import RunPlan, evaluators
from pipeline.studies import answers
from pipeline.studies.base import Answer, Arm, Results, Size, Study
from stages.core.errors import GranularError
from stages.report.canvas import Picture
from stages.study import pictures
from stages.study.conclusion import Comparison
from stages.study.intervals import difference, over_seeds

BOTH = "both"


def arms(run: RunPlan) -> Sequence[Arm]:
    """One arm for each trained scorer alone, and one for all of them."""
    method = {"method": {"name": "g2rpo", "granularities": [1, 2, 3]}}
    if len(run.rewards) < 2 or not _watching(run):
        raise GranularError(
            "align.rewards: this study needs two scorers to train on, and one more in section scorers that watches."
        )
    alone = [
        Arm(f"only-{name}", f"{name} alone", {**method, "rewards": {**dict.fromkeys(run.rewards), name: 1.0}})
        for name in run.rewards
    ]
    return (*alone, Arm(BOTH, " and ".join(run.rewards), method))


def _watching(run: RunPlan) -> list[str]:
    return [name for name in evaluators(run.scorers) if name not in run.rewards]


def _mean(names: Sequence[str] | Mapping[str, float]) -> dict[str, float]:
    return {name: 1 / len(names) for name in names}


def answer(results: Results) -> Answer:
    steps = int(results.base["steps"].iloc[0])
    watching = _watching(results.plans[BOTH])
    unseen = results.gained(steps, _mean(watching))
    measure = f"the untrained evaluators ({', '.join(watching)})"
    decisive, others, rows = [], [], []
    for arm in results.arms:
        own = results.gained(steps, _mean(results.plans[arm.key].rewards))
        gap = over_seeds(own.loc[arm.key] - unseen.loc[arm.key])
        mine, theirs = over_seeds(own.loc[arm.key]), over_seeds(unseen.loc[arm.key])
        if arm.key != BOTH:
            decisive.append(
                Comparison(arm.label, results.label(BOTH), measure, difference(unseen, arm.key, BOTH), "in the end")
            )
        others.append(Comparison(arm.label, "", "gain of its own reward beyond that of the untrained", gap, "", False))
        rows.append(
            {
                "arm": arm.label, "own reward": mine.mean, "untrained": theirs.mean, "untrained low": theirs.low,
                "untrained high": theirs.high, "own − untrained": gap.mean, "low": gap.low, "high": gap.high,
            }
        )  # fmt: skip
    notes = (
        *answers.NOTES,
        "Own reward and untrained evaluators: means over scorers, each in standard deviations of the base's images. "
        "Where the first rises beyond the second, a policy learns its scorers rather than the prompts.",
    )
    return Answer((*decisive, *others), _picture(results, watching), pd.DataFrame(rows), notes)


def _picture(results: Results, watching: Sequence[str]) -> Picture:
    """Every evaluator over the rounds, one panel each, means over seeds with the range of seeds."""
    panels: dict[str, dict[str, list[tuple[float, float, float, float]]]] = {}
    for name in sorted(results.curves["scorer"].unique(), key=lambda one: (one in watching, one)):
        use = "untrained" if name in watching else "trained by some"
        panels[f"{name} ({use})"] = {
            arm.label: _points(results.curves[results.curves["scorer"] == name], arm.key) for arm in results.arms
        }
    seeds = results.curves["seed"].nunique()
    caption = (
        "Validation rewards over the rounds in standard deviations of the base's images, 0 is the start; means of "
        f"{seeds} training seeds, the band from the lowest to the highest."
    )
    return pictures.lines("hacking", panels, "round", "change", caption, "Trained and untrained scorers")


def _points(curve: pd.DataFrame, arm: str) -> list[tuple[float, float, float, float]]:
    ours = curve[curve["arm"] == arm].pivot(index="round", columns="seed", values="value")
    start = curve[(curve["arm"] == arm) & (curve["round"] == 0)].set_index("seed")
    change = (ours - start["value"]) / start["std"].replace(0.0, 1.0)
    return [(float(r), float(row.mean()), float(row.min()), float(row.max())) for r, row in change.iterrows()]


STUDY = Study(
    name="hacking",
    title="Reward hacking",
    question="Is one scorer hacked sooner than two trained on together, as evaluators outside the training see it?",
    design=(
        "G²RPO trains on each scorer of `align.rewards` alone and on both, at one budget of model evaluations; scorers "
        "that are never trained on watch, along the way and in the end.",
    ),
    arms=arms,
    answer=answer,
    size=Size(seeds=3, budget=96_000, watched=6),
)
