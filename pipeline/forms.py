"""The form of an alignment run: the types that Prefect's page turns into fields, and the command line they make.

The names of runs are read from params.yaml when a deployment is made (`granular serve` and `prefect deploy` do), so the
page offers exactly those.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from stages.core.spec import read_yaml


def run_names(path: Path = Path("params.yaml")) -> tuple[str, ...]:
    """Runs of the file: those of the graph first, then presets, then those of the study; empty where there is none."""
    raw = read_yaml(path) if path.is_file() else {}
    study = raw.get("study")
    sections = (raw.get("runs"), raw.get("presets"), study.get("runs") if isinstance(study, dict) else None)
    return tuple(str(name) for section in sections if isinstance(section, dict) for name in section)


RunName: Any = Literal[names] if (names := run_names()) else str
StageName = Literal["rollout", "reward", "advantage", "update", "evaluate"]
RoundNumber = Annotated[int, Field(ge=1)]
Override = Annotated[str, Field(pattern=r"^[\w.-]+=.*$")]


def align_arguments(
    run: str,
    name: str = "",
    overrides: Sequence[str] = (),
    start_round: int = 1,
    start_stage: str = "rollout",
    force: bool = False,
    redo: bool = False,
) -> list[str]:
    """The arguments of `granular` that do what a filled-in form says."""
    found = ["align", run]
    for one in overrides:
        found += ["--set", one]
    if name:
        found += ["--name", name]
    if start_round != 1:
        found += ["--start-round", str(start_round)]
    if start_stage != "rollout":
        found += ["--start-stage", start_stage]
    return [*found, *(["--force"] if force else []), *(["--redo"] if redo else [])]


def device(run: str | None = None, overrides: Sequence[str] = ()) -> str:
    """The device that params.yaml names, overrides laid over it; `cpu` where the file has a mistake, which whoever
    reads it to work with it will report."""
    from pipeline.params import load_params
    from stages.core.errors import GranularError

    try:
        return load_params(sets=list(overrides), run=run).policy.device
    except GranularError:
        return "cpu"
