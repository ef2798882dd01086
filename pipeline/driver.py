"""One call of one stage: found in the store, or made by a worker and published; and whose code made what was found.

accepted-code.json     {"<stage>": ["<code digest>", …]}: results by these older codes are as good as new ones
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.artifacts import Artifact, External, Input
from pipeline.events import Emit, Event
from pipeline.reuse import Published, Request, Store, settings, write_json
from pipeline.workers import Worker
from stages.core.errors import GranularError
from stages.core.progress import say
from stages.core.spec import read_json
from stages.core.types import Ledger

ACCEPTED = Path("accepted-code.json")
STAGES = ("rollout", "reward", "advantage", "update", "evaluate")  # of a round, in their order


class NotYet(Exception):
    """A dry walk met a stage that was never computed."""


@dataclass(frozen=True)
class OtherCode:
    """A result whose recipe is the run's and whose code is not."""

    stage: str
    round: int
    code: str


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run begins; what lies before must be in the store.

    round: counted from 1. stage: of that round; `reward.<scorer>` is one scorer alone. force: everything from there on
    is computed again; without it, what is in the store is found.
    """

    round: int = 1
    stage: str = "rollout"
    force: bool = False

    def again(self, name: str, round_: int) -> bool:
        """Whether a stage of a round is to be computed although it may be there."""
        if not self.force or round_ < self.round:
            return False
        rank, first = (STAGES.index(one.partition(".")[0]) for one in (name, self.stage))
        if round_ > self.round or rank > first:
            return True
        return rank == first and ("." not in self.stage or name == self.stage)


class Driver:
    """Answers stage calls of one run.

    redo: results by other code are computed again instead of stopping the run. start: see `Start`. dry: nothing is
    computed, a stage that is not in the store raises `NotYet`, and results by other code are collected in `others`.
    """

    def __init__(
        self,
        name: str,
        store: Store,
        worker: Worker,
        emit: Emit,
        *,
        accepted: Path = ACCEPTED,
        redo: bool = False,
        start: Start | None = None,
    ) -> None:
        self.name, self.store, self.worker, self.emit, self.redo = name, store, worker, emit, redo
        self.start = start or Start()
        self.accepted = _read_accepted(accepted)
        self.dry = False
        self.others: list[OtherCode] = []
        self._externals: dict[Path, External] = {}

    def external(self, path: Path) -> External:
        """Something outside the store, digested once per driver."""
        if path not in self._externals:
            self._externals[path] = External(self.store.content(path), path)
        return self._externals[path]

    def call(
        self,
        name: str,
        round_: int,
        inputs: Mapping[str, Input],
        spec: Any,
        *,
        uses: Sequence[str] = (),
        ledger: Ledger | None = None,
        force: bool = False,
        usable: Callable[[Published], bool] = lambda found: True,
    ) -> Artifact:
        """The artifact of a stage call.

        Args:
            name: `rollout`, `reward.<scorer>`, …; what follows the dot only tells calls of one stage apart.
            inputs: what it reads. spec: its frozen spec. uses: method and scorer modules it runs.
            ledger: its cost by the plan. force: forget what is there and compute it again. usable: whether what is
                there may be found; it is computed again otherwise.
        """
        stage = name.partition(".")[0]
        request = Request(
            stage=stage,
            inputs={key: one.digest for key, one in inputs.items()},
            settings=settings(spec),
            code=self.worker.code(stage, uses),
            versions=self.worker.versions(stage),
            ledger=ledger or Ledger(),
        )
        force = force or self.start.again(name, round_)
        if force and not self.dry and (old := self._find(request, name, round_, usable)):
            self.store.forget(old)
        published = None if force else self._find(request, name, round_, usable)
        if published is None:
            if self.dry:
                raise NotYet(name)
            if useless := self.store.published(request.stage, request.fingerprint):
                self.store.forget(useless)
            published = self._compute(request, name, round_, inputs, spec)
        elif not self.dry:
            self._tell(name, round_, "cached")

        def make(folders: Mapping[str, Path], scratch: Path) -> None:
            self.worker.run(stage, folders, spec, scratch)

        return Artifact(self.store, published, inputs, make, f"{self.name}: {name} of round {round_}")

    def _find(self, request: Request, name: str, round_: int, usable: Callable[[Published], bool]) -> Published | None:
        exact = self.store.published(request.stage, request.fingerprint)
        if exact or self.redo:
            return exact if exact and usable(exact) else None
        for other in filter(usable, self.store.similar(request)):
            if dict(other.manifest["versions"]) != dict(request.versions):
                continue
            if other.code in self.accepted.get(request.stage, ()):
                return other
            if self.dry:
                self.others.append(OtherCode(request.stage, round_, other.code))
                return other
        return None

    def _compute(self, request: Request, name: str, round_: int, inputs: Mapping[str, Input], spec: Any) -> Published:
        self._tell(name, round_, "started")
        self._settings_changed(request, name, round_)
        try:
            with self.store.scratch(request.stage) as scratch:
                folders = {key: one.path for key, one in inputs.items()}
                began = time.time()
                known = self.worker.run(request.stage, folders, spec, scratch)
                seconds = round(time.time() - began, 3)
                write_json(scratch / "request.json", {"inputs": _portable(folders), "spec": asdict(spec)})
                published = self.store.publish(request, scratch, {"began": began, "seconds": seconds}, known)
        except BaseException as error:
            self._tell(name, round_, "failed", str(error) or type(error).__name__)
            raise
        self._tell(name, round_, "done", f"{seconds:.1f} s", seconds)
        return published

    def _settings_changed(self, request: Request, name: str, round_: int) -> None:
        """Say aloud that library versions changed under a run: its results may differ in the last bits."""
        for other in self.store.similar(request):
            if other.code == request.code:
                changed = [
                    f"{library} {before} → {request.versions.get(library)}"
                    for library, before in other.manifest["versions"].items()
                    if request.versions.get(library) != before
                ]
                say(f"{self.name}: {name} of round {round_} is there from {', '.join(changed)}; making it again")
                return

    def _tell(self, name: str, round_: int, status: Any, detail: str = "", seconds: float = 0.0) -> None:
        event = Event(
            kind="stage", run=self.name, round=round_, stage=name, status=status, detail=detail, seconds=seconds
        )
        self.emit(event)

    def refuse_other_code(self) -> None:
        """Stop, in one sentence, if a dry walk met results by other code that nobody accepted."""
        if not self.others:
            return
        stages = sorted({other.stage for other in self.others})
        made = "; ".join(
            f"{stage} of round{'s' if len(rounds) > 1 else ''} {spans(rounds)}"
            for stage in stages
            for rounds in [sorted({other.round for other in self.others if other.stage == stage})]
        )
        accept = {
            stage: sorted({*self.accepted.get(stage, ()), *(o.code for o in self.others if o.stage == stage)})
            for stage in sorted({*stages, *self.accepted})
        }
        raise GranularError(
            f"{self.name}: other code than today's made {made}; to keep these results commit {ACCEPTED} with "
            f"{json.dumps(accept)}, or make them again with `granular align {self.name} --redo`."
        )


def spans(numbers: Iterable[int]) -> str:
    """1, 2, 3, 7 → "1–3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}–{high}" for low, high in runs)


def _portable(folders: Mapping[str, Path]) -> dict[str, str]:
    """Paths as a person in the project folder would write them."""
    here = Path.cwd()
    return {name: os.path.relpath(path, here) for name, path in folders.items()}


def _read_accepted(path: Path) -> dict[str, list[str]]:
    if not path.is_file():
        return {}
    values = read_json(path)
    valid = isinstance(values, dict) and all(
        isinstance(codes, list) and all(isinstance(code, str) for code in codes) for codes in values.values()
    )
    if not valid:
        raise GranularError(f'{path}: expected {{"<stage>": ["<code digest>", …]}}.')
    return values
