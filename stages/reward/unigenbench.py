"""Scorer `unigenbench`: how many of a prompt's test points an image passes, by a vision-language judge (UniGenBench++).

    value = passed points / points in [0, 1]        sub-score <dimension> = the same over the points of one dimension

A prompt's metadata holds its test points as the benchmark's table does (column `sub_dims`): `Testpoints`, such as
"Attribute - Color" or "Style", and `Testpoint Description`, what each means for this prompt. What stands before the
dash is one of ten primary dimensions. The benchmark counts points and not images, so the number of a dimension over an
evaluation is Σ <dimension> · points.<dimension> / Σ points.<dimension> over its images.

Each point is asked for alone, yes or no; an image of which one point has no answer is a failed reward, since a share of
fewer points would be another number. The benchmark's own script asks a judge for all points of an image at once and in
its own words, so numbers from here are comparable with each other and close to, not equal to, published ones.

Source: arXiv 2510.18701; CodeGoat24/UniGenBench, eval/ (names of the test points, how they are counted).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from stages.core.code import code_digest
from stages.core.types import Reward
from stages.reward.base import require_aligned
from stages.reward.chat import Answer, Chat, ChatOptions, Question, served_model
from stages.reward.judges import Unparsable
from stages.reward.vlm import refuse_another

TESTPOINTS, DESCRIPTIONS = "Testpoints", "Testpoint Description"

# Name in results → how the benchmark's table writes it, and what is meant.
DIMENSIONS: dict[str, tuple[str, str]] = {
    "style": ("Style", "the style of art, photography or design, or of a named artist"),
    "world_knowledge": ("World Knowledge", "something one has to know: people, buildings, facts, sayings"),
    "attribute": ("Attribute", "a property of something: its number, colour, shape, size, material or expression"),
    "action": ("Action", "what somebody or something does, alone or with others, or the state it is in"),
    "relationship": ("Relationship", "how things relate: compared, similar, one made of or inside another"),
    "compound": ("Compound", "properties put together: each thing has its own, or what cannot be in reality"),
    "grammar": ("Grammar", "what a construction says: a negation, what a pronoun refers to, what is shared"),
    "logical_reasoning": ("Logical Reasoning", "what follows from the prompt and is not said in it"),
    "layout": ("Entity Layout", "where things are, in the picture's plane or in depth"),
    "text": ("Text Generation", "the text to be shown, with nothing left out and nothing added"),
}

_QUESTION = """\
An image was generated from a prompt. Check one point of it, and nothing else.

Prompt: 「{prompt}」
Point: {point} ({meaning})
What it asks for here: 「{description}」

Count only what can be seen in the image; what is unclear or only suggested is not there. Answer in two lines:

