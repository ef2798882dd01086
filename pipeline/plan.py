"""What a run is going to do, decided before any of it: prompts, trees, specs and costs of every round.

Everything here is a pure function of the run's plan and the prompt table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from pipeline.retention import RetentionSpec
from stages.core.errors import GranularError
from stages.core.noise import generator
from stages.core.types import Ledger
from stages.policies.spec import PolicySpec
from stages.rollout.grid import GridSpec
from stages.rollout.spec import RolloutSpec, SamplerSpec
from stages.update.spec import OptimizerSpec, UpdateSpec

if TYPE_CHECKING:
    from stages.evaluate.spec import EvaluateSpec
    from stages.reward.spec import ScorerSpec
    from stages.rollout.tree import FrozenTree


@dataclass(frozen=True, kw_only=True)
class ValidateSpec:
    """When and on what a run is watched (section `align.validate`); no number of it is trained on.

    every: rounds between validations; round 0 and the last round are always validated. 0: none at all.
    prompts: validation prompts, spread evenly over the split. noises: images per prompt, from noise that is the
        same in every round.
    """

    every: Annotated[int, Field(ge=0)] = 10
    prompts: Annotated[int, Field(ge=1)] = 32
    noises: Annotated[int, Field(ge=1)] = 2


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """One alignment run, resolved.

    name: of the run, and of its folders. rounds: how many. prompts_per_round: distinct train prompts of a round.
    group: G, samples per prompt. method: name and options. rewards: trained scorer → weight. scorers: every scorer
    of the project; those without a weight only watch. ema: decay per round. update_batch: parents per forward.
    grid: of rollouts. evaluation: grid of validations, that of the final evaluation. failures: what a missing
    reward does. prompts, embeddings: folders of those stages. past: the run whose first rounds this one took over.
    """

    name: str
    seed: int
    rounds: int
    prompts_per_round: int
    group: int
    grid: GridSpec
    evaluation: GridSpec
    method: dict[str, Any]
    rewards: dict[str, float]
    scorers: dict[str, ScorerSpec]
    policy: PolicySpec
    sampler: SamplerSpec
    optimizer: OptimizerSpec
    ema: float
    update_batch: int
    failures: Literal["stop", "drop"]
    validate: ValidateSpec
    retention: RetentionSpec
    prompts: Path
    embeddings: Path
    past: Past | None = None


@dataclass(frozen=True)
class Past:
    """Where a fork came from: its rounds 1..`rounds` are those of `run`, artifact by artifact."""

    run: RunPlan
    rounds: int


def in_force(run: RunPlan, round_: int) -> RunPlan:
    """The plan a round is made by: the run's own, or, before its fork, that of the run it left."""
    while run.past is not None and round_ <= run.past.rounds:
        run = run.past.run
    return run


@lru_cache(maxsize=8)
def read_split(prompts: Path, split: str) -> tuple[int, ...]:
    """Row ids of one split, in the order of the prompt table."""
    import pandas as pd

    path = prompts / "prompts.parquet"
    if not path.is_file():
        raise GranularError(f"{path}: not there; make the prompt table first, with `dvc repro prompts`.")
    table = pd.read_parquet(path, columns=["id", "split"])
    return tuple(int(row) for row in table["id"][table["split"] == split])


def round_prompts(run: RunPlan, round_: int) -> tuple[int, ...]:
    """Row ids of a round, in order: the train split is shuffled once per epoch by (seed, epoch) and cut into rounds.

    The rest that does not fill a round is left out of its epoch, so no round holds a prompt twice.
    """
    ids = read_split(run.prompts, "train")
    per_epoch = len(ids) // run.prompts_per_round
    if per_epoch == 0:
        raise GranularError(
            f"runs.{run.name}.prompts_per_round: at most {len(ids)}, the size of the train split, got "
            f"{run.prompts_per_round}."
        )
    epoch, place = divmod(round_ - 1, per_epoch)
    order = generator(run.seed, epoch, -1, "prompts").permutation(len(ids))
    chosen = order[place * run.prompts_per_round : (place + 1) * run.prompts_per_round]
    return tuple(ids[i] for i in chosen)


