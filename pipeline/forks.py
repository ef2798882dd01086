"""`granular fork RUN --at N --set key=value`: a new run that begins where round N of an old one ended.

Rounds 1..N of the new run are the old run's own artifacts, found in the store. From there on weights, their average,
the optimizer's state and what the method remembers are carried over, and the new settings apply.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.driver import ACCEPTED, Driver, NotYet
from pipeline.evaluations import delivered_to
from pipeline.params import Params, load_params, require_weights
from pipeline.plan import RunPlan
from pipeline.run_sections import BASE
from pipeline.variations import RUNS, Variation, find, known
from stages.core.errors import GranularError

if TYPE_CHECKING:
    from pipeline.reuse import Store
    from pipeline.workers import Worker

# Settings that say what the weights of a policy state are; under other ones the state means nothing.
OF_THE_STATE = ("family", "base", "single_file", "adapters", "merge", "lora")


def forked(params: Params, run: str, at: int, sets: Sequence[str], name: str | None) -> Variation:
    """The fork that a command asks for, checked.

    Raises:
        GranularError: no such run or round, a name that is taken, or a setting the old state does not fit.
    """
    before = find(params, run)
    if not 1 <= at <= before.rounds:
        raise GranularError(f"--at {at}: {run} has rounds 1–{before.rounds}.")
    title = name or f"{run}-at{at}"
    if title in (BASE, run) or title in params.all_runs:
        raise GranularError(f"--name {title}: this name stands for another policy or run; choose another one.")
    old = known(params).get(run)
    root, inherited, seed = (run, (), None) if old is None else (old.run, old.sets, old.seed)
    fork = Variation(name=title, run=root, sets=(*inherited, *sets), seed=seed, of=run, at=at)
    refuse_other_state(before, fork.plan(params), at)
    return fork


def refuse_other_state(before: RunPlan, after: RunPlan, at: int) -> None:
    """Say in one sentence which setting the state of the old run does not fit."""
    for key in OF_THE_STATE:
        if getattr(before.policy, key) != getattr(after.policy, key):
            raise GranularError(
                f"--set policy.{key}: the weights of {before.name} after round {at} were trained with "
                f"{getattr(before.policy, key)!r} and mean nothing with {getattr(after.policy, key)!r}; align a run of "
                "its own instead of a fork."
            )
    if before.method["name"] != after.method["name"] and (keeper := _remembers(before, after)):
        raise GranularError(
            f"--set method.name: {keeper} remembers things between rounds that belong to it alone, so a fork keeps the "
            f"method of {before.name}, {before.method['name']}; align a run of its own instead."
        )
    if after.rounds <= at:
        raise GranularError(
            f"--at {at}: the fork would end at round {after.rounds}, so it has nothing left to train; fork earlier, or "
            f"raise rounds or budget with --set."
        )


def _remembers(*runs: RunPlan) -> str | None:
    """The method, if any, whose state is more than weights and optimizer."""
    from stages.methods import Method, build
    from stages.update.objective import Objective

    for run in runs:
        method = build(run.method)
        kinds = (
            type(method).remember is not Method.remember,
            type(method.objective).remember is not Objective.remember,
        )
        if any(kinds) or method.behaviour_decay(0) is not None:
            return str(run.method["name"])
    return None


def require_rounds(run: RunPlan, at: int, store: Store, worker: Worker, accepted: Path = ACCEPTED) -> None:
    """The old run has come as far as the fork begins.

    Raises:
        GranularError: it has not.
    """
    from pipeline.calls import Loop

    driver = Driver(run.name, store, worker, lambda event: None, accepted=accepted)
    driver.dry = True
    loop, reached = Loop(run, driver), 0
    try:
        policy = loop.start()
        for reached in range(1, at + 1):
            policy = loop.round(reached, policy).update
    except NotYet:
        raise GranularError(
            f"--at {at}: {run.name} is in the store up to round {reached - 1}; align it further, or fork earlier."
        ) from None
    driver.refuse_other_code()


def fork_run(run: str, at: int, sets: Sequence[str], name: str | None) -> str:
    """The command: check, write down, train to the end; a second call goes on where the first stopped. Returns the name
    of the fork."""
    from pipeline.reuse import Store
    from pipeline.rounds import align
    from pipeline.view import shown
    from pipeline.workers import InlineWorker

    params = load_params()
    fork = forked(params, run, at, sets, name)
    plan = fork.plan(params)
    require_weights(plan.policy, plan.scorers)
    store, worker = Store(), InlineWorker(plan.policy.threads)
    require_rounds(find(params, run), at, store, worker)
    fork.keep()
    with shown(fork.name, Path.cwd(), RUNS / fork.name / "prefect.log") as emit:
        align(plan, store, worker, emit, delivered=delivered_to(params, fork.run))
    return fork.name
