"""The reward stage: one scorer over every distinct image of a rollout -> `rewards.parquet`, `summary.json`.

Each image is scored once, with its own prompt; leaves that share a node share the reward. A groupwise scorer compares
leaves of one prompt, step, stride and occurrence, and each leaf has the reward of its own group. Scores are raw:
weights between scorers belong to the advantage. Where the run's method asks for them, `maps.npy` holds the scorer's
map of every distinct image, float32 [images, H, W] in the order of `leaf_nodes` (NaN where the reward failed).
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
from stages.reward.base import GroupScorer, Scorer
from stages.reward.scoring import require_identity, score_images, score_members
from stages.reward.spec import RewardSpec

if TYPE_CHECKING:
    import pandas as pd

    from stages.core.resident import Resident


def run(inputs: Mapping[str, Path], spec: RewardSpec, resident: Resident, out: Path) -> None:
    """Score a rollout.

    inputs: rollout, prompts (folders of those stages), base (pipeline folder), scorer (weights, where it has some),
        identity (of a scorer behind an address: file with who it was when the run began).
    """
    import pandas as pd

    policy = resident.policy(spec.policy, inputs["base"])
    rollout = resident.rollout(inputs["rollout"])
    images = resident.images(policy, inputs["rollout"], rollout.leaf_x)
    resident.make_room(policy)
    scorer = resident.scorer(spec.name, spec.scorer, inputs.get("scorer"), spec.policy.device)
    require_identity(spec.name, scorer, inputs.get("identity"))
    table = read_prompts(inputs["prompts"])
    asked = prompt_of_nodes(rollout.leaves, rollout.leaf_nodes)
    absent = sorted(set(asked.tolist()) - set(table["id"]))
    if absent:
        raise GranularError(f"{inputs['prompts']}: the rollout used prompt {absent[0]}, which is not in the table.")
    rows = table.set_index("id").loc[asked]
    parsed = {text: json.loads(text) for text in rows["metadata"].unique()}
    metadata = [parsed[text] for text in rows["metadata"].tolist()]
    texts, label = rows["text"].tolist(), f"{spec.name} scores"
    if scorer.kind == "groupwise":
        shown = pd.Index(rollout.leaf_nodes).get_indexer(rollout.leaves["node"])
        group = comparison_groups(rollout.leaves)
        rewards = score_members(scorer, images, texts, metadata, shown, group, label=label)
        # A reward belongs to a leaf in its group here, so every leaf counts as an image of its own.
        ids = rollout.leaves["leaf"].to_numpy()
        leaves = reward_table(rollout.leaves.assign(node=ids), ids, rewards)
        images = [images[row] for row in shown]
    else:
        maps = np.empty(images.shape[:3], np.float32) if spec.maps else None
        rewards = score_images(scorer, images, texts, metadata, label=label, maps=maps)
        leaves = reward_table(rollout.leaves, rollout.leaf_nodes, rewards)
        if maps is not None:
            np.save(out / "maps.npy", maps)
    leaves.to_parquet(out / "rewards.parquet", index=False)
    summary = summarise(spec.name, scorer, images, rewards, leaves, sorted(set(texts)))
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def prompt_of_nodes(leaves: pd.DataFrame, leaf_nodes: np.ndarray) -> np.ndarray:
    """The prompt (row id) of each distinct leaf node, int64 [M]."""
    prompts = leaves["prompt"].to_numpy(np.int64)
    nodes, first, place = np.unique(leaves["node"], return_index=True, return_inverse=True)
    if (prompts[first][place] != prompts).any():
        raise AssertionError("a leaf node belongs to two prompts")
    found = np.searchsorted(nodes, leaf_nodes)
    if (nodes[found.clip(max=len(nodes) - 1)] != leaf_nodes).any():
        raise AssertionError("a decoded node is no leaf")
    return prompts[first][found]


def comparison_groups(leaves: pd.DataFrame) -> np.ndarray:
    """The group of each leaf, int64 [leaves]: one prompt, step, stride and occurrence, as credit rules compare them."""
    occurrence = leaves.groupby(["prompt", "s", "member", "stride"], sort=False).cumcount()
    keys = leaves[["prompt", "s", "stride"]].assign(occurrence=occurrence)
    return keys.groupby(list(keys), sort=False).ngroup().to_numpy(np.int64)


def reward_table(leaves: pd.DataFrame, leaf_nodes: np.ndarray, rewards: Sequence[Reward]) -> pd.DataFrame:
    """One row per leaf, sorted by leaf: leaf, prompt, value (null unless ok), status, reason, `sub.<name>`…; of a judge
    that answers in words also `reply`.

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
    if any(reward.reply for reward in rewards):
        columns["reply"] = [reward.reply for reward in own]
    return pd.DataFrame(columns)


def summarise(
    name: str,
    scorer: Scorer | GroupScorer,
    images: Sequence[np.ndarray],
    rewards: Sequence[Reward],
    leaves: pd.DataFrame,
    prompts: Sequence[str],
) -> dict[str, Any]:
    """The round's scores in numbers: means over ok leaves, failures over images, what was cut, who scored.

    images: what each reward is about. `constant`: the images differ, yet all of them got one value (the advantage
    stage stops the run on it). `probe`: answers to the built-in probe, which a run compares between its rounds.
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
        "probe": getattr(scorer, "probe", None),
    }
