"""From a scorer's spec to a loaded scorer that has passed its golden pairs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stages.core.errors import GateError, GranularError
from stages.reward.base import GroupScorer, Scorer, check_golden
from stages.reward.spec import ScorerSpec


def _open_clip(path: Path, batch: int, device: str) -> Scorer:
    from stages.reward.clip import load_open_clip

    return load_open_clip(path, batch, device)


def _hpsv2(path: Path, batch: int, device: str) -> Scorer:
    from stages.reward.hps import load_hpsv2

    return load_hpsv2(path, batch, device)


def _lab_oracle(path: None, batch: int, device: str) -> Scorer:
    from stages.reward.oracle import OracleScorer

    return OracleScorer(batch)


LOADERS: dict[str, Callable[..., Scorer]] = {
    "open_clip": _open_clip,
    "hpsv2": _hpsv2,
    "lab_oracle": _lab_oracle,
}


def load(name: str, spec: ScorerSpec, path: Path | None, device: str) -> Scorer | GroupScorer:
    """Load the scorer called `name` from `path` (its weights; None for the oracle) and check its golden pairs.

    Those of a pairwise scorer are its judge's.

    Raises:
        GranularError: one sentence: which file is missing or does not fit, and where it was looked for.
        GateError: it does not reproduce a golden score.
    """
    if (path is None) != (spec.model == "lab_oracle"):
        raise GranularError(f"scorers.{name}: kind {spec.model} {'needs' if path is None else 'takes no'} weights.")
    if path is not None and not path.exists():
        raise GranularError(f"scorers.{name}.path: no weights at {path}; give the folder of an {spec.model} model.")
    try:
        scorer = LOADERS[spec.model](path, spec.batch, device)
        if path is not None:
            check_golden(scorer, path if path.is_dir() else path.parent)
    except GateError as error:
        raise GateError(f"scorers.{name}: {error}") from None
    except GranularError as error:
        raise GranularError(f"scorers.{name}: {error}") from None
    if spec.kind == "pairwise":
        from stages.reward.pairwise import MarginJudge, PairwiseScorer

        return PairwiseScorer(MarginJudge(scorer, spec.margin))
    return scorer
