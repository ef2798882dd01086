"""The evaluation stage: every prompt × noise sampled once by the pure ODE, scored by every scorer.

x_T of (prompt, noise) is a pure function of (seed, prompt, noise): policies are compared on the same noise, and the
order of prompts or the way they are divided into shards changes nothing. Sampling is the rollout's own engine on
trees that are chains.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.core.errors import GranularError
from stages.core.images import to_uint8
from stages.core.noise import normal
from stages.core.spec import read_json
from stages.core.types import Ledger, Reward
from stages.evaluate.sheet import contact_sheet, thumbnail
from stages.evaluate.spec import EvaluateSpec
from stages.prompts.stage import read_prompts
from stages.reward.scoring import require_identity, score_images
from stages.rollout.buffers import RolloutShard
from stages.rollout.forest import Noise
from stages.rollout.grid import Grid, make_grid
from stages.rollout.stage import sample
from stages.rollout.tree import FrozenTree, Tree

if TYPE_CHECKING:
    import pandas as pd

    from stages.core.resident import Resident
    from stages.policies.base import Policy

SCHEMA = 1
KEPT_NOISES = 4


@dataclass(frozen=True)
class EvaluationNoise(Noise):
    """Initial noise under a purpose of its own, so that no evaluation shares a stream with a rollout."""

    def __call__(self, prompt: int, purpose: str, path: Sequence[int]) -> np.ndarray:
        return normal(self.shape, seed=self.seed, round_=0, prompt=prompt, purpose="evaluate", path=path)


def chains(grid: Grid, noises: int) -> FrozenTree:
    """One prompt's tree: a deterministic chain from each of its initial noises to an image."""
    tree = Tree(grid)
    for noise in range(noises):
        tree.complete(tree.root(member=noise), range(grid.steps))
    return tree.freeze()


def run(inputs: Mapping[str, Path], spec: EvaluateSpec, resident: Resident, out: Path) -> None:
    """Evaluate a policy.

    inputs: base (pipeline folder), policy (policy state folder; absent for `which: base`), prompts, embeddings, and
        `scorer.<name>` for every scorer that has weights, `identity.<name>` as in the reward stage.
    Writes `rewards.parquet` (prompt, noise, tag, scorer, value, status, reason, `sub.*`; one row per image and
    scorer), `images.npz` (prompt, noise, text, images uint8 [prompt, noise, H, W, 3]), `grid.png`, `summary.json`, and
    with `more_steps` their rewards as `steps.parquet`.
    """
    policy = resident.policy(spec.policy, inputs["base"])
    resident.make_room(policy, "module")
    weights = use_weights(inputs, spec, policy, resident)
    table = prompt_rows(inputs["prompts"], spec.prompts)
    images = pictures(inputs, spec, resident)
    rewards, scorers = score(inputs, spec, resident, images, table)
    rewards.to_parquet(out / "rewards.parquet", index=False)
    write_pictures(out, images.reshape(len(spec.prompts), spec.noises, *images.shape[1:]), spec, table["text"].tolist())
    others = [other_steps(spec, steps) for steps in spec.more_steps]
    if others:
        write_steps(out, inputs, others, resident, table)
    cost = sum((ledger(one, policy.passes) for one in (spec, *others)), Ledger())
    (out / "summary.json").write_text(
        json.dumps(summary(spec, weights, scorers, cost), indent=1) + "\n", encoding="utf-8"
    )


def pictures(inputs: Mapping[str, Path], spec: EvaluateSpec, resident: Resident) -> np.ndarray:
    """float32 [prompts · noises, H, W, 3] in [0, 1]: every prompt from each of its noises, by the weights in use."""
    policy = resident.policy(spec.policy, inputs["base"])
    resident.make_room(policy, "module")
    grid = make_grid(spec.grid)
    shards = sample(
        [chains(grid, spec.noises)] * len(spec.prompts),
        spec.prompts,
        policy=policy,
        conditions=resident.conditions(policy, inputs["embeddings"], spec.prompts),
        noise=EvaluationNoise(spec.seed, 0, policy.latent_shape),
        sampler=spec.sampler,
        label=f"evaluation, {spec.grid.steps} steps",
    )
    resident.make_room(policy, "vae")
    return policy.decode(latents(shards, spec.noises).reshape(-1, *policy.latent_shape))


