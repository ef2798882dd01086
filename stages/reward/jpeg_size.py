"""Scorer `jpeg_size`: how large an image is as a JPEG file, in kB (1000 bytes).

    incompress: +size        compress: −size

The two rewards DDPO was shown on (arXiv 2305.13301, kvablack/ddpo-pytorch: quality 95). A reward without a model: the
smallest complete example of a scorer, and one whose optimum everybody can see. Images are rounded to 8 bits.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from stages.core.code import code_digest
from stages.core.images import to_uint8
from stages.core.types import Reward
from stages.reward.base import require_aligned
from stages.reward.probe import Probe, plain

WEIGHTS = "none"


@dataclass(frozen=True, kw_only=True)
class Options:
    """goal: whether small files (`compress`) or large ones (`incompress`) are rewarded. quality: of the JPEG encoder;
    95 is DDPO's, and above it the encoder keeps noise that nobody sees."""

    goal: Literal["compress", "incompress"] = "compress"
    quality: Annotated[int, Field(ge=1, le=100)] = 95


def load(path: Path | None, batch: int, device: str, options: Options) -> JpegSizeScorer:
    """The scorer; it has no weights."""
    return JpegSizeScorer(options, batch)


def probe(options: Options) -> Probe:
    """At DDPO's quality the files are 2.028 and 1.660 kB (Pillow 13); 5 % for other builds of libjpeg."""
    sign = -1 if options.goal == "compress" else 1
    return plain(expected=(sign * 2.028, sign * 1.660) if options.quality == 95 else None, tolerance=0.1)


def kilobytes(image: np.ndarray, quality: int) -> float:
    """Size of a picture, uint8 [H, W, 3], as a JPEG file, in 1000 bytes."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, format="JPEG", quality=quality)
    return file.tell() / 1000


class JpegSizeScorer:
    """Sizes of JPEG files, with the sign of the goal."""

    kind: Literal["pointwise"] = "pointwise"
    differentiable = False

    def __init__(self, options: Options, batch: int) -> None:
        self.options, self.batch = options, batch

    def identity(self) -> dict[str, str]:
        """Kind, code digest and options."""
        options = f"{self.options.goal}, quality {self.options.quality}"
        return {"kind": "jpeg_size", "code": code_digest(__name__), "options": options}

    def prepare(self, prompts: Sequence[str]) -> None:
        """Nothing: the text is not read."""

    def truncated(self, prompts: Sequence[str]) -> list[bool]:
        """None: the text is not read."""
        return [False] * len(prompts)

    def score(self, *, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> list[Reward]:
        """±kB of each image, [N]."""
        require_aligned(images, prompts, metadata)
        sign = -1 if self.options.goal == "compress" else 1
        return [Reward(sign * kilobytes(to_uint8(image), self.options.quality)) for image in images]
