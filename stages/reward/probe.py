"""The built-in probe: two fixed pictures that every scorer of this process judges when it is loaded.

A kind whose answers are known without weights says them (`probe` of its module, see `stages.reward.kinds`) and must
reproduce them. What a scorer with weights answers is written into each round's `summary.json`, where a run compares it
from round to round: a scorer can change while every digest of it stays, by a library, the device or the precision.

A scorer behind an address is not asked: its answers may cost money, and its identity is asked for instead. The service
of `granular serve-scorer` probes what it serves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from stages.core.errors import GateError, GranularError
from stages.core.types import Reward
from stages.reward.base import Scorer, check_golden

# Of one scorer at two times. Float32 models on another device or library version differ by 1e-6 to 1e-4 of their
# scores; another precision or another resize by more. The absolute part is for cosines that happen to be near 0.
RELATIVE, ABSOLUTE = 1e-3, 1e-5

Answers = tuple[float | None, ...]  # a value per picture, None where there is no reward


@dataclass(frozen=True)
class Probe:
    """Pictures and what is known of the answers.

    images: float32 [2, H, W, 3] in [0, 1]. prompts, metadata: each picture's own. expected: values of every right
    scorer of the kind, within `tolerance`; None where they depend on weights. must_answer: whether a reward that failed
    is a fault of the scorer. compared: whether answers must stay from round to round.
    """

    images: np.ndarray
    prompts: Sequence[str]
    metadata: Sequence[dict[str, Any]]
    expected: tuple[float, ...] | None = None
    tolerance: float = 0.0
    must_answer: bool = True
    compared: bool = True


def pictures() -> np.ndarray:
    """A red disc and a blue square on two gradients, float32 [2, 64, 64, 3]."""
    row, column = np.mgrid[0:64, 0:64].astype(np.float32) / 63
    images = np.stack([np.stack([column, row, 1 - column], -1), np.stack([row, 1 - row, column], -1)])
    images[0][(row - 0.5) ** 2 + (column - 0.5) ** 2 < 0.09] = (0.9, 0.1, 0.1)
    images[1][(abs(row - 0.4) < 0.25) & (abs(column - 0.6) < 0.25)] = (0.1, 0.2, 0.9)
    return images


def plain(**known: Any) -> Probe:
    """The probe of a kind that has none of its own; `known` are fields of `Probe`."""
    return Probe(pictures(), ["a red circle", "a blue square"], known.pop("metadata", [{}, {}]), **known)


def probe_of(module: ModuleType, options: Any) -> Probe | None:
    """What a scorer of a kind's module is asked at its start; None for one behind an address."""
    if hasattr(module, "introduce"):
        return None
    own = getattr(module, "probe", None)
    return plain() if own is None else own(options)


def ask(scorer: Scorer, probe: Probe) -> list[Reward]:
    """The scorer's rewards of the probe; what it raises is a failed reward, as in a round."""
    try:
        return scorer.score(images=probe.images, prompts=list(probe.prompts), metadata=list(probe.metadata))
    except GranularError:
        raise
    except Exception as error:
        return [Reward.failed(f"{type(error).__name__}: {error}")] * len(probe.images)


def check(scorer: Scorer, probe: Probe | None) -> Answers | None:
    """Ask the scorer once; its answers, None where they are not to be compared.

    Raises:
        GateError: it has no value where it must have one, or not the one that every scorer of its kind has.
    """
    if probe is None:
        return None
    rewards = ask(scorer, probe)
    if len(rewards) != len(probe.images):
        raise GateError(f"the built-in probe: {len(rewards)} rewards for {len(probe.images)} pictures.")
    failed = next((one for one in rewards if one.status == "failed"), None)
    if failed is not None and probe.must_answer:
        raise GateError(f"the built-in probe has no score ({failed.reason}); check the weights and the device.")
    answers = tuple(one.value for one in rewards)
    if probe.expected is not None:
        for found, expected in zip(answers, probe.expected, strict=True):
            # Written so that no value fails too.
            if found is None or not abs(found - expected) <= probe.tolerance:
                raise GateError(
                    f"the built-in probe scores {found}, expected {expected:g} ± {probe.tolerance:g}; a library that "
                    "the scorer uses, or its code, does something else than it did."
                )
    return answers if probe.compared else None


def prove(scorer: Scorer, module: ModuleType, options: Any, path: Path | None) -> None:
    """Golden pairs beside the weights and the built-in probe; the scorer remembers its answers as `probe`.

    Raises:
        GateError: it is not the scorer it claims to be.
    """
    if path is not None:
        check_golden(scorer, path if path.is_dir() else path.parent)
    scorer.probe = check(scorer, probe_of(module, options))


def same(one: Sequence[float | None], other: Sequence[float | None]) -> bool:
    """Whether two answers to the probe are of the same scorer."""
    return len(one) == len(other) and all(
        a is b if a is None or b is None else math.isclose(a, b, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
        for a, b in zip(one, other)
    )
