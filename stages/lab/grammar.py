"""Every prompt of the lab's world: prompts stage <- this; text, tag and GenEval metadata pass through.

The metadata are GenEval's own (`{"tag", "include": [{"class", "count", "color"?, "position"?}], "exclude"?, "prompt"}`)
and so is their meaning: `include` asks for *at least* `count` objects, `exclude` forbids `count` or more.

The world: 3 shapes, 6 colours, 4 relations, counts 2-4; 294 prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations, product
from typing import Any

SHAPES = ("circle", "square", "triangle")
# sRGB. Okabe-Ito in spirit: the six differ in lightness as well as in hue, so they stay apart for colour-blind readers.
COLORS: dict[str, tuple[int, int, int]] = {
    "red": (196, 32, 38),
    "orange": (238, 146, 18),
    "yellow": (246, 232, 80),
    "green": (0, 158, 110),
    "blue": (24, 88, 200),
    "pink": (234, 130, 198),
}
RELATIONS = ("left of", "right of", "above", "below")
NUMBERS = {2: "two", 3: "three", 4: "four"}
TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")


@dataclass(frozen=True)
class LabPrompt:
    """One prompt: its text, its GenEval tag, and the metadata the oracle judges by (do not mutate)."""

    text: str
    tag: str
    metadata: dict[str, Any]


def _prompt(tag: str, text: str, include: list[dict], exclude: list[dict] | None = None) -> LabPrompt:
    text = f"a photo of {text}"
    metadata: dict[str, Any] = {"tag": tag, "include": include}
    if exclude:
        metadata["exclude"] = exclude
    metadata["prompt"] = text
    return LabPrompt(text, tag, metadata)


def _single_object() -> list[LabPrompt]:
    return [_prompt("single_object", f"a {s}", [{"class": s, "count": 1}]) for s in SHAPES]


def _two_object() -> list[LabPrompt]:
    return [
        _prompt("two_object", f"a {a} and a {b}", [{"class": a, "count": 1}, {"class": b, "count": 1}])
        for a, b in permutations(SHAPES, 2)
    ]


def _counting() -> list[LabPrompt]:
    prompts = []
    for (n, word), shape, color in product(NUMBERS.items(), SHAPES, (None, *COLORS)):
        wanted = {"class": shape, "count": n} | ({"color": color} if color else {})
        text = f"{word} {color + ' ' if color else ''}{shape}s"
        prompts.append(_prompt("counting", text, [wanted], [{"class": shape, "count": n + 1}]))
    return prompts


def _colors() -> list[LabPrompt]:
    return [
        _prompt("colors", f"{_article(c)} {c} {s}", [{"class": s, "count": 1, "color": c}])
        for s, c in product(SHAPES, COLORS)
    ]


def _position() -> list[LabPrompt]:
    """As in GenEval the first included object is the landmark: "a circle left of a square" lists the square first."""
    return [
        _prompt(
            "position",
            f"a {a} {relation} a {b}",
            [{"class": b, "count": 1}, {"class": a, "count": 1, "position": [relation, 0]}],
        )
        for (a, b), relation in product(permutations(SHAPES, 2), RELATIONS)
    ]


def _color_attr() -> list[LabPrompt]:
    return [
        _prompt(
            "color_attr",
            f"{_article(ca)} {ca} {a} and {_article(cb)} {cb} {b}",
            [{"class": a, "count": 1, "color": ca}, {"class": b, "count": 1, "color": cb}],
        )
        for (a, b), (ca, cb) in product(permutations(SHAPES, 2), permutations(COLORS, 2))
    ]


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def enumerate_prompts() -> list[LabPrompt]:
    """All 294 prompts, grouped by tag in the order of `TAGS`; the position in this list is a prompt's stable id."""
    return [*_single_object(), *_two_object(), *_counting(), *_colors(), *_position(), *_color_attr()]


def vocabulary() -> list[str]:
    """Every word that occurs in a prompt, sorted."""
    return sorted({word for p in enumerate_prompts() for word in p.text.split()})
