"""What a vision-language judge is asked, and how its words become numbers: strictly, or not at all.

A judge's question is a template with `{prompt}` in it; its reply is read by patterns with a named group per number. A
number that is not there, is there twice with two values, is the beginning of a longer number or of a range, or lies
outside the judge's scale is no number. (Published parsers give 0, the batch's mean, or the next best number.)

    unified_reward     UnifiedReward v1.5 (arXiv 2503.05236): one "Final Score" from 1 to 5
    unified_reward_2   UnifiedReward 2.0: Alignment, Coherence and Style Score from 1 to 5, their mean as the value
    template           a question and a pattern of one's own: group `value` is the reward, other named groups sub-scores

The questions are worded here, for the form of reply that these models were trained to give. Where a model card
prescribes a wording to the letter, put it into a file and name that as `template`; the patterns stay.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from stages.core import digest
from stages.core.errors import GranularError

JudgeName = Literal["unified_reward", "unified_reward_2", "template"]
PLACE = "{prompt}"


class Unparsable(ValueError):
    """A reply without the numbers it was asked for; the message says what is wrong."""


@dataclass(frozen=True)
class Verdict:
    """What a reply says. parts: named sub-scores."""

    value: float
    parts: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Judge:
    """A question about one image, and how the answer is read.

    question: with `{prompt}` where the prompt belongs. patterns: with named groups, one for each number. The one called
    `value` is the reward; without it the mean of all is. low, high: the scale, both ends included.
    """

    name: str
    question: str
    patterns: tuple[str, ...]
    low: float
    high: float

    @property
    def digest(self) -> str:
        """Of what is asked and what counts as an answer."""
        return digest.of_json([self.question, list(self.patterns), self.low, self.high])

    def ask(self, prompt: str) -> str:
        """The question about an image of a prompt (which may itself hold braces)."""
        return self.question.replace(PLACE, prompt)

    def read(self, reply: str) -> Verdict:
        """The verdict in a reply.

        Raises:
            Unparsable: a number is absent, ambiguous or off the scale.
        """
        found: dict[str, float] = {}
        for pattern in map(_compiled, self.patterns):
            matches = list(pattern.finditer(reply))
            for name in pattern.groupindex:
                texts = [match[name] for match in matches if match[name] is not None]
                found[name] = self._number(name, texts)
        value = found.pop("value") if "value" in found else sum(found.values()) / len(found)
        return Verdict(value, tuple(found.items()))

    def _number(self, name: str, texts: list[str]) -> float:
        if not texts:
            raise Unparsable(f"no {name}")
        try:
            numbers = {float(text) for text in texts}
        except ValueError:
            raise Unparsable(f"{name} is no number") from None
        if len(numbers) > 1:
            raise Unparsable(f"{len(numbers)} different numbers for {name}")
        number = numbers.pop()
        # Written so that NaN is off every scale.
        if not self.low <= number <= self.high:
            raise Unparsable(f"{name} is {number:g}, outside {self.low:g} to {self.high:g}")
        return number


def _labelled(label: str, group: str) -> str:
    """A label and its number as judges spell it ("(1-5)", emphasis, "4/5"), but not the beginning of a longer one."""
    gap = r"[\s*]*"
    number = rf"(?P<{group}>(?<![\w.\-])[-+]?\d+(?:\.\d+)?)(?:\s*/\s*5(?![\d.]))?"
    longer = r"(?![\w%]|\.\d|\s*/|\s*[-–—]\s*\d|\s*(?:to|or|out\s+of)\s+\d)"
    return rf"{label}\s+score{gap}(?:\(1-5\))?{gap}[:：]{gap}{number}{longer}"


_FINAL = """\
A caption and an image generated from it are given. Judge the image by two criteria:
1. Alignment with the caption: are the objects, their attributes and their relations as the caption says?
2. Overall image quality: is it clear, detailed, right in colour and pleasing?
Assign one score from 1 to 5 for both together, after 'Final Score:'.
Text Caption: [{prompt}]"""

_AXES = """\
A generated image and its text caption are given. Rate the image on three axes, each from 1 to 5:
- Alignment Score: how well the content of the image matches the caption.
- Coherence Score: how consistent the image is in itself, without visual glitches or distorted objects.
- Style Score: how appealing the image looks, whatever the caption says.
Answer with exactly these lines:

Alignment Score (1-5): X
Coherence Score (1-5): Y
Style Score (1-5): Z

Text Caption: [{prompt}]"""

_KNOWN: dict[str, tuple[str, tuple[str, ...]]] = {
    "unified_reward": (_FINAL, (_labelled("final", "value"),)),
    "unified_reward_2": (_AXES, tuple(_labelled(axis, axis) for axis in ("alignment", "coherence", "style"))),
}


def make_judge(
    name: JudgeName, template: str | None = None, pattern: str | None = None, low: float = 1.0, high: float = 5.0
) -> Judge:
    """The judge of that name.

    template: the text of a question that takes the place of the known one. pattern, low, high: those of a `template`.

    Raises:
        GranularError: a question without a place for the prompt, or a pattern that cannot be used.
    """
    if template is not None and PLACE not in template:
        raise GranularError(f"template: has no {PLACE} in it, so the judge would not know what the image is of.")
    if name != "template":
        question, patterns = _KNOWN[name]
        return Judge(name, template or question, patterns, 1.0, 5.0)
    if template is None or pattern is None:
        raise GranularError("a judge of kind template needs both a template and a pattern.")
    try:
        groups = _compiled(pattern).groupindex
    except re.error as error:
        raise GranularError(f"pattern: is no regular expression ({error}).") from None
    if "value" not in groups:
        raise GranularError("pattern: needs a group (?P<value>…) around the reward's number.")
    return Judge(name, template, (pattern,), low, high)


def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE | re.MULTILINE)
