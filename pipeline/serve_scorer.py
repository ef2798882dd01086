"""`granular serve-scorer`: one scorer as a small HTTP service, here or in an environment of its own.

Imports nothing but what the scorer needs: an environment made for one reward model has no Prefect, DVC or diffusers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.core.errors import GranularError, nearest
from stages.core.spec import read_yaml
from stages.reward.spec import scorer_spec

PARAMS = Path("params.yaml")


def serve_scorer(name: str, kind: str | None, path: str | None, device: str | None, host: str, port: int) -> None:
    """Serve a scorer of params.yaml, or one that is described by its kind and path alone, until it is stopped.

    device: null takes `policy.device` of the file, or `cpu` where there is none.

    Raises:
        GranularError: no such scorer, a taken port, or weights that cannot be loaded.
    """
    from stages.reward.service import serve

    if kind is None and path is not None:
        raise GranularError("--path: belongs to --kind; without a kind the scorer is the one of params.yaml.")
    file = read_yaml(PARAMS) if kind is None or (device is None and PARAMS.is_file()) else {}
    values = _section(file, name) if kind is None else {"kind": kind, **({"path": path} if path else {})}
    spec = scorer_spec(values, f"scorers.{name}")
    policy = file.get("policy")
    found = policy.get("device") if isinstance(policy, Mapping) else None
    serve(name, spec, Path(spec.path) if spec.path else None, device or found or "cpu", host, port)


def _section(file: Mapping[str, Any], name: str) -> Any:
    scorers = file.get("scorers")
    if not isinstance(scorers, Mapping):
        raise GranularError(f"{PARAMS}: no section 'scorers'; describe the scorer with --kind and --path instead.")
    if name not in scorers:
        raise GranularError(f"{name}: no such scorer in {PARAMS}; {nearest(name, map(str, scorers))}")
    return scorers[name]
