"""What a scorer is, and the golden pairs that prove it is the scorer it claims to be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from stages.core.errors import GateError, GranularError
from stages.core.images import from_uint8
from stages.core.spec import read_json
from stages.core.types import Reward

GOLDEN = "golden.json"
GOLDEN_TOLERANCE = 1e-3


class Scorer(Protocol):
    """A loaded reward model.

    kind: `pointwise`: every image is judged alone, so `score(batch)[i] == score([i])` bit for bit, and permuting the
        inputs permutes the outputs.
    differentiable: whether it also is a `DifferentiableScorer`.
    batch: images it likes to be handed at a time (its own forwards are padded to exactly this many).
    probe: what it answered to the built-in probe when it was loaded (`stages.reward.probe`), to be compared between
        rounds; None where it was not asked or may answer anything.
    """

    kind: Literal["pointwise"]
    differentiable: bool
    batch: int
    probe: tuple[float | None, ...] | None

    def score(self, *, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> list[Reward]:
        """One reward per image.

        images: float32 [N, H, W, 3] in [0, 1]; a scorer whose reference works on 8-bit pictures rounds them itself.
        prompts, metadata: each image's own, [N].
        """
        ...

    def prepare(self, prompts: Sequence[str]) -> None:
        """Read the prompts once, before their images come in batches."""
        ...

    def truncated(self, prompts: Sequence[str]) -> list[bool]:
        """Which prompts are longer than the scorer reads, so that their end is ignored, [N]."""
        ...

    def identity(self) -> dict[str, str]:
        """Kind, code digest and weight digest: two scorers with equal identities give equal rewards."""
        ...


class DifferentiableScorer(Scorer, Protocol):
    """A reward model that can say where in an image its reward comes from."""

    def sensitivity(
        self, *, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> tuple[list[Reward], np.ndarray]:
        """Rewards as of `score`, and ‖∂reward/∂pixel‖ over the channels, float32 [N, H, W]; bit-equal alone or not."""
        ...


class GroupScorer(Protocol):
    """A reward model that judges images by comparison with others.

    kind: `groupwise`: a reward belongs to an image within one group; permuting a group permutes its rewards, and no
        other group has an influence.
    """

    kind: Literal["groupwise"]
    probe: tuple[float | None, ...] | None  # its judge's

    def score_groups(
        self,
        *,
        images: np.ndarray,
        prompts: Sequence[str],
        metadata: Sequence[dict[str, Any]],
        groups: Sequence[Sequence[int]],
        label: str,
    ) -> list[list[Reward]]:
        """One reward per member of each group; an image may be in several groups.

        images, prompts, metadata: as in `Scorer.score`. groups: rows of the images, of one prompt each. label: names
        the work in a progress bar.
        """
        ...

    def truncated(self, prompts: Sequence[str]) -> list[bool]:
        """As in `Scorer`."""
        ...

    def identity(self) -> dict[str, str]:
        """As in `Scorer`."""
        ...


def require_aligned(images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> None:
    """Refuse anything but float32 images [N, H, W, 3] in [0, 1] with one prompt and one metadata each."""
    if images.dtype != np.float32 or images.ndim != 4 or images.shape[-1] != 3:
        raise ValueError(f"images must be float32 [N, H, W, 3], got {images.dtype} {list(images.shape)}")
    # Written so that NaN is refused too.
    if images.size and not (images.min() >= 0 and images.max() <= 1):
        raise ValueError(f"pixels must lie in [0, 1], got {images.min():g} to {images.max():g}")
    if not len(images) == len(prompts) == len(metadata):
        raise ValueError(f"{len(images)} images with {len(prompts)} prompts and {len(metadata)} metadata")


def check_golden(scorer: Scorer, folder: Path, tolerance: float = GOLDEN_TOLERANCE) -> int:
    """Score the golden pairs of a scorer folder; returns how many there were (0 without a `golden.json`).

    `golden.json` is a list of {"image": PNG beside it, "prompt": str, "score": float, "metadata"?: {…}}.

    Raises:
        GateError: a score is further than `tolerance` from the recorded one, or there is none.
        GranularError: the file cannot be read as such a list.
    """
    path = folder / GOLDEN
    if not path.is_file():
        return 0
    pairs = read_json(path)
    if not isinstance(pairs, list) or not all({"image", "prompt", "score"} <= set(pair) for pair in pairs):
        raise GranularError(f"{path}: expected a list of objects with 'image', 'prompt' and 'score'.")
    for pair in pairs:
        image = _read_image(folder / pair["image"])
        reward = scorer.score(images=image[None], prompts=[pair["prompt"]], metadata=[pair.get("metadata", {})])[0]
        # Written so that a failed reward (no value) fails too.
        if reward.value is None or not abs(reward.value - pair["score"]) <= tolerance:
            raise GateError(
                f"{path}: {pair['image']} with {pair['prompt']!r} scores {reward.value} {reward.reason}, expected "
                f"{pair['score']} ± {tolerance:g}; the weights, the preprocessing or a library changed."
            )
    return len(pairs)


def _read_image(path: Path) -> np.ndarray:
    from PIL import Image

    try:
        with Image.open(path) as image:
            return from_uint8(np.asarray(image.convert("RGB")))
    except OSError as error:
        raise GranularError(f"{path}: cannot read the golden image ({error}).") from None
