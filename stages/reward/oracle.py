"""Scorer `lab_oracle`: the embedded world's ground truth, of 8-bit pictures: it judges what a person would see.

Value: graded score in [0, 1]. Sub-score `correct`: 0 or 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from stages.core.code import code_digest
from stages.core.images import from_uint8, to_uint8
from stages.core.types import Reward
from stages.reward.base import require_aligned
from stages.reward.probe import Probe

WEIGHTS = "none"
_PROBED = (("circle", "red"), ("square", "blue"))


def load(path: Path | None, batch: int, device: str, options: None) -> OracleScorer:
    """The oracle; it has no weights."""
    return OracleScorer(batch)


def probe(options: None) -> Probe:
    """A drawn red circle and a drawn blue square, both judged by the prompt for the circle."""
    from stages.lab.scenes import sample_images

    drawn = [{"include": [{"class": shape, "count": 1, "color": color}]} for shape, color in _PROBED]
    images = from_uint8(sample_images(drawn, np.random.default_rng(0)))
    return Probe(images, ["a red circle"] * 2, [drawn[0]] * 2, expected=(0.995, 0.0), tolerance=0.01)


class OracleScorer:
    """`stages.lab.oracle.judge` as a scorer; it reads a prompt's metadata, never its text."""

    kind: Literal["pointwise"] = "pointwise"
    differentiable = False

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def identity(self) -> dict[str, str]:
        """Kind and code digest; there are no weights."""
        return {"kind": "lab_oracle", "code": code_digest(__name__)}

    def prepare(self, prompts: Sequence[str]) -> None:
        """Nothing: the text is not read."""

    def truncated(self, prompts: Sequence[str]) -> list[bool]:
        """None: the text is not read."""
        return [False] * len(prompts)

    def score(self, *, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> list[Reward]:
        """Graded verdicts, [N]; a prompt from outside the lab (no `include`) is a failure, not a zero."""
        from stages.lab.oracle import judge

        require_aligned(images, prompts, metadata)
        rewards = [Reward.failed("the prompt's metadata has no 'include'; the oracle judges lab prompts only")] * len(
            images
        )
        known = [row for row, wanted in enumerate(metadata) if "include" in wanted]
        verdicts = judge(to_uint8(images[known]), [metadata[row] for row in known]) if known else []
        for row, verdict in zip(known, verdicts):
            rewards[row] = Reward(
                float(verdict.score), reason=verdict.reason, parts=(("correct", float(verdict.correct)),)
            )
        return rewards
