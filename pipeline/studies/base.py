"""What a study is: arms that are trained alike but for what is asked, what is measured of them, and how that answers.

A study is one file of this package with one `Study`. It knows nothing of stores, stages or files: the runner trains and
evaluates (`runner.py`), and hands over tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pandas as pd

from pipeline.plan import RunPlan
from stages.study.conclusion import Comparison

if TYPE_CHECKING:
    from stages.report.canvas import Picture


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large a study is: what makes it an hour, or, in tests, a second.

    seeds: training seeds 1..seeds. budget: model evaluations of an arm and seed, a gradient counting 3; or `rounds`.
    prompts, noises: of an evaluation, on the test split. steps: ODE steps of it, one evaluation each.
    watched: validations during training, 0 for none. per_prompt, completions: see `stages.effect.spec`.
    changes: keys of a run laid over every arm (tests make prompts and groups smaller).
    """

    seeds: int = 3
    budget: int = 48_000
    rounds: int | None = None
    prompts: int = 96
    noises: int = 4
    steps: tuple[int, ...] = (16,)
    watched: int = 0
    per_prompt: int = 2
    completions: int = 64
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Arm:
    """One way to train. key: in names of files. label: for people. section: keys of a run, laid over `align`."""

    key: str
    label: str
    section: Mapping[str, Any]


@dataclass(frozen=True)
class Results:
    """What the runner found.

    scores: arm, seed, steps, prompt, noise, scorer, value; base: the same columns of the untrained policy (no arm, no
    seed). curves: arm, seed, round, scorer, value (means over validation images). effects: arm, seed, prompt, s,
    advantage, effect. costs: arm → rounds, equivalents, seconds (means over seeds of one training).
    arms: in their order. plans: arm → the plan of its first seed. rewards: scorer → weight, of `align`.
    """

    arms: Sequence[Arm]
    plans: Mapping[str, RunPlan]
    rewards: Mapping[str, float]
    scores: pd.DataFrame
    base: pd.DataFrame
    curves: pd.DataFrame
    effects: pd.DataFrame
    costs: pd.DataFrame

    def label(self, key: str) -> str:
        return next(arm.label for arm in self.arms if arm.key == key)

    def gained(self, steps: int, weights: Mapping[str, float] | None = None) -> pd.DataFrame:
        """Gain over the base policy of every (arm, seed) × prompt in an evaluation of so many steps: Σ_m w_m·reward_m,
        each in standard deviations of the base's images, minus the base's own on the same prompt and noises.

        weights: those of `align` where nothing else is said.
        """
        from stages.study.intervals import training_reward

        ours, base = (table[table["steps"] == steps] for table in (self.scores, self.base))
        start = training_reward(base.assign(arm="base", seed=0), base, weights or self.rewards).loc["base"].iloc[0]
        return training_reward(ours, base, weights or self.rewards) - start


@dataclass(frozen=True)
class Answer:
    """comparisons: with intervals, those that decide and those that only stand in the table. data: a row an arm."""

    comparisons: tuple[Comparison, ...]
    picture: Picture
    data: pd.DataFrame
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Study:
    """One question.

    arms: from the lab's default run (an arm without a section) to the arms. answer: from results to intervals.
    trains: whether arms are trained and evaluated; a study of credit samples one round of each and measures effects.
    wall_time: whether arms are also trained on, up to the time that the slowest one took.
    """

    name: str
    title: str
    question: str
    design: tuple[str, ...]
    arms: Callable[[RunPlan], Sequence[Arm]]
    answer: Callable[[Results], Answer]
    size: Size = field(default_factory=Size)
    trains: bool = True
    wall_time: bool = False


LONGER = ".time"  # ends the key of an arm that was trained on up to the slowest arm's time
