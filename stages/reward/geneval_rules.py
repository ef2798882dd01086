"""GenEval's judgement of detected objects: what a prompt asked for, what is there, and what is missing.

    include   every clause must hold: at least `count` objects of a class, of a `color`, in a `position` to another's
    exclude   no clause may hold: `count` or more objects of a class

Only the most confident `count` objects of a class are looked at for colour and position. a is left of b if, with
c = centre of a − centre of b, e = max(|c| − 0.1·(size a + size b), 0)·sign(c), e_x/‖c‖ < −½; likewise for the others.

Source: GenEval, arXiv 2310.11513; djghosh13/geneval, evaluation/evaluate_images.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
POSITIONS = ("left of", "right of", "above", "below")
CONFIDENCE, COUNTING_CONFIDENCE = 0.3, 0.9  # an object counts above it; the second for prompts of kind "counting"
MOST = 16  # objects of one class
POSITION_MARGIN = 0.1
# COCO's names, and others that detectors have for them, as the benchmark writes them.
NAMES = {
    "aeroplane": "airplane", "motorbike": "motorcycle", "sofa": "couch", "pottedplant": "potted plant",
    "diningtable": "dining table", "tvmonitor": "tv", "mouse": "computer mouse", "remote": "tv remote",
    "keyboard": "computer keyboard",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Detected:
    """One object. box: x0, y0, x1, y1 in pixels, the last two outside. mask: bool [H, W], or None."""

    name: str
    confidence: float
    box: tuple[float, float, float, float]
    mask: np.ndarray | None = None


@dataclass(frozen=True)
class Verdict:
    """Whether an image is as asked, how many clauses hold of how many, and what is missing."""

    correct: bool
    held: int
    clauses: int
    reason: str


ColorsOf = Callable[[Sequence[Detected], str], Sequence[str]]


def kept(objects: Sequence[Detected], counting: bool) -> dict[str, list[Detected]]:
    """Class → its objects that count, most confident first."""
    least = COUNTING_CONFIDENCE if counting else CONFIDENCE
    found: dict[str, list[Detected]] = {}
    for one in sorted(objects, key=lambda one: -one.confidence):
        if one.confidence > least and len(found.setdefault(one.name, [])) < MOST:
            found[one.name].append(one)
    return found


def is_counting(metadata: Mapping[str, Any]) -> bool:
    """Whether a prompt is of the benchmark's kind "counting", the only one that excludes anything."""
    return metadata["tag"] == "counting" if "tag" in metadata else bool(metadata.get("exclude"))


def judge(objects: Sequence[Detected], metadata: Mapping[str, Any], colors_of: ColorsOf) -> Verdict:
    """The verdict on an image; `colors_of(objects, class)` names each object's colour.

    Raises:
        ValueError: the metadata is not as the benchmark writes it.
    """
    include, exclude = checked(metadata)
    found = kept(objects, is_counting(metadata))
    reasons: list[str] = []
    held: list[list[Detected] | None] = []
    for clause in include:
        reason = _lacks(clause, found, held, colors_of)
        held.append(None if reason else found[clause["class"]][: clause["count"]])
        reasons += [reason] if reason else []
    for clause in exclude:
        there = len(found.get(clause["class"], ()))
        if there >= clause["count"]:
            reasons.append(f"expected fewer than {clause['count']} {clause['class']}, found {there}")
    clauses = len(include) + len(exclude)
    return Verdict(not reasons, clauses - len(reasons), clauses, "; ".join(reasons))


def _lacks(
    clause: Mapping[str, Any],
    found: Mapping[str, list[Detected]],
    held: Sequence[list[Detected] | None],
    colors_of: ColorsOf,
) -> str:
    """What is missing of one clause; empty where it holds."""
    name, count = clause["class"], clause["count"]
    objects = found.get(name, [])[:count]
    if len(objects) < count:
        return f"expected {count} {name}, found {len(objects)}"
    if "color" in clause:
        colors = list(colors_of(objects, name))
        if colors.count(clause["color"]) < count:
            return f"expected {count} {clause['color']} {name}, found {', '.join(colors)}"
    if "position" in clause:
        wanted, other = clause["position"]
        others = held[other]
        if others is None:
            return f"nothing there that {name} could be {wanted}"
        for one in objects:
            for target in others:
                relations = relative_position(one.box, target.box)
                if wanted not in relations:
                    seen = " and ".join(sorted(relations)) or "neither beside, above nor below"
                    return f"expected {name} {wanted} {target.name}, found it {seen}"
    return ""


def relative_position(box: Sequence[float], other: Sequence[float]) -> set[str]:
    """Where an object is, seen from another; both boxes x0, y0, x1, y1, y pointing down."""
    a, b = (np.asarray(one, np.float64).reshape(2, 2) for one in (box, other))
    offset = a.mean(0) - b.mean(0)
    margin = POSITION_MARGIN * (np.abs(a[1] - a[0]) + np.abs(b[1] - b[0]))
    beyond = np.maximum(np.abs(offset) - margin, 0) * np.sign(offset)
    if (np.abs(beyond) < 1e-3).all():
        return set()
    x, y = beyond / np.linalg.norm(offset)
    held = {"left of": x < -0.5, "right of": x > 0.5, "above": y < -0.5, "below": y > 0.5}
    return {name for name, true in held.items() if true}


def checked(metadata: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The clauses of a prompt.

    Raises:
        ValueError: they are not as the benchmark writes them.
    """
    include, exclude = metadata.get("include"), metadata.get("exclude") or []
    if not isinstance(include, list) or not isinstance(exclude, list):
        raise ValueError("'include' and 'exclude' must be lists of clauses")
    for place, clause in enumerate([*include, *exclude]):
        if not isinstance(clause, Mapping) or not isinstance(clause.get("class"), str):
            raise ValueError(f"clause {clause!r} names no 'class'")
        count = clause.get("count")
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"clause {clause!r} needs a 'count' from 1 on")
        if "color" in clause and clause["color"] not in COLORS:
            raise ValueError(f"color {clause['color']!r} is none of {', '.join(COLORS)}")
        if "position" in clause:
            position = clause["position"]
            if not isinstance(position, list | tuple) or len(position) != 2 or position[0] not in POSITIONS:
                raise ValueError(f"position {position!r} is not one of {', '.join(POSITIONS)} with a clause's number")
            other = position[1]
            if isinstance(other, bool) or not isinstance(other, int) or not 0 <= other < place:
                raise ValueError(f"position {position!r} must name an earlier clause")
    return include, exclude
