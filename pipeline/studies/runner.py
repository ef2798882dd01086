"""Run a study: train its arms, evaluate them, compute its answer, write its page. A second call finds what is there.

Order: seed by seed, so that a study that is stopped has whole replicates. Ctrl-C leaves the store as it is, and no page
without all of its numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas as pd

from pipeline.params import Params, require_weights
from pipeline.plan import RunPlan
from pipeline.reuse import Store
from pipeline.rounds import RunResult
from pipeline.studies.base import LONGER, Arm, Results, Size, Study
from pipeline.studies.lab import Lab
from pipeline.workers import Worker
from stages.core.progress import say
from stages.core.publish import scratch_beside
from stages.core.types import Ledger
from stages.study.page import Page

# The lab on two cores: 18 runs of 48,000 evaluations, evaluated and scored, took 31 minutes (`make study`).
SECONDS_PER_EVALUATION = 1.8e-3
REPORTS, FOLDER = Path("reports/studies"), Path("data/study")


@dataclass
class Clock:
    """Says how far a study is. total, done: expected evaluations; only what was computed now tells the speed."""

    name: str
    pieces: int
    total: int
    said: Callable[[str], None]
    finished: int = 0
    done: int = 0
    _worked: int = 0
    _seconds: float = 0.0
    _began: float = field(default_factory=time.monotonic)

    def piece(self, cost: int, label: str) -> None:
        """A piece is done. One that took no time worth mentioning was found in the store."""
        took, self._began = time.monotonic() - self._began, time.monotonic()
        self.finished, self.done = self.finished + 1, self.done + cost
        if took > 0.1 * SECONDS_PER_EVALUATION * cost:
            self._worked, self._seconds = self._worked + cost, self._seconds + took
        speed = self._seconds / self._worked if self._worked else SECONDS_PER_EVALUATION
        left = max(self.total - self.done, 0) * speed / 60
        self.said(f"{self.name}: {label}, {self.finished} of {self.pieces}; about {left:.0f} min left")


def run_study(
    study: Study,
    params: Params,
    store: Store,
    worker: Worker,
    *,
    size: Size | None = None,
    folder: Path = FOLDER,
    reports: Path = REPORTS,
    said: Callable[[str], None] = say,
) -> Page:
    """Everything, and the page under `reports/<study>`.

    Raises:
        GranularError: weights that are not there, a gate, …
        SystemExit: 130 after Ctrl-C; the next call resumes.
    """
    require_weights(params.policy, params.scorers)
    lab = Lab(params, size or study.size, store, worker, folder / study.name, study.name)
    arms = study.arms(lab.plan(Arm("default", "", {"method": {"name": "g2rpo"}}), 1))
    seeds = range(1, lab.size.seeds + 1)
    plans = {(arm.key, seed): lab.plan(arm, seed) for seed in seeds for arm in arms}
    costs = {key: lab.expected(run, trains=study.trains) for key, run in plans.items()}
    total = sum(costs.values()) + (lab.evaluation_cost() if study.trains else 0)
    clock = Clock(study.name, len(plans), total, said)
    minutes = total * SECONDS_PER_EVALUATION / 60
    more = ", and more to bring faster arms up to equal wall time" if study.wall_time else ""
    said(
        f"{study.name}: {len(arms)} arms × {len(seeds)} training seeds, {total:,} model evaluations (one with gradient "
        f"counting 3), about {minutes:.0f} min on two cores{more}; what is in the store is found"
    )
    results = (
        _trained(study, lab, arms, plans, costs, clock) if study.trains else _measured(lab, arms, plans, costs, clock)
    )
    page = paged(study, lab, results, total)
    with scratch_beside(reports / study.name) as out:
        page.write(out)
    said(f"{study.name}: {page.conclusion}")
    said(f"{study.name}: wrote {reports / study.name / 'index.html'}")
    return page


Plans = dict[tuple[str, int], RunPlan]


def _trained(
    study: Study, lab: Lab, arms: Sequence[Arm], plans: Plans, costs: dict[tuple[str, int], int], clock: Clock
) -> Results:
    scores: list[pd.DataFrame] = []
    curves: list[pd.DataFrame] = []
    spent: list[dict[str, object]] = []
    base: pd.DataFrame | None = None

    def work(arm: Arm, seed: int, run: RunPlan) -> None:
        nonlocal base
        result = lab.train(run)
        if base is None:
            base = pd.concat([lab.evaluate(run, result.start, steps) for steps in lab.size.steps], ignore_index=True)
        for steps in lab.size.steps:
            scores.append(lab.evaluate(run, result.policy, steps).assign(arm=arm.key, seed=seed))
        curves.extend(_curve(result, arm.key, seed))
        spent.append({"arm": arm.key, "seed": seed, **_spent(result)})

    for (key, seed), run in plans.items():
        arm = next(one for one in arms if one.key == key)
        work(arm, seed, run)
        clock.piece(costs[key, seed], f"{arm.label}, seed {seed}")
    if study.wall_time:
        longer = _longer(lab, arms, pd.DataFrame(spent))
        clock.pieces += len(longer) * lab.size.seeds
        for arm, rounds in longer:
            for seed in range(1, lab.size.seeds + 1):
                run = lab.plan(arm, seed, rounds)
                clock.total += lab.expected(run, trains=True)
                work(arm, seed, run)
                clock.piece(lab.expected(run, trains=True), f"{arm.label}, seed {seed}")
        arms = [*arms, *(arm for arm, _ in longer)]
    assert base is not None
    first = {
        arm.key: next(run for (key, _), run in plans.items() if key == arm.key.removesuffix(LONGER)) for arm in arms
    }
    table = pd.DataFrame(spent).groupby("arm", sort=False)[["rounds", "evaluations", "seconds"]].mean()
    return Results(
        arms, first, lab.plan(Arm("default", "", {"method": {"name": "g2rpo"}}), 1).rewards,
        pd.concat(scores, ignore_index=True), base,
        pd.concat(curves, ignore_index=True) if curves else pd.DataFrame(), pd.DataFrame(), table,
    )  # fmt: skip


def _longer(lab: Lab, arms: Sequence[Arm], spent: pd.DataFrame) -> list[tuple[Arm, int]]:
    """Every arm but the slowest again, with as many rounds as fit into the slowest one's time (never fewer)."""
    means = spent.groupby("arm")[["rounds", "seconds"]].mean()
    limit = float(means["seconds"].max())
    found = []
    for arm in arms:
        rounds, seconds = (float(means.loc[arm.key, name]) for name in ("rounds", "seconds"))
        wanted = int(rounds * limit / seconds) if seconds else int(rounds)
        found.append((replace(arm, key=arm.key + LONGER), max(wanted, int(rounds))))
    return found


