"""Scorer `callable`: a Python function of one's own, in a file of one's own.

    scorers:
      mine: {kind: callable, path: my_rewards.py, function: score}

    # my_rewards.py
    def score(*, images, prompts, metadata):        # float32 [N, H, W, 3] in [0, 1], N texts, N dicts
        return [float(image.mean()) for image in images]

It returns one answer an image: a number, a `stages.core.types.Reward`, or None where it has nothing to say. It must
judge every image alone, whatever else is in the batch. The file is the scorer's path, so its content counts as weights
do: an edit makes the rewards again. What it imports from other files of one's own does not; keep it in one.

What goes wrong is a failure with a reason, never a number: an exception (that image is tried alone once), another
number of answers than images, NaN, infinities, a text.
"""

from __future__ import annotations

import copy
import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from stages.core import digest
from stages.core.code import code_digest
from stages.core.errors import GranularError, nearest
from stages.core.types import Reward
from stages.reward.base import require_aligned
from stages.reward.probe import Probe, plain


@dataclass(frozen=True, kw_only=True)
class Options:
    """function: its name in the file."""

    function: str = "score"


def load(path: Path | None, batch: int, device: str, options: Options) -> CallableScorer:
    """The scorer of a Python file.

    Raises:
        GranularError: the file is not there or cannot be imported, or has no such function.
    """
    if path is None or not path.is_file() or path.suffix != ".py":
        raise GranularError(f"a callable scorer needs the path of a Python file, got {path}.")
    weights = digest.of_file(path)
    # A name that changes with the content: an edited file is another module, also where the old one is loaded still.
    name = f"granular_callable_{path.stem}_{weights[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses and pickles of the file look for it
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise GranularError(f"{path}: cannot be imported ({_told(error)}).") from None
    function = getattr(module, options.function, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise GranularError(f"{path}: no function '{options.function}'; {nearest(options.function, known)}")
    return CallableScorer(function, f"{path.name}:{options.function}", weights, batch)


def probe(options: Options) -> Probe:
    """Any answer will do: the function may need metadata that a probe lacks, or ask a service that varies."""
    return plain(must_answer=False, compared=False)


class CallableScorer:
    """A function as a scorer. name: what it is called in messages. source: digest of the file it is from."""

    kind: Literal["pointwise"] = "pointwise"
    differentiable = False

    def __init__(self, function: Callable[..., Any], name: str, source: str, batch: int) -> None:
        self.function, self.name, self.source, self.batch = function, name, source, batch

    def identity(self) -> dict[str, str]:
        """Kind, code digest, the function's name and the digest of its file."""
        return {"kind": "callable", "code": code_digest(__name__), "function": self.name, "weights": self.source}

    def prepare(self, prompts: Sequence[str]) -> None:
        """Nothing: the function sees texts and images together."""

    def truncated(self, prompts: Sequence[str]) -> list[bool]:
        """None: what the function reads is not known here."""
        return [False] * len(prompts)

    def score(self, *, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> list[Reward]:
        """The function's answers, [N].

        Raises:
            RuntimeError: the function raised; nothing it raises may stop the run as a mistake of a person does.
        """
        require_aligned(images, prompts, metadata)
        try:
            # Copies: other scorers see the same images and metadata.
            answers = self.function(images=images.copy(), prompts=list(prompts), metadata=copy.deepcopy(list(metadata)))
            answers = list(answers)
        except Exception as error:
            raise RuntimeError(f"{self.name} raised {_told(error)}") from error
        if len(answers) != len(images):
            # Not raised: alone, the same function might answer once and look right.
            return [Reward.failed(f"{self.name} gave {len(answers)} answers for {len(images)} images")] * len(images)
        return [self._reward(answer) for answer in answers]

    def _reward(self, answer: Any) -> Reward:
        if isinstance(answer, Reward):
            return answer
        if answer is None:
            return Reward(None, "missing", f"{self.name} had no answer")
        if isinstance(answer, str | bytes):
            return Reward.failed(f"{self.name} answered a text, {answer[:60]!r}")
        try:
            value = float(answer)
        except (TypeError, ValueError) as error:
            return Reward.failed(f"{self.name} answered no number ({_told(error)})")
        if not math.isfinite(value):
            return Reward.failed(f"{self.name} answered {value}")
        return Reward(value)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
