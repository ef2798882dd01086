"""Scorer `vlm`: a vision-language judge behind an OpenAI-compatible endpoint (vLLM, SGLang) that rates one image.

What it is asked and how its words are read is `stages.reward.judges`; how, `stages.reward.chat`. A reply that cannot be
read, a number off the scale, an endpoint that does not answer: a failed reward with the reason and the raw reply, and
the run's `failures` decides. Nothing is imputed.

Its identity is what a server can know of a model (the name it is served under, the folder it was loaded from), the
question, the patterns and this code. Weights that are replaced in place under the same name are not noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from stages.core.code import code_digest
from stages.core.errors import GateError, GranularError
from stages.core.types import Reward
from stages.reward.base import require_aligned
from stages.reward.chat import Chat, ChatOptions, Question, served_model
from stages.reward.judges import Judge, JudgeName, make_judge

WEIGHTS = "none"


@dataclass(frozen=True, kw_only=True)
class Options(ChatOptions):
    """Which judge, on top of where it is (`stages.reward.chat.ChatOptions`).

    judge: see `stages.reward.judges`. template: text file with the question and `{prompt}` in it; needed by the judge
        `template`, and takes the place of the known question of any other. pattern: regular expression with a group
        `(?P<value>…)`, and others for sub-scores; low, high: the scale; all three for the judge `template` only.
    """

    judge: JudgeName = "unified_reward_2"
    template: str | None = None
    pattern: str | None = None
    low: float = 1.0
    high: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.judge == "template" and (self.template is None or self.pattern is None):
            raise ValueError("judge template needs a template, the file with its question, and a pattern")
        if self.judge != "template" and (self.pattern is not None or (self.low, self.high) != (1.0, 5.0)):
            raise ValueError(f"pattern, low and high belong to the judge template, this one is {self.judge}")
        if not self.low < self.high:
            raise ValueError(f"low must be less than high, got {self.low:g} and {self.high:g}")


def load(path: Path | None, batch: int, device: str, options: Options) -> VlmScorer:
    """The judge behind an endpoint; `path` and `device` are the server's own business.

    Raises:
        GranularError: nothing there answers, there is no such model, or the template cannot be used.
    """
    return VlmScorer(options, batch)


def introduce(options: Options) -> dict[str, str]:
    """The identity of the judge, by one light request.

    Raises:
        GranularError: as `load`.
    """
    return _identity(options, _judge(options))


class VlmScorer:
    """Ratings of single images by a vision-language judge."""

    kind: Literal["pointwise"] = "pointwise"
    differentiable = False

    def __init__(self, options: Options, batch: int) -> None:
        self.options, self.batch = options, batch
        self.judge = _judge(options)
        self._identity = _identity(options, self.judge)
        self._chat = Chat(options)

    def identity(self) -> dict[str, str]:
        """Model as the server names it, question and patterns, and this code."""
        return dict(self._identity)

    def prepare(self, prompts: Sequence[str]) -> None:
        """Ask who is there before every round: the same name may be another model by now.

        Raises:
            GateError: the endpoint serves another model than at the start.
        """
        refuse_another(self.options.url, self._identity, lambda: _identity(self.options, self.judge))

    def truncated(self, prompts: Sequence[str]) -> list[bool]:
        """None: a server refuses what is too long for its model, and that is a failed reward."""
        return [False] * len(prompts)

    def score(self, *, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> list[Reward]:
        """The judge's ratings, [N], on its own scale, each with the raw reply; see `Chat.ask` for what is raised."""
        require_aligned(images, prompts, metadata)
        questions = [Question(row, self.judge.ask(prompt)) for row, prompt in enumerate(prompts)]
        return [
            Reward.failed(answer.reason, answer.reply)
            if answer.verdict is None
            else Reward(answer.verdict.value, parts=answer.verdict.parts, reply=answer.reply)
            for answer in self._chat.ask(images, questions, self.judge.read)
        ]


def refuse_another(url: str, known: dict[str, str], ask: Callable[[], dict[str, str]]) -> None:
    """Stop if who answers now is not who answered at the start.

    Raises:
        GateError: it is another.
    """
    try:
        now = ask()
    except GranularError:
        return  # nobody answers now; whoever answers the questions that follow is judged by them
    changed = [
        f"{name} from {known.get(name)} to {now.get(name)}"
        for name in sorted({*known, *now})
        if known.get(name) != now.get(name)
    ]
    if changed:
        raise GateError(
            f"another judge answers at {url} than at the start: {', '.join(changed)}; serve the former one again."
        )


def _judge(options: Options) -> Judge:
    return make_judge(options.judge, _text(options.template), options.pattern, options.low, options.high)


def _text(template: str | None) -> str | None:
    if template is None:
        return None
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GranularError(f"template: {template} cannot be read ({error}); give a text file in UTF-8.") from None


def _identity(options: Options, judge: Judge) -> dict[str, str]:
    served = {f"served.{name}": text for name, text in served_model(options).items()}
    return {"kind": "vlm", "code": code_digest(__name__), "judge": judge.name, "question": judge.digest, **served}
