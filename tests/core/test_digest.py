"""Content digests: names, dtypes, shapes and values count; layout, order of keys, compression and times do not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from stages.core import digest

X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.mark.parametrize(
    "other",
    [{"y": X}, {"x": X.astype(np.float64)}, {"x": X.reshape(3, 2)}, {"x": X + 1}, {"x": X, "y": X}, {}],
    ids=["name", "dtype", "shape", "values", "more", "fewer"],
)
def test_every_difference_between_arrays_counts(other: dict[str, np.ndarray]) -> None:
    assert digest.of_arrays(other) != digest.of_arrays({"x": X})
    as_tensors = {name: torch.from_numpy(array) for name, array in other.items()}
    assert digest.of_tensors(as_tensors) != digest.of_tensors({"x": torch.from_numpy(X)})


def test_order_and_memory_layout_do_not_count() -> None:
    assert digest.of_arrays({"a": X, "b": X + 1}) == digest.of_arrays({"b": X + 1, "a": np.asfortranarray(X)})
    assert digest.of_json({"a": 1, "b": [2]}) == digest.of_json({"b": [2], "a": 1})


def test_minus_zero_and_nan_are_values() -> None:
    assert digest.of_arrays({"x": np.array([0.0])}) != digest.of_arrays({"x": np.array([-0.0])})
    assert digest.of_arrays({"x": np.array([np.nan])}) == digest.of_arrays({"x": np.array([np.nan])})


def test_a_table_counts_names_dtypes_and_values() -> None:
    table = pd.DataFrame({"a": [1, 2], "b": ["x", None]})
    assert digest.of_table(table) == digest.of_table(table.copy())
    others = (table.rename(columns={"a": "c"}), table.astype({"a": "int32"}), table.assign(b=["x", "y"]), table[::-1])
    assert len({digest.of_table(one) for one in (table, *others)}) == 5


def test_files_count_by_what_they_hold(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    (tmp_path / "a.json").write_text('{"x": 1, "y": [2]}')
    (tmp_path / "b.json").write_text(json.dumps({"y": [2], "x": 1}, indent=4))
    assert digest.of_file(tmp_path / "a.json") == digest.of_file(tmp_path / "b.json")
    tensors = {"one": torch.ones(2), "two": torch.zeros(3)}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"k": "v", "format": "pt"})
    save_file(tensors, tmp_path / "b.safetensors")
    assert digest.of_file(tmp_path / "a.safetensors") == digest.of_file(tmp_path / "b.safetensors")
    table = pd.DataFrame({"a": [1, 2]})
    table.to_parquet(tmp_path / "a.parquet", compression=None)
    table.to_parquet(tmp_path / "b.parquet", compression="zstd")
    assert digest.of_file(tmp_path / "a.parquet") == digest.of_file(tmp_path / "b.parquet")
    np.savez(tmp_path / "a.npz", x=X)
    np.savez_compressed(tmp_path / "b.npz", x=X)
    assert digest.of_file(tmp_path / "a.npz") == digest.of_file(tmp_path / "b.npz")


@pytest.mark.parametrize("content", [b'{"x": 1,', b"", b"\xff\xfe\x00"], ids=["cut", "empty", "not text"])
def test_a_file_called_json_that_is_none_counts_by_its_bytes(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    (tmp_path / "a.bin").write_bytes(content)
    assert digest.of_file(tmp_path / "a.json") == digest.of_file(tmp_path / "a.bin")
    (tmp_path / "a.json").write_bytes(content + b"x")
    assert digest.of_file(tmp_path / "a.json") != digest.of_file(tmp_path / "a.bin")


def test_a_zarr_store_counts_by_arrays_not_by_chunks(tmp_path: Path) -> None:
    import zarr

    def store(name: str, *, chunks: tuple[int, int], dims: tuple[str, str] = ("a", "b"), value: float = 0.0) -> str:
        folder = tmp_path / name
        group = zarr.create_group(str(folder / "r.zarr"), zarr_format=3, attributes={"k": 1})
        inner = group.create_group("shard")
        inner.create_array("x", shape=X.shape, dtype=X.dtype, chunks=chunks, dimension_names=dims)[...] = X + value
        return digest.of_path(folder)

    one = store("one", chunks=(2, 3))
    assert store("two", chunks=(1, 1)) == one
    assert store("three", chunks=(2, 3), value=1.0) != one
    assert store("four", chunks=(2, 3), dims=("b", "a")) != one
    parts = digest.of_parts(tmp_path / "one")
    assert set(parts) == {"r.zarr/zarr.json", "r.zarr/shard/zarr.json", "r.zarr/shard/x"}


def test_a_folder_counts_names_and_forgets_logs(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub" / "a.txt").write_text("a")
        (tmp_path / name / "log.json").write_text(f'{{"time": "{name}"}}')
    assert digest.of_path(tmp_path / "one") == digest.of_path(tmp_path / "two")
    (tmp_path / "two" / "sub" / "a.txt").rename(tmp_path / "two" / "sub" / "b.txt")
    assert digest.of_path(tmp_path / "one") != digest.of_path(tmp_path / "two")


@pytest.mark.parametrize(
    "options", [{"chunks": (2, 3)}, {"chunks": (1, 3), "shards": (4, 3)}], ids=["chunks", "shards"]
)
def test_a_large_array_is_read_in_blocks_with_the_same_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict
) -> None:
    import zarr

    group = zarr.create_group(str(tmp_path / "r.zarr"), zarr_format=3)
    values = np.arange(33, dtype=np.float32).reshape(11, 3)
    array = group.create_array("x", shape=values.shape, dtype=values.dtype, dimension_names=("a", "b"), **options)
    array[...] = values
    whole = digest.of_zarr(tmp_path / "r.zarr")
    monkeypatch.setattr(digest, "BLOCK", 40)
    assert digest.of_zarr(tmp_path / "r.zarr") == whole
    assert whole["x"] == digest.of_arrays({"a/b": values})