def _curve(result: RunResult, arm: str, seed: int) -> list[pd.DataFrame]:
    from pipeline.outputs import validation_table

    tables = []
    for round_, one in sorted(result.validations.items()):
        means = validation_table(one).groupby("scorer", as_index=False)["value"].agg(value="mean", std="std")
        tables.append(means.assign(arm=arm, seed=seed, round=round_))
    return tables


def _spent(result: RunResult) -> dict[str, float]:
    from pipeline.outputs import round_ledger

    parts = [part for one in result.rounds for part in one.artifacts().values()]
    return {
        "rounds": len(result.rounds),
        "evaluations": sum((round_ledger(one) for one in result.rounds), Ledger()).equivalents,
        "seconds": sum(part.published.seconds for part in parts),
    }


def _measured(
    lab: Lab, arms: Sequence[Arm], plans: Plans, costs: dict[tuple[str, int], int], clock: Clock
) -> Results:  # fmt: skip
    tables = []
    for (key, seed), run in plans.items():
        tables.append(lab.effects(run).assign(arm=key, seed=seed))
        clock.piece(costs[key, seed], f"{next(arm.label for arm in arms if arm.key == key)}, seed {seed}")
    first = {key: run for (key, seed), run in plans.items() if seed == 1}
    empty = pd.DataFrame()
    return Results(
        arms, first, dict(next(iter(first.values())).rewards), empty, empty, empty,
        pd.concat(tables, ignore_index=True), empty,
    )  # fmt: skip


def paged(study: Study, lab: Lab, results: Results, total: int) -> Page:
    """The page of an answer."""
    answer, size = study.answer(results), lab.size
    run = next(iter(results.plans.values()))
    design = (
        *study.design,
        f"{size.seeds} training seeds an arm; {run.prompts_per_round} prompts a round, {run.group} samples a group, "
        f"{run.grid.steps} sampling steps in training, learning rate {run.optimizer.lr:g}.",
    )
    facts = [("model evaluations by the plan, one with gradient counting 3", f"{total:,}")]
    if study.trains:
        words = " and ".join(str(steps) for steps in size.steps)
        facts.append(
            ("evaluation", f"{len(lab.prompts())} test prompts × {size.noises} initial noises, {words} ODE steps")
        )
    return Page(
        study.name, study.title, study.question, design, answer.comparisons, answer.picture, tuple(facts), answer.data,
        answer.notes,
    )  # fmt: skip
