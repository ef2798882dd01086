"""Prompt metadata -> symbolic scene -> pixels: a pure function of the generator; pretraining and tests consume both.

Coordinates are pixels of a 32 x 32 image, x to the right, y downwards. An object's size `r` gives its three shapes
nearly equal area: circle of radius r, square of half side 0.89 r, upright equilateral triangle of circumradius 1.5 r.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stages.lab.grammar import COLORS, SHAPES

SIZE = 32
MARGIN = 1.0  # background left free along the border: the oracle reads the background there
GAP = 1.6  # smallest gap between the bounding boxes of two objects, so that they stay two objects when antialiased
RADII = {1: (5.6, 7.6), 2: (4.6, 5.6), 3: (4.0, 4.6), 4: (3.7, 4.2)}  # range of r by number of objects
LATTICE, JITTER = 4.0, 0.5  # centroids lie within JITTER of a lattice point: a world a small model can learn in minutes
PALETTE = np.array(list(COLORS.values()), dtype=np.float32)
_COLOR_INDEX = {name: i for i, name in enumerate(COLORS)}
_SQUARE, _TRIANGLE = 0.89, 1.5
_ROOT3 = 3.0**0.5
# Bounding box (left, top, right, bottom) around the centroid in units of r, by shape.
EXTENT = np.array(
    [[1, 1, 1, 1], [_SQUARE] * 4, [_TRIANGLE * _ROOT3 / 2, _TRIANGLE, _TRIANGLE * _ROOT3 / 2, _TRIANGLE / 2]],
    dtype=np.float32,
)


@dataclass(frozen=True)
class Scene:
    """What was drawn: shape and colour indices [n], centroids [n, 2] (x, y), sizes [n], background sRGB [3]."""

    shapes: np.ndarray
    colors: np.ndarray
    centers: np.ndarray
    radii: np.ndarray
    background: np.ndarray

    @property
    def boxes(self) -> np.ndarray:
        """Bounding boxes [n, 4]: left, top, right, bottom."""
        return boxes(self.shapes, self.centers, self.radii)


def boxes(shapes: np.ndarray, centers: np.ndarray, radii: np.ndarray) -> np.ndarray:
    """Bounding boxes [..., 4] of objects [...]."""
    extent = EXTENT[shapes] * radii[..., None]
    return np.concatenate([centers - extent[..., :2], centers + extent[..., 2:]], axis=-1)


def relation_strength(box: np.ndarray, landmark: np.ndarray, relation: str) -> np.ndarray:
    """How far `box` lies on the named side of `landmark`, boxes [..., 4] -> [...] in [-1, 1]; it holds above 0.5.

    GenEval's rule: the offset between the centres, shortened by a tenth of the summed box sizes, over its own length.
    """
    size = (box[..., 2:] - box[..., :2]) + (landmark[..., 2:] - landmark[..., :2])
    offset = (box[..., :2] + box[..., 2:] - landmark[..., :2] - landmark[..., 2:]) / 2
    short = np.maximum(np.abs(offset) - 0.1 * size, 0) * np.sign(offset)
    direction = short / np.maximum(np.linalg.norm(offset, axis=-1, keepdims=True), 1e-6)
    axis, sign = {"left of": (0, -1), "right of": (0, 1), "above": (1, -1), "below": (1, 1)}[relation]
    return sign * direction[..., axis]


def sample_scenes(metadata: Sequence[dict[str, Any]], rng: np.random.Generator) -> list[Scene]:
    """One scene per prompt, showing exactly the objects it names; everything it leaves open is drawn at random."""
    n = len(metadata)
    shapes, colors, counts = np.zeros((n, 4), np.int64), np.zeros((n, 4), np.int64), np.zeros(n, np.int64)
    relations: list[tuple[int, int, str] | None] = []
    for row, wanted in enumerate(metadata):
        relation, starts = None, []
        for item in wanted["include"]:
            start, k = int(counts[row]), item["count"]
            starts.append(start)
            shapes[row, start : start + k] = SHAPES.index(item["class"])
            named = "color" in item
            colors[row, start : start + k] = _COLOR_INDEX[item["color"]] if named else rng.integers(0, len(PALETTE), k)
            if "position" in item:
                relation = (start, starts[item["position"][1]], item["position"][0])
            counts[row] += k
        relations.append(relation)
    centers, radii = _place(shapes, counts, relations, rng)
    dark = rng.random(n) < 0.5
    grey = np.where(dark, rng.uniform(8, 70, n), rng.uniform(188, 244, n))
    background = (grey[:, None] + rng.uniform(-10, 10, (n, 3))).clip(0, 255).astype(np.float32)
    return [
        Scene(shapes[i, :c], colors[i, :c], centers[i, :c], radii[i, :c], background[i]) for i, c in enumerate(counts)
    ]


def _place(
    shapes: np.ndarray, counts: np.ndarray, relations: list, rng: np.random.Generator, tries: int = 48
) -> tuple[np.ndarray, np.ndarray]:
    """Centroids [n, 4, 2] and sizes [n, 4] by vectorised rejection: `tries` layouts a row, the first good one wins."""
    n = len(shapes)
    centers, radii = np.zeros((n, 4, 2), np.float32), np.ones((n, 4), np.float32)
    low, high = (np.array([RADII[c][side] for c in counts], np.float32) for side in (0, 1))
    names = np.array([r[2] if r else "" for r in relations])
    first = np.array([r[0] if r else 0 for r in relations])
    second = np.array([r[1] if r else 0 for r in relations])
    present = np.arange(4) < counts[:, None]
    open_rows = np.arange(n)
    while len(open_rows):
        o = open_rows
        r = rng.uniform(low[o, None, None], high[o, None, None], (len(o), tries, 4)).astype(np.float32)
        extent = EXTENT[shapes[o]][:, None] * r[..., None]
        least, most = MARGIN + extent[..., :2], SIZE - MARGIN - extent[..., 2:]
        c = least + rng.random(least.shape, dtype=np.float32) * (most - least)
        c = np.round(c / LATTICE) * LATTICE + rng.uniform(-JITTER, JITTER, c.shape).astype(np.float32)
        box = np.concatenate([c - extent[..., :2], c + extent[..., 2:]], axis=-1)
        good = (((c >= least) & (c <= most)).all(-1) | ~present[o, None]).all(-1)
        for i in range(1, 4):
            for j in range(i):
                gap = np.maximum(box[..., i, :2] - box[..., j, 2:], box[..., j, :2] - box[..., i, 2:]).max(-1)
                good &= (gap >= GAP) | ~present[o, i, None]
        for name in set(names[o]) - {""}:
            rows = np.flatnonzero(names[o] == name)
            a, b = box[rows, :, first[o[rows]]], box[rows, :, second[o[rows]]]
            good[rows] &= relation_strength(a, b, name) > 0.65
        found = np.flatnonzero(good.any(1))
        pick = good[found].argmax(1)
        centers[o[found]], radii[o[found]] = c[found, pick], r[found, pick]
        open_rows = np.delete(o, found)
    return centers, radii


def signed_distance(
    shape: int, centers: np.ndarray, radii: np.ndarray, height: int = SIZE, width: int = SIZE
) -> np.ndarray:
    """Signed distance [k, H, W] in pixels (negative inside) to one shape at centroids [k, 2] with sizes [k]."""
    x = (np.arange(width, dtype=np.float32) + 0.5 - centers[:, :1])[:, None, :]
    y = (np.arange(height, dtype=np.float32) + 0.5 - centers[:, 1:])[:, :, None]
    r = radii.astype(np.float32)[:, None, None]
    if shape == 0:
        return np.sqrt(x * x + y * y) - r
    if shape == 1:
        return np.maximum(np.abs(x), np.abs(y)) - _SQUARE * r
    inner = _TRIANGLE / 2 * r  # from the centroid to each side
    return np.maximum(y - inner, np.abs(x) * (_ROOT3 / 2) - y / 2 - inner)


def render(scenes: Sequence[Scene]) -> np.ndarray:
    """Scenes -> images uint8 [N, 32, 32, 3]."""
    counts = np.array([len(s.shapes) for s in scenes])
    shapes, colors, centers, radii = (
        np.concatenate([getattr(s, field) for s in scenes]) for field in ("shapes", "colors", "centers", "radii")
    )
    alpha = np.empty((len(shapes), SIZE, SIZE), np.float32)
    for shape in range(len(SHAPES)):
        rows = np.flatnonzero(shapes == shape)
        # One pixel of ramp across the edge: antialiased without supersampling.
        alpha[rows] = np.clip(0.5 - signed_distance(shape, centers[rows], radii[rows]), 0, 1)
    images = np.stack([s.background for s in scenes])[:, None, None, :].repeat(SIZE, 1).repeat(SIZE, 2)
    first = np.cumsum(counts) - counts
    for slot in range(counts.max(initial=0)):  # the slot-th object of every scene that has one
        rows = np.flatnonzero(counts > slot)
        objects = first[rows] + slot
        images[rows] += alpha[objects][..., None] * (PALETTE[colors[objects]][:, None, None, :] - images[rows])
    return (images + 0.5).clip(0, 255).astype(np.uint8)


def sample_images(metadata: Sequence[dict[str, Any]], rng: np.random.Generator) -> np.ndarray:
    """Prompts' metadata -> images uint8 [N, 32, 32, 3]."""
    return render(sample_scenes(metadata, rng))


def satisfies(scene: Scene, metadata: dict[str, Any]) -> bool:
    """The truth about a scene, by GenEval's rules and without pixels (the oracle must agree, and never sees this)."""
    box = scene.boxes

    def matching(item: dict, color: bool = True) -> np.ndarray:
        of_class = scene.shapes == SHAPES.index(item["class"])
        return of_class & (scene.colors == _COLOR_INDEX[item["color"]]) if color and "color" in item else of_class

    groups = [np.flatnonzero(matching(item)) for item in metadata["include"]]
    for item, group in zip(metadata["include"], groups, strict=True):
        if len(group) < item["count"]:
            return False
        if "position" in item:
            relation, landmark = item["position"]
            pairs = [(a, b) for a in group for b in groups[landmark] if a != b]
            if not any(relation_strength(box[a], box[b], relation) > 0.5 for a, b in pairs):
                return False
    return all(matching(item).sum() < item["count"] for item in metadata.get("exclude", ()))
