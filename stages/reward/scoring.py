"""Images through one scorer: batches with a progress bar, failures kept apart row by row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stages.core.errors import GateError, GranularError
from stages.core.progress import bar
from stages.core.spec import read_json
from stages.core.types import Reward
from stages.reward.base import GroupScorer, Scorer


def score_images(
    scorer: Scorer,
    images: np.ndarray,
    prompts: Sequence[str],
    metadata: Sequence[dict[str, Any]],
    *,
    label: str,
    maps: np.ndarray | None = None,
) -> list[Reward]:
    """One reward per image, [N], for images float32 [N, H, W, 3] in [0, 1] with their own prompts and metadata.

    A batch that raises is scored again one image at a time, once, so that one bad image costs one row: whatever
    raises alone is a failed reward with the error as its reason.

    maps: float32 [N, H, W], to be filled with the maps of a differentiable scorer; NaN where the reward failed.
    """
    rewards: list[Reward] = []
    scorer.prepare(prompts)
    with bar(len(images), label, "images") as progress:
        for start in range(0, len(images), scorer.batch):
            chosen = slice(start, start + scorer.batch)
            batch = [images[chosen], prompts[chosen], metadata[chosen], *([] if maps is None else [maps[chosen]])]
            try:
                rewards += _score(scorer, *batch)
            except GranularError:
                raise
            except Exception:
                for row in range(len(batch[0])):
                    rewards += _score_alone(scorer, *(part[row : row + 1] for part in batch))
            progress.update(len(batch[0]))
    return rewards


def score_members(
    scorer: GroupScorer,
    images: np.ndarray,
    prompts: Sequence[str],
    metadata: Sequence[dict[str, Any]],
    shown: np.ndarray,
    group: np.ndarray,
    *,
    label: str,
) -> list[Reward]:
    """One reward per member of a group, [L]; `shown` [L] are the members' images, `group` [L] numbers their groups.

    images, prompts, metadata: as in `score_images`.
    """
    order = np.argsort(group, kind="stable")
    members = np.split(order, np.flatnonzero(np.diff(group[order])) + 1) if len(order) else []
    groups = [shown[rows].tolist() for rows in members]
    found = scorer.score_groups(images=images, prompts=prompts, metadata=metadata, groups=groups, label=label)
    if [len(own) for own in found] != [len(own) for own in groups]:
        raise GranularError("a groupwise scorer did not answer one reward for every member of every group.")
    rewards = dict(zip(order.tolist(), (reward for own in found for reward in own)))
    return [rewards[member] for member in range(len(group))]


def require_identity(name: str, scorer: Scorer | GroupScorer, known: Path | None) -> None:
    """Refuse a scorer behind an address that is not the one its run asked about when it began.

    known: JSON file with what it said of itself then; None for a scorer of this process.

    Raises:
        GateError: it is another one.
    """
    if known is None:
        return
    then, now = read_json(known), scorer.identity()
    changed = sorted(key for key in then if then[key] != now.get(key))
    if changed:
        raise GateError(
            f"scorers.{name}: another scorer answers than when the run began ({', '.join(changed)} changed); serve the "
            "former one again, or start the run again so that its rewards are computed by the new one."
        )


def _score(
    scorer: Scorer,
    images: np.ndarray,
    prompts: Sequence[str],
    metadata: Sequence[dict[str, Any]],
    maps: np.ndarray | None = None,
) -> list[Reward]:
    if maps is None:
        rewards = scorer.score(images=images, prompts=prompts, metadata=metadata)
    else:
        rewards, found = scorer.sensitivity(images=images, prompts=prompts, metadata=metadata)
        finite = np.isfinite(found).all((1, 2))
        rewards = [
            Reward.failed("the reward's gradient is not finite") if reward.status == "ok" and not fine else reward
            for reward, fine in zip(rewards, finite)
        ]
        failed = np.array([reward.status != "ok" for reward in rewards], bool)
        maps[...] = np.where(failed[:, None, None], np.float32("nan"), found)
    if len(rewards) != len(images):
        raise GranularError(f"a scorer answered {len(rewards)} rewards for {len(images)} images.")
    return rewards


def _score_alone(
    scorer: Scorer,
    image: np.ndarray,
    prompt: Sequence[str],
    metadata: Sequence[dict[str, Any]],
    maps: np.ndarray | None = None,
) -> list[Reward]:
    try:
        return _score(scorer, image, prompt, metadata, maps)
    except GranularError:
        raise
    except Exception as error:
        if maps is not None:
            maps[...] = np.nan
        return [Reward.failed(f"{type(error).__name__}: {error}")]
