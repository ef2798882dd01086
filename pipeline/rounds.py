"""The round loop of an alignment run: rollout → reward per scorer → advantage → update, and a validation now and then.

Plain Python over cached stage calls (`calls.py`, `driver.py`). A run that was stopped, extended or changed computes
exactly what its store does not hold. Whoever wants to watch listens to events.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import curves, outputs, plan, sheets
from pipeline.artifacts import Artifact
from pipeline.calls import Loop, Round
from pipeline.collect import register
from pipeline.driver import ACCEPTED, STAGES, Driver, NotYet, Start, spans
from pipeline.events import Emit, Event
from pipeline.locks import alone
from pipeline.plan import RunPlan
from pipeline.retention import evictions
from pipeline.reuse import Store
from pipeline.status import Journal
from pipeline.workers import Worker
from stages.core.command import stoppable
from stages.core.errors import GranularError, nearest
from stages.core.progress import say

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class RunResult:
    """A run's results. validations: round → evaluation. best: the round whose policy validated best (0 = the start)."""

    run: RunPlan
    start: Artifact
    rounds: tuple[Round, ...]
    validations: Mapping[int, Artifact]
    best: int

    @property
    def policy(self) -> Artifact:
        """The final policy state."""
        return self.rounds[-1].update if self.rounds else self.start


@dataclass(frozen=True)
class Redone:
    """What `run_stage` found. before is None where the stage had never been computed."""

    stage: str
    round: int
    before: str | None
    after: str

    @property
    def same(self) -> bool:
        """Whether the content stayed what it was."""
        return self.before == self.after


def align(
    run: RunPlan,
    store: Store,
    worker: Worker,
    emit: Emit,
    *,
    project: Path = Path(),
    delivered: Path = Path("data/runs"),
    accepted: Path = ACCEPTED,
    redo: bool = False,
    start: Start | None = None,
) -> RunResult:
    """Bring a run to its last round, assemble `<delivered>/<run>` and write its curves and times beside that.

    Args:
        emit: hears every event. project: folder that holds `runs/` and `data/`. delivered: where results go, under it.
        accepted: codes whose results count as today's. redo: compute again what other code made. start: where to begin.

    Raises:
        GranularError: unaccepted results of other code, a gate, a scorer that failed, another process on this run, …
        SystemExit: 130 after Ctrl-C or SIGTERM; the next call resumes where this one stopped.
    """
    start = start or Start()
    _check_start(run, start)
    journal = Journal(run, project, emit)
    driver = Driver(run.name, store, worker, journal.hear, accepted=accepted, redo=redo, start=start)
    register(store, project)
    with stoppable(), alone(run.name, project / "runs" / run.name), journal.beating():
        try:
            loop = Loop(run, driver)
            cached = _walk_dry(loop)
            driver.refuse_other_code()
            if cached < start.round - 1:
                raise GranularError(
                    f"{run.name}: asked to start at round {start.round}, but round {cached + 1} is not in the store "
                    f"yet; start at round {cached + 1} at the latest."
                )
            if cached:
                say(f"{run.name}: round{'s' if cached > 1 else ''} {spans(range(1, cached + 1))} found in the store")
            result = _play(loop, journal, project)
            curves.write(result, (project / delivered).parent / "curves")
            outputs.assemble(result, project / delivered / run.name)
            outputs.write_times(result, project / delivered.parent / "times" / f"{run.name}.parquet")
        except KeyboardInterrupt:
            sentence = f"stopped; nothing is half-written, the next call resumes at round {max(journal.round, 1)}"
            journal.hear(_of_run(run, journal.round, "failed", sentence))
            say(f"{run.name}: {sentence}.")
            raise SystemExit(130) from None
        except Exception as error:
            journal.hear(_of_run(run, journal.round, "failed", str(error)))
            raise
    journal.hear(_of_run(run, run.rounds, "done", f"{run.rounds} rounds, best validation at round {result.best}"))
    return result


def _check_start(run: RunPlan, start: Start) -> None:
    if not 1 <= start.round <= run.rounds:
        raise GranularError(f"{run.name} has rounds 1–{run.rounds}, got start round {start.round}.")
    _check_stage(run, start.stage)


def _check_stage(run: RunPlan, stage: str) -> None:
    known = {*STAGES, *(f"reward.{name}" for name in run.rewards)}
    if stage not in known:
        raise GranularError(f"{stage}: unknown stage; {nearest(stage, known)}")


def _of_run(run: RunPlan, round_: int, status: str, detail: str = "") -> Event:
    return Event(kind="run", run=run.name, round=round_, status=status, detail=detail)  # type: ignore[arg-type]


def _walk_dry(loop: Loop) -> int:
    """Walk the run through the store without computing; returns the number of whole rounds that are there."""
    loop.driver.dry = True
    done = 0
    try:
        policy = loop.start()
        for round_ in range(loop.run.rounds + 1):
            if round_:
                policy = loop.round(round_, policy).update
                done = round_
            if plan.validated(loop.run, round_):
                with suppress(NotYet):
                    loop.validate(round_, policy)
    except NotYet:
        pass
    finally:
        loop.driver.dry = False
    return done


