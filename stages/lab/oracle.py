"""Pixels -> verdict: does the image show what the prompt says? The lab's ground truth; evaluation reads it, RL may too.

    background   median of the border pixels
    coverage     distance from the background over the distance of the object's own colour from it, per pixel in [0, 1]
    objects      connected components of coverage > 0.5
    colour       nearest palette colour to the mean of the component's inner pixels
    shape        best overlap (soft IoU) of the coverage with an ideal circle, square, triangle of its area and centroid

then GenEval's rules over the detected objects: `include` at least, `exclude` fewer than, relations between centres.
The oracle knows the palette and the three shapes and nothing else; it never sees a scene. It works on any H, W >= 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import ndimage

from stages.lab.grammar import COLORS, SHAPES
from stages.lab.scenes import PALETTE, boxes, relation_strength, signed_distance

CONTRAST = 40.0  # sRGB distance from the background at which a pixel may belong to an object
MIN_AREA = 9.0  # pixels of a 32 x 32 image; the smallest object drawn covers 30
MIN_OVERLAP = 0.72  # soft IoU; drawn objects reach 0.9 and more, blobs that could be two shapes stay under 0.7
MAX_COLOR_DISTANCE = 75.0  # sRGB; the two nearest palette colours are 100 apart
CHUNK = 128  # images at a time: the working set stays in the processor's cache
_COLOR_INDEX = {name: i for i, name in enumerate(COLORS)}


@dataclass(frozen=True)
class Verdict:
    """`correct`: every clause holds. `score` in [0, 1]: mean confidence. `reason`: what was missed, or ''."""

    correct: bool
    score: float
    reason: str


@dataclass(frozen=True)
class Detections:
    """Objects found in one image; k may be 0.

    `shape_p` [k, 3] and `color_p` [k, 6] are graded memberships in [0, 1] (rows need not sum to 1: a blob is nothing);
    `shapes`, `colors` [k] are the winners, -1 where none is good enough; `boxes` [k, 4] left, top, right, bottom.
    """

    shapes: np.ndarray
    colors: np.ndarray
    shape_p: np.ndarray
    color_p: np.ndarray
    boxes: np.ndarray


def judge(images: np.ndarray, metadata: Sequence[dict[str, Any]]) -> list[Verdict]:
    """Images uint8 [N, H, W, 3] and their prompts' metadata [N] -> verdicts [N]."""
    if len(images) != len(metadata):
        raise ValueError(f"judge() got {len(images)} images and {len(metadata)} metadata; give one metadata per image")
    found = [d for start in range(0, len(images), CHUNK) for d in detect(images[start : start + CHUNK])]
    return [_apply(objects, wanted) for objects, wanted in zip(found, metadata, strict=True)]


def detect(images: np.ndarray) -> list[Detections]:
    """Images uint8 [N, H, W, 3] -> the objects in each."""
    images = np.asarray(images)
    if images.ndim != 4 or images.shape[-1] != 3 or images.dtype != np.uint8:
        raise ValueError(f"the oracle takes uint8 images [N, H, W, 3]; got {images.dtype} {list(images.shape)}")
    n, h, w, _ = images.shape
    if n == 0:
        return []
    pixels = images.astype(np.float32)
    border = np.concatenate([pixels[:, 0], pixels[:, -1], pixels[:, 1:-1, 0], pixels[:, 1:-1, -1]], axis=1)
    offset = pixels - np.median(border, axis=1)[:, None, None]
    contrast = np.sqrt(np.square(offset).sum(-1))
    # A pixel of an antialiased edge has part of its object's contrast: measure it against the neighbourhood's highest.
    peak = ndimage.maximum_filter(contrast, size=(1, 5, 5))
    inside = (contrast > CONTRAST) & (contrast > 0.5 * peak)
    structure = np.zeros((3, 3, 3), int)
    structure[1] = [[0, 1, 0], [1, 1, 1], [0, 1, 0]]  # neighbours within an image only
    labels, total = ndimage.label(inside, structure)
    scale = (h * w) ** 0.5 / 32
    area = np.bincount(labels.ravel(), minlength=total + 1)[1:]
    kept = np.flatnonzero(area >= MIN_AREA * scale**2 * 0.6) + 1
    if not len(kept):
        return [_select(np.zeros(0, bool), *_empty()) for _ in range(n)]
    spans = ndimage.find_objects(labels)
    owner = np.array([spans[k - 1][0].start for k in kept])
    own = labels[owner] == kept[:, None, None]
    grown = ndimage.maximum_filter(own.view(np.uint8), size=(1, 3, 3))
    shades = _inner_color(pixels[owner], own, contrast[owner])
    ink = shades - np.median(border, axis=1)[owner]
    strength = np.maximum(np.square(ink).sum(-1, keepdims=True), 1e-12)  # ink like the background covers nothing
    cover = (offset[owner].reshape(len(kept), -1, 3) @ (ink / strength)[..., None])[..., 0]
    cover = np.clip(cover.reshape(len(kept), h, w), 0, 1) * grown
    shape_p, box, size = _shape_memberships(cover)
    distance = np.sqrt(np.square(shades[:, None] - PALETTE).sum(-1))
    color_p = 1 / (1 + np.exp((distance - MAX_COLOR_DISTANCE) / 8))
    big = size >= MIN_AREA * scale**2
    return [_select((owner == i) & big, shape_p, color_p, box) for i in range(n)]


