"""Scorer `ocr`: is the text that the prompt asks for in the image, as a text recogniser reads it?

    score = 1 − min(distance(read, target), len(target)) / len(target)   in [0, 1]

Both without white space and in lower case; distance is Levenshtein's, and 0 where the target is a part of what was
read, so that other signs in a street scene cost nothing. This is the reward of Flow-GRPO's text-rendering task (arXiv
2505.05470, yifan123/flow_grpo), with another recogniser: RapidOCR's PP-OCR models, which come with the package.

The target is the prompt's `metadata["target"]`, or the first phrase in double quotes of its text; a prompt without
either has no reward. Images are rounded to 8 bits. Each is read alone, by one thread, so a score depends on nothing
else. Sub-scores: `distance`, and `characters`, how many were read; the reason says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from stages.core import digest
from stages.core.code import code_digest
from stages.core.errors import GranularError
from stages.core.images import from_uint8, to_uint8
from stages.core.types import Reward
from stages.prompts.targets import quoted_phrase
from stages.reward.base import require_aligned
from stages.reward.probe import Probe

WEIGHTS = "none"


@dataclass(frozen=True, kw_only=True)
class Options:
    """None: everything about this reward is said by the formula."""


class Reader(Protocol):
    """Finds and reads text. weights: digest of its models."""

    weights: str

    def __call__(self, image: np.ndarray) -> str:
        """The text of a picture, uint8 [H, W, 3], from top to bottom; empty where there is none."""
        ...


def load(path: Path | None, batch: int, device: str, options: Options) -> OcrScorer:
    """The scorer with RapidOCR's models; it runs on the CPU whatever the device.

    Raises:
        GranularError: the package is not installed, or came without its models.
    """
    return OcrScorer(RapidReader(), batch)


def probe(options: Options) -> Probe:
    """A written word and a blank picture, both asked for the word: read without a mistake, and not at all."""
    from PIL import Image, ImageDraw, ImageFont

    word = "SIGNAL"
    written = Image.new("RGB", (320, 96), "white")
    ImageDraw.Draw(written).text((20, 16), word, fill="black", font=ImageFont.load_default(56))
    images = np.stack([from_uint8(np.asarray(written)), np.ones((96, 320, 3), np.float32)])
    return Probe(images, [f'a sign that says "{word}"'] * 2, [{}, {}], expected=(1.0, 0.0))


class OcrScorer:
    """How much of each prompt's target a reader finds in its image."""

    kind: Literal["pointwise"] = "pointwise"
    differentiable = False

    def __init__(self, reader: Reader, batch: int) -> None:
        self.reader, self.batch = reader, batch

    def identity(self) -> dict[str, str]:
        """Kind, code digest and the digest of the reader's models."""
        return {"kind": "ocr", "code": code_digest(__name__), "weights": self.reader.weights}

    def prepare(self, prompts: Sequence[str]) -> None:
        """Nothing: targets are looked up with the images."""

    def truncated(self, prompts: Sequence[str]) -> list[bool]:
        """None: a target is read whole."""
        return [False] * len(prompts)

    def score(self, *, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> list[Reward]:
        """Shares of the target that were read, [N]; missing where there is no target."""
        require_aligned(images, prompts, metadata)
        return [self._one(*row) for row in zip(images, prompts, metadata)]

    def _one(self, image: np.ndarray, prompt: str, metadata: dict[str, Any]) -> Reward:
        target = target_of(prompt, metadata)
        if target is None:
            return Reward(
                None, "missing", "the prompt has no target: no metadata.target and no phrase in double quotes"
            )
        read = self.reader(to_uint8(image))
        found, wanted = _plain(read), _plain(target)
        distance = 0 if wanted in found else levenshtein(found, wanted)
        value = 1 - min(distance, len(wanted)) / len(wanted)
        parts = (("characters", float(len(found))), ("distance", float(distance)))
        return Reward(value, reason=f"read {read!r}, wanted {target!r}", parts=parts)


def target_of(prompt: str, metadata: dict[str, Any]) -> str | None:
    """The text an image of the prompt has to show, or None."""
    target = metadata.get("target")
    if not isinstance(target, str):
        target = quoted_phrase(prompt)
    return target if target and _plain(target) else None


def levenshtein(a: str, b: str) -> int:
    """The least number of insertions, deletions and replacements of one character that turn a into b."""
    row = list(range(len(b) + 1))
    for place, one in enumerate(a, 1):
        before, row[0] = row[0], place
        for column, other in enumerate(b, 1):
            before, row[column] = row[column], min(row[column] + 1, row[column - 1] + 1, before + (one != other))
    return row[-1]


def _plain(text: str) -> str:
    return "".join(text.lower().split())


class RapidReader:
    """RapidOCR with the detection and recognition models of its package; nothing is downloaded or logged."""

    def __init__(self) -> None:
        try:
            import rapidocr
        except ImportError:
            raise GranularError("the ocr scorer needs the packages rapidocr and onnxruntime; install both.") from None
        folder = Path(rapidocr.__file__).parent / "models"
        det, rec = _model(folder, "det"), _model(folder, "rec")
        self._read = rapidocr.RapidOCR(
            params={
                "Global.log_level": "critical",
                "Global.use_cls": False,  # text upside down is not what was asked for
                "Det.model_path": str(det),
                "Rec.model_path": str(rec),
                "EngineConfig.onnxruntime.intra_op_num_threads": 1,
                "EngineConfig.onnxruntime.inter_op_num_threads": 1,
            }
        )
        self.weights = digest.of_json([digest.of_file(det), digest.of_file(rec)])

    def __call__(self, image: np.ndarray) -> str:
        """Lines that RapidOCR trusts (confidence ½ or more, its default), joined by spaces."""
        found = self._read(np.ascontiguousarray(image[..., ::-1]))  # it expects blue first
        return " ".join(found.txts or ())


def _model(folder: Path, task: str) -> Path:
    found = sorted(folder.glob(f"*_{task}_*.onnx"))
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        raise GranularError(
            f"expected exactly one model *_{task}_*.onnx in {folder}, found {names}; reinstall rapidocr."
        )
    return found[0]
