"""Thumbnails: exact while they are small, and never more than fits."""

from __future__ import annotations

import base64
import io

import numpy as np
from PIL import Image

from stages.audit.pictures import fit
from stages.core.images import to_uint8


def pictures(side: int, count: int = 12) -> np.ndarray:
    return np.random.default_rng(0).random((count, side, side, 3), dtype=np.float32)


def opened(uri: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).convert("RGB"))


def test_small_images_are_kept_to_the_last_bit():
    images = pictures(16)
    found = fit([(1, range(6)), (2, range(6, 12))], lambda rows: images[list(rows)], 1_000_000)
    assert found.side == 16 and not found.left_out
    for row, uri in found.uris.items():
        assert (opened(uri) == to_uint8(images[row])).all()


def test_large_images_shrink_until_all_of_them_fit():
    images = pictures(400)
    sizes = []
    for budget in (1_000_000, 100_000):
        found = fit([(1, range(6)), (2, range(6, 12))], lambda rows: images[list(rows)], budget)
        assert len(found.uris) == 12 and sum(map(len, found.uris.values())) <= budget
        sizes.append(found.side)
    assert 64 <= sizes[1] < sizes[0] < 400


def test_what_does_not_fit_is_left_out_whole_and_not_even_decoded():
    images, asked = pictures(32), []

    def decode(rows):
        asked.extend(rows)
        return images[list(rows)]

    found = fit([(9, range(4)), (4, range(4, 8)), (5, range(8, 12))], decode, 8_000)
    assert found.left_out and 9 not in found.left_out
    assert sum(map(len, found.uris.values())) <= 8_000
    assert len(asked) < 12 and set(found.uris) <= set(asked)


def test_an_image_of_several_leaves_is_stored_once():
    images = pictures(8, 2)
    found = fit([(1, [0, 1, 1]), (2, [1, 0])], lambda rows: images[list(rows)], 100_000)
    assert set(found.uris) == {0, 1} and not found.left_out
