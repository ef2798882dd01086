"""Everything the report knows, read from files: `data/evaluations/*`, `data/runs/*` and `data/times/*`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from stages.core.errors import GranularError
from stages.core.spec import read_json
from stages.report.credit import by_step

BASE = "base"
# Evaluations that differ in any of these did not measure the same thing and are never compared.
COMPARABLE = (*("seed", "prompts", "noises", "steps", "shift", "family", "model_time", "guidance", "height", "width"),)


@dataclass(frozen=True)
class Evaluation:
    """One policy's evaluation.

    rewards: prompt, noise, tag, scorer, value, status, reason and `sub.*`, one row per image and scorer.
    prompt [I], text [I], noise [N], images uint8 [I, N, H, W, 3]: the images kept for people.
    summary: what was evaluated and how (see `stages.evaluate`).
    steps: the columns of `rewards` behind a column `steps`, at other numbers of steps; None where there are none.
    """

    name: str
    rewards: pd.DataFrame
    prompt: np.ndarray
    text: np.ndarray
    images: np.ndarray
    summary: dict[str, Any]
    steps: pd.DataFrame | None = None

    @property
    def weights(self) -> str:
        """The first letters of the digest of the evaluated weights."""
        return str(self.summary["policy"]["digest"]).rpartition(":")[2][:8]

    def at(self, count: int, noises: int) -> pd.DataFrame:
        """The rewards at a number of steps, on the first few noises."""
        rows = self.rewards
        if count != self.summary["steps"]:
            assert self.steps is not None
            rows = self.steps[self.steps["steps"] == count]
        return rows[rows["noise"] < noises]

    def of(self, scorer: str) -> pd.DataFrame:
        """The rows of one scorer."""
        return self.rewards[self.rewards["scorer"] == scorer]


@dataclass(frozen=True)
class Run:
    """One training run: run.json, rounds.parquet, validation.parquet, and its advantages by trained step.

    advantages: s, count, std and zero (share that is exactly 0) of the advantage, and `gain`: the mean reward behind
        positive advantages minus that behind negative ones, in standard deviations of a round's rewards, averaged over
        scorers and rounds (NaN where the run's rewards do not say where they branched off).
    times: round, stage, seconds; None where nobody measured them.
    """

    name: str
    info: dict[str, Any]
    rounds: pd.DataFrame
    validation: pd.DataFrame
    advantages: pd.DataFrame
    times: pd.DataFrame | None = None

    @property
    def minutes(self) -> pd.Series | None:
        """Minutes since the start at the end of each round (index: round)."""
        return None if self.times is None else self.times.groupby("round")["seconds"].sum().cumsum() / 60

    @property
    def trained(self) -> frozenset[str]:
        """Names of the scorers it was trained on; one of weight 0 only makes maps, or watches."""
        return frozenset(name for name, weight in self.info["spec"]["rewards"].items() if weight)

    @property
    def ledger(self) -> dict[str, int]:
        """What it cost, counted (`stages.core.types.Ledger`)."""
        return self.info["ledger"]


@dataclass(frozen=True)
class Results:
    """The base policy's evaluation, and each run with its own, in the order of their names."""

    base: Evaluation
    evaluations: tuple[Evaluation, ...]
    runs: Mapping[str, Run]

    @property
    def policies(self) -> tuple[Evaluation, ...]:
        """The base first, then the runs."""
        return (self.base, *self.evaluations)

    @property
    def scorers(self) -> tuple[str, ...]:
        """Trained ones first, then the others, each in the order of the evaluation."""
        names = list(self.base.summary["scorers"])
        trained = {name for run in self.runs.values() for name in run.trained}
        return (*(n for n in names if n in trained), *(n for n in names if n not in trained))

    def trained(self, policy: str, scorer: str) -> bool:
        """Whether `policy` was trained on `scorer`."""
        return policy in self.runs and scorer in self.runs[policy].trained

    def use(self, scorer: str) -> str:
        """How the runs used a scorer: `trained`, `not trained`, or `trained by some`."""
        uses = {self.trained(name, scorer) for name in self.runs}
        return {frozenset({True}): "trained", frozenset({True, False}): "trained by some"}.get(
            frozenset(uses), "not trained"
        )


def read(
    evaluations: Path, runs: Path, names: Sequence[str] = (), base: Path | None = None, times: Path | None = None
) -> Results:
    """Read the results of the named runs, in their order; of all runs there are, where none is named.

    base: the base policy's evaluation, where it lies apart from the others. times: how long runs took, a file each.

    Raises:
        GranularError: one sentence naming what to run, where an evaluation or a run is missing; or which setting
            differs, where evaluations cannot be compared.
    """
    present = _folders(evaluations, "summary.json")
    trained = list(names) or _folders(runs, "run.json")
    absent = [name for name in trained if not (runs / name / "run.json").is_file()]
    if absent:
        raise GranularError(f"{runs}: no finished run {absent[0]}; run `granular align {absent[0]}`.")
    base = base or evaluations / BASE
    missing = [] if (base / "summary.json").is_file() else [BASE]
    missing += [name for name in trained if name not in present]
    if missing:
        raise GranularError(
            f"{evaluations}: no evaluation of {', '.join(missing)}; run "
            + " and ".join(f"`granular evaluate {name}`" for name in missing)
            + "."
        )
    start = read_evaluation(base)
    others = tuple(read_evaluation(evaluations / name) for name in trained)
    for other in others:
        comparable(evaluations, start, other)
    return Results(start, others, {name: read_run(runs / name, times) for name in trained})


def _folders(root: Path, marker: str) -> list[str]:
    return sorted(path.parent.name for path in root.glob(f"*/{marker}") if not path.parent.name.startswith("."))


def read_evaluation(folder: Path) -> Evaluation:
    """One evaluation folder."""
    with np.load(folder / "images.npz", allow_pickle=False) as pictures:
        arrays = {name: pictures[name] for name in ("prompt", "text", "images")}
    rewards = pd.read_parquet(folder / "rewards.parquet")
    if rewards.duplicated(["prompt", "noise", "scorer"]).any():
        raise GranularError(
            f"{folder}/rewards.parquet: an image is scored twice; run `granular evaluate {folder.name}`."
        )
    steps = folder / "steps.parquet"
    return Evaluation(
        folder.name,
        rewards,
        summary=read_json(folder / "summary.json"),
        steps=pd.read_parquet(steps) if steps.is_file() else None,
        **arrays,
    )


def read_run(folder: Path, times: Path | None = None) -> Run:
    """One run folder; times: folder of `<run>.parquet`."""
    measured = None if times is None else times / f"{folder.name}.parquet"
    return Run(
        folder.name,
        read_json(folder / "run.json"),
        pd.read_parquet(folder / "rounds.parquet"),
        pd.read_parquet(folder / "validation.parquet"),
        by_step(folder),
        pd.read_parquet(measured) if measured is not None and measured.is_file() else None,
    )


def comparable(root: Path, base: Evaluation, other: Evaluation) -> None:
    """Raises: GranularError: another setting, or another version of a scorer: the two did not measure the same."""
    for key in COMPARABLE:
        if base.summary.get(key) != other.summary.get(key):
            raise GranularError(
                f"{root}: '{other.name}' was evaluated with {key} {_short(other.summary.get(key))}, '{base.name}' with "
                f"{_short(base.summary.get(key))}; run `granular evaluate` for both under one setting."
            )
    ours, theirs = base.summary["scorers"], other.summary["scorers"]
    for name in {*ours, *theirs}:
        if ours.get(name, {}).get("identity") != theirs.get(name, {}).get("identity"):
            raise GranularError(
                f"{root}: '{other.name}' and '{base.name}' were scored by different versions of '{name}'; "
                "run `granular evaluate` for both."
            )


def _short(value: Any) -> str:
    return f"a list of {len(value)}" if isinstance(value, list) else str(value)
