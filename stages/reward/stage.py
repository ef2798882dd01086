"""The reward stage: one scorer over every distinct image of a rollout -> `rewards.parquet`, `summary.json`.

Each image is scored once, with its own prompt; leaves that share a node share the reward. Scores are raw: weights
between scorers belong to the advantage.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.core.errors import GranularError
from stages.core.progress import say
from stages.core.types import Reward, constant
from stages.prompts.stage import read_prompts
from stages.reward.base import Scorer
from stages.reward.scoring import score_images
from stages.reward.spec import RewardSpec

if TYPE_CHECKING:
    import pandas as pd

    from stages.core.resident import Resident


def run(inputs: Mapping[str, Path], spec: RewardSpec, resident: Resident, out: Path) -> None:
    """Score a rollout.

    inputs: rollout, prompts (folders of those stages), base (pipeline folder), scorer (weights; absent for the oracle).
    """
    policy = resident.policy(spec.policy, inputs["base"])
    scorer = resident.scorer(spec.name, spec.scorer, inputs.get("scorer"), spec.policy.device)
    rollout = resident.rollout(inputs["rollout"])
    images = resident.images(policy, inputs["rollout"], rollout.leaf_x)
    table = read_prompts(inputs["prompts"])
    asked = prompt_of_nodes(rollout.leaves, rollout.leaf_nodes)
    absent = sorted(set(asked.tolist()) - set(table["id"]))
    if absent:
        raise GranularError(f"{inputs['prompts']}: the rollout used prompt {absent[0]}, which is not in the table.")
    rows = table.set_index("id").loc[asked]
    parsed = {text: json.loads(text) for text in rows["metadata"].unique()}
    metadata = [parsed[text] for text in rows["metadata"].tolist()]
    rewards = score_images(scorer, images, rows["text"].tolist(), metadata, label=f"{spec.name} scores")
    leaves = reward_table(rollout.leaves, rollout.leaf_nodes, rewards)
    leaves.to_parquet(out / "rewards.parquet", index=False)
    summary = summarise(spec.name, scorer, images, rewards, leaves, sorted(set(rows["text"])))
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def prompt_of_nodes(leaves: pd.DataFrame, leaf_nodes: np.ndarray) -> np.ndarray:
    """The prompt (row id) of each distinct leaf node, int64 [M]."""
    prompts = leaves["prompt"].to_numpy(np.int64)
    nodes, first, place = np.unique(leaves["node"], return_index=True, return_inverse=True)
    if (prompts[first][place] != prompts).any():
        raise AssertionError("a leaf node belongs to two prompts")
    return prompts[first][np.searchsorted(nodes, leaf_nodes)]


def reward_table(leaves: pd.DataFrame, leaf_nodes: np.ndarray, rewards: Sequence[Reward]) -> pd.DataFrame:
    """One row per leaf, sorted by leaf: leaf, prompt, value (null unless ok), status, reason, `sub.<name>`…

    `rewards` belong to `leaf_nodes`; every leaf gets the reward of its node.
    """
    import pandas as pd

    position = pd.Series(range(len(leaf_nodes)), index=leaf_nodes)
    ordered = leaves.sort_values("leaf")
    own = [rewards[place] for place in position.loc[ordered["node"]]]
    columns: dict[str, Any] = {
        "leaf": ordered["leaf"].to_numpy(np.int64),
        "prompt": ordered["prompt"].to_numpy(np.int64),
        "value": np.array([np.nan if reward.value is None else reward.value for reward in own], np.float64),
        "status": [reward.status for reward in own],
        "reason": [reward.reason for reward in own],
    }
    for name in sorted({part for reward in rewards for part, _ in reward.parts}):
        columns[f"sub.{name}"] = np.array([dict(reward.parts).get(name, np.nan) for reward in own], np.float64)
    return pd.DataFrame(columns)


def summarise(
    name: str,
    scorer: Scorer,
    images: np.ndarray,
    rewards: Sequence[Reward],
    leaves: pd.DataFrame,
    prompts: Sequence[str],
) -> dict[str, Any]:
    """The round's scores in numbers: means over ok leaves, failures over images, what was cut, who scored.

    `constant`: the images differ, yet all of them got one value (the advantage stage stops the run on it).
    """
    failed = [reward for reward in rewards if reward.status == "failed"]
    if failed:
        say(f"warning: scorer {name} failed on {len(failed)} of {len(rewards)} images: {failed[0].reason}")
    ok = np.array([reward.status == "ok" for reward in rewards], bool)
    values = np.array([reward.value for reward in rewards if reward.status == "ok"], np.float64)
    scored = leaves.loc[leaves["status"] == "ok", "value"].to_numpy()
    shown = np.flatnonzero(ok)
    differ = any(not np.array_equal(images[row], images[shown[0]]) for row in shown[1:])
    return {
        "scorer": name,
        "images": len(rewards),
        "leaves": len(leaves),
        "ok": int(ok.sum()),
        "failed": len(failed),
        **{
            key: float(measure(scored)) if len(scored) else None
            for key, measure in (("mean", np.mean), ("std", np.std), ("min", np.min), ("max", np.max))
        },
        "constant": differ and constant(values),
        "prompts": len(prompts),
        "truncated_prompts": sum(scorer.truncated(prompts)),
        "identity": scorer.identity(),
    }
