"""Valid data that this installation decodes slowly, or not at all, is not called damaged."""

from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest
import zarr

import oocgemm
from oocgemm.errors import InputError
from oocgemm.stores import open_matrix
from oocgemm.stores.hdf5_filters import pipeline
from tests.support.command import run
from tests.support.hdf5_files import DTYPES, opened, whole, write
from tests.support.suite import thinned

_rng = np.random.default_rng(3)
SMALL: dict[str, Any] = {
    **{f"lz4, {size}": dict(hdf5plugin.LZ4(nbytes=size)) for size in (1, 7, 16, 64, 127)},
    **{
        f"bitshuffle-{name}, {count}": dict(hdf5plugin.Bitshuffle(nelems=count, cname=name))
        for name in ("lz4", "zstd")
        for count in (8, 16, 64)
    },
}


@pytest.mark.parametrize("dtype", thinned(DTYPES, ("<f4",)))
@pytest.mark.parametrize("filters", SMALL)
def test_blocks_of_few_bytes_are_decoded(tmp_path: Path, filters: str, dtype: str) -> None:
    """The larger chunk has more blocks than any fixed scratch memory would have room for."""
    for shape, chunk in (((4, 4), (4, 4)), ((40, 70), (16, 31)), ((3, 5), (3, 5)), ((200, 300), (200, 300))):
        for content in (_rng.integers(-9, 9, shape).astype(dtype), np.zeros(shape, dtype)):
            matrix = opened(write(tmp_path / "x.h5", content, chunks=chunk, **SMALL[filters]))
            assert matrix.describe()["direct"]
            np.testing.assert_array_equal(whole(matrix), content)


def test_scratch_memory_grows_only_for_small_blocks() -> None:
    size, stored = 1 << 20, 1 << 19
    usual = [pipeline([(number, values, b"")], size) for number, values in ((32004, (0,)), (32004, (128,)))]
    small = pipeline([(32004, (4,), b"")], size)
    assert usual[0].scratch_bytes(stored) == usual[1].scratch_bytes(stored) < small.scratch_bytes(stored)
    assert small.scratch_bytes(stored) <= 2 * usual[0].scratch_bytes(stored)


@pytest.mark.parametrize("shuffle", [0, 1, 2])
def test_snappy_in_hdf5_is_decoded_by_h5py(tmp_path: Path, shuffle: int) -> None:
    content = _rng.integers(-9, 9, (40, 70)).astype("f4")
    filters = dict(hdf5plugin.Blosc(cname="snappy", shuffle=shuffle))
    address = write(tmp_path / "x.h5", content, chunks=(16, 31), **filters)
    with pytest.warns(UserWarning, match=r"oocgemm does not decode its filters \(blosc\): store it"):
        np.testing.assert_array_equal(whole(opened(address)), content)
    # The remedy.
    with h5py.File(tmp_path / "x.h5") as old, h5py.File(tmp_path / "y.h5", "w") as new:
        new.create_dataset("x", data=old["x"], chunks=(16, 31), **dict(hdf5plugin.Blosc(cname="lz4")))
    np.testing.assert_array_equal(whole(opened(f"{tmp_path}/y.h5::x")), content)


SNAPPY = {"cname": "snappy", "clevel": 5, "shuffle": "shuffle", "typesize": 8, "blocksize": 0}
BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
INNER = [BYTES, {"name": "blosc", "configuration": SNAPPY}]
SHARDED = [
    {
        "name": "sharding_indexed",
        "configuration": {"chunk_shape": [5, 5], "codecs": INNER, "index_codecs": [BYTES]},
    }
]


@pytest.mark.parametrize("kind", ["zarr", "zarr3", "sharded"])
def test_snappy_in_zarr_is_refused_with_a_remedy_that_works(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensorstore = pytest.importorskip("tensorstore")
    content = _rng.integers(-9, 9, (40, 50)).astype("f8")
    metadata: dict[str, Any] = {"shape": [40, 50], "dtype": "<f8", "chunks": [10, 20]}
    metadata["compressor"] = {"id": "blosc", "cname": "snappy", "clevel": 5, "shuffle": 1, "blocksize": 0}
    if kind != "zarr":
        grid = {"name": "regular", "configuration": {"chunk_shape": [10, 20]}}
        codecs = INNER if kind == "zarr3" else SHARDED
        metadata = {"shape": [40, 50], "data_type": "float64", "chunk_grid": grid, "codecs": codecs}
    place = tmp_path / "A.zarr"
    spec = {
        "driver": "zarr" if kind == "zarr" else "zarr3",
        "kvstore": {"driver": "file", "path": str(place)},
    }
    source = tensorstore.open(spec | {"metadata": metadata}, create=True).result()
    source[...] = content
    expected = r"A at .*A.zarr is compressed by blosc with snappy, which the installed numcodecs lacks: pass"
    monkeypatch.chdir(tmp_path)
    for operand in (str(place), zarr.open_array(place, mode="r")):
        with pytest.raises(InputError, match=expected):
            open_matrix("A", operand)
    np.save("B.npy", np.eye(50))
    done = run("A.zarr", "B.npy", "C.zarr")
    assert (done.code, "with snappy, which the installed numcodecs lacks" in done.err) == (2, True)
    # Both remedies.
    np.testing.assert_array_equal(oocgemm.matmul(source, np.eye(50)), content)
    zarr.create_array("D.zarr", data=source[...].read().result(), chunks=(10, 20))
    np.testing.assert_array_equal(oocgemm.matmul("D.zarr", np.eye(50)), content)
