"""`granular gc`: bytes of the round store that no run refers to any more.

A setting that was changed leaves the rounds it had behind. Their latents, maps, weights and optimizer states go; their
manifests, tables and everything else stay, and whoever reads what went makes it again (`artifacts.py`). A run refers to
the rounds under its `runs/<run>/rounds`; to give one up, delete that folder.

    <store>/checkouts/*.json    the project folders that use this store, so that a shared store is never swept by one
                                of them alone
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from pipeline.retention import LATENTS, MAPS, OPTIMIZER, WEIGHTS
from pipeline.reuse import Published, Store, write_json
from stages.core import digest
from stages.core.errors import GranularError
from stages.core.spec import read_json

BYTES = {"rollout": LATENTS, "reward": MAPS, "update": (*WEIGHTS, *OPTIMIZER)}
# A round is linked when it is whole; what is younger may belong to one that is being computed.
YOUNG = 24 * 3600.0  # seconds


@dataclass(frozen=True)
class Freed:
    """results: how many lost bytes (or would). bytes: how many."""

    results: int
    bytes: int


def register(store: Store, project: Path) -> None:
    """Note that a project folder uses a store."""
    place = str(project.resolve())
    file = store.root / "checkouts" / f"{digest.of_json([socket.gethostname(), place])}.json"
    if not file.is_file():
        write_json(file, {"path": place, "host": socket.gethostname()})


def referred(store: Store) -> set[tuple[str, str]]:
    """(stage, fingerprint) of every round of every run of every project folder that uses the store.

    Raises:
        GranularError: a project folder on another host cannot be seen from here.
    """
    found = set()
    for file in sorted(store.root.glob("checkouts/*.json")):
        checkout = read_json(file)
        project = Path(checkout["path"])
        if not project.is_dir():
            if checkout["host"] == socket.gethostname():
                continue  # deleted, and its runs with it
            raise GranularError(
                f"{store.root}: {project} on {checkout['host']} uses this store too and cannot be seen from here; run "
                f"`granular gc` where it can, or delete {file} if that folder is gone."
            )
        for manifest in project.glob("runs/*/rounds/[0-9]*/manifest.json"):
            stages = read_json(manifest)["stages"].values()
            found |= {(one["stage"], one["fingerprint"]) for one in stages}
    return found


def collect(store: Store, *, dry: bool) -> Freed:
    """Evict the bytes that nobody refers to; with `dry`, only count them.

    Raises:
        GranularError: see `referred`.
    """
    kept = referred(store)
    results = total = 0
    for stage, patterns in BYTES.items():
        for manifest in sorted(store.root.glob(f"{stage}/*/manifest.json")):
            if (stage, manifest.parent.name) in kept or time.time() - manifest.stat().st_mtime < YOUNG:
                continue
            one = Published(manifest.parent, read_json(manifest))
            size = sum(_size(one.folder / part) for part in one.parts(patterns))
            if size:
                results, total = results + 1, total + size
                if not dry:
                    store.evict(one, patterns)
    return Freed(results, total)


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(os.path.getsize(file) for file in path.rglob("*") if file.is_file())
    return path.stat().st_size if path.exists() else 0
