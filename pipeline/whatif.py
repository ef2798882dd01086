"""`granular whatif RUN --credit my.py:fn`: advantages of stored rounds by another credit rule, on a CPU, in seconds.

Nothing is sampled, scored or trained: rewards, trees and latents come from the store as they are. Latents that
retention has evicted are not made again; the cosine of such a round is left out, and said to be.

    runs/<run>/whatif/<rule>.csv      one row a round, and one for all of them
    runs/<run>/whatif/<rule>.py       the source of a rule from a file
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from pipeline.artifacts import Artifact
from pipeline.calls import TABLES, Loop, Round
from pipeline.driver import Driver, NotYet
from pipeline.plan import RunPlan, in_force
from pipeline.retention import LATENTS
from pipeline.reuse import Store
from pipeline.workers import InlineWorker
from stages.core import outside
from stages.core.errors import GranularError, nearest
from stages.core.publish import write_text
from stages.core.spec import read_json

if TYPE_CHECKING:
    from stages.advantage.compare import Likeness
    from stages.methods import Method
    from stages.rollout.store import Rollout


@dataclass(frozen=True)
class Compared:
    """One round (0: all of them) under the run's own rule and under the other one.

    cosine: of the two update directions in velocity space, NaN where `note` says why there is none.
    """

    round: int
    likeness: Likeness
    cosine: float
    note: str = ""


@dataclass(frozen=True)
class _Push:
    """Products of the two directions of a round: with each other, and with themselves."""

    between: float
    before: float
    after: float


def alternative(run: RunPlan, rule: str) -> Method:
    """The run's method with another credit rule: of a function `my.py:fn`, or of another method by its name or file.

    Raises:
        GranularError: no such rule, or one whose method scores images that this run's tree does not have.
    """
    from stages.methods import METHODS, build

    if ":" in rule:
        return build({**run.method, "credit": rule}, "--credit")
    if not outside.is_file(rule) and rule not in METHODS:
        raise GranularError(f"--credit {rule}: give FILE.py:FUNCTION or a method; {nearest(rule, METHODS)}")
    other = build({"name": rule}, "--credit")
    refuse_other_tree(run, other, rule)
    return other


def refuse_other_tree(run: RunPlan, other: Method, rule: str) -> None:
    """A rule reads the images its method scores: of other ones it would make numbers that mean nothing.

    Raises:
        GranularError: the other method's tree differs in what is scored, or, for a rule that climbs the tree, at all.
    """
    from stages.advantage.fusion import Fusion, PruneWidth
    from stages.methods import Plan, build
    from stages.rollout.grid import make_grid

    mine = build(run.method)
    plan = Plan(make_grid(run.grid), run.group, run.seed, prompt=0)
    scored = []
    for method in (mine, other):
        leaves = method.tree(plan).leaves
        scored.append(set(zip(leaves["s"].tolist(), (leaves["member"] < 0).tolist(), leaves["stride"].tolist())))
    climbs = any(isinstance(step, Fusion | PruneWidth) for step in other.credit) and not isinstance(mine, type(other))
    if scored[0] != scored[1] or climbs:
        raise GranularError(
            f"--credit {rule}: its rule needs another tree than {run.name} sampled ({run.method['name']} scores "
            f"{_told(scored[0])}, {rule} {_told(scored[1])}{' in a tree of branches' if climbs else ''}); align a run "
            "of that method to compare them."
        )


def _told(scored: set[tuple[int, bool, int]]) -> str:
    steps = sorted({s for s, _, _ in scored})
    strides = sorted({stride for _, _, stride in scored})
    where = "whole trajectories" if steps == [-1] else f"images of steps or states {steps[0]}–{steps[-1]}"
    return f"{where} at stride{'s' if len(strides) > 1 else ''} {', '.join(map(str, strides))}"


def whatif(run: RunPlan, rule: str, rounds: range | None, store: Store) -> list[Compared]:
    """Every round of the range that the store holds (by default all), and last, as round 0, all of them together."""
    from stages.methods import build

    alternative(run, rule)  # a mistake is heard of before anything is read
    found, pushes, pairs = [], [], []
    own = build(run.method)
    for one, policy in stored_rounds(run, rounds, store):
        plan = in_force(run, one.number)
        other = alternative(plan, rule)
        before, after, push, note = _round(plan, one, policy, other)
        found.append(_compared(one.number, before, after, [] if push is None else [push], note, own))
        pushes += [] if push is None else [push]
        pairs.append((before, after))
    whole = [np.concatenate(arrays) for arrays in zip(*pairs)]
    missing = len(found) - len(pushes)
    note = f"cosine of {len(pushes)} of {len(found)} rounds" if missing and pushes else ""
    return [*found, _compared(0, whole[0], whole[1], pushes, note, own)]


def _compared(
    number: int, before: np.ndarray, after: np.ndarray, pushes: list[_Push], note: str, own: Method
) -> Compared:  # fmt: skip
    from stages.advantage.compare import likeness

    dot, one, two = (sum(getattr(push, name) for push in pushes) for name in ("between", "before", "after"))
    cosine = float(dot / np.sqrt(one * two)) if one and two else float("nan")
    return Compared(number, likeness(before, after, own.adv_clip), cosine, note)


def stored_rounds(run: RunPlan, rounds: range | None, store: Store) -> Iterator[tuple[Round, Artifact]]:
    """Rounds that the store holds, each with the policy it was sampled by; nothing is computed.

    Raises:
        GranularError: a round that was asked for, or every one, is not there.
    """
    driver = Driver(run.name, store, InlineWorker(run.policy.threads), lambda event: None)
    driver.dry = True
    loop = Loop(run, driver)
    last = run.rounds if rounds is None else rounds[-1]
    number = 0
    try:
        policy = loop.start()
        for number in range(1, last + 1):
            one = loop.round(number, policy)
            if rounds is None or number in rounds:
                yield one, policy
            policy = one.update
    except NotYet as missing:
        if rounds is not None or number == 1:
            raise GranularError(
                f"{run.name}: {missing} of round {number} is not in the store; run `granular align {run.name}` or ask "
                "for the rounds that are there."
            ) from None


def _round(
    run: RunPlan, round_: Round, policy: Artifact, other: Method
) -> tuple[np.ndarray, np.ndarray, _Push | None, str]:
    """A round's advantages by either rule, in the order of trained rows, the push, and why there is none."""
    from stages.advantage.stage import advantages
    from stages.rollout.store import NAME, read_rollout

    rollout = read_rollout(round_.rollout.folder(TABLES) / NAME, latents=False)
    rewards = {
        name: pd.read_parquet(one.folder(("rewards.parquet",)) / "rewards.parquet")
        for name, one in round_.rewards.items()
    }
    before = pd.read_parquet(round_.advantage.folder(("advantages.parquet",)) / "advantages.parquet")
    after, _ = advantages(rollout, rewards, run.rewards, other.credit, run.failures)
    values = [table.sort_values("edge")["advantage"].to_numpy(np.float64) for table in (before, after)]
    if round_.rollout.missing(LATENTS):
        return (*values, None, "latents evicted")
    try:
        push = _push(run, round_, policy, before, after, other)
    except GranularError as error:
        return (*values, None, str(error))
    return (*values, push, "")


