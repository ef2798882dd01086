"""Arrays written by hand are what the Zarr library reads."""

from pathlib import Path

import numpy as np
import pytest
import zarr

from stages.core.zarr_files import write_array, write_group


@pytest.mark.parametrize("dtype", ["bool", "int16", "int32", "int64", "float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(5,), (0,), (2, 3, 4), (0, 3, 4)])
@pytest.mark.parametrize("compress", [True, False])
def test_it_reads_back(tmp_path: Path, dtype: str, shape: tuple[int, ...], compress: bool) -> None:
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    write_group(tmp_path / "g", {"complete": False})
    write_array(tmp_path / "g" / "x", array, ("a", "b", "c")[: len(shape)], compress=compress)
    write_group(tmp_path / "g", {"complete": True})
    group = zarr.open_group(str(tmp_path / "g"), mode="r")
    assert dict(group.attrs) == {"complete": True}
    assert group["x"].metadata.dimension_names == ("a", "b", "c")[: len(shape)]
    assert group["x"].dtype == array.dtype
    assert np.array_equal(group["x"][...], array)


def test_memory_layout_does_not_count(tmp_path: Path) -> None:
    array = np.asfortranarray(np.arange(6, dtype=">f4").reshape(2, 3))
    write_group(tmp_path, {})
    write_array(tmp_path / "x", array, ("a", "b"), compress=False)
    assert np.array_equal(zarr.open_array(str(tmp_path / "x"), mode="r")[...], array)
