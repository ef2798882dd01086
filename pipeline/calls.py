"""The stage calls of a run: which stage reads which parts of what, under which spec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pipeline import plan
from pipeline.artifacts import Artifact, External, Input
from pipeline.driver import Driver
from pipeline.plan import RunPlan
from pipeline.reuse import Request
from pipeline.scorers import Identities, service, usable, weights
from pipeline.workers import credit_code, method_code, scorer_modules
from stages.core.code import code_digest
from stages.core.spec import read_json
from stages.core.types import Ledger
from stages.policies import FAMILIES
from stages.policies.loading import start_digest

# What the readers of an artifact need of it, so that nothing is made again for their sake that they never open.
TABLES = (
    *("rollouts.zarr/zarr.json", "rollouts.zarr/*/zarr.json", "rollouts.zarr/*/prompt"),
    *("rollouts.zarr/*/nodes_*", "rollouts.zarr/*/edges_*", "rollouts.zarr/*/leaves_*", "rollouts.zarr/*/renoised_*"),
    *("rollouts.zarr/*/parent_node", "rollouts.zarr/*/next_edge", "rollouts.zarr/*/leaf_node"),
)
SAMPLER = ("policy/state.json", "policy/transformer", "policy/lora", "policy/behaviour")
EMA = ("policy/state.json", "policy/ema")
STATE = ("policy",)


@dataclass(frozen=True)
class Round:
    """One round's results. rewards: scorer → artifact."""

    number: int
    rollout: Artifact
    rewards: Mapping[str, Artifact]
    advantage: Artifact
    update: Artifact

    def artifacts(self) -> dict[str, Artifact]:
        """By the names of stage calls."""
        rewards = {f"reward.{name}": one for name, one in self.rewards.items()}
        return {"rollout": self.rollout, **rewards, "advantage": self.advantage, "update": self.update}


