"""Small Zarr arrays written as the files they are: one JSON and one chunk each.

A round has dozens of arrays of a few kilobytes, and the library takes milliseconds for each whatever its size. The
format is open (Zarr v3: https://zarr-specs.readthedocs.io/en/latest/v3/core/), and reading is left to the library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from stages.core.publish import write_text


def write_group(folder: Path, attributes: Mapping[str, Any]) -> None:
    """A group, or an existing one with new attributes."""
    write_text(folder / "zarr.json", _json(node_type="group", attributes=dict(attributes)))


def write_array(folder: Path, array: np.ndarray, dimensions: Sequence[str], *, compress: bool) -> None:
    """A new array of numbers in a single chunk, compressed by zstd or not at all."""
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    bytes_codec: dict[str, Any] = {"name": "bytes"}
    if array.itemsize > 1:
        bytes_codec["configuration"] = {"endian": "little"}
    zstd = {"name": "zstd", "configuration": {"level": 0, "checksum": False}}
    described = _json(
        node_type="array",
        shape=array.shape,
        data_type=array.dtype.name,
        chunk_grid={"name": "regular", "configuration": {"chunk_shape": [max(n, 1) for n in array.shape]}},
        chunk_key_encoding={"name": "default", "configuration": {"separator": "/"}},
        fill_value=array.dtype.type(0).item(),
        codecs=[bytes_codec, zstd] if compress else [bytes_codec],
        attributes={},
        dimension_names=list(dimensions),
    )
    folder.mkdir()
    (folder / "zarr.json").write_text(described, encoding="utf-8")
    if array.size:
        chunk = folder.joinpath("c", *["0"] * array.ndim)
        chunk.parent.mkdir(parents=True)
        chunk.write_bytes(pa.compress(array, codec="zstd", asbytes=True) if compress else array.data)


def _json(**values: Any) -> str:
    return json.dumps({"zarr_format": 3, **values}, indent=2) + "\n"
