"""HDF5 datasets of all supported layouts, filters and dtypes are read as h5py reads them."""

from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oocgemm.errors import ExecutionError
from oocgemm.stores import hdf5_chunks, hdf5_filters
from oocgemm.stores.hdf5_filters import checked_content, fletcher32
from tests.support.hdf5_files import (
    BEFORE,
    COMPRESSORS,
    DTYPES,
    THROUGH_H5PY,
    opened,
    rewritten,
    stored,
    whole,
    write,
)
from tests.support.suite import examples, slow, thinned

_rng = np.random.default_rng(0)


def values(shape: tuple[int, ...], dtype: str, noise: bool = False) -> Any:
    """Return a matrix of small integers or, with `noise`, of random bytes, which do not compress."""
    if noise:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return np.nan_to_num(np.frombuffer(_rng.bytes(size), dtype).reshape(shape))
    return _rng.integers(-9, 9, shape).astype(dtype)


@pytest.fixture(autouse=True)
def _no_overflow() -> Any:
    with np.errstate(all="ignore"):
        yield


@settings(max_examples=examples(300, 15), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_block_is_what_h5py_reads(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    draw = data.draw
    shape = draw(st.integers(0, 40)), draw(st.sampled_from([1, 7, 33, 1500]))
    dtype = draw(st.sampled_from(DTYPES))
    options: dict[str, Any] = {"fillvalue": np.dtype(dtype).type(5) if draw(st.booleans()) else None}
    chunk = draw(st.sampled_from([None, (1, 1), (3, 5), (16, 16), (64, 700)]))
    if chunk is not None and shape[0] > 0:
        options["chunks"] = tuple(min(a, b) for a, b in zip(chunk, shape, strict=True))
        options |= BEFORE[draw(st.sampled_from(sorted(BEFORE)))]
        options |= COMPRESSORS[draw(st.sampled_from(sorted(COMPRESSORS)))]
        if draw(st.booleans()):
            options["maxshape"] = (None, None)
    path = tmp_path_factory.mktemp("hdf5") / "x.h5"
    content = values(shape, dtype, noise=draw(st.booleans()))
    with h5py.File(path, "w", userblock_size=draw(st.sampled_from([0, 512]))) as file:
        dataset = file.create_dataset("x", shape, dtype, **options)
        if draw(st.booleans()):
            dataset[...] = content
        elif shape[0] > 2:
            dataset[1 : shape[0] // 2] = content[1 : shape[0] // 2]  # the other chunks are not stored
        expected = dataset[...]
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(hdf5_chunks, "MIN_STRAIGHT", draw(st.sampled_from([1, 1 << 18])))
        patches.setattr(hdf5_chunks, "BATCH_BYTES", draw(st.sampled_from([64, 5000, 1 << 20])))
        patches.setattr(hdf5_filters, "UNSHUFFLE_BYTES", draw(st.sampled_from([64, 256 << 10])))
        matrix = opened(f"{path}::x")
        assert matrix.describe()["direct"]
        top, bottom = sorted(draw(st.integers(0, shape[0])) for _ in range(2))
        left, right = sorted(draw(st.integers(0, shape[1])) for _ in range(2))
        room = np.full((bottom - top, right - left + 2), 7, matrix.dtype)
        out = room[:, 1:-1] if draw(st.booleans()) else np.ascontiguousarray(room[:, 1:-1])
        matrix.read((top, bottom), (left, right), out)
        np.testing.assert_array_equal(out, expected[top:bottom, left:right])
        assert (room[:, [0, -1]] == 7).all()


@pytest.mark.parametrize("dtype", thinned(DTYPES, ("<f4", ">c16")))
@pytest.mark.parametrize("before", thinned(BEFORE, ("shuffle", "both")))
@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_every_combination_of_filters_is_decoded(
    tmp_path: Path, compressor: str, before: str, dtype: str
) -> None:
    """The chunks hold runs of equal elements, small integers, and noise."""
    content = values((90, 70), dtype)
    content[:32] = 3
    content[64:] = values((26, 70), dtype, noise=True)
    options = {"chunks": (32, 31), **COMPRESSORS[compressor], **BEFORE[before]}
    matrix = opened(write(tmp_path / "x.h5", content, **options))
    assert matrix.describe()["direct"]
    np.testing.assert_array_equal(whole(matrix), content)


@pytest.mark.parametrize("size", [512, *slow((1 << 18,))])
@pytest.mark.parametrize("compressor", ["bitshuffle-lz4", "bitshuffle-zstd", "lz4", "lz4, small blocks"])
def test_blocks_that_compression_does_not_make_smaller(tmp_path: Path, compressor: str, size: int) -> None:
    """Some compressed blocks then have exactly the size of the block."""
    for noise in np.linspace(0, 1, 30):
        content = np.zeros((8, size // 8), "i1")
        content.ravel()[: int(noise * size)] = _rng.integers(-128, 128, int(noise * size))
        address = write(tmp_path / "x.h5", content, chunks=content.shape, **COMPRESSORS[compressor])
        np.testing.assert_array_equal(whole(opened(address)), content)


def test_a_block_of_its_own_size_is_decompressed() -> None:
    """Bitshuffle compresses every block. In a blosc frame, a block of its decoded size is not compressed."""
    import numcodecs.lz4

    size = 512
    for zeros in range(size):
        block = bytes(zeros) + _rng.bytes(size - zeros)
        packed = numcodecs.lz4.compress(block)[4:]
        if len(packed) == size:
            break
    else:
        pytest.fail("no block compresses to its own size")
    data = size.to_bytes(8, "big") + size.to_bytes(4, "big") + len(packed).to_bytes(4, "big") + packed
    out, memory = np.empty(size, np.uint8), np.empty(hdf5_filters.scratch_bytes(size, len(data)), np.uint8)
    hdf5_filters.decode_blocks(np.frombuffer(data, np.uint8), hdf5_filters.LZ4_BLOCKS, 1, out, memory)
    bits = np.unpackbits(np.frombuffer(block, np.uint8), bitorder="little").reshape(8, size)
    np.testing.assert_array_equal(out, np.packbits(bits.T, axis=1, bitorder="little").ravel())


@pytest.mark.parametrize("mask", [0, 1, 2, 3])
def test_filters_that_a_chunk_skips_are_not_undone(tmp_path: Path, mask: int) -> None:
    content = values((16, 16), "<f4")
    options: dict[str, Any] = {"chunks": (16, 16), "compression": "gzip", "shuffle": True}
    address = write(tmp_path / "x.h5", content, **options)
    plain = content.tobytes()
    import zlib

    shuffled = np.frombuffer(plain, np.uint8).reshape(-1, 4).T.tobytes()
    data = plain if mask & 1 else shuffled
    rewritten(tmp_path / "x.h5", (0, 0), data if mask & 2 else zlib.compress(data), mask)
    np.testing.assert_array_equal(whole(opened(address)), content)


@pytest.mark.parametrize("filters", THROUGH_H5PY)
def test_other_filters_are_undone_by_h5py_with_a_warning(tmp_path: Path, filters: str) -> None:
    content = values((40, 50), "<f4")
    address = write(tmp_path / "x.h5", content, chunks=(16, 16), **THROUGH_H5PY[filters])
    with pytest.warns(UserWarning, match="is read by h5py, in one thread at a time, since oocgemm does not"):
        matrix = opened(address)
    assert matrix.describe() | {"direct": False, "through": "h5py"} == matrix.describe()
    np.testing.assert_array_equal(whole(matrix), content)


def test_elements_in_the_metadata_are_read_by_h5py(tmp_path: Path) -> None:
    content = values((9, 8), "<f4")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_layout(h5py.h5d.COMPACT)
        space = h5py.h5s.create_simple(content.shape)
        made = h5py.h5d.create(file.id, b"x", h5py.h5t.IEEE_F32LE, space, dcpl=plist)
        made.write(h5py.h5s.ALL, h5py.h5s.ALL, content)
    with pytest.warns(UserWarning, match="its elements are stored inside the metadata"):
        matrix = opened(f"{tmp_path}/x.h5::/x")
    np.testing.assert_array_equal(whole(matrix), content)


def _undefined_fill(plist: Any) -> None:
    """Set no fill value, as `H5Pset_fill_value` with NULL does, which h5py does not offer."""
    import ctypes

    library = next(
        line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libhdf5-" in line
    )
    call = ctypes.CDLL(library).H5Pset_fill_value
    call.argtypes = ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p
    assert call(plist.id, h5py.h5t.IEEE_F32LE.id, None) >= 0


def _compound(first: bytes, second: bytes, size: int) -> Any:
    kind = h5py.h5t.create(h5py.h5t.COMPOUND, size)
    kind.insert(first, 0, h5py.h5t.IEEE_F32LE)
    kind.insert(second, size - 4, h5py.h5t.IEEE_F32LE)
    return kind


def _brain_float() -> Any:
    kind = h5py.h5t.IEEE_F32LE.copy()
    kind.set_fields(31, 23, 8, 0, 23)
    kind.set_precision(32)
    kind.set_offset(0)
    kind.set_ebias(120)
    return kind


@pytest.mark.parametrize("kind", [_compound(b"r", b"i", 12), _brain_float()], ids=["padded", "float"])
def test_elements_that_numpy_does_not_know_are_converted_by_h5py(tmp_path: Path, kind: Any) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        space = h5py.h5s.create_simple((6, 5))
        h5py.h5d.create(file.id, b"x", kind, space)
        file["x"][...] = content = values((6, 5), "c8" if kind.get_class() == h5py.h5t.COMPOUND else "f4")
        expected = file["x"][...]
    assert np.array_equal(expected, content)
    with pytest.warns(UserWarning, match="stored in a format that NumPy does not have"):
        matrix = opened(f"{tmp_path}/x.h5::/x")
    np.testing.assert_array_equal(whole(matrix), content)


def test_chunks_anywhere_in_the_file_are_read(tmp_path: Path) -> None:
    """Write the chunks in a random order, so that neighbours in a row are not adjacent in the file."""
    content = values((64, 96), "<f8")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        dataset = file.create_dataset("x", content.shape, "<f8", chunks=(8, 12), **hdf5plugin.Zstd())
        for number in _rng.permutation(64):
            i, j = divmod(int(number), 8)
            part = np.s_[i * 8 : i * 8 + 8, j * 12 : j * 12 + 12]
            dataset[part] = content[part]
    matrix = opened(f"{tmp_path}/x.h5::/x")
    np.testing.assert_array_equal(whole(matrix), content)
    for left in range(0, 84, 5):  # as wide as a chunk, but of two chunks
        out = np.empty((8, 12))
        matrix.read((8, 16), (left, left + 12), out)
        np.testing.assert_array_equal(out, content[8:16, left : left + 12])


@pytest.mark.parametrize("chunks", [(4, 4), None])
@pytest.mark.parametrize("written", [True, False])
def test_elements_that_were_never_written_have_no_value_without_a_fill_value(
    tmp_path: Path, chunks: tuple[int, int] | None, written: bool
) -> None:
    with h5py.File(tmp_path / "x.h5", "w", userblock_size=512) as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        if chunks:
            plist.set_chunk(chunks)
        plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        _undefined_fill(plist)
        h5py.h5d.create(file.id, b"x", h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple((8, 8)), dcpl=plist)
        if written:
            file["x"][:4, :4] = 1
    matrix, out = opened(f"{tmp_path}/x.h5::/x"), np.empty((4, 4), "f4")
    if written:
        matrix.read((0, 4), (0, 4), out)
        assert out.sum() == 16
    if chunks or not written:
        with pytest.raises(ExecutionError, match="was never written"):
            matrix.read((4, 8), (0, 4), out)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 131, 70_000, 200_001])
def test_checksums_are_those_of_hdf5(tmp_path: Path, size: int) -> None:
    """Compare with a plain sum, word by word, and with chunks that HDF5 has written."""
    content = np.frombuffer(_rng.bytes(size), np.uint8)
    low = high = 0
    padded = content.tobytes() + bytes(size % 2)
    for at in range(0, len(padded), 2):
        low = (low + padded[at] * 256 + padded[at + 1]) % 65535
        high = (high + low) % 65535
    assert fletcher32(content) == (low, high)
    if size:
        address = write(tmp_path / "x.h5", content.view("i1")[None], chunks=(1, size), fletcher32=True)
        chunk = np.frombuffer(stored(tmp_path / "x.h5"), np.uint8)
        assert len(checked_content(chunk)) == size
        np.testing.assert_array_equal(whole(opened(address)), content.view("i1")[None])


@pytest.mark.parametrize("name", ["_FillValue", "missing_value"])
@pytest.mark.parametrize("chunks", [None, (4, 4)])
def test_missing_elements_of_netcdf_are_an_error_that_names_the_first(
    tmp_path: Path, name: str, chunks: tuple[int, int] | None
) -> None:
    content = values((12, 10), "<f4")
    address = write(tmp_path / "x.nc", content, chunks=chunks)
    with h5py.File(tmp_path / "x.nc", "r+") as file:
        file["x"].attrs[name] = np.float32(-999)
    np.testing.assert_array_equal(whole(opened(address)), content)
    with h5py.File(tmp_path / "x.nc", "r+") as file:
        file["x"][7, 3] = -999
    out = np.empty((6, 10), "f4")
    with pytest.raises(ExecutionError, match=r"the element at \[7, 3\] of .*x is -999.0, which stands for a"):
        opened(address).read((6, 12), (0, 10), out)
    opened(address).read((0, 6), (0, 10), out)


def test_nan_may_stand_for_missing_elements(tmp_path: Path) -> None:
    """xarray writes this attribute for every variable. NaN propagates through a product anyway."""
    content = values((6, 7), "<f8")
    content[2, 3] = np.nan
    address = write(tmp_path / "x.nc", content)
    with h5py.File(tmp_path / "x.nc", "r+") as file:
        file["x"].attrs["_FillValue"] = np.nan
        file["x"].attrs["scale_factor"], file["x"].attrs["add_offset"] = 1.0, 0.0
    np.testing.assert_array_equal(whole(opened(address)), content)


def test_netcdf_s_default_fill_value_is_a_missing_element(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.nc", "w") as file:
        file.attrs["_NCProperties"] = b"version=2,netcdf=4.9.2,hdf5=1.14.2"
        file.create_dataset("x", (4, 4), "f4", chunks=(2, 2), fillvalue=9.969209968386869e36)[:2] = 1
    with pytest.raises(ExecutionError, match=r"the element at \[2, 0\]"):
        whole(opened(f"{tmp_path}/x.nc::x"))


def test_many_chunks_are_indexed_compactly(tmp_path: Path) -> None:
    address = write(tmp_path / "x.h5", np.ones((400, 400), "f4"), chunks=(4, 4))
    matrix: Any = opened(address)
    index = matrix._reader.index
    assert index.offsets.size == 10_000
    assert index.offsets.nbytes + index.sizes.nbytes + index.masks.nbytes == 200_000
    assert matrix.layout.read_chunk == (4, 4)
