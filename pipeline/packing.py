"""A run's rounds as a folder that DVC can carry: `data/rounds/<run>`, and back into the store of another machine.

The round store lies outside every DVC output, because DVC deletes outputs before it runs a command; so a run's part of
it is laid out again, in the store's own structure `<stage>/<fingerprint>/`, and added to DVC for the remote `bulk`.
What retention has evicted is not there; tables and manifests always are.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.reuse import BESIDE, Published, Store
from stages.core import digest
from stages.core.errors import GranularError, nearest
from stages.core.publish import scratch_beside, write_text
from stages.core.spec import read_json

if TYPE_CHECKING:
    from pipeline.plan import RunPlan
    from pipeline.workers import Worker

PACKED = Path("data/rounds")
REMOTE = "bulk"  # of .dvc/config


def results(run: RunPlan, store: Store, worker: Worker) -> Iterator[Published]:
    """Everything of a run that the store holds, in the order of the run."""
    from pipeline import plan
    from pipeline.calls import Loop
    from pipeline.driver import Driver, NotYet

    driver = Driver(run.name, store, worker, lambda event: None)
    loop = Loop(run, driver)
    policy = loop.start()
    driver.dry = True
    yield policy.published
    with suppress(NotYet):
        for number in range(run.rounds + 1):
            if number:
                round_ = loop.round(number, policy)
                yield from (one.published for one in round_.artifacts().values())
                policy = round_.update
            if plan.validated(run, number):
                with suppress(NotYet):
                    yield loop.validate(number, policy).published


def pack(run: RunPlan, store: Store, worker: Worker, packed: Path = PACKED) -> int:
    """Lay a run's results out under `<packed>/<run>`, whole or not at all; returns how many there are.

    Files are hard links where the filesystem has them, so this costs no room before DVC takes them into its cache.

    Raises:
        GranularError: the store holds no round of the run.
    """
    found = list(results(run, store, worker))
    if not any(one.stage == "update" for one in found):
        raise GranularError(
            f"{run.name}: no round of it is in the store {store.root}; make one with `granular align {run.name}`."
        )
    with scratch_beside(packed / run.name) as out:
        for one in found:
            target = out / one.stage / one.folder.name
            if not target.exists():  # a policy that stayed the same is one result of several rounds
                shutil.copytree(one.folder, target, copy_function=_link)
    return len(found)


def add(name: str, packed: Path = PACKED) -> Path:
    """Add a packed run to DVC, for the remote of what can be made again; returns the file to commit.

    Raises:
        GranularError: DVC refuses.
    """
    from ruamel.yaml import YAML

    folder, yaml = packed / name, YAML()
    command = [sys.executable, "-m", "dvc", "--wait-for-lock", "add", "--quiet", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[0].removeprefix("ERROR: ")
        raise GranularError(f"dvc add {folder}: {said}")
    note = packed / f"{name}.dvc"
    content = yaml.load(note.read_text(encoding="utf-8"))
    content["outs"][0]["remote"] = REMOTE
    text = io.StringIO()
    yaml.dump(content, text)
    write_text(note, text.getvalue())
    return note


def unpack(name: str, store: Store, packed: Path = PACKED) -> tuple[int, int]:
    """Bring `<packed>/<name>` into the store; returns (results that were new, results whose bytes came back).

    Every part is checked against its manifest first. A result appears by one rename, so an interrupted call leaves
    nothing that could be taken for whole, and the next one goes on.

    Raises:
        GranularError: no such folder, or a part that is not what its manifest says.
    """
    folder = packed / name
    manifests = sorted(folder.glob("*/*/manifest.json"))
    if not manifests:
        known = sorted(one.name for one in packed.glob("[!.]*") if one.is_dir())
        raise GranularError(
            f"{folder}: no packed rounds there, `dvc pull {folder}` brings them; {nearest(name, known)}"
        )
    new = back = 0
    for manifest in manifests:
        packed_one = Published(manifest.parent, read_json(manifest))
        _check(packed_one)
        stage, fingerprint = packed_one.stage, packed_one.manifest["fingerprint"]
        there = store.published(stage, fingerprint)
        with store.scratch(stage) as scratch:
            if there is None:
                shutil.copytree(packed_one.folder, scratch, dirs_exist_ok=True)
                target = store.root / stage / fingerprint
                with suppress(FileNotFoundError):
                    shutil.rmtree(target)  # without a manifest it counts as absent
                os.rename(scratch, target)
                new += 1
                continue
            parts = [part for part in there.missing([""]) if (packed_one.folder / part).exists()]
            if there.digest == packed_one.digest and parts:
                for part in parts:
                    _copy(packed_one.folder / part, scratch / part)
                    (there.folder / part).parent.mkdir(parents=True, exist_ok=True)
                    os.replace(scratch / part, there.folder / part)
                back += 1
    return new, back


def _check(one: Published) -> None:
    outputs, bad = one.manifest["outputs"], ""
    try:
        found = digest.of_parts(one.folder, BESIDE)
        bad = next((f"{part} is not what its manifest says" for part in found if outputs.get(part) != found[part]), "")
    except Exception as error:  # whatever a library makes of bytes that are not its format
        bad = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if bad:
        raise GranularError(f"{one.folder}: {bad}; nothing of this result was taken, fetch the folder again.")


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copyfile(source, target)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
