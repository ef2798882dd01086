"""Where a study trains, evaluates and measures: cached stage calls, so that it can be stopped at any time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from pipeline.artifacts import Artifact, Input
from pipeline.calls import EMA, SAMPLER, Loop
from pipeline.driver import Driver, NotYet
from pipeline.overrides import merge
from pipeline.params import Params, parse, resolve_run
from pipeline.plan import RunPlan, evaluators, ledger, read_split, validated
from pipeline.reuse import Store
from pipeline.rounds import RunResult, align
from pipeline.studies.base import Arm, Size
from pipeline.workers import Worker, scorer_modules
from stages.core.errors import GranularError
from stages.core.types import Ledger
from stages.effect.spec import EffectSpec
from stages.evaluate.spec import EvaluateSpec

# Nobody reads a study's old rounds again, and its policies are evaluated the moment they are done.
RETENTION = {"optimizer_rounds": 2, "weights_every": 1000, "latents_rounds": 1}


@dataclass(frozen=True)
class Lab:
    """params: of the project. size: of the study. folder: what its runs leave. name: the study's."""

    params: Params
    size: Size
    store: Store
    worker: Worker
    folder: Path
    name: str

    def plan(self, arm: Arm, seed: int, rounds: int | None = None) -> RunPlan:
        """The plan of an arm: the file's `align`, the study's size and the arm over it."""
        size = self.size
        length = {"rounds": rounds or size.rounds} if rounds or size.rounds else {"budget": size.budget}
        over: dict[str, Any] = {**length, "validate": {"every": 0}, "retention": RETENTION}
        section = merge(merge(over, size.changes), arm.section)
        raw = {**self.params.raw, "runs": {"arm": section}, "presets": {}, "study": {}}
        run = resolve_run(parse(raw), "arm", seed=seed, label=f"{self.name}.{arm.key}-seed{seed}")
        if size.watched:
            every = -(-run.rounds // size.watched)
            run = replace(run, validate=replace(run.validate, every=every, noises=2))
        return run

    def train(self, run: RunPlan) -> RunResult:
        """Train an arm to its end, or find it trained: a training that is in the store is not assembled again, for its
        weights may have been evicted by one that went on from there."""
        return self._found(run) or align(
            run, self.store, self.worker, lambda event: None, project=self.folder, delivered=Path("policies"), redo=True
        )

    def _found(self, run: RunPlan) -> RunResult | None:
        loop, rounds, validations = self.loop(run), [], {}
        loop.driver.dry = True
        try:
            start = policy = loop.start()
            for round_ in range(run.rounds + 1):
                if round_:
                    rounds.append(loop.round(round_, policy))
                    policy = rounds[-1].update
                if validated(run, round_):
                    validations[round_] = loop.validate(round_, policy)
        except NotYet:
            return None
        return RunResult(run, start, tuple(rounds), validations, 0)

    def loop(self, run: RunPlan) -> Loop:
        """The calls of a run. All arms of a study are of one code, today's, so what other code made is made again."""
        return Loop(run, Driver(run.name, self.store, self.worker, lambda event: None, redo=True))

    def prompts(self) -> tuple[int, ...]:
        """Test prompts, spread over the split."""
        ids = read_split(Path("data/prompts"), "test")
        if not ids:
            raise GranularError("prompts.test: a study evaluates on held-out test prompts, and there are none.")
        count = min(self.size.prompts, len(ids))
        return tuple(ids[i * len(ids) // count] for i in range(count))

    def evaluate(self, run: RunPlan, policy: Artifact, steps: int) -> pd.DataFrame:
        """steps, prompt, noise, scorer, value of a policy on the test prompts."""
        loop, judging = self.loop(run), evaluators(run.scorers)
        prompts = self.prompts()
        spec = EvaluateSpec(
            seed=self.params.seed, prompts=prompts, noises=self.size.noises,
            grid=replace(run.evaluation, steps=steps), which="ema", policy=run.policy, sampler=run.sampler,
            scorers=judging, images=min(12, len(prompts)),
        )  # fmt: skip
        inputs = {
            "policy": Input(policy, EMA, "policy"), "base": loop.base, "prompts": loop.prompts,
            "embeddings": loop.embeddings, **_weights(loop, judging),
        }  # fmt: skip
        made = loop.driver.call("evaluate", run.rounds, inputs, spec, uses=_uses(loop, judging))
        table = pd.read_parquet(made.folder(("rewards.parquet",)) / "rewards.parquet")
        return table[["prompt", "noise", "scorer", "value"]].assign(steps=steps)

    def effects(self, run: RunPlan) -> pd.DataFrame:
        """prompt, s, member, advantage, effect of some trained steps of the run's first round, under the base policy.

        effect: Σ_m w_m·effect_m/std_m, std_m that of the round's images.
        """
        loop, judging = self.loop(run), {name: run.scorers[name] for name in run.rewards}
        start = loop.start()
        rollout = loop.rollout(1, start)
        rewards = {name: loop.reward(1, name, rollout) for name in run.rewards}
        advantage = loop.advantage(1, rollout, rewards)
        spec = EffectSpec(
            seed=run.seed, per_prompt=self.size.per_prompt, completions=self.size.completions, grid=run.grid,
            policy=run.policy, sampler=run.sampler, scorers=judging,
        )  # fmt: skip
        inputs = {
            "rollout": Input(rollout), "policy": Input(start, SAMPLER, "policy"), "base": loop.base,
            "prompts": loop.prompts, "embeddings": loop.embeddings, **_weights(loop, judging),
        }  # fmt: skip
        made = loop.driver.call("effect", 1, inputs, spec, uses=[loop.method, *_uses(loop, judging)])
        table = pd.read_parquet(made.folder(("effects.parquet",)) / "effects.parquet")
        total = 0.0
        for name, weight in run.rewards.items():
            values = pd.read_parquet(rewards[name].folder(("rewards.parquet",)) / "rewards.parquet")["value"]
            rows = table[table["scorer"] == name].set_index("edge")
            total = total + weight * rows["effect"] / (float(values.std(ddof=0)) or 1.0)
        paid = pd.read_parquet(advantage.folder(("advantages.parquet",)) / "advantages.parquet").set_index("edge")
        steps = table[["edge", "prompt", "s", "member"]].drop_duplicates().set_index("edge")
        return steps.assign(advantage=paid["advantage"], effect=total).reset_index(drop=True)

    def expected(self, run: RunPlan, *, trains: bool) -> int:
        """Model evaluations of an arm and seed by the plan, a gradient counting 3, evaluations included."""
        if not trains:
            steps = run.grid.steps
            states = 2 * self.size.per_prompt * run.prompts_per_round
            return ledger(replace(run, rounds=1))[0].evaluations + states * self.size.completions * steps // 2
        training = sum(ledger(run), Ledger()).equivalents
        return training + self.evaluation_cost()

    def evaluation_cost(self) -> int:
        """Model evaluations of evaluating one policy."""
        return len(self.prompts()) * self.size.noises * sum(self.size.steps)


def _weights(loop: Loop, judging: Mapping[str, Any]) -> dict[str, Input]:
    return {f"scorer.{name}": one for name, one in loop.weights.items() if name in judging}


def _uses(loop: Loop, judging: Mapping[str, Any]) -> list[str]:
    scorers = [module for spec in judging.values() for module in scorer_modules(spec)]
    return [*scorers, loop.family, *loop.decoder]