def validation_prompts(run: RunPlan) -> tuple[int, ...]:
    """The same validation prompts in every round, spread evenly over the split (which is ordered by kind)."""
    ids = read_split(run.prompts, "validation")
    if run.validate.prompts > len(ids):
        raise GranularError(
            f"runs.{run.name}.validate.prompts: at most {len(ids)}, the size of the validation split, got "
            f"{run.validate.prompts}."
        )
    return tuple(ids[i * len(ids) // run.validate.prompts] for i in range(run.validate.prompts))


def validated(run: RunPlan, round_: int) -> bool:
    """Whether the policy after this round is validated."""
    return run.validate.every > 0 and (round_ % run.validate.every == 0 or round_ == run.rounds)


def rollout_spec(run: RunPlan, round_: int, prompts: tuple[int, ...]) -> RolloutSpec:
    from stages.methods import sampling_options

    method = sampling_options(run.method)
    return RolloutSpec(
        seed=run.seed, round_=round_, prompts=prompts, method=method, group=run.group, grid=run.grid,
        policy=run.policy, sampler=run.sampler,
    )  # fmt: skip


def makes_maps(run: RunPlan, scorer: str) -> bool:
    """Whether the run's method weighs tokens by the maps of a scorer."""
    from stages.methods import build

    tokens = build(run.method).token_credit
    return tokens is not None and scorer in tokens.scorers


def reward_spec(run: RunPlan, scorer: str) -> Any:
    from stages.reward.spec import RewardSpec

    return RewardSpec(name=scorer, scorer=run.scorers[scorer], policy=run.policy, maps=makes_maps(run, scorer))


def advantage_spec(run: RunPlan) -> Any:
    from stages.advantage.spec import AdvantageSpec

    return AdvantageSpec(method=run.method, rewards=run.rewards, failures=run.failures)


def update_spec(run: RunPlan, round_: int) -> UpdateSpec:
    return UpdateSpec(
        method=run.method, optimizer=run.optimizer, ema=run.ema, update_batch=run.update_batch, grid=run.grid,
        policy=run.policy, sampler=run.sampler, round_=round_,
    )  # fmt: skip


def evaluators(scorers: dict[str, ScorerSpec]) -> dict[str, ScorerSpec]:
    """The scorers that say how good a policy is: not win rates, whose mean within one policy's images is always ½."""
    return {name: spec for name, spec in scorers.items() if spec.kind != "pairwise"}


def validation_spec(run: RunPlan) -> EvaluateSpec:
    """Validation is an evaluation of the averaged weights on the validation split, with evaluation's own steps."""
    from stages.evaluate.spec import EvaluateSpec

    return EvaluateSpec(
        seed=run.seed, prompts=validation_prompts(run), noises=run.validate.noises, grid=run.evaluation, which="ema",
        policy=run.policy, sampler=run.sampler, images=min(12, run.validate.prompts), scorers=evaluators(run.scorers),
    )  # fmt: skip


def plan_trees(run: RunPlan, round_: int) -> list[FrozenTree]:
    """One tree per prompt of a round; prompts share the object where the method plans them alike."""
    from stages.methods import build
    from stages.rollout.stage import plan_trees as trees_of

    run = in_force(run, round_)

    # Only methods that plan every prompt by itself need to know which prompts there are; before there is a prompt
    # table, any ids give the same counts up to chance.
    named = build(run.method).per_prompt and (run.prompts / "prompts.parquet").is_file()
    prompts = round_prompts(run, round_) if named else tuple(range(run.prompts_per_round))
    return trees_of(rollout_spec(run, round_, prompts))


def round_ledger(run: RunPlan, round_: int) -> Ledger:
    """What one round costs. Optimizer steps are those of the round, not of its prompts."""
    from stages.methods import build
    from stages.update.stage import recomputes

    run = in_force(run, round_)
    method = build(run.method)
    again = recomputes(update_spec(run, round_)) and not method.objective.fresh
    known: dict[int, Ledger] = {}
    total, steps = Ledger(), 0
    for tree in plan_trees(run, round_):
        if id(tree) not in known:
            known[id(tree)] = method.ledger(tree, scorers=len(run.rewards), passes=passes(run))
            if again:
                once_more = tree.ledger(frozen=1).frozen
                known[id(tree)] = replace(known[id(tree)], frozen=known[id(tree)].frozen + once_more)
        total += known[id(tree)]
        steps = max(steps, known[id(tree)].optimizer_steps)
    return replace(total, optimizer_steps=steps)


def passes(run: RunPlan) -> int:
    """Transformer passes of one velocity evaluation."""
    from stages.policies import policy_class

    return policy_class(run.policy.family).passes_of(run.policy, Path(run.policy.base))


def ledger(run: RunPlan) -> list[Ledger]:
    """The cost of every round of the run, validation not counted."""
    return [round_ledger(run, round_) for round_ in range(1, run.rounds + 1)]


def rounds_within(run: RunPlan, budget: int) -> int:
    """The largest number of rounds whose cumulative model evaluations (a gradient counts 3) stay within a budget.

    Raises:
        GranularError: the budget does not pay for one round.
    """
    spent = 0
    for round_, cost in _costs(run):
        spent += cost
        if spent > budget:
            if round_ == 1:
                raise GranularError(
                    f"runs.{run.name}.budget: one round costs {cost} model evaluations, so at least that, got {budget}."
                )
            return round_ - 1
    raise AssertionError("unreachable")


def _costs(run: RunPlan) -> Iterator[tuple[int, int]]:
    for round_ in count(1):
        yield round_, round_ledger(run, round_).equivalents


def validation_ledger(run: RunPlan) -> Ledger:
    """What one validation costs."""
    images = run.validate.prompts * run.validate.noises
    evaluations = images * run.evaluation.steps
    scores = images * len(evaluators(run.scorers))
    return Ledger(evaluations=evaluations, passes=evaluations * passes(run), images=images, scores=scores)