def other_steps(spec: EvaluateSpec, steps: int) -> EvaluateSpec:
    """The same evaluation with another number of steps, on its first few noises."""
    return replace(spec, grid=replace(spec.grid, steps=steps), noises=spec.more_noises, more_steps=())


def write_steps(
    out: Path, inputs: Mapping[str, Path], specs: Sequence[EvaluateSpec], resident: Resident, table: pd.DataFrame
) -> None:
    """`steps.parquet`: the columns of `rewards.parquet` behind a column `steps`."""
    import pandas as pd

    tables = []
    for spec in specs:
        rewards, _ = score(inputs, spec, resident, pictures(inputs, spec, resident), table)
        rewards.insert(0, "steps", spec.grid.steps)
        tables.append(rewards)
    pd.concat(tables, ignore_index=True).to_parquet(out / "steps.parquet", index=False)


def ledger(spec: EvaluateSpec, passes: int) -> Ledger:
    """What sampling and scoring every prompt and noise costs; passes: transformer passes of one evaluation."""
    images = len(spec.prompts) * spec.noises
    evaluations = images * spec.grid.steps
    return Ledger(
        evaluations=evaluations, passes=evaluations * passes, images=images, scores=images * len(spec.scorers)
    )


def use_weights(inputs: Mapping[str, Path], spec: EvaluateSpec, policy: Policy, resident: Resident) -> str:
    """Load the weights to evaluate; returns their digest."""
    from stages.update.state import start

    if spec.which != "base":
        resident.use(policy, inputs["policy"], spec.which)
        return str(read_json(inputs["policy"] / "state.json")["digests"][spec.which])
    with tempfile.TemporaryDirectory() as folder:
        state = start(spec.policy, inputs["base"], Path(folder))
        resident.use(policy, Path(folder), "train")
    return state.digests["train"]


def prompt_rows(folder: Path, prompts: Sequence[int]) -> pd.DataFrame:
    """Text, tag and metadata of some prompts, in the order asked for (index: row id).

    Raises:
        GranularError: a row id that is not in the table.
    """
    table = read_prompts(folder).set_index("id")
    absent = [prompt for prompt in prompts if prompt not in table.index]
    if absent:
        raise GranularError(
            f"{folder}: no prompt {absent[0]} ({len(absent)} of {len(prompts)} are missing); row ids are those of "
            "prompts.parquet."
        )
    return table.loc[list(prompts)]


def latents(shards: Sequence[RolloutShard], noises: int) -> np.ndarray:
    """Clean latents [prompts, noises, *latent] in the order in which prompts were sampled."""
    parts = []
    for shard in shards:
        leaves = shard.forest.leaves
        place = np.searchsorted(shard.leaf_nodes, leaves["node"])
        # Within a prompt leaves come in the order of their noises; say so rather than trust it.
        order = np.lexsort((leaves["member"], shard.forest.index[leaves["node"]]))
        rows = shard.leaf_x[place[order]]
        parts.append(rows.reshape(-1, noises, *rows.shape[1:]))
    return np.concatenate(parts)


