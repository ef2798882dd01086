"""Pixels between float and 8 bits: one helper, nearest level, and the way there and back changes nothing."""

import numpy as np

from stages.core.images import from_uint8, to_uint8


def test_every_level_survives_the_way_there_and_back():
    levels = np.arange(256, dtype=np.uint8)
    assert from_uint8(levels).dtype == np.float32
    assert (to_uint8(from_uint8(levels)) == levels).all()


def test_rounding_goes_to_the_nearest_level():
    images = np.float32([0, 0.4, 0.6, 254.4, 255]) / 255
    assert to_uint8(images).tolist() == [0, 0, 1, 254, 255]
