"""Rounds that travel: packed here, unpacked there, and nothing there is computed again or taken for whole too early."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline.packing import pack, results, unpack
from pipeline.reuse import Store
from stages.core.errors import GranularError
from tests.pipeline.fake_world import FakeWorker, World, make_run


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A project with a finished run of four rounds."""
    world = World(tmp_path / "here")
    world.align(4)
    return world


def store(world: World) -> Store:
    return Store(world.folder / "store")


def packed(world: World) -> Path:
    folder = world.folder / "data/rounds"
    pack(make_run(world.folder, 4), store(world), FakeWorker(), folder)
    return folder


def elsewhere(world: World, tmp_path: Path) -> World:
    """A second project with the same inputs, an empty store, and what was packed in the first."""
    for name in ("prompts", "embeddings", "base", "scorer.json"):
        source, target = world.folder / name, tmp_path / "there" / name
        target.parent.mkdir(exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    shutil.copytree(packed(world), tmp_path / "there/data/rounds")
    return World(tmp_path / "there")


def test_what_was_unpacked_is_found_and_nothing_is_computed(world: World, tmp_path: Path) -> None:
    before = world.outputs()
    there = elsewhere(world, tmp_path)
    new, back = unpack("toy", store(there), there.folder / "data/rounds")
    assert (new, back) == (
        len({one.folder for one in results(make_run(there.folder, 4), store(there), FakeWorker())}),
        0,
    )
    there.align(4)
    assert there.worker.calls == [] and there.outputs() == before


def test_one_round_more_starts_where_the_packed_ones_end(world: World, tmp_path: Path) -> None:
    there = elsewhere(world, tmp_path)
    unpack("toy", store(there), there.folder / "data/rounds")
    there.align(5)
    assert set(there.worker.calls) == {"rollout5", "reward.clip", "reward.oracle", "advantage", "update5", "evaluate"}


def test_unpacking_again_changes_nothing_and_brings_evicted_bytes_back(world: World) -> None:
    folder = packed(world)
    own = store(world)
    assert unpack("toy", own, folder) == (0, 0)
    last = [one for one in results(make_run(world.folder, 4), own, FakeWorker()) if one.stage == "rollout"][-1]
    gone = own.evict(last, ["rollouts.zarr/*/leaf_x"])
    assert gone and unpack("toy", own, folder) == (0, 1) and not last.missing([""])


def test_packing_costs_no_room_and_leaves_the_store_alone(world: World) -> None:
    folder = packed(world)
    one = next(file for file in folder.rglob("optimizer.safetensors"))
    assert one.stat().st_nlink == 2
    shutil.rmtree(folder)
    world.align(4)
    assert world.worker.calls == []


def test_an_interrupted_unpacking_leaves_nothing_that_counts_and_the_next_goes_on(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = elsewhere(world, tmp_path)
    copies = 0

    def interrupted(source: str, target: str, **options: object) -> str:
        nonlocal copies
        copies += 1
        if copies > 20:
            raise KeyboardInterrupt
        return plain(source, target)

    plain = shutil.copy2
    with monkeypatch.context() as patch:
        patch.setattr(shutil.copytree, "__defaults__", (False, None, interrupted, False, False))
        with pytest.raises(KeyboardInterrupt):
            unpack("toy", store(there), there.folder / "data/rounds")
    for manifest in (there.folder / "store").glob("*/*/manifest.json"):
        source = there.folder / "data/rounds/toy" / manifest.parent.relative_to(there.folder / "store")
        names = {file.relative_to(source) for file in source.rglob("*")}
        assert {file.relative_to(manifest.parent) for file in manifest.parent.rglob("*")} == names
    unpack("toy", store(there), there.folder / "data/rounds")
    there.align(4)
    assert there.worker.calls == []


@pytest.mark.parametrize("damage", [b"[0.25]", b"no table at all"], ids=["another value", "unreadable"])
def test_a_part_that_is_not_what_its_manifest_says_is_refused(world: World, tmp_path: Path, damage: bytes) -> None:
    there = elsewhere(world, tmp_path)
    name = "summary.json" if damage.startswith(b"[") else "rewards.parquet"
    part = next((there.folder / "data/rounds/toy/reward").glob(f"*/{name}"))
    part.write_bytes(damage)
    with pytest.raises(GranularError, match="nothing of this result was taken, fetch the folder again"):
        unpack("toy", store(there), there.folder / "data/rounds")


def test_what_is_not_there_is_said_in_one_sentence(world: World, tmp_path: Path) -> None:
    with pytest.raises(GranularError, match=r"no packed rounds there, `dvc pull .*did you mean 'toy'"):
        unpack("toi", store(world), packed(world))
    with pytest.raises(GranularError, match="no round of it is in the store"):
        pack(make_run(world.folder, 4, seed=9), store(world), FakeWorker(), tmp_path / "rounds")
    assert not (tmp_path / "rounds").exists()
