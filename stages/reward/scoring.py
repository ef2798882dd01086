"""Images through one scorer: batches with a progress bar, failures kept apart row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stages.core.errors import GranularError
from stages.core.progress import bar
from stages.core.types import Reward
from stages.reward.base import Scorer


def score_images(
    scorer: Scorer,
    images: np.ndarray,
    prompts: Sequence[str],
    metadata: Sequence[dict[str, Any]],
    *,
    label: str,
) -> list[Reward]:
    """One reward per image, [N], for images float32 [N, H, W, 3] in [0, 1] with their own prompts and metadata.

    A batch that raises is scored again one image at a time, once, so that one bad image costs one row: whatever
    raises alone is a failed reward with the error as its reason.
    """
    rewards: list[Reward] = []
    scorer.prepare(prompts)
    with bar(len(images), label, "images") as progress:
        for start in range(0, len(images), scorer.batch):
            chosen = slice(start, start + scorer.batch)
            batch = (images[chosen], prompts[chosen], metadata[chosen])
            try:
                rewards += _score(scorer, *batch)
            except GranularError:
                raise
            except Exception:
                for image, prompt, wanted in zip(*batch):
                    rewards += _score_alone(scorer, image, prompt, wanted)
            progress.update(len(batch[0]))
    return rewards


def _score(
    scorer: Scorer, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
) -> list[Reward]:
    rewards = scorer.score(images=images, prompts=prompts, metadata=metadata)
    if len(rewards) != len(images):
        raise GranularError(f"a scorer answered {len(rewards)} rewards for {len(images)} images.")
    return rewards


def _score_alone(scorer: Scorer, image: np.ndarray, prompt: str, metadata: dict[str, Any]) -> list[Reward]:
    try:
        return _score(scorer, image[None], [prompt], [metadata])
    except GranularError:
        raise
    except Exception as error:
        return [Reward.failed(f"{type(error).__name__}: {error}")]