def _inner_color(pixels: np.ndarray, own: np.ndarray, contrast: np.ndarray) -> np.ndarray:
    """Mean colour [k, 3] of a component's pixels of more than its mean contrast: antialiased edges stay out of it."""
    level = (own * contrast).sum((1, 2)) / own.sum((1, 2))
    inner = (own & (contrast >= 0.999 * level[:, None, None])).astype(np.float32)
    k = len(own)
    return (inner.reshape(k, 1, -1) @ pixels.reshape(k, -1, 3))[:, 0] / inner.sum((1, 2))[:, None]


def _shape_memberships(cover: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Coverage [k, H, W] -> memberships [k, 3], bounding boxes of the best template [k, 4], areas [k]."""
    k, h, w = cover.shape
    size = cover.sum((1, 2))
    safe = np.maximum(size, 1e-6)
    y, x = np.arange(h, dtype=np.float32) + 0.5, np.arange(w, dtype=np.float32) + 0.5
    # Not `cover.sum(1) @ x`: the bits of a matrix product depend on how many objects share the call.
    centers = np.stack([(cover.sum(1) * x).sum(-1), (cover.sum(2) * y).sum(-1)], -1) / safe[:, None]
    overlap = np.empty((k, len(SHAPES)), np.float32)
    radii = np.sqrt(safe[:, None] / np.array([np.pi, 4 * 0.89**2, 0.75 * 3**0.5 * 1.5**2], np.float32))
    for shape in range(len(SHAPES)):
        template = np.clip(0.5 - signed_distance(shape, centers, radii[:, shape], h, w), 0, 1)
        overlap[:, shape] = np.minimum(cover, template).sum((1, 2)) / np.maximum(cover, template).sum((1, 2))
    best = overlap.argmax(1)
    relative = np.exp((overlap - overlap.max(1, keepdims=True)) / 0.03)
    quality = 1 / (1 + np.exp(-(overlap.max(1, keepdims=True) - MIN_OVERLAP) / 0.03))
    box = boxes(best, centers, radii[np.arange(k), best])
    return relative / relative.sum(1, keepdims=True) * quality, box, size


def _empty() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.zeros((0, len(SHAPES))), np.zeros((0, len(COLORS))), np.zeros((0, 4))


def _select(rows: np.ndarray, shape_p: np.ndarray, color_p: np.ndarray, box: np.ndarray) -> Detections:
    shape_p, color_p = shape_p[rows], color_p[rows]
    recognised = shape_p.sum(1) > 0.5  # the sum is the quality of the best overlap: 0.5 at MIN_OVERLAP
    shapes = np.where(recognised, shape_p.argmax(1), -1)
    colors = np.where(color_p.max(1) > 0.5, color_p.argmax(1), -1)
    return Detections(shapes, colors, shape_p, color_p, box[rows])


def _apply(found: Detections, wanted: dict[str, Any]) -> Verdict:
    """GenEval's rules: a hard verdict from the winners, a graded score from the memberships."""
    groups, clauses, missed = [], [], []
    for item in wanted["include"]:
        shape, color = SHAPES.index(item["class"]), item.get("color")
        hit = found.shapes == shape
        member = found.shape_p[:, shape]
        if color:
            hit = hit & (found.colors == _COLOR_INDEX[color])
            member = member * found.color_p[:, _COLOR_INDEX[color]]
        best = np.sort(member)[::-1][: item["count"]]
        clauses.append(float(best.sum()) / item["count"])
        groups.append((np.flatnonzero(hit), member))
        if hit.sum() < item["count"]:
            missed.append(
                f"expected {item['count']} x {color + ' ' if color else ''}{item['class']}, found {hit.sum()}"
            )
        if "position" in item:
            relation, landmark = item["position"]
            held, grade = _related(found.boxes, groups[-1], groups[landmark], relation)
            clauses.append(grade)
            if not held:
                missed.append(f"expected {item['class']} {relation} {wanted['include'][landmark]['class']}")
    for item in wanted.get("exclude", ()):
        shape = SHAPES.index(item["class"])
        number = int((found.shapes == shape).sum())
        surplus = np.sort(found.shape_p[:, shape])[::-1][item["count"] - 1 : item["count"]].sum()
        clauses.append(1.0 - float(surplus))
        if number >= item["count"]:
            missed.append(f"expected fewer than {item['count']} x {item['class']}, found {number}")
    return Verdict(not missed, min(1.0, max(0.0, float(np.mean(clauses)))), "; ".join(missed))


def _related(box: np.ndarray, group: tuple, landmark: tuple, relation: str) -> tuple[bool, float]:
    """Whether some member of `group` stands in `relation` to some member of `landmark`, and how surely (0 to 1)."""
    if len(box) < 2:
        return False, 0.0
    strength = relation_strength(box[:, None], box[None, :], relation)
    other = ~np.eye(len(box), dtype=bool)
    held = bool(((strength > 0.5) & other)[np.ix_(group[0], landmark[0])].any())
    grade = group[1][:, None] * landmark[1][None, :] / (1 + np.exp(-(strength - 0.5) / 0.1)) * other
    return held, float(grade.max())
