"""A stored round reads back as it was sampled, whole or not at all, and opens in xarray with named dimensions."""

from dataclasses import fields

import numpy as np
import pandas as pd
import pytest
import zarr

from stages.core import digest
from stages.core.errors import GranularError
from stages.core.resident import Resident
from stages.rollout.store import create, read_rollout, write_round, write_shard
from tests.rollout.test_engine import forest, sample

DIMS = ("token", "channel")


def write(path, shards):
    create(path, {"spec": {}, "sigmas": [1.0, 0.5, 0.0], "latent_dims": DIMS, "shards": len(shards)})
    for number, shard in enumerate(shards):
        write_shard(path, number, shard, "float32", DIMS)
    return path


def test_a_round_reads_back_bit_for_bit(tmp_path):
    shard = sample(forest({"name": "g2rpo"}))
    back = read_rollout(write(tmp_path / "r.zarr", [shard]))
    for name in ("parent_x", "parent_v", "next_x", "leaf_x", "parent_nodes", "next_edges", "leaf_nodes"):
        assert np.array_equal(getattr(back, name), getattr(shard, name)), name


def test_ids_of_several_shards_are_global_over_the_round(tmp_path):
    whole = read_rollout(write(tmp_path / "whole.zarr", [sample(forest({"name": "g2rpo"}, prompts=(4, 4)))]))
    parts = [sample(forest({"name": "g2rpo"}, prompts=(4,)))] * 2
    split = read_rollout(write(tmp_path / "split.zarr", parts))
    assert split.edges.equals(whole.edges)
    assert split.leaves.equals(whole.leaves)
    assert np.array_equal(split.parent_nodes, whole.parent_nodes)
    assert np.array_equal(split.next_edges, whole.next_edges)


def test_an_unfinished_shard_is_refused(tmp_path):
    path = write(tmp_path / "r.zarr", [sample(forest({"name": "g2rpo"}))])
    zarr.open_group(str(path / "shard-0000"), mode="r+").attrs["complete"] = False
    with pytest.raises(GranularError, match="shard-0000 was never finished"):
        read_rollout(path)


def test_a_missing_shard_is_refused(tmp_path):
    shard = sample(forest({"name": "g2rpo"}))
    path = tmp_path / "r.zarr"
    create(path, {"spec": {}, "sigmas": [1.0, 0.0], "latent_dims": DIMS, "shards": 2})
    write_shard(path, 0, shard, "float32", DIMS)
    with pytest.raises(GranularError, match="1 of 2 shards"):
        read_rollout(path)


def test_it_opens_in_xarray_with_named_dimensions(tmp_path):
    xarray = pytest.importorskip("xarray")
    path = write(tmp_path / "r.zarr", [sample(forest({"name": "g2rpo"}))])
    opened = xarray.open_zarr(path, group="shard-0000", consolidated=False)
    assert opened["leaf_x"].dims == ("image", "token", "channel")
    assert opened["edges_std"].dims == ("edge",)


def test_latents_evicted_while_they_are_read_are_an_error_and_not_zeros(tmp_path, monkeypatch):
    path = write(tmp_path / "r.zarr", [sample(forest({"name": "g2rpo"}))])
    read = zarr.Array.__getitem__

    def evicting(array, key):
        if (path / "shard-0000" / "leaf_x").exists():
            (path / "shard-0000" / "leaf_x").rename(tmp_path / "gone")
        return read(array, key)

    monkeypatch.setattr(zarr.Array, "__getitem__", evicting)
    with pytest.raises(GranularError, match="no longer holds leaf_x"):
        read_rollout(path)


@pytest.mark.parametrize("state_dtype", ["float32", "float16"])
def test_what_the_writer_says_of_a_round_is_what_a_reader_finds(tmp_path, state_dtype):
    path, shards = tmp_path / "rollouts.zarr", [sample(forest({"name": "g2rpo"}, prompts=(4,)))] * 2
    attrs = {"spec": {"round_": 1}, "sigmas": (1.0, 0.0), "latent_dims": DIMS, "shards": 2}
    said, digests = write_round(path, shards, attrs, state_dtype, DIMS)
    assert digests == digest.of_parts(tmp_path)
    back = read_rollout(path)
    for field in fields(back):
        one, two = getattr(said, field.name), getattr(back, field.name)
        if isinstance(two, pd.DataFrame):
            pd.testing.assert_frame_equal(one, two, check_exact=True)
        elif isinstance(two, np.ndarray):
            assert one.dtype == two.dtype and np.array_equal(one, two), field.name
        else:
            assert one == two


def test_a_written_round_is_not_read_back_until_another_is_written(tmp_path):
    def write_to(folder):
        folder.mkdir()
        shards = [sample(forest({"name": "g2rpo"}))]
        return write_round(folder / "rollouts.zarr", shards, {"spec": {}, "shards": 1}, "float32", DIMS)[0]

    resident = Resident()
    mine, other = write_to(tmp_path / "a"), write_to(tmp_path / "b")
    resident.wrote(tmp_path / "a", mine)
    (tmp_path / "a").rename(tmp_path / "published")
    assert resident.rollout(tmp_path / "published") is mine
    assert resident.rollout(tmp_path / "b") is not mine
    assert resident.rollout(tmp_path / "b").edges.equals(other.edges)
