"""Pixels: float32 in [0, 1] between decoder and scorers, 8 bits where a picture is kept or a reference rounds.

Rounding is a step of height 1/255, so whoever rounds lets the last bit of a latent flip a pixel. It therefore happens
as late as possible, in one way, and only where something needs it.
"""

from __future__ import annotations

import numpy as np


def to_uint8(images: np.ndarray) -> np.ndarray:
    """float32 in [0, 1] → uint8, rounded to the nearest level as the diffusers pipeline does."""
    return (images * 255).round().astype(np.uint8)


def from_uint8(images: np.ndarray) -> np.ndarray:
    """uint8 → float32 in [0, 1]; `to_uint8` gives it back exactly."""
    return images.astype(np.float32) / np.float32(255)
