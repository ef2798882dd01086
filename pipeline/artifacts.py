"""Results that may have lost their bytes: an artifact is known by its manifest, and re-made only when it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.reuse import Published, Store
from stages.core.progress import say

Make = Callable[[Mapping[str, Path], Path], None]


@dataclass(frozen=True)
class External:
    """Something outside the store that a stage reads: known by content, always complete."""

    digest: str
    path: Path

    def missing(self, need: tuple[str, ...]) -> list[str]:
        return []

    def folder(self, need: tuple[str, ...] = ("",)) -> Path:
        return self.path


@dataclass(frozen=True)
class Input:
    """One input of a stage: an artifact, the parts of it that the stage reads, and the folder it is handed."""

    source: Artifact | External
    need: tuple[str, ...] = ("",)
    inside: str = ""

    @property
    def digest(self) -> str:
        return self.source.digest

    @property
    def path(self) -> Path:
        """The folder the stage receives; re-makes what the stage needs and is not there."""
        return self.source.folder(self.need) / self.inside


@dataclass(frozen=True)
class Artifact:
    """A published result with the way to make it again.

    label: what a person calls it, `rollout of round 3`. make: runs the stage from input folders into a scratch one.
    """

    store: Store
    published: Published
    inputs: Mapping[str, Input]
    make: Make
    label: str

    @property
    def digest(self) -> str:
        """Content digest; needs the manifest only."""
        return self.published.digest

    def missing(self, need: tuple[str, ...]) -> list[str]:
        """Parts under `need` whose bytes were evicted."""
        return self.published.missing(need)

    def folder(self, need: tuple[str, ...] = ("",)) -> Path:
        """The published folder with at least the parts under `need` in it.

        Evicted parts are re-made, and what they in turn are made from: round n's policy needs round n − 1's, and so
        on down to one whose bytes are there. Intermediate bytes are evicted again.

        Raises:
            GranularError: re-made bytes differ from the manifest; nothing was adopted.
        """
        borrowed: dict[Path, tuple[Artifact, list[str]]] = {}
        # An explicit stack: a chain of policies may be longer than Python's own.
        waiting: list[tuple[Artifact, tuple[str, ...]]] = [(self, need)]
        try:
            while waiting:
                artifact, wanted = waiting[-1]
                if not artifact.missing(wanted):
                    waiting.pop()
                    continue
                absent = [
                    (one.source, one.need)
                    for one in artifact.inputs.values()
                    if isinstance(one.source, Artifact) and one.source.missing(one.need)
                ]
                if absent:
                    waiting += absent
                    continue
                gone = artifact.missing(("",))
                say(f"{artifact.label}: making evicted outputs again ({len(gone)} parts)")
                with artifact.store.scratch(artifact.published.stage) as scratch:
                    artifact.make({name: one.path for name, one in artifact.inputs.items()}, scratch)
                    artifact.store.restore(artifact.published, scratch, artifact.label)
                back = gone if artifact is not self else [p for p in gone if p not in self.published.parts(need)]
                borrowed[artifact.published.folder] = (artifact, back)
                waiting.pop()
        finally:
            for artifact, parts in borrowed.values():
                artifact.store.evict(artifact.published, parts)
        return self.published.folder
