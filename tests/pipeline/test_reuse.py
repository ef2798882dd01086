"""The store: names are contents, publication is one rename, bytes may go and come back, nothing is adopted silently."""

from __future__ import annotations

import inspect
import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.artifacts import Artifact, External, Input
from pipeline.reuse import Published, Request, Store, settings
from stages.core.errors import GranularError
from stages.policies.spec import PolicySpec
from stages.reward.spec import RewardSpec, ScorerSpec

REQUEST = Request(stage="toy", inputs={"a": "1"}, settings={"lr": 0.1}, code="c", versions={"numpy": "2"})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def put(store: Store, request: Request = REQUEST, text: str = "hello") -> Published:
    with store.scratch(request.stage) as scratch:
        (scratch / "out.txt").write_text(text)
        (scratch / "policy").mkdir()
        (scratch / "policy" / "w.txt").write_text(text * 2)
        return store.publish(request, scratch, {"seconds": 1.5})


@pytest.mark.parametrize(
    "change",
    [
        {"inputs": {"a": "2"}},
        {"settings": {"lr": 0.2}},
        {"code": "d"},
        {"versions": {"numpy": "3"}},
        {"stage": "other"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_everything_that_can_change_a_result_changes_the_fingerprint(change: dict[str, Any]) -> None:
    assert replace(REQUEST, **change).fingerprint != REQUEST.fingerprint


def test_the_recipe_forgets_code_and_versions_only() -> None:
    assert replace(REQUEST, code="d", versions={}).recipe == REQUEST.recipe
    assert replace(REQUEST, inputs={}).recipe != REQUEST.recipe


def test_places_and_device_numbers_are_no_settings() -> None:
    def spec(base: str, path: str, device: str, threads: int = 2) -> RewardSpec:
        scorer = ScorerSpec(kind="open_clip", path=path)
        return RewardSpec(name="clip", scorer=scorer, policy=PolicySpec(base=base, device=device, threads=threads))

    assert settings(spec("/a", "/b", "cuda:0")) == settings(spec("/c", "/d", "cuda:1"))
    assert settings(spec("/a", "/b", "cuda")) != settings(spec("/a", "/b", "cpu"))
    assert settings(spec("/a", "/b", "cpu", 1)) != settings(spec("/a", "/b", "cpu", 2))


def test_published_is_found_and_times_do_not_enter_its_digest(store: Store, tmp_path: Path) -> None:
    one = put(store)
    found = store.published("toy", REQUEST.fingerprint)
    assert found is not None and found.digest == one.digest and found.seconds == 1.5
    assert set(one.manifest["outputs"]) == {"out.txt", "policy/w.txt"}
    assert put(Store(tmp_path / "other")).digest == one.digest


def test_publishing_an_equal_result_twice_is_success_and_a_different_one_is_refused(store: Store) -> None:
    one = put(store)
    assert put(store).folder == one.folder
    with pytest.raises(GranularError, match="nothing was replaced"):
        put(store, text="something else")
    assert (one.folder / "out.txt").read_text() == "hello"


def test_an_interrupted_attempt_leaves_nothing(store: Store) -> None:
    with pytest.raises(KeyboardInterrupt), store.scratch("toy") as scratch:
        (scratch / "half").write_text("x")
        raise KeyboardInterrupt
    assert list((store.root / "toy").iterdir()) == []


def test_only_attempts_of_dead_processes_of_this_host_are_swept(store: Store) -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    host = socket.gethostname()
    names = {f".attempt-{host}-{child.pid}-aa": False, f".attempt-{host}-{os.getpid()}-bb": True}
    names[f".attempt-some-other-host-{child.pid}-cc"] = True
    for name in names:
        (store.root / "toy" / name).mkdir(parents=True)
    Store(store.root)
    assert {name: (store.root / "toy" / name).exists() for name in names} == names


def test_a_folder_without_a_manifest_is_absent_and_gives_way(store: Store) -> None:
    store.forget(put(store))
    assert store.published("toy", REQUEST.fingerprint) is None
    assert put(store, text="new").manifest["outputs"]
    assert store.published("toy", REQUEST.fingerprint) is not None


def test_similar_finds_other_code_and_not_what_was_forgotten(store: Store) -> None:
    one = put(store)
    other = replace(REQUEST, code="d")
    assert [hit.code for hit in store.similar(other)] == ["c"]
    assert store.similar(REQUEST) == []
    store.forget(one)
    assert store.similar(other) == []


def test_eviction_takes_bytes_by_pattern_and_keeps_the_manifest(store: Store) -> None:
    one = put(store)
    assert store.evict(one, ["policy"]) == ["policy/w.txt"]
    assert one.missing([""]) == ["policy/w.txt"] and one.missing(["out.txt"]) == []
    assert store.published("toy", REQUEST.fingerprint) is not None
    assert store.evict(one, ["policy"]) == []


def test_arrays_of_a_zarr_store_are_parts_of_their_own(store: Store) -> None:
    import zarr

    with store.scratch("toy") as scratch:
        group = zarr.create_group(str(scratch / "x.zarr"), zarr_format=3, attributes={"k": 1})
        group.create_group("s").create_array("latents", data=np.ones(3))
        group["s"].create_array("table", data=np.ones(2))
        one = store.publish(REQUEST, scratch, {"seconds": 0})
    store.evict(one, ["x.zarr/*/latents"])
    opened = zarr.open_group(str(one.folder / "x.zarr"), mode="r")
    assert sorted(opened["s"].array_keys()) == ["table"] and one.missing([""]) == ["x.zarr/s/latents"]


@dataclass
class Chain:
    """Artifacts 0 … n, each made from the one before; counts how often each is made."""

    store: Store
    length: int

    def __post_init__(self) -> None:
        self.made: list[int] = []
        self.drift = ""
        previous = Input(External("root", self.store.root))
        self.artifacts: list[Artifact] = []
        for number in range(self.length):
            request = replace(REQUEST, inputs={"before": previous.digest}, settings={"n": number})

            def make(folders: Any, scratch: Path, number: int = number) -> None:
                self.made.append(number)
                file = folders["before"] / "out.txt"
                before = file.read_text() if file.exists() else ""
                (scratch / "out.txt").write_text(f"{before}{number}{self.drift}"[-50:])
                (scratch / "table.txt").write_text(f"table {number}")

            with self.store.scratch("toy") as scratch:
                make({"before": previous.path}, scratch)
                published = self.store.publish(request, scratch, {"seconds": 0})
            self.artifacts.append(Artifact(self.store, published, {"before": previous}, make, f"link {number}"))
            previous = Input(self.artifacts[-1], ("out.txt",))
        self.made.clear()


def test_evicted_parts_are_made_again_only_when_read(store: Store) -> None:
    chain = Chain(store, 3)
    for one in chain.artifacts:
        store.evict(one.published, ["out.txt"])
    last = chain.artifacts[-1]
    assert last.digest and (last.folder(("table.txt",)) / "table.txt").exists() and chain.made == []
    assert (last.folder() / "out.txt").read_text() == "012"
    assert chain.made == [0, 1, 2]
    # What was borrowed on the way is evicted again, what was asked for stays.
    assert [bool(one.missing(("",))) for one in chain.artifacts] == [True, True, False]


def test_the_depth_of_a_chain_does_not_matter(store: Store) -> None:
    chain = Chain(store, 60)
    for one in chain.artifacts:
        store.evict(one.published, ["out.txt"])
    depth = len(inspect.stack())
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(depth + 50)
    try:
        chain.artifacts[-1].folder()
    finally:
        sys.setrecursionlimit(limit)
    assert chain.made == list(range(60))


def test_bytes_made_again_differently_are_reported_and_not_adopted(store: Store) -> None:
    chain = Chain(store, 2)
    one = chain.artifacts[1]
    old = one.digest
    store.evict(one.published, ["out.txt"])
    chain.drift = "!"
    with pytest.raises(GranularError) as error:
        one.folder()
    assert "link 1" in str(error.value) and old[:12] in str(error.value) and "nothing was adopted" in str(error.value)
    assert one.missing(("",)) == ["out.txt"]
    assert json.loads((one.published.folder / "manifest.json").read_text())["digest"] == old
    assert not list(store.root.glob("*/.attempt-*"))


def test_content_is_remembered_until_a_file_changes(store: Store, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "a.txt").write_text("one")
    first = store.content(tmp_path / "base")
    assert store.content(tmp_path / "base") == first
    (tmp_path / "base" / "a.txt").write_text("two")
    assert store.content(tmp_path / "base") != first
    with pytest.raises(GranularError, match="not there"):
        store.content(tmp_path / "nothing")


def test_a_scorer_may_be_called_like_a_place() -> None:
    from stages.advantage.spec import AdvantageSpec

    def spec(weight: float) -> AdvantageSpec:
        return AdvantageSpec(method={"name": "g2rpo"}, rewards={"base": weight, "path": 1.0})

    assert settings(spec(1.0)) != settings(spec(2.0))


@pytest.mark.parametrize("part", ["file", "folder"])
def test_two_drivers_evict_and_restore_the_same_part_at_once(
    store: Store, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    import os

    import zarr

    def make(scratch: Path) -> None:
        zarr.create_group(str(scratch / "x.zarr"), zarr_format=3).create_array("folder", data=np.ones(3))
        (scratch / "file").write_text("x")

    with store.scratch("toy") as scratch:
        make(scratch)
        one = store.publish(REQUEST, scratch, {"seconds": 0})
    name = {"file": "file", "folder": "x.zarr/folder"}[part]
    kept = one.folder.parent / "kept"
    with monkeypatch.context() as patch:
        # The other one is quicker: the part is gone between the question and the deed.
        patch.setattr(Path, "is_dir", lambda self: (os.rename(one.folder / name, kept), part == "folder")[1])
        assert store.evict(one, [name]) == []
    assert one.missing([""]) == [name]

    missing = type(one).missing

    def restored_meanwhile(self: Published, patterns: list[str]) -> list[str]:
        gone = missing(self, patterns)
        os.rename(kept, one.folder / name)
        return gone

    with monkeypatch.context() as patch, store.scratch("toy") as scratch:
        make(scratch)
        patch.setattr(type(one), "missing", restored_meanwhile)
        store.restore(one, scratch, "toy")
    assert one.missing([""]) == []
