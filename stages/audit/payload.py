"""What a round's page is given: the tables column by column, and figures of the round. JSON, numbers unrounded."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from stages.audit.read import StoredRound
from stages.audit.tables import Tables, ranked_images

EXTREMES = 8  # best and worst images of a round on its page

# What the summary of a round is told in: key, name, what it means.
ADVANTAGE = (
    ("edges", "trained steps", "rows of advantages.parquet"),
    ("groups", "groups", "sets of rewards that were compared with each other"),
    ("constant_groups", "zero-variance groups", "all rewards equal, so nothing to learn from"),
    ("dropped_members", "dropped members", "left their group because a reward is missing"),
    ("zero_advantages", "advantages of 0", ""),
    ("clipped_advantages", "clipped advantages", "advantage ≠ sum"),
    ("advantage_std", "std of advantages", ""),
)
UPDATE = (
    ("points", "update points", "transitions that entered an optimizer step"),
    ("steps", "optimizer steps", ""),
    ("skipped_steps", "skipped steps", "every advantage was 0"),
    ("clip_fraction", "clip fraction", "update points where the clip stops the gradient"),
    ("ratio_min", "smallest ratio", ""),
    ("ratio_max", "largest ratio", ""),
    ("grad_norm", "gradient norm", "largest of the steps, before it is cut"),
    ("param_change", "‖Δθ‖", "how far the weights moved"),
    ("loss", "loss", "mean over steps"),
)


def payload(stored: StoredRound, tables: Tables, trees: Sequence[int]) -> dict[str, Any]:
    """Everything but the images. trees: prompts whose tree is drawn."""
    leaves = [tables.leaves.get(int(edge), []) for edge in tables.members["edge"]]
    return {
        "run": stored.run,
        "round": stored.number,
        "method": stored.credit.method,
        "failures": stored.credit.failures,
        "scorers": {name: float(weight) for name, weight in stored.credit.rewards.items()},
        "members": columns(tables.members),
        "leavesOf": leaves,
        "images": columns(tables.images),
        "prompts": columns(tables.prompts),
        "steps": columns(tables.steps),
        "missing": columns(tables.failures),
        "facts": facts(stored),
        "correlation": stored.summary["rank_correlation"],
        "rewardFigures": stored.summary["scorers"],
        "optimizerSteps": stored.update["steps"],
        "extremes": extremes(stored),
        "sigmas": [float(one) for one in stored.rollout.attrs["sigmas"]],
        "trees": {str(prompt): tree(stored, prompt) for prompt in trees},
    }


def facts(stored: StoredRound) -> list[dict[str, Any]]:
    """Figures of the round: of, key, name, note, value."""
    found = []
    for of, names, values in (
        ("summary.json", ADVANTAGE, stored.summary),
        ("update.json", UPDATE, stored.update["total"]),
    ):
        for key, name, note in names:
            if values.get(key) is not None:
                found.append({"of": of, "key": key, "name": name, "note": note, "value": values[key]})
    return found


def extremes(stored: StoredRound) -> dict[str, list[dict[str, Any]]]:
    """The best and the worst images: leaf and total."""
    table = ranked_images(stored)
    count = min(EXTREMES, len(table) // 2)
    rows = [{"leaf": int(row.leaf), "total": float(row.total)} for row in table.itertuples()]
    return {"best": rows[:count], "worst": rows[::-1][:count]}


def tree(stored: StoredRound, prompt: int) -> dict[str, Any]:
    """One prompt's tree: of every node its parent (place in this list), level (of the distinct σ, from noise) and the
    trained edge that leads to it (−1: none); leaves as (place of the node, leaf)."""
    nodes = stored.rollout.nodes
    ids = np.flatnonzero(nodes["prompt"].to_numpy() == prompt)
    place = {int(node): i for i, node in enumerate(ids)}
    sigma = nodes["sigma"].to_numpy()[ids]
    levels = np.unique(sigma)[::-1]
    edges = stored.rollout.edges[(stored.rollout.edges["prompt"] == prompt) & stored.rollout.edges["recorded"]]
    trained = dict(zip(edges["child"].tolist(), edges["edge"].tolist()))
    leaves = stored.rollout.leaves[stored.rollout.leaves["prompt"] == prompt]
    return {
        "parent": [place.get(int(one), -1) for one in nodes["parent"].to_numpy()[ids]],
        "level": np.searchsorted(-levels, -sigma).tolist(),
        "edge": [trained.get(int(one), -1) for one in ids],
        "levels": [float(one) for one in levels],
        "leaves": [[place[int(row.node)], int(row.leaf)] for row in leaves.itertuples()],
    }


def columns(table: pd.DataFrame) -> dict[str, list[Any]]:
    """Column → values as JSON carries them; what is not a finite number is null."""
    return {str(name): [plain(value) for value in table[name].tolist()] for name in table}


def plain(value: Any) -> Any:
    """A value as JSON carries it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def as_json(value: Any) -> str:
    """JSON that may stand inside a script element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _plain(value: Any) -> Any:
    return value.item()


def size(parts: Iterable[str]) -> int:
    """Bytes of texts on disk."""
    return sum(len(part.encode()) for part in parts)