Analysis: what is to be seen of it
Answer: Yes or No"""

_ANSWER = re.compile(r"\banswer\b[\s*]*[:：][\s*]*(yes|no)\b", re.IGNORECASE)
_BARE = re.compile(r"[\s*]*(yes|no)[\s*.!]*", re.IGNORECASE)

WEIGHTS = "none"


@dataclass(frozen=True, kw_only=True)
class Options(ChatOptions):
    """Where the judge is: `CodeGoat24/UniGenBench-EvalModel-qwen-72b-v1`, or any other that answers yes or no."""


@dataclass(frozen=True)
class Point:
    """One test point of a prompt. name: as the table writes it. dimension: one of `DIMENSIONS`."""

    name: str
    dimension: str
    description: str

    def ask(self, prompt: str) -> str:
        """The question about it."""
        words = {
            "prompt": prompt, "point": self.name, "meaning": DIMENSIONS[self.dimension][1],
            "description": self.description,
        }  # fmt: skip
        return re.sub(r"\{(\w+)\}", lambda place: words[place[1]], _QUESTION)


def load(path: Path | None, batch: int, device: str, options: Options) -> UniGenBenchScorer:
    """The benchmark's judge behind an endpoint; `path` and `device` are the server's own business.

    Raises:
        GranularError: nothing there answers, or there is no such model.
    """
    return UniGenBenchScorer(options, batch)


def introduce(options: Options) -> dict[str, str]:
    """The identity of the judge, by one light request.

    Raises:
        GranularError: as `load`.
    """
    served = {f"served.{name}": text for name, text in served_model(options).items()}
    return {"kind": "unigenbench", "code": code_digest(__name__), **served}


class UniGenBenchScorer:
    """Shares of passed test points."""

    kind: Literal["pointwise"] = "pointwise"
    differentiable = False

    def __init__(self, options: Options, batch: int) -> None:
        self.options, self.batch = options, batch
        self._identity = introduce(options)
        self._chat = Chat(options)

    def identity(self) -> dict[str, str]:
        """Model as the server names it, and this code with its questions."""
        return dict(self._identity)

    def prepare(self, prompts: Sequence[str]) -> None:
        """Ask who is there, see `stages.reward.vlm`."""
        refuse_another(self.options.url, self._identity, lambda: introduce(self.options))

    def truncated(self, prompts: Sequence[str]) -> list[bool]:
        """None: a server refuses what is too long for its model, and that is a failed reward."""
        return [False] * len(prompts)

    def score(self, *, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> list[Reward]:
        """Shares, [N], with sub-scores `<dimension>` and `points.<dimension>` and all replies; see `Chat.ask`."""
        require_aligned(images, prompts, metadata)
        rewards: dict[int, Reward] = {}
        points: dict[int, list[Point]] = {}
        for row, own in enumerate(metadata):
            try:
                points[row] = points_of(own)
            except LookupError as error:
                rewards[row] = Reward(None, "missing", str(error.args[0]))
            except ValueError as error:
                rewards[row] = Reward.failed(str(error))
        questions = [Question(row, point.ask(prompts[row])) for row, own in points.items() for point in own]
        answers = iter(self._chat.ask(images, questions, yes_or_no))
        for row, own in points.items():
            rewards[row] = _reward(own, [next(answers) for _ in own])
        return [rewards[row] for row in range(len(images))]


def points_of(metadata: dict[str, Any]) -> list[Point]:
    """The test points of a prompt.

    Raises:
        LookupError: it has none. ValueError: they are not as the benchmark writes them.
    """
    names, descriptions = metadata.get(TESTPOINTS), metadata.get(DESCRIPTIONS)
    if not names:
        raise LookupError(f"the prompt's metadata has no '{TESTPOINTS}'")
    for key, values in ((TESTPOINTS, names), (DESCRIPTIONS, descriptions)):
        if not isinstance(values, list) or not all(isinstance(one, str) for one in values):
            raise ValueError(f"the prompt's '{key}' is no list of texts")
    if len(names) != len(descriptions):
        raise ValueError(f"the prompt has {len(names)} test points and {len(descriptions)} descriptions")
    return [Point(name, _dimension(name), description) for name, description in zip(names, descriptions)]


def _dimension(point: str) -> str:
    primary = point.partition(" - ")[0].strip().casefold()
    for name, (written, _) in DIMENSIONS.items():
        if primary in (written.casefold(), name.replace("_", " ")):
            return name
    raise ValueError(f"test point '{point}' belongs to none of the ten dimensions")


def yes_or_no(reply: str) -> bool:
    """Whether a point is passed.

    Raises:
        Unparsable: the reply says neither, or both.
    """
    bare = _BARE.fullmatch(reply)
    found = {word.lower() for word in (bare.groups() if bare else _ANSWER.findall(reply))}
    if len(found) != 1:
        raise Unparsable("neither yes nor no" if not found else "both yes and no")
    return found == {"yes"}


def _reward(points: Sequence[Point], answers: Sequence[Answer[bool]]) -> Reward:
    reply = "\n\n".join(f"[{point.name}] {answer.reply}" for point, answer in zip(points, answers))
    lost = [(point, answer) for point, answer in zip(points, answers) if answer.verdict is None]
    if lost:
        point, answer = lost[0]
        return Reward.failed(f"{len(lost)} of {len(points)} test points: {point.name}: {answer.reason}", reply)
    parts: list[tuple[str, float]] = []
    for name in DIMENSIONS:
        passed = [bool(answer.verdict) for point, answer in zip(points, answers) if point.dimension == name]
        if passed:
            parts += [(name, sum(passed) / len(passed)), (f"points.{name}", float(len(passed)))]
    return Reward(sum(bool(answer.verdict) for answer in answers) / len(answers), parts=tuple(parts), reply=reply)