def _play(loop: Loop, journal: Journal, project: Path) -> RunResult:
    run, store = loop.run, loop.driver.store
    journal.hear(_of_run(run, 0, "started"))
    outputs.copy_sources(run, project / "runs" / run.name / "method")
    start = policy = loop.start()
    rounds: list[Round] = []
    validations: dict[int, Artifact] = {}
    best = 0
    for round_ in range(run.rounds + 1):
        journal.round = round_
        if round_:
            rounds.append(loop.round(round_, policy))
            policy = rounds[-1].update
        was_best = best
        if plan.validated(run, round_):
            validations[round_] = loop.validate(round_, policy)
            best = best_round(run, validations)
        if not round_:
            journal.start(validations.get(0))
        else:
            outputs.link_round(run, rounds[-1], project / "runs" / run.name / "rounds")
            sheets.draw(loop, rounds[-1], project / "runs" / run.name / "sheets")
            journal.finish(rounds[-1], loop.cost(round_), validations.get(round_))
            for number, stage, patterns in evictions(run.retention, round_, best, was_best):
                for name, old in rounds[number - 1].artifacts().items():
                    if name.partition(".")[0] == stage:
                        store.evict(old.published, patterns)
    return RunResult(run, start, tuple(rounds), validations, best)


def best_round(run: RunPlan, validations: Mapping[int, Artifact]) -> int:
    """The validated round with the highest Σ_m w_m·(mean_m − mean_m at the start)/std_m at the start.

    m runs over the trained scorers with their weights w_m; the std is that of the start's images, so scorers of
    different scale count alike, and are evaluators (`plan.evaluators`). Ties go to the earlier round.
    """
    tables = {round_: outputs.validation_table(one) for round_, one in validations.items()}

    def score(table: pd.DataFrame) -> float:
        total = 0.0
        for scorer, weight in run.rewards.items():
            if scorer not in plan.evaluators(run.scorers):
                continue
            before = tables[0].loc[tables[0]["scorer"] == scorer, "value"]
            scale = float(before.std(ddof=0)) or 1.0
            total += weight * float(table.loc[table["scorer"] == scorer, "value"].mean() - before.mean()) / scale
        return total

    return max(sorted(tables), key=lambda round_: score(tables[round_]))


def run_stage(
    run: RunPlan,
    store: Store,
    worker: Worker,
    emit: Emit,
    stage: str,
    round_: int,
    *,
    force: bool,
    accepted: Path = ACCEPTED,
) -> list[Redone]:
    """One stage of one round, alone: found or computed, or with `force` computed again in place.

    `reward` stands for all scorers, `reward.<scorer>` for one. What follows in the run is not touched: it stays
    cached if the content stays the same, and is computed by the next `align` if not.

    Raises:
        GranularError: an unknown stage, or the run has not reached what the stage reads.
    """
    kind, _, scorer = stage.partition(".")
    _check_stage(run, stage)
    if not (kind == "evaluate" and round_ == 0) and not 1 <= round_ <= run.rounds:
        raise GranularError(f"{run.name} has rounds 1–{run.rounds}, got round {round_}.")
    driver = Driver(run.name, store, worker, emit, accepted=accepted)
    loop = Loop(run if kind == "evaluate" else plan.in_force(run, round_), driver)
    run = loop.run
    policy = loop.start()
    last = round_ if kind == "evaluate" else round_ - 1
    reached = 0
    driver.dry = True
    try:
        for reached in range(1, last + 1):
            policy = loop.round(reached, policy).update
        reached = round_
        rollout = loop.rollout(round_, policy) if kind not in ("rollout", "evaluate") else None
        scorers = run.rewards if kind in ("advantage", "update") else ()
        rewards = {name: loop.reward(round_, name, rollout) for name in scorers} if rollout else {}
        advantage = loop.advantage(round_, rollout, rewards) if kind == "update" and rollout else None
    except NotYet as missing:
        raise GranularError(
            f"{run.name}: stage {stage} of round {round_} reads {missing} of round {reached}, which is not there yet; "
            f"run `granular align {run.name}` or make that stage first."
        ) from None
    finally:
        driver.dry = False
    driver.refuse_other_code()

    def call(name: str, force: bool) -> Artifact:
        if kind == "rollout":
            return loop.rollout(round_, policy, force)
        if kind == "evaluate":
            return loop.validate(round_, policy, force)
        assert rollout is not None
        if kind == "reward":
            return loop.reward(round_, name, rollout, force)
        if kind == "advantage":
            return loop.advantage(round_, rollout, rewards, force)
        assert advantage is not None
        return loop.update(round_, rollout, advantage, policy, force)

    done = []
    for name in ([scorer] if scorer else list(run.rewards)) if kind == "reward" else [""]:
        driver.dry, before = True, None
        with suppress(NotYet):
            before = call(name, False).digest
        driver.dry = False
        done.append(Redone(f"{kind}.{name}" if name else kind, round_, before, call(name, force).digest))
    return done