class Loop:
    """The calls of a run, each with its inputs; the driver decides whether anything is computed."""

    def __init__(self, run: RunPlan, driver: Driver) -> None:
        self.run, self.driver = run, driver
        self.method = method_code(run.method)
        self.family = FAMILIES[run.policy.family]
        base = Path(run.policy.base)
        # A start may have weights from elsewhere too; what it consists of is what it is known by.
        self.base = Input(External(start_digest(run.policy, base, lambda path: driver.external(path).digest), base))
        self.prompts = Input(driver.external(run.prompts))
        self.embeddings = Input(driver.external(run.embeddings))
        self.weights = {
            name: Input(weights(spec, driver.external)) for name, spec in run.scorers.items() if spec.path is not None
        }
        self.decoder = _components(Path(run.policy.base))
        self._services: dict[str, Input | None] = {}
        self._costs: dict[int, Ledger] = {}
        self.past = None if run.past is None else Loop(run.past.run, driver)
        self.identities = Identities(run.name) if self.past is None else self.past.identities

    def cost(self, round_: int) -> Ledger:
        """What a round costs, planned once."""
        if round_ not in self._costs:
            self._costs[round_] = plan.round_ledger(self.run, round_)
        return self._costs[round_]

    def _service(self, scorer: str, called: str) -> dict[str, Input]:
        """Who answers for a scorer behind an address, asked once, as an input of that name; nothing for any other."""
        if scorer not in self._services:
            found = service(self.driver.store, scorer, self.run.scorers[scorer])
            self._services[scorer] = None if found is None else Input(found)
        known = self._services[scorer]
        return {} if known is None else {called: known}

    def start(self) -> Artifact:
        """The round-0 policy state: a name for the base's weights, never a copy."""
        store, base, policy = self.driver.store, self.base, self.run.policy
        code = code_digest("stages.update.state")
        kind = {"family": policy.family, "lora": policy.lora and asdict(policy.lora)}
        request = Request(stage="start", inputs={"base": base.digest}, settings=kind, code=code, versions={})

        def make(folders: Mapping[str, Path], scratch: Path) -> None:
            from stages.update.state import start

            (scratch / "policy").mkdir()
            start(policy, folders["base"], scratch / "policy")

        published = store.published("start", request.fingerprint)
        if published is None:
            with store.scratch("start") as scratch:
                make({"base": base.path}, scratch)
                published = store.publish(request, scratch, {"seconds": 0.0})
        return Artifact(store, published, {"base": base}, make, f"{self.run.name}: start")

    def rollout(self, round_: int, policy: Artifact, force: bool = False) -> Artifact:
        prompts = plan.round_prompts(self.run, round_)
        inputs = {
            "prompts": self.prompts, "embeddings": self.embeddings, "base": self.base,
            "policy": Input(policy, SAMPLER, "policy"),
        }  # fmt: skip
        cost = self.cost(round_)
        ledger = Ledger(evaluations=cost.evaluations, passes=cost.passes)
        spec = plan.rollout_spec(self.run, round_, prompts)
        uses = [self.method, self.family]
        return self.driver.call("rollout", round_, inputs, spec, uses=uses, ledger=ledger, force=force)

    def reward(self, round_: int, scorer: str, rollout: Artifact, force: bool = False) -> Artifact:
        inputs = {"rollout": Input(rollout), "prompts": self.prompts, "base": self.base}
        if scorer in self.weights:
            inputs["scorer"] = self.weights[scorer]
        inputs |= self._service(scorer, "identity")
        uses = [*scorer_modules(self.run.scorers[scorer]), self.family, *self.decoder]
        images = self.cost(round_).images
        ledger = Ledger(images=images, scores=images)
        spec = plan.reward_spec(self.run, scorer)
        return self.driver.call(
            f"reward.{scorer}", round_, inputs, spec, uses=uses, ledger=ledger, force=force,
            usable=lambda found: usable(found, self.run.failures),
        )  # fmt: skip

    def advantage(
        self, round_: int, rollout: Artifact, rewards: Mapping[str, Artifact], force: bool = False
    ) -> Artifact:
        inputs = {"rollout": Input(rollout, TABLES)}
        for name, one in rewards.items():
            maps = ("maps.npy",) if plan.makes_maps(self.run, name) else ()
            inputs[f"rewards.{name}"] = Input(one, ("rewards.parquet", *maps))
        spec = plan.advantage_spec(self.run)
        uses = [self.method, *credit_code(self.run.method)]
        return self.driver.call("advantage", round_, inputs, spec, uses=uses, force=force)

    def update(
        self, round_: int, rollout: Artifact, advantage: Artifact, policy: Artifact, force: bool = False
    ) -> Artifact:
        inputs = {
            "rollout": Input(rollout), "advantage": Input(advantage, ("advantages.parquet", "tokens.npy")),
            "policy": Input(policy, STATE, "policy"), "base": self.base, "embeddings": self.embeddings,
        }  # fmt: skip
        spec = plan.update_spec(self.run, round_)
        ledger = replace(self.cost(round_), evaluations=0, passes=0, images=0, scores=0)
        uses = [self.method, self.family]
        return self.driver.call("update", round_, inputs, spec, uses=uses, ledger=ledger, force=force)

    def validate(self, round_: int, policy: Artifact, force: bool = False) -> Artifact:
        judging = plan.evaluators(self.run.scorers)
        inputs = {
            "policy": Input(policy, EMA, "policy"), "base": self.base, "prompts": self.prompts,
            "embeddings": self.embeddings,
            **{f"scorer.{name}": one for name, one in self.weights.items() if name in judging},
        }  # fmt: skip
        for name in judging:
            inputs |= self._service(name, f"identity.{name}")
        uses = [*(one for spec in judging.values() for one in scorer_modules(spec)), self.family, *self.decoder]
        spec = plan.validation_spec(self.run)
        return self.driver.call(
            "evaluate", round_, inputs, spec, uses=uses, ledger=plan.validation_ledger(self.run), force=force
        )

    def round(self, round_: int, policy: Artifact) -> Round:
        """One whole round under the policy of the round before; of a fork, its past's own where that reaches so far."""
        if self.past is not None and self.run.past is not None and round_ <= self.run.past.rounds:
            return self.past.round(round_, policy)
        rollout = self.rollout(round_, policy)
        rewards = {name: self.reward(round_, name, rollout) for name in self.run.rewards}
        for name, one in rewards.items():
            self.identities.check(name, round_, one.published)
        advantage = self.advantage(round_, rollout, rewards)
        return Round(round_, rollout, rewards, advantage, self.update(round_, rollout, advantage, policy))


def _components(base: Path) -> list[str]:
    """Modules of this project that a base folder names as its parts (the lab's autoencoder): code behind its images,
    which no import mentions."""
    index = base / "model_index.json"
    entries = read_json(index).values() if index.is_file() else ()
    return sorted({str(one[0]) for one in entries if isinstance(one, list) and str(one[0]).startswith("stages.")})
