"""What the store may lose: bytes nobody refers to; never a table, a manifest, or what another checkout still uses."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from pipeline.collect import YOUNG, collect
from pipeline.reuse import Store
from stages.core.errors import GranularError
from tests.pipeline.fake_world import World


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A run that was trained twice: the store holds the rounds of two settings, and the run refers to the second."""
    world = World(tmp_path)
    world.align(3, seed=1)
    world.align(3, seed=2)
    age(world)
    return world


def age(world: World) -> None:
    for manifest in (world.folder / "store").glob("*/*/manifest.json"):
        os.utime(manifest, (time.time() - 2 * YOUNG,) * 2)


def store(world: World) -> Store:
    return Store(world.folder / "store")


def files(world: World) -> dict[Path, int]:
    root = world.folder / "store"
    return {file.relative_to(root): file.stat().st_size for file in root.rglob("*") if file.is_file()}


def test_what_a_run_refers_to_stays_and_what_nobody_does_goes(world: World) -> None:
    before = files(world)
    told = collect(store(world), dry=True)
    assert files(world) == before
    freed = collect(store(world), dry=False)
    assert freed == told and freed.results > 0
    gone = set(before) - set(files(world))
    assert sum(before[one] for one in gone) == freed.bytes
    assert {one.name for one in gone if one.suffix in (".json", ".parquet", ".png")} <= {"zarr.json"}
    assert collect(store(world), dry=False).results == 0
    world.align(3, seed=2)
    assert world.worker.calls == []


def test_what_went_is_made_again_when_somebody_reads_it(world: World) -> None:
    collect(store(world), dry=False)
    world.align(4, seed=1)  # round 4 needs the state of round 3, which went
    assert "update3" in world.worker.calls and "update4" in world.worker.calls


def test_a_run_that_was_given_up_frees_its_rounds(world: World) -> None:
    collect(store(world), dry=False)
    shutil.rmtree(world.folder / "runs/toy")
    assert collect(store(world), dry=False).results > 0


def test_a_round_that_is_being_computed_is_too_young_to_go(world: World) -> None:
    shutil.rmtree(world.folder / "runs/toy")
    for manifest in (world.folder / "store").glob("*/*/manifest.json"):
        os.utime(manifest)
    assert collect(store(world), dry=False).results == 0


def test_a_shared_store_keeps_what_the_other_checkout_refers_to(world: World, tmp_path: Path) -> None:
    other = World(tmp_path / "other")
    (tmp_path / "other/store").symlink_to(world.folder / "store")
    other.align(3, seed=1)
    age(world)
    assert collect(store(world), dry=False).results == 0


def test_a_checkout_that_cannot_be_seen_stops_the_collection_and_one_that_was_deleted_does_not(world: World) -> None:
    note = world.folder / "store/checkouts/other.json"
    here = json.loads(next((world.folder / "store/checkouts").glob("*.json")).read_text())["host"]
    note.write_text(json.dumps({"path": "/nowhere/project", "host": "node-7"}))
    with pytest.raises(GranularError, match=r"/nowhere/project on node-7 uses this store too"):
        collect(store(world), dry=False)
    note.write_text(json.dumps({"path": "/nowhere/project", "host": here}))
    assert collect(store(world), dry=True).results > 0
