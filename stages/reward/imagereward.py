"""Scorer `imagereward`: ImageReward (arXiv 2304.05977), a BLIP fine-tuned on rankings that people made.

    score = (m(image, prompt) − 0.167…) / 1.033…,  about −2.3 to 2; by the authors' own package

The package `image-reward` 1.5 does not import beside transformers 5 and pins timm 0.6.13, so it lives in an environment
of its own and is reached as a scorer of kind `http`:

    granular serve-scorer imagereward --kind imagereward --path /models/ImageReward --port 8300    # in that environment
    scorers: {image_reward: {kind: http, url: "http://127.0.0.1:8300"}}                            # in params.yaml

The path is a folder with `ImageReward.pt` and `med_config.json`, as zai-org/ImageReward has them. Its tokenizer,
bert-base-uncased, is read from the Hugging Face cache of that environment. Images are rounded to 8 bits. One image goes
through the model at a time, so a score depends on nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from stages.core import digest
from stages.core.code import code_digest
from stages.core.errors import GranularError
from stages.core.images import to_uint8
from stages.core.types import Reward
from stages.reward.base import require_aligned

CHECKPOINT, CONFIG = "ImageReward.pt", "med_config.json"
TOKENS = 35  # that the package hands to BLIP's text encoder


def load(path: Path, batch: int, device: str, options: None = None) -> ImageRewardScorer:
    """The scorer of a folder.

    Raises:
        GranularError: a file is missing, or the package cannot be imported here.
    """
    for name in (CHECKPOINT, CONFIG):
        if not (path / name).is_file():
            raise GranularError(f"no {name} in {path}; both files are those of zai-org/ImageReward.")
    try:
        import ImageReward
    except Exception as error:  # on newer libraries it is an ImportError, or whatever these raise
        told = (str(error).splitlines() or [""])[0]
        raise GranularError(
            f"the package ImageReward cannot be imported here ({type(error).__name__}: {told}); install image-reward "
            "in an environment of its own, run `granular serve-scorer` there and name its address in a scorer of "
            "kind http."
        ) from None
    model = ImageReward.load(str(path / CHECKPOINT), device=device, med_config=str(path / CONFIG))
    weights = digest.of_json([digest.of_file(path / name) for name in (CHECKPOINT, CONFIG)])
    return ImageRewardScorer(model, weights, batch)


class ImageRewardScorer:
    """The package's model as a scorer. weights: digest of its files."""

    kind: Literal["pointwise"] = "pointwise"
    differentiable = False

    def __init__(self, model: Any, weights: str, batch: int) -> None:
        self.model, self.weights, self.batch = model, weights, batch

    def identity(self) -> dict[str, str]:
        """Kind, code digest and digest of checkpoint and config."""
        return {"kind": "imagereward", "code": code_digest(__name__), "weights": self.weights}

    def prepare(self, prompts: Sequence[str]) -> None:
        """Nothing: text and image go through the model together."""

    def truncated(self, prompts: Sequence[str]) -> list[bool]:
        """Which prompts have more tokens than the package passes on."""
        tokenizer = self.model.blip.tokenizer
        return [len(tokenizer(prompt).input_ids) > TOKENS for prompt in prompts]

    def score(self, *, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> list[Reward]:
        """The package's scores, [N]."""
        from PIL import Image

        require_aligned(images, prompts, metadata)
        return [
            Reward(float(self.model.score(prompt, Image.fromarray(picture))))
            for prompt, picture in zip(prompts, to_uint8(images))
        ]
