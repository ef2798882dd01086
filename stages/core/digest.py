"""Content digests: they cover names, dtypes, shapes and values, never file bytes or times.

Two files with the same content in another layout (a safetensors header in another order, a Parquet file written by
another version) have the same digest, so caches stay warm and comparisons mean something.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

BLOCK = 2**28  # bytes of a large array that are read at a time


def _hasher() -> Any:
    return hashlib.blake2b(digest_size=20)


def of_json(value: Any) -> str:
    """Digest of a JSON-like value; keys are sorted, dataclasses become mappings."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain)
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no canonical JSON form")


def of_arrays(arrays: Mapping[str, np.ndarray]) -> str:
    """Digest of named arrays, independent of the order of the mapping."""
    total = _hasher()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        total.update(f"{name}|{array.dtype.str}|{array.shape}|".encode())
        total.update(array.view(np.uint8).reshape(-1).data if array.size else b"")
    return total.hexdigest()


def of_tensors(tensors: Mapping[str, Any]) -> str:
    """Digest of named torch tensors (any dtype, any device)."""
    import torch

    total = _hasher()
    for name in sorted(tensors):
        tensor = tensors[name].detach().to("cpu").contiguous()
        total.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        if tensor.numel():
            total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def of_table(table: Any) -> str:
    """Digest of a pandas table: column names, dtypes and values in row order."""
    total = _hasher()
    for name in table.columns:
        column = table[name]
        if column.dtype.kind in "OUS" or not isinstance(column.dtype, np.dtype):
            plain = column.to_numpy(object)  # iterating over a column of strings is slow
            values = json.dumps([None if v is None or v != v else str(v) for v in plain]).encode()
            total.update(f"{name}|str|{len(column)}|".encode())
            total.update(values)
        else:
            array = np.ascontiguousarray(column.to_numpy())
            total.update(f"{name}|{array.dtype.str}|{array.shape}|".encode())
            total.update(array.view(np.uint8).data if array.size else b"")
    return total.hexdigest()


def of_file(path: Path) -> str:
    """Digest of a file by what it holds: tensors, a table, JSON, or plain bytes."""
    if path.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(path, framework="pt") as handle:
            return of_tensors({name: handle.get_tensor(name) for name in handle.keys()})  # noqa: SIM118
    if path.suffix == ".parquet":
        import pandas as pd

        return of_table(pd.read_parquet(path))
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return of_arrays(dict(arrays))
    if path.suffix == ".json":
        try:
            return of_json(json.loads(path.read_text(encoding="utf-8")))
        except ValueError:  # not JSON, or not UTF-8: whoever reads the file says so, here it is bytes
            pass
    total = _hasher()
    with path.open("rb") as handle:
        while block := handle.read(1 << 20):
            total.update(block)
    return total.hexdigest()


def of_zarr(path: Path) -> dict[str, str]:
    """Digests inside a Zarr store, by place: `<array>` covers dtype, dimension names and values, `<group>/zarr.json`
    the group's attributes. Chunking and compression do not count."""
    import zarr

    root = zarr.open_group(str(path), mode="r", use_consolidated=False)
    found = {"zarr.json": of_json(dict(root.attrs))}
    for name, member in root.members(max_depth=None):
        if isinstance(member, zarr.Group):
            found[f"{name}/zarr.json"] = of_json(dict(member.attrs))
        else:
            value = _of_member(member)
            found[name] = of_json([value, dict(member.attrs)]) if member.attrs else value
    return found


def _of_member(array: Any) -> str:
    """`of_arrays` of one Zarr array, named by its dimensions, with at most about `BLOCK` bytes of it in memory."""
    name = "/".join(str(label) for label in array.metadata.dimension_names or ())
    if array.nbytes <= BLOCK:
        return of_arrays({name: np.asarray(array[...])})
    # Whole chunks, so that none is read twice.
    chunk = (array.shards or array.chunks)[0]
    rows = chunk * max(1, BLOCK // (array.nbytes // array.shape[0] * chunk))
    total = _hasher()
    total.update(f"{name}|{array.dtype.str}|{array.shape}|".encode())
    for start in range(0, array.shape[0], rows):
        total.update(np.ascontiguousarray(array[start : start + rows]).view(np.uint8).reshape(-1).data)
    return total.hexdigest()


def of_parts(
    folder: Path, skip: frozenset[str] = frozenset({"log.json"}), known: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Digests of a folder's parts by relative place: a part is a file, or an array or group of a Zarr store.

    known: digests of parts that need not be read for it; a Zarr store is known as a whole or not at all.
    """
    known = known or {}
    found: dict[str, str] = {}
    for entry in sorted(folder.iterdir()):
        if entry.name in skip or entry.name == "__pycache__":
            continue
        if entry.is_dir():
            prefix = f"{entry.name}/"
            inside = {place.removeprefix(prefix): value for place, value in known.items() if place.startswith(prefix)}
            if not (entry / "zarr.json").is_file():
                inside = of_parts(entry, skip, inside)
            elif not inside:
                inside = of_zarr(entry)
            found.update({f"{prefix}{place}": value for place, value in inside.items()})
        else:
            found[entry.name] = known.get(entry.name) or of_file(entry)
    return found


def of_path(path: Path, skip: frozenset[str] = frozenset({"log.json"})) -> str:
    """Digest of a file or of a whole folder (relative names and contents; `skip` names files left out)."""
    return of_file(path) if path.is_file() else of_json(of_parts(path, skip))
