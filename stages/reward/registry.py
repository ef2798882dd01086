"""From a scorer's spec to a loaded scorer that has passed its golden pairs and the built-in probe."""

from __future__ import annotations

from pathlib import Path

from stages.core.errors import GateError, GranularError
from stages.reward import kinds
from stages.reward.base import GroupScorer, Scorer
from stages.reward.probe import prove
from stages.reward.spec import ScorerSpec


def load(name: str, spec: ScorerSpec, path: Path | None, device: str) -> Scorer | GroupScorer:
    """Load the scorer called `name` from `path` (its weights; None for a kind without any) and check it.

    By its golden pairs and the built-in probe, of a pairwise scorer those of its judge.

    Raises:
        GranularError: one sentence: which file is missing or does not fit, and where it was looked for.
        GateError: it does not reproduce a golden score, or has no right answer to the probe.
    """
    weights = kinds.weights(spec.model)
    if (path is None and weights == "needed") or (path is not None and weights == "none"):
        raise GranularError(f"scorers.{name}: kind {spec.model} {'needs' if path is None else 'takes no'} weights.")
    if path is not None and not path.exists():
        revision = f" (revision {spec.revision})" if spec.revision else ""
        raise GranularError(
            f"scorers.{name}.path: no weights at {path}{revision}; give the folder of an {spec.model} model."
        )
    try:
        module, options = kinds.module_of(spec.kind), kinds.options_of(spec.kind, spec.options)
        scorer = module.load(path, spec.batch, device, options)
        if scorer.kind == "pointwise":
            prove(scorer, module, options, path)
    except GateError as error:
        raise GateError(f"scorers.{name}: {error}") from None
    except GranularError as error:
        # With its cause: whether a service that is away may come back is read from there.
        raise GranularError(f"scorers.{name}: {error}") from error
    return scorer