def score(
    inputs: Mapping[str, Path], spec: EvaluateSpec, resident: Resident, images: np.ndarray, table: pd.DataFrame
) -> tuple[pd.DataFrame, dict[str, dict[str, Any]]]:
    """All rewards as one table, and what is said of each scorer in the summary.

    images: float32 [prompts · noises, H, W, 3] in [0, 1], noises of a prompt beside each other. table: its prompts'
    rows.
    """
    import pandas as pd

    rows = table.loc[np.repeat(table.index, spec.noises)]
    texts = rows["text"].tolist()
    metadata = [json.loads(text) for text in rows["metadata"]]
    tables, said = [], {}
    policy = resident.policy(spec.policy, inputs["base"])
    for name, scorer_spec in spec.scorers.items():
        resident.make_room(policy)
        scorer = resident.scorer(name, scorer_spec, inputs.get(f"scorer.{name}"), spec.policy.device)
        require_identity(name, scorer, inputs.get(f"identity.{name}"))
        rewards = score_images(scorer, images, texts, metadata, label=f"evaluation {name}")
        tables.append(reward_rows(name, rewards, rows, spec.noises))
        values = [reward.value for reward in rewards if reward.value is not None]
        said[name] = {
            "identity": scorer.identity(),
            # The exactly rounded sum: the same mean in any order.
            "mean": math.fsum(values) / len(values) if values else None,
            **{status: sum(reward.status == status for reward in rewards) for status in ("ok", "failed", "missing")},
        }
    return pd.concat(tables, ignore_index=True), said


def reward_rows(name: str, rewards: Sequence[Reward], rows: pd.DataFrame, noises: int) -> pd.DataFrame:
    """One scorer's rows: prompt, noise, tag, scorer, value (null unless ok), status, reason, `sub.<part>`…, `reply`."""
    import pandas as pd

    columns: dict[str, Any] = {
        "prompt": rows.index.to_numpy(np.int64),
        "noise": np.tile(np.arange(noises), len(rows) // noises),
        "tag": rows["tag"].to_numpy(),
        "scorer": name,
        "value": np.asarray([np.nan if reward.value is None else reward.value for reward in rewards], np.float64),
        "status": [reward.status for reward in rewards],
        "reason": [reward.reason for reward in rewards],
    }
    for part in sorted({part for reward in rewards for part, _ in reward.parts}):
        columns[f"sub.{part}"] = np.asarray([dict(reward.parts).get(part, np.nan) for reward in rewards], np.float64)
    if any(reward.reply for reward in rewards):
        columns["reply"] = [reward.reply for reward in rewards]
    return pd.DataFrame(columns)


def spread(count: int, wanted: int) -> list[int]:
    """`wanted` positions out of `count`, evenly spread: prompts are ordered by kind, so all kinds are seen."""
    wanted = min(count, wanted)
    return [i * count // wanted for i in range(wanted)]


def write_pictures(out: Path, images: np.ndarray, spec: EvaluateSpec, texts: Sequence[str]) -> None:
    """`images.npz` and `grid.png` of the kept prompts; images: float32 [prompts, noises, H, W, 3] in [0, 1]."""
    kept = spread(len(images), spec.images)
    noises = min(spec.noises, KEPT_NOISES)
    shown = to_uint8(images[kept][:, :noises])
    np.savez_compressed(
        out / "images.npz",
        prompt=np.asarray([spec.prompts[i] for i in kept], np.int64),
        noise=np.arange(noises),
        text=np.asarray([texts[i] for i in kept]),
        images=shown,
    )
    tiles = [[thumbnail(image) for image in row] for row in shown]
    heads = [f"noise {j}" for j in range(noises)]
    (out / "grid.png").write_bytes(contact_sheet(tiles, [texts[i] for i in kept], heads))


def summary(spec: EvaluateSpec, weights: str, scorers: Mapping[str, Any], cost: Ledger) -> dict[str, Any]:
    """What was evaluated and how: two evaluations that agree on all but `policy` and the means can be compared."""
    return {
        "schema": SCHEMA,
        "policy": {"digest": weights, "which": spec.which},
        "seed": spec.seed,
        "prompts": list(spec.prompts),
        "noises": spec.noises,
        "steps": spec.grid.steps,
        "shift": spec.grid.shift,
        "family": spec.grid.family,
        "model_time": spec.grid.model_time,
        "guidance": spec.policy.guidance,
        "height": spec.policy.height,
        "width": spec.policy.width,
        "max_batch": spec.sampler.max_batch,
        **({"more_steps": list(spec.more_steps), "more_noises": spec.more_noises} if spec.more_steps else {}),
        "evaluations": cost.evaluations,
        "images": cost.images,
        "scores": cost.scores,
        "scorers": dict(scorers),
    }
