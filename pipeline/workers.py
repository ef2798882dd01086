"""Who runs a stage: a worker keeps models in memory and calls `stages.<stage>.stage.run`.

`inline` is one worker in the driver's own process: a laptop, or one GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from stages.core import code
from stages.policies import FAMILIES
from stages.reward.kinds import KINDS

if TYPE_CHECKING:
    from stages.reward.spec import ScorerSpec


def scorer_modules(spec: ScorerSpec) -> list[str]:
    """The modules of a scorer: its kind's, and its judge's."""
    return [KINDS[kind] for kind in dict.fromkeys((spec.kind, spec.model))]


def method_code(method: Mapping[str, Any]) -> str:
    """The module of a run's method, or the path of its file outside the package."""
    from stages.methods import method_class

    name = method["name"]
    return name if name.endswith(".py") else method_class(name).__module__


def credit_code(method: Mapping[str, Any]) -> list[str]:
    """The file whose function takes the place of the method's credit rule, if there is one."""
    from stages.methods import credit_file

    own = credit_file(method)
    return [] if own is None else [str(own[0])]


class Worker(Protocol):
    """Runs stages, and says by which code."""

    def run(self, stage: str, inputs: Mapping[str, Path], spec: Any, out: Path) -> Mapping[str, str] | None:
        """One stage call; returns when its outputs are complete in `out`, raises otherwise.

        What it returns are digests of large outputs, taken while they were in memory: these need not be read again.
        """

    def code(self, stage: str, uses: Sequence[str]) -> str:
        """Digest of the code behind a stage; `uses` names the method and scorer modules in use."""

    def versions(self, stage: str) -> Mapping[str, str]:
        """Versions of the libraries behind a stage."""


class InlineWorker:
    """One worker in this process; the policy and the scorers stay loaded between stages.

    threads: torch threads, part of what makes results bit-equal; 0 leaves torch's own choice.
    """

    def __init__(self, threads: int = 0) -> None:
        self.threads = threads
        self._resident: Any = None

    def run(self, stage: str, inputs: Mapping[str, Path], spec: Any, out: Path) -> Mapping[str, str] | None:
        from stages.core.resident import Resident, trim_heap

        if self._resident is None:
            import torch

            if self.threads:
                torch.set_num_threads(self.threads)
            self._resident = Resident()
        try:
            return import_module(f"stages.{stage}.stage").run(inputs, spec, self._resident, out)
        finally:
            trim_heap()

    def code(self, stage: str, uses: Sequence[str]) -> str:
        offered = {*KINDS.values(), *FAMILIES.values(), *code.modules_of("stages.methods")} - {"stages.methods.base"}
        return code.code_digest(f"stages.{stage}.stage", sorted(uses), sorted(offered - set(uses)))

    def versions(self, stage: str) -> Mapping[str, str]:
        return code.versions(stage)
