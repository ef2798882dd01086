"""The content-addressed store of rounds: what was computed once, from equal inputs by equal code, is never redone.

    <store>/<stage>/<fingerprint>/      manifest.json   inputs, settings, code, versions, digests of the outputs
                                        request.json    what `python -m stages.<stage> --request` needs
                                        log.json        times and host, outside every digest
                                        …               the outputs

A fingerprint is the digest of {stage, digests of the inputs, settings, code, library versions}. Work happens in a
scratch folder on the store's own filesystem and appears by one rename, manifest included; a folder without a
manifest counts as absent. Manifests outlive bytes: outputs may be evicted, and are re-made when somebody reads them
(`artifacts.py`).
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from stages.core import digest
from stages.core.errors import GranularError
from stages.core.publish import alive, write_text
from stages.core.spec import read_json
from stages.core.types import Ledger

SCHEMA = 1
# Written by the driver beside a stage's outputs; not outputs themselves.
BESIDE = frozenset({"manifest.json", "request.json", "log.json"})
# Where a file lies says nothing about what it holds; its content enters as the digest of an input (`processor`, `clip`:
# of scorers that read two folders).
LOCATIONS = frozenset({"base", "path", "single_file", "processor", "clip"})
# How memory is used, and where a download came from, change no number.
NEUTRAL = frozenset({"residency", "checkpointing", "revision"})
# Of a scorer behind an address: where it is and how patiently it is asked. What it is enters as its identity.
ASKING = frozenset({"url", "api_key_env", "timeout", "retries", "concurrency", "chunk", "template"})


def settings(spec: Any) -> dict[str, Any]:
    """A spec as JSON without its locations, and with the device's type instead of its number: what can change a
    result."""
    return _without_locations(json.loads(json.dumps(asdict(spec))))


def _without_locations(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_locations(item) for item in value]
    if not isinstance(value, dict):
        return value
    # Only a place itself: a scorer called "base" has a weight or a section under that name, which counts.
    kept = {
        name: _without_locations(item)
        for name, item in value.items()
        if not (name in LOCATIONS and (item is None or isinstance(item, str))) and name not in NEUTRAL
    }
    if isinstance(value.get("url"), str):
        kept = {name: item for name, item in kept.items() if name not in ASKING}
    if isinstance(kept.get("device"), str):
        kept["device"] = kept["device"].partition(":")[0]
    return kept


@dataclass(frozen=True, kw_only=True)
class Request:
    """One call of a stage, named by everything that can change its result.

    inputs: digest of each input. settings: see `settings`. code: digest of the stage's code (`stages.core.code`).
    versions: library versions. ledger: what the call costs by the plan, for the record.
    """

    stage: str
    inputs: Mapping[str, str]
    settings: Mapping[str, Any]
    code: str
    versions: Mapping[str, str]
    ledger: Ledger = field(default_factory=Ledger)

    @cached_property
    def recipe(self) -> str:
        """What is asked for, whoever's code answers."""
        return digest.of_json({"stage": self.stage, "inputs": dict(self.inputs), "settings": dict(self.settings)})

    @cached_property
    def fingerprint(self) -> str:
        """What is asked for, and who answers: the name of the result."""
        return digest.of_json({"recipe": self.recipe, "code": self.code, "versions": dict(self.versions)})


@dataclass(frozen=True)
class Published:
    """A finished result: its folder and its manifest. Bytes may have been evicted; the manifest stays."""

    folder: Path
    manifest: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """Content digest over all outputs."""
        return self.manifest["digest"]

    @property
    def stage(self) -> str:
        return self.manifest["stage"]

    @property
    def code(self) -> str:
        """Digest of the code that made it."""
        return self.manifest["code"]

    @property
    def seconds(self) -> float:
        """How long the work took, by the log (0 where there is none)."""
        log = self.folder / "log.json"
        return float(read_json(log)["seconds"]) if log.is_file() else 0.0

    def parts(self, patterns: Iterable[str]) -> list[str]:
        """Outputs under any of the patterns: a part's own place, a folder above it, or a glob; "" is everything."""
        wanted = list(patterns)
        return [part for part in self.manifest["outputs"] if any(_matches(part, one) for one in wanted)]

    def missing(self, patterns: Iterable[str]) -> list[str]:
        """Those parts whose bytes are not there."""
        return [part for part in self.parts(patterns) if not (self.folder / part).exists()]


def _matches(part: str, pattern: str) -> bool:
    return not pattern or part == pattern or part.startswith(f"{pattern}/") or fnmatchcase(part, pattern)


