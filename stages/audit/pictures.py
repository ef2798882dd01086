"""Thumbnails that fit: every image as WebP, as large and as good as a page's size allows."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from stages.core.images import to_uint8

Decode = Callable[[Sequence[int]], np.ndarray]
"""Rows of the round's images → float32 [N, H, W, 3] in [0, 1]."""

# Longest side in pixels (small images stay as they are) and WebP quality (101: without loss), best first.
LADDER = ((192, 82), (128, 75), (96, 65), (64, 50))
SMALL = 64  # pixels up to which an image is kept without loss


@dataclass(frozen=True)
class Thumbnails:
    """uris: image → data URI. side: longest side in pixels. left_out: groups (prompts) that did not fit, in order."""

    uris: dict[int, str]
    side: int
    left_out: list[int]


def fit(groups: Iterable[tuple[int, Sequence[int]]], decode: Decode, budget: int) -> Thumbnails:
    """Encode images group by group until `budget` characters are spent.

    groups: (prompt, rows of its images), the most wanted first. How small and how coarse is decided on the first group
    and then kept, so that images of one page can be compared with each other.
    """
    wanted = [(group, [int(row) for row in rows]) for group, rows in groups]
    count = len({row for _, rows in wanted for row in rows})
    uris: dict[int, str] = {}
    left_out: list[int] = []
    spent, setting, side = 0, None, 0
    for group, rows in wanted:
        new = [row for row in dict.fromkeys(rows) if row not in uris]
        if setting is not None and spent + len(new) * spent / max(len(uris), 1) > budget:
            left_out.append(group)
            continue
        images = to_uint8(decode(new)) if new else np.zeros((0, 1, 1, 3), np.uint8)
        if setting is None and new:
            setting = _setting(images, budget / count)
        encoded = [_uri(image, setting) for image in images] if setting else []
        size = sum(map(len, encoded))
        if spent + size > budget:
            left_out.append(group)
            continue
        spent += size
        uris |= dict(zip(new, encoded))
        if new and setting:
            side = min(setting[0], max(images.shape[1:3]))
    return Thumbnails(uris, side, left_out)


def _setting(images: np.ndarray, allowance: float) -> tuple[int, int]:
    """The first rung of the ladder on which an image takes no more than its share."""
    side = max(images.shape[1:3])
    ladder = [(side, 101), *LADDER] if side <= SMALL else list(LADDER)
    for setting in ladder:
        if np.mean([len(_uri(image, setting)) for image in images]) <= allowance:
            return setting
    return ladder[-1]


def _uri(image: np.ndarray, setting: tuple[int, int]) -> str:
    from PIL import Image

    side, quality = setting
    picture = Image.fromarray(image)
    if max(picture.size) > side:
        picture.thumbnail((side, side), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    lossless = quality > 100
    picture.save(out, "WEBP", lossless=lossless, quality=100 if lossless else quality, method=4)
    return "data:image/webp;base64," + base64.b64encode(out.getvalue()).decode()
