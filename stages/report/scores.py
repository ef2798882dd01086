"""Scores: what tables, figures and conclusions are computed from, per run and per row of runs that differ by seed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from stages.core.types import Ledger
from stages.report.reader import Evaluation, Results, Run
from stages.report.statistics import Bootstrap, Interval, paired, per_prompt

COST = {
    "rounds": "rounds",
    "evaluations": "model evaluations",
    "with_gradient": "gradient evaluations",
    "frozen": "frozen evaluations",
    "equivalents": "equivalents",
    "images": "images decoded",
    "scores": "images scored",
    "optimizer_steps": "optimizer steps",
}


@dataclass(frozen=True)
class Score:
    """One policy under one scorer: its mean, and its paired difference to the base (None for the base itself)."""

    policy: str
    scorer: str
    trained: bool
    mean: float
    difference: Interval | None


def scores(results: Results, bootstrap: Bootstrap) -> dict[tuple[str, str], Score]:
    """(policy, scorer) → score."""
    found = {}
    for policy in results.policies:
        for scorer in results.scorers:
            rows = policy.of(scorer)
            difference = None
            if policy is not results.base:
                difference = bootstrap.interval(paired(rows, results.base.of(scorer)))
            mean = float(per_prompt(rows).mean())
            found[policy.name, scorer] = Score(
                policy.name, scorer, results.trained(policy.name, scorer), mean, difference
            )
    return found


def joint(results: Results, bootstrap: Bootstrap, rewards: Mapping[str, float] | None = None) -> dict[str, Interval]:
    """Run → its training reward as a whole against the base: Σ_m w_m·(r_m − r_m,base)/std_m over its scorers m.

    std_m is that of the base's images, so rewards of different scale count alike. rewards: scorer → w_m, one measure
    for all runs; without it, the weights each run was trained with.
    """
    found = {}
    for name, run in results.runs.items():
        rows = next(policy for policy in results.evaluations if policy.name == name)
        total = 0.0
        for scorer, weight in (rewards or run.info["spec"]["rewards"]).items():
            if scorer not in results.scorers:
                continue  # a win rate trains and does not evaluate
            base = results.base.of(scorer)
            total = total + weight * paired(rows.of(scorer), base) / (float(base["value"].std(ddof=0)) or 1.0)
        # A run on win rates alone has nothing here that says what it was trained for.
        found[name] = bootstrap.interval(total.dropna() if isinstance(total, pd.Series) else [])
    return found


def pairs(results: Results, bootstrap: Bootstrap) -> dict[tuple[str, str, str], Interval]:
    """(run, other run, scorer) → paired difference of the two, for every unordered pair of runs, first minus second."""
    found = {}
    for place, one in enumerate(results.evaluations):
        for other in results.evaluations[place + 1 :]:
            for scorer in results.scorers:
                found[one.name, other.name, scorer] = bootstrap.interval(paired(one.of(scorer), other.of(scorer)))
    return found


def costs(results: Results) -> dict[str, dict[str, int]]:
    """Run → what it cost, counted."""
    found = {}
    for name, run in results.runs.items():
        ledger = Ledger(**{key: run.ledger[key] for key in Ledger.__dataclass_fields__})
        known = {key: getattr(ledger, key) for key in COST if key != "rounds"}
        found[name] = {"rounds": int((run.rounds["round"] > 0).sum())} | known
    return found


def oracle(results: Results) -> str | None:
    """The scorer that says right or wrong (sub-score `correct`), if the evaluation had one."""
    if "sub.correct" not in results.base.rewards:
        return None
    known = results.base.rewards.dropna(subset=["sub.correct"])["scorer"].unique()
    return str(known[0]) if len(known) else None


@dataclass(frozen=True)
class Entry:
    """A row of a table: the base (no runs), or runs that agree in everything but their seed."""

    name: str
    policies: tuple[Evaluation, ...]
    runs: tuple[Run, ...]

    @property
    def seeds(self) -> tuple[int, ...]:
        """Training seeds; none for the base."""
        return tuple(int(run.info["spec"]["seed"]) for run in self.runs)

    @property
    def method(self) -> str:
        """`method.name` of its runs; `base` for the base."""
        return str(self.runs[0].info["spec"]["method"]["name"]) if self.runs else "base"

    @property
    def strides(self) -> tuple[int, ...] | None:
        """Granularities of a method that has them."""
        given = self.runs[0].info["spec"]["method"].get("granularities") if self.runs else None
        return None if given is None else tuple(sorted(int(one) for one in given))

    @property
    def rewards(self) -> Mapping[str, float]:
        """Trained scorer → weight; those of weight 0 are not trained on."""
        given = self.runs[0].info["spec"]["rewards"] if self.runs else {}
        return {name: float(weight) for name, weight in given.items() if weight}

    @property
    def sources(self) -> str:
        """Which evaluations, by which weights."""
        return "; ".join(f"{one.name} (weights {one.weights})" for one in self.policies)


def entries(results: Results) -> list[Entry]:
    """The base, then the runs in their order, those that differ by seed alone as one."""
    groups: dict[str, list[str]] = {}
    for name, run in results.runs.items():
        spec = {key: value for key, value in run.info["spec"].items() if key not in ("seed", "name")}
        groups.setdefault(json.dumps(spec, sort_keys=True), []).append(name)
    by_name = {policy.name: policy for policy in results.evaluations}
    found = [Entry(results.base.name, (results.base,), ())]
    for group in groups.values():
        seeds = [results.runs[name].info["spec"]["seed"] for name in group]
        # The same settings and the same seed twice is one run under two names: nothing to pool.
        pools = [group] if len(set(seeds)) == len(seeds) else [[name] for name in group]
        for pool in pools:
            name = pool[0] if len(pool) == 1 else re.sub(r"-seed\d+$", "", pool[0])
            found.append(Entry(name, tuple(by_name[one] for one in pool), tuple(results.runs[one] for one in pool)))
    return found


def pooled(
    tables: list[pd.DataFrame], base: pd.DataFrame | None, bootstrap: Bootstrap, value: str = "value"
) -> tuple[float, Interval | None]:
    """Mean over prompts and its paired difference to `base` (None: no difference), averaged over seeds in a prompt.

    tables: one per seed: prompt, noise, <value>.
    """
    mean = float(np.mean([per_prompt(rows, value).mean() for rows in tables]))
    if base is None:
        return mean, None
    by_seed = pd.concat([paired(rows, base, value) for rows in tables], axis=1)
    return mean, bootstrap.interval(by_seed.mean(axis=1))
