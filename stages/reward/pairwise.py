"""Scorer `pairwise`: how often an image beats the other images of its group, by a judge that sees two at a time.

    win rate_i = (wins_i + ½·(ties_i + unparsed_i)) / comparisons_i,   over all G(G−1)/2 pairs of the group

A group is a prompt's images of one step, stride and occurrence, whatever is executed together; no image meets one of
another prompt. A verdict that cannot be read counts as a tie. A comparison that never came about (the judge failed on
one of the two) counts for nobody, and an image without any comparison has no reward. The average over a group is ½ by
construction, so win rates compare members and never policies.

Source: Pref-GRPO, arXiv 2508.20751; CodeGoat24/Pref-GRPO, `cal_win_rate` in fastvideo/train_flux_pref_grpo.py, whose
judge is a vision-language model behind a server. The judge here is a pointwise scorer with a margin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from pydantic import Field

from stages.core.code import code_digest
from stages.core.errors import GranularError, nearest
from stages.core.types import Reward
from stages.reward import kinds
from stages.reward.base import Scorer
from stages.reward.probe import Answers, prove
from stages.reward.scoring import score_images

WEIGHTS = "optional"  # as its judge says


@dataclass(frozen=True, kw_only=True)
class Options:
    """Who compares two images.

    judge: kind of a pointwise scorer. margin: scores at most this far apart are a tie, in the judge's own unit (cosine
        for the CLIP kinds). model: the judge's own options.
    """

    judge: str
    margin: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    model: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = sorted({*kinds.KINDS} - {"pairwise"})
        if self.judge not in known:
            raise ValueError(f"judge: no pointwise scorer of kind {self.judge!r}; {nearest(self.judge, known)}")
        try:
            object.__setattr__(self, "model", kinds.checked_options(self.judge, self.model, "model"))
        except GranularError as error:
            raise ValueError(str(error)) from None


def load(path: Path | None, batch: int, device: str, options: Options) -> PairwiseScorer:
    """The judge, checked against its own golden pairs and the built-in probe, as one that compares."""
    module, model = kinds.module_of(options.judge), kinds.options_of(options.judge, options.model)
    scorer = module.load(path, batch, device, model)
    prove(scorer, module, model, path)
    return PairwiseScorer(MarginJudge(scorer, options.margin), probe=scorer.probe)


Outcome = Literal["first", "second", "tie", "unparsed", "missing"]


class Judge(Protocol):
    """Says of two images of one prompt which one is better."""

    def compare(
        self,
        *,
        images: np.ndarray,
        prompts: Sequence[str],
        metadata: Sequence[dict[str, Any]],
        pairs: Sequence[tuple[int, int]],
        label: str,
    ) -> list[Outcome]:
        """One outcome per pair of rows; images, prompts, metadata as in `Scorer.score`."""
        ...

    def truncated(self, prompts: Sequence[str]) -> list[bool]: ...

    def identity(self) -> dict[str, str]: ...


@dataclass(frozen=True)
class MarginJudge:
    """A pointwise scorer as a judge: the higher score wins, scores at most `margin` apart are a tie."""

    scorer: Scorer
    margin: float = 0.0

    def compare(
        self,
        *,
        images: np.ndarray,
        prompts: Sequence[str],
        metadata: Sequence[dict[str, Any]],
        pairs: Sequence[tuple[int, int]],
        label: str,
    ) -> list[Outcome]:
        """Every image is scored once, however many pairs it is in."""
        values = [reward.value for reward in score_images(self.scorer, images, prompts, metadata, label=label)]
        return [self._outcome(values[first], values[second]) for first, second in pairs]

    def _outcome(self, first: float | None, second: float | None) -> Outcome:
        if first is None or second is None:
            return "missing"
        if abs(first - second) <= self.margin:
            return "tie"
        return "first" if first > second else "second"

    def truncated(self, prompts: Sequence[str]) -> list[bool]:
        return self.scorer.truncated(prompts)

    def identity(self) -> dict[str, str]:
        return {**self.scorer.identity(), "margin": repr(float(self.margin))}


@dataclass(frozen=True)
class PairwiseScorer:
    """Win rates within groups under a judge."""

    judge: Judge
    kind: Literal["groupwise"] = "groupwise"
    probe: Answers | None = None

    def score_groups(
        self,
        *,
        images: np.ndarray,
        prompts: Sequence[str],
        metadata: Sequence[dict[str, Any]],
        groups: Sequence[Sequence[int]],
        label: str,
    ) -> list[list[Reward]]:
        """Win rates, one list per group in the order of its members; sub-scores are counts of comparisons."""
        inside = [list(combinations(range(len(group)), 2)) for group in groups]
        pairs = [(group[one], group[two]) for group, own in zip(groups, inside) for one, two in own]
        strange = [(one, two) for one, two in pairs if prompts[one] != prompts[two]]
        if strange:
            raise AssertionError(f"images of two prompts in one group: rows {strange[0]}")
        outcomes = self.judge.compare(images=images, prompts=prompts, metadata=metadata, pairs=pairs, label=label)
        if len(outcomes) != len(pairs):
            raise AssertionError(f"a judge answered {len(outcomes)} outcomes for {len(pairs)} pairs")
        answers = iter(outcomes)
        return [win_rates(len(group), [(*pair, next(answers)) for pair in own]) for group, own in zip(groups, inside)]

    def truncated(self, prompts: Sequence[str]) -> list[bool]:
        """Which prompts are longer than the judge reads."""
        return self.judge.truncated(prompts)

    def identity(self) -> dict[str, str]:
        """The judge's, under names of its own, and this code."""
        judge = {f"judge.{name}": value for name, value in self.judge.identity().items()}
        others = {*kinds.KINDS.values()} - {__name__}  # that the table names; the judge has a digest of its own
        return {"kind": "pairwise", "code": code_digest(__name__, skip=sorted(others)), **judge}


def win_rates(members: int, comparisons: Sequence[tuple[int, int, Outcome]]) -> list[Reward]:
    """The win rate of every member of one group, from (first, second, outcome) of its comparisons."""
    seen: list[list[str]] = [[] for _ in range(members)]  # what a member's comparisons came to, from its own side
    for first, second, outcome in comparisons:
        if outcome != "missing":
            seen[first].append({"first": "won", "second": "lost"}.get(outcome, outcome))
            seen[second].append({"first": "lost", "second": "won"}.get(outcome, outcome))
    return [_win_rate(own) for own in seen]


def _win_rate(own: Sequence[str]) -> Reward:
    if not own:
        return Reward.failed("it was compared with no other image of its group")
    won, tie, unparsed = (own.count(kind) for kind in ("won", "tie", "unparsed"))
    counts = {"won": won, "tie": tie, "unparsed": unparsed}
    return Reward((won + (tie + unparsed) / 2) / len(own), parts=tuple((k, float(n)) for k, n in counts.items()))