class Store:
    """The store's folder. Several drivers may share it: names are contents, and publication is one rename."""

    def __init__(self, root: Path | None = None) -> None:
        """`root` defaults to the environment's GRANULAR_STORE, else `.granular/store`."""
        self.root = Path(root or os.environ.get("GRANULAR_STORE") or ".granular/store")
        self.root.mkdir(parents=True, exist_ok=True)
        self._recipes: dict[str, dict[str, list[Published]]] = {}
        self._sweep()

    def published(self, stage: str, fingerprint: str) -> Published | None:
        """The finished result of that name, if there is one."""
        folder = self.root / stage / fingerprint
        manifest = folder / "manifest.json"
        return Published(folder, read_json(manifest)) if manifest.is_file() else None

    def similar(self, request: Request) -> list[Published]:
        """Finished results of the same recipe by other code or other library versions, in order of name."""
        if request.stage not in self._recipes:
            index: dict[str, list[Published]] = {}
            for manifest in sorted(self.root.glob(f"{request.stage}/*/manifest.json")):
                found = Published(manifest.parent, read_json(manifest))
                index.setdefault(found.manifest["recipe"], []).append(found)
            self._recipes[request.stage] = index
        hits = self._recipes[request.stage].get(request.recipe, [])
        alive = (hit for hit in hits if hit.manifest["fingerprint"] != request.fingerprint)
        return [hit for hit in alive if (hit.folder / "manifest.json").is_file()]

    @contextmanager
    def scratch(self, stage: str) -> Iterator[Path]:
        """A fresh folder for one attempt, removed afterwards unless it was published."""
        attempt = self.root / stage / _attempt_name()
        try:
            attempt.mkdir(parents=True)
            yield attempt
        finally:
            shutil.rmtree(attempt, ignore_errors=True)

    def publish(
        self, request: Request, scratch: Path, log: Mapping[str, Any], known: Mapping[str, str] | None = None
    ) -> Published:
        """Name the outputs in `scratch` and move them into the store.

        known: digests of outputs that whoever wrote them took already.

        Finding an equal result there already is success.

        Raises:
            GranularError: another driver published a *different* result under this fingerprint meanwhile.
        """
        outputs = digest.of_parts(scratch, BESIDE, known)
        if not outputs:
            raise GranularError(f"stage {request.stage} wrote nothing, so there is nothing to publish.")
        manifest = {
            "schema": SCHEMA,
            "stage": request.stage,
            "fingerprint": request.fingerprint,
            "recipe": request.recipe,
            "inputs": dict(request.inputs),
            "spec": dict(request.settings),
            "code": request.code,
            "versions": dict(request.versions),
            "outputs": outputs,
            "digest": digest.of_json(outputs),
            "ledger": asdict(request.ledger),
        }
        write_json(scratch / "log.json", {**log, "host": socket.gethostname()})
        write_json(scratch / "manifest.json", manifest)
        folder = self.root / request.stage / request.fingerprint
        if folder.exists() and not (folder / "manifest.json").exists():
            aside = folder.parent / _attempt_name()
            os.replace(folder, aside)
            shutil.rmtree(aside, ignore_errors=True)
        try:
            os.rename(scratch, folder)
        except OSError:
            there = self.published(request.stage, request.fingerprint)
            if there is None:
                raise
            if there.digest != manifest["digest"]:
                raise GranularError(
                    f"{folder}: another process published digest {there.digest[:12]} for the same inputs, settings "
                    f"and code while this one made {manifest['digest'][:12]}; nothing was replaced, run "
                    "the stage again with --force to find out which one repeats."
                ) from None
            return there
        return Published(folder, manifest)

    def forget(self, published: Published) -> None:
        """Delete a manifest, which forces a redo; the old bytes go when the new ones arrive."""
        (published.folder / "manifest.json").unlink(missing_ok=True)

    def evict(self, published: Published, patterns: Iterable[str]) -> list[str]:
        """Delete the bytes of some outputs, never manifests; returns the parts that went."""
        gone = []
        for part in published.parts(patterns):
            path = published.folder / part
            try:
                if path.is_dir():
                    # A half-deleted array would read as fill values, so it leaves by a rename first.
                    aside = published.folder.parent / _attempt_name()
                    os.replace(path, aside)
                    shutil.rmtree(aside, ignore_errors=True)
                else:
                    path.unlink()
            except FileNotFoundError:
                continue  # evicted before, or by another driver this moment
            gone.append(part)
        return gone

    def restore(self, published: Published, scratch: Path, label: str) -> None:
        """Adopt re-made bytes, if they are what the manifest says.

        Raises:
            GranularError: they are not; nothing was adopted.
        """
        outputs = digest.of_parts(scratch, BESIDE)
        if (made := digest.of_json(outputs)) != published.digest:
            expected = published.manifest["outputs"]
            differing = sorted(part for part in {*outputs, *expected} if outputs.get(part) != expected.get(part))
            raise GranularError(
                f"{label}: its evicted outputs were re-made with digest {made[:12]}, but the manifest says "
                f"{published.digest[:12]} (different: {', '.join(differing[:4])}); nothing was adopted: restore the "
                f"code and library versions of {published.folder / 'manifest.json'}, or redo it with --force."
            )
        for part in published.missing([""]):
            target = published.folder / part
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.replace(scratch / part, target)
            except OSError:
                # A folder that another driver brought back meanwhile does not give way, and holds the same.
                if not target.is_dir():
                    raise

    def content(self, path: Path) -> str:
        """Digest of something outside the store (a base policy, scorer weights, prompts), remembered by the sizes
        and times of its files."""
        if not path.exists():
            raise GranularError(
                f"{path}: not there; make it first (granular run makes the stages before align), or fix its path in "
                "params.yaml."
            )
        files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
        facts = [(str(file), (stat := file.stat()).st_size, stat.st_mtime_ns, stat.st_ino) for file in files]
        place = self.root / "contents" / f"{digest.of_json(str(path.resolve()))}.json"
        state = digest.of_json(facts)
        if place.is_file() and (known := read_json(place))["state"] == state:
            return known["digest"]
        value = digest.of_path(path)
        write_json(place, {"path": str(path), "state": state, "digest": value})
        return value

    def _sweep(self) -> None:
        """Remove what dead processes of this host left behind."""
        for attempt in self.root.glob("*/.attempt-*"):
            host, _, pid = attempt.name.removeprefix(".attempt-").rpartition("-")[0].rpartition("-")
            if host == socket.gethostname() and pid.isdigit() and not alive(int(pid)):
                shutil.rmtree(attempt, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    """Indented JSON with sorted keys, whole or not at all."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def _attempt_name() -> str:
    return f".attempt-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
