"""The embedding store: one Zarr array per kind of embedding, one row per prompt, opens in xarray with named dimensions.

    embeddings.zarr/    attrs: schema, family, encoder, prompts, text_limit, truncated, truncated_count, complete
      id                [prompt]                    row ids of the prompt table
      <name>            [prompt, …]  float32        FLUX: prompt_embeds [prompt, token, channel],
                                                    pooled_prompt_embeds [prompt, channel]
      unconditional_<name>  [once, …]     float32   what stands for no prompt; only with classifier-free guidance

A chunk is one prompt, so a round reads only its own; a file (shard) holds many, so DVC sees few files. `complete` is
written last: a missing shard reads as zeros in Zarr.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stages.core.errors import GranularError

SCHEMA = 1
NAME = "embeddings.zarr"
SHARD_PROMPTS = 256
# A shard is built in memory: FLUX.1-dev's 8 MiB a prompt would make 2 GiB of 256 prompts.
SHARD_BYTES = 256 * 2**20
ONCE = "once"
_DIMENSIONS = {1: (), 2: ("channel",), 3: ("token", "channel")}


def write_embeddings(
    folder: Path,
    ids: Sequence[int],
    batches: Iterable[Mapping[str, np.ndarray]],
    attrs: Mapping[str, Any],
    once: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Write `folder/embeddings.zarr` from batches of consecutive rows (name -> [rows, …]), one per entry of `ids`.

    once: arrays [1, …] that belong to all prompts.
    """
    import zarr

    root = zarr.create_group(str(folder / NAME), zarr_format=3, attributes={"schema": SCHEMA, "complete": False})
    root.create_array("id", data=np.asarray(ids, np.int64), dimension_names=("prompt",))
    for name, array in (once or {}).items():
        dimensions = (ONCE, *_DIMENSIONS[array.ndim])
        root.create_array(name, data=array.astype(np.float32), dimension_names=dimensions)
    writers: dict[str, _Writer] = {}
    for batch in batches:
        for name, rows in batch.items():
            if name not in writers:
                writers[name] = _Writer(root, name, len(ids), rows)
            writers[name].add(rows)
    for writer in writers.values():
        writer.finish()
    root.attrs.update({**attrs, "complete": True})


class _Writer:
    """One array, written a whole shard at a time (filling a shard bit by bit would rewrite it each time)."""

    def __init__(self, root: Any, name: str, count: int, rows: np.ndarray) -> None:
        self.size = min(SHARD_PROMPTS, count, max(1, SHARD_BYTES // (rows[0].size * 4)))
        self.waiting: list[np.ndarray] = []
        self.written = 0
        self.array = root.create_array(
            name,
            shape=(count, *rows.shape[1:]),
            dtype=np.float32,
            chunks=(1, *rows.shape[1:]),
            shards=(self.size, *rows.shape[1:]),
            dimension_names=("prompt", *_DIMENSIONS[rows.ndim]),
        )

    def add(self, rows: np.ndarray) -> None:
        self.waiting.extend(rows)
        while len(self.waiting) >= self.size:
            self._write(self.size)

    def finish(self) -> None:
        if self.waiting:
            self._write(len(self.waiting))
        if self.written != self.array.shape[0]:
            raise ValueError(f"{self.array.name}: {self.written} rows for {self.array.shape[0]} prompts")

    def _write(self, count: int) -> None:
        self.array[self.written : self.written + count] = np.stack(self.waiting[:count]).astype(np.float32)
        self.written += count
        del self.waiting[:count]


def open_embeddings(folder: Path) -> Any:
    """The Zarr group of a finished embed stage, read-only.

    Raises:
        GranularError: no store there, another schema, or one that was never finished.
    """
    import zarr

    path = Path(folder) / NAME
    if not path.is_dir():
        raise GranularError(f"{path}: no embeddings there; run the embed stage first.")
    root = zarr.open_group(str(path), mode="r")
    if root.attrs.get("schema") != SCHEMA:
        raise GranularError(f"{path}: embedding schema {root.attrs.get('schema')}, this version reads {SCHEMA}.")
    if not root.attrs.get("complete"):
        raise GranularError(f"{path}: the embed stage never finished; run it again.")
    return root


def read_embeddings(folder: Path, ids: Sequence[int]) -> dict[str, np.ndarray]:
    """Embeddings of some prompts, in the order asked for (repeats allowed): name -> float32 [len(ids), …].

    What belongs to all prompts is [1, …].
    """
    root = open_embeddings(folder)
    position = {int(row): place for place, row in enumerate(root["id"][...])}
    absent = [int(row) for row in ids if int(row) not in position]
    if absent:
        raise GranularError(
            f"{folder / NAME}: no embedding of prompt {absent[0]} ({len(absent)} of {len(ids)} are missing); the "
            "prompts changed, run the embed stage again."
        )
    # Each chunk is read once, however often its prompt is asked for.
    distinct, inverse = np.unique([position[int(row)] for row in ids], return_inverse=True)
    return {
        name: array[...] if array.metadata.dimension_names[0] == ONCE else _rows(array, distinct)[inverse]
        for name, array in sorted(root.arrays())
        if name != "id"
    }


def _rows(array: Any, rows: np.ndarray) -> np.ndarray:
    return array.get_orthogonal_selection((rows,))