def _push(
    run: RunPlan, round_: Round, policy: Artifact, before: pd.DataFrame, after: pd.DataFrame, other: Method
) -> _Push:
    from stages.advantage.tokens import token_rows
    from stages.methods import build
    from stages.rollout.grid import make_grid
    from stages.rollout.store import NAME, read_rollout
    from stages.update.direction import velocity_direction
    from stages.update.points import gather

    own = build(run.method)
    rollout: Rollout = read_rollout(round_.rollout.folder() / NAME)
    weights = None
    if own.token_credit is not None:
        weights = np.load(round_.advantage.folder(("tokens.npy",)) / "tokens.npy")
        after = after.assign(token_row=token_rows(rollout, after))
    memory: Mapping[str, Any] = read_json(policy.published.folder / "policy" / "state.json")["memory"]["objective"]
    one, two = (
        velocity_direction(
            gather(rollout, table, make_grid(run.grid), tokens=weights, zero_groups=own.zero_groups),
            own.objective,
            memory,
        ).ravel()
        for table in (before, after)
    )
    return _Push(float(one @ two), float(one @ one), float(two @ two))


def lines(run: str, rule: str, compared: list[Compared]) -> list[str]:
    """A table for people."""
    head = ("round", "steps", "rank corr.", "sign flips", "to zero", "from zero", "clipped", "→", "cosine")
    rows = [f"{run}: advantages by {rule}, beside the run's own", ""]
    rows.append("".join(f"{name:>12}" for name in head))
    for one in compared:
        it = one.likeness
        cells = (
            str(one.round or "all"), str(it.edges), f"{it.rank_correlation:.3f}", f"{it.flips:.1%}",
            f"{it.silenced:.1%}", f"{it.woken:.1%}", f"{it.clipped_before:.1%}", f"{it.clipped_after:.1%}",
            "—" if np.isnan(one.cosine) else f"{one.cosine:.3f}",
        )  # fmt: skip
        rows.append("".join(f"{cell:>12}" for cell in cells) + (f"  {one.note}" if one.note else ""))
    return rows


def write(compared: list[Compared], rule: str, folder: Path) -> Path:
    """The same as CSV, and the source of a rule from a file beside it."""
    file = rule.partition(":")[0]
    name = rule.replace(".py", "").replace(":", ".").replace("/", "-").strip(".-")
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"round": one.round or "all", **asdict(one.likeness), "cosine": one.cosine, "note": one.note}
        for one in compared
    ]  # fmt: skip
    write_text(folder / f"{name}.csv", pd.DataFrame(rows).to_csv(index=False, lineterminator="\n"))
    if outside.is_file(file):
        shutil.copyfile(file, folder / f"{name}.py")
    return folder / f"{name}.csv"


def parse_rounds(text: str | None, last: int) -> range | None:
    """`3-7` or `5` → the rounds; None for none given.

    Raises:
        GranularError: not of that form, or outside the run.
    """
    if text is None:
        return None
    low, dash, high = text.replace("–", "-").partition("-")
    if not low.strip().isdigit() or (dash and not high.strip().isdigit()):
        raise GranularError(f"--rounds {text}: expected one round or a range, as in --rounds 3-7.")
    first, end = int(low), int(high) if dash else int(low)
    if not 1 <= first <= end <= last:
        raise GranularError(f"--rounds {text}: the run has rounds 1–{last}, and a range rises.")
    return range(first, end + 1)
