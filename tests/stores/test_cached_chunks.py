"""Compiled code reads blocks of uncompressed chunks from the page cache. Python reads everything else."""

import os
import resource
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import h5py
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from oocgemm.errors import ExecutionError
from oocgemm.stores import Array, open_matrix
from oocgemm.stores.files import CachedChunks, OpenFile, chunk_files
from oocgemm.stores.npy import open_npy
from oocgemm.stores.zarr_matrix import ZarrMatrix
from oocgemm.system.installed import compiled
from tests.support.problems import integers
from tests.support.suite import examples

pytestmark = pytest.mark.skipif(compiled() is None, reason="the C sources are not compiled")
rng = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oocgemm.stores.files.MAPPING_CORES", 0)


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """For each block that compiled code has read: how many chunks it left to Python; None for all."""
    found, right = list[int | None](), CachedChunks.read

    def read(*given: Any) -> list[int] | None:
        left = right(*given)
        found.append(None if left is None else len(left))
        return left

    monkeypatch.setattr(CachedChunks, "read", read)
    return found


@st.composite
def blocks(draw: st.DrawFn) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int], tuple[int, int], str]:
    """Return the shapes of a matrix and of its chunks, the rows and columns of a block, and the dtype."""
    dtype = draw(st.sampled_from(["i1", "f4", "c16"]))
    high, wide = draw(st.integers(1, 40)), draw(st.sampled_from([1, 3, 50, 2000, 9000]) | st.integers(1, 700))
    shape = draw(st.integers(1, 3 * high)), draw(st.integers(1, 3 * wide))
    r0, c0 = (draw(st.integers(0, extent - 1)) for extent in shape)
    r1, c1 = draw(st.integers(r0 + 1, shape[0])), draw(st.integers(c0 + 1, shape[1]))
    return shape, (high, wide), (r0, r1), (c0, c1), dtype


def around(rows: tuple[int, int], cols: tuple[int, int], dtype: Any) -> tuple[Array, Array]:
    """Return the memory for a block, and an array that it is the middle of."""
    whole = np.full((rows[1] - rows[0] + 2, cols[1] - cols[0] + 2), 77, dtype)
    return whole[1:-1, 1:-1], whole


def is_right(whole: Array, expected: Array) -> bool:
    """Return whether the middle of an array is as expected, and its border was not written to."""
    middle = whole[1:-1, 1:-1].copy()
    whole[1:-1, 1:-1] = 77
    return bool((middle == expected).all() and (whole == 77).all())


@settings(max_examples=examples(150, quick=15), deadline=None)
@given(blocks(), st.integers(0, 8), st.sampled_from("/."), st.sampled_from([0, 1000]))
def test_any_block_of_chunk_files_is_read_but_for_missing_ones(
    tmp_path_factory: pytest.TempPathFactory, given: Any, missing: int, separator: str, few: int
) -> None:
    shape, (high, wide), rows, cols, dtype = given
    down, across = -(-shape[0] // high), -(-shape[1] // wide)
    values = rng.integers(-9, 9, (down * high, across * wide)).astype(dtype)
    root = tmp_path_factory.mktemp("chunks")
    for i in range(down):
        (root / f"c/{i}").mkdir(parents=True)
        for j in range(across):
            path = root / f"c/{i}{separator}{j}"
            if i * across + j != missing:
                path.write_bytes(values[i * high : (i + 1) * high, j * wide : (j + 1) * wide].tobytes())
    with patch("oocgemm.stores.files.MAPPING_CORES", few):
        chunks = chunk_files(root, lambda at: f"c/{at[0]}{separator}{at[1]}", (high, wide), values.itemsize)
    assert chunks is not None
    out, whole = around(rows, cols, dtype)
    expected, lacking = values[slice(*rows), slice(*cols)].copy(), []
    numbers = [(i, j) for i in range(rows[0] // high, -(-rows[1] // high)) for j in _columns(cols, wide)]
    for number, (i, j) in enumerate(numbers):
        if i * across + j == missing:
            lacking.append(number)
            top, left = max(rows[0], i * high) - rows[0], max(cols[0], j * wide) - cols[0]
            bottom, right = (i + 1) * high - rows[0], (j + 1) * wide - cols[0]
            expected[top:bottom, left:right] = 77
    assert chunks.read(rows, cols, out) == lacking
    assert is_right(whole, expected)


def _columns(cols: tuple[int, int], wide: int) -> range:
    return range(cols[0] // wide, -(-cols[1] // wide))


@settings(max_examples=examples(100, quick=10), deadline=None)
@given(blocks(), st.integers(0, 9), st.integers(0, 8))
def test_any_block_of_chunks_in_one_file_is_read_but_for_missing_ones(
    tmp_path_factory: pytest.TempPathFactory, given: Any, head: int, missing: int
) -> None:
    shape, (high, wide), rows, cols, dtype = given
    down, across = -(-shape[0] // high), -(-shape[1] // wide)
    values = rng.integers(-9, 9, (down * high, across * wide)).astype(dtype)
    size, order = high * wide * values.itemsize, rng.permutation(down * across).reshape(down, across)
    stored = bytearray(head + down * across * size)
    for i, j in np.ndindex(down, across):
        at = head + int(order[i, j]) * size
        part = values[i * high : (i + 1) * high, j * wide : (j + 1) * wide]
        stored[at : at + size] = part.tobytes()
    path = tmp_path_factory.mktemp("file") / "é file"
    path.write_bytes(stored)
    offsets = head + order * size
    chunks = CachedChunks(path, None, (high, wide), values.itemsize, len(stored), offsets=offsets)
    out, whole = around(rows, cols, dtype)
    assert chunks.read(rows, cols, out) == []
    assert is_right(whole, values[slice(*rows), slice(*cols)])
    offsets.flat[missing % offsets.size] = -1
    count = len(range(rows[0] // high, -(-rows[1] // high))) * len(_columns(cols, wide))
    chunks = CachedChunks(path, None, (high, wide), values.itemsize, len(stored), offsets=offsets)
    assert len(chunks.read(rows, cols, out) or ()) <= 1
    chunks = CachedChunks(path, None, (high, wide), values.itemsize, len(stored) + 1, offsets=offsets)
    assert chunks.read(rows, cols, out) == list(range(count))  # the file is too short


def test_other_names_of_chunk_files_are_left_to_python() -> None:
    names: list[Callable[[tuple[int, int]], str]] = [
        *(lambda at: f"{at[0]}.{at[1]}.x", lambda at: f"{at[1]}/{at[0]}", lambda at: f"{at[0]:04}.{at[1]}")
    ]
    for name in names:
        assert chunk_files(Path("/"), name, (2, 2), 8) is None


def stored(folder: Path, values: Array, **options: Any) -> ZarrMatrix:
    given: dict[str, Any] = {"chunks": (40, 64), "compressors": None, "fill_value": 3} | options
    array = zarr.create_array(folder / "A.zarr", data=values, **given)
    return ZarrMatrix("A", array, unchanging=True)


def read(matrix: Any) -> Array:
    out = np.full(matrix.shape, -1.0)
    matrix.read((0, matrix.shape[0]), (0, matrix.shape[1]), out)
    return out


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("plain", {}), ("format 2", {"zarr_format": 2})),
        *(("compressed", {"compressors": "auto"}), ("shards", {"chunks": (20, 32), "shards": (80, 64)})),
        *(("big-endian", {"zarr_format": 2}), ("by columns", {"zarr_format": 2, "order": "F"})),
    ],
)
def test_only_the_plain_case_is_read_by_compiled_code(
    tmp_path: Path, unread: list[int | None], name: str, options: dict[str, Any]
) -> None:
    values = integers(rng, (230, 310), "float64")
    values[40:80, 64:128] = 3  # zarr does not store this chunk, and the part of a shard
    stored_values = values.astype(">f8") if name == "big-endian" else values
    np.testing.assert_array_equal(read(stored(tmp_path, stored_values, **options)), values)
    assert unread == ([1] if name in ("plain", "format 2") else [])


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: os.truncate(path, 100), "c/5/4 in .* has 100 bytes instead of 20480: it is damaged"),
        (lambda path: os.truncate(path, 20481), "c/5/4 in .* has 20481 bytes instead of 20480"),
        (os.unlink, "c/5/4 is missing in .* files were added or removed"),
    ],
    ids=["truncated", "too long", "deleted"],
)
def test_errors_are_those_of_python(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], None],
    message: str,
    library: bool,
) -> None:
    if not library:
        monkeypatch.setattr("oocgemm.stores.files.compiled", lambda: None)
    matrix = stored(tmp_path, integers(rng, (230, 310), "float64"))
    change(tmp_path / "A.zarr" / "c" / "5" / "4")
    before = descriptors()
    with pytest.raises(ExecutionError, match=message):
        read(matrix)
    assert descriptors() == before


def descriptors() -> list[str]:
    """Return what the open file descriptors of the process are for."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            found.append(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
    return sorted(found)


def test_more_files_are_read_than_a_process_may_open(tmp_path: Path, unread: list[int | None]) -> None:
    values = integers(rng, (400, 400), "float64")
    matrix = stored(tmp_path, values, chunks=(10, 10))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = max(int(entry.split()[0]) for entry in descriptors()) + 8
    resource.setrlimit(resource.RLIMIT_NOFILE, (room, limits[1]))
    try:
        np.testing.assert_array_equal(read(matrix), values)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert unread == [0]


@pytest.mark.parametrize("kind", ["zarr", "npy"])
def test_what_the_page_cache_does_not_contain_is_left_to_python(
    tmp_path: Path, unread: list[int | None], kind: str
) -> None:
    values = integers(rng, (230, 310), "float64")
    if kind == "zarr":
        matrix: Any = stored(tmp_path, values)
        paths = [path for path in (tmp_path / "A.zarr" / "c").rglob("*") if path.is_file()]
    else:
        np.save(tmp_path / "A.npy", values)
        matrix, paths = open_npy("A", tmp_path / "A.npy"), [tmp_path / "A.npy"]
    with open(paths[-1], "rb") as file:
        try:
            os.preadv(file.fileno(), [bytearray(8)], 0, os.RWF_NOWAIT)
        except OSError:
            pytest.skip("this file system cannot say what is in the page cache")
    for _ in range(5):  # an attempt starts readahead, which may end before the attempt on a busy machine
        unread.clear()
        for path in paths[:7]:
            with OpenFile(path) as opened:
                os.fsync(opened.descriptor)
                os.posix_fadvise(opened.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                if opened.cached([0]):
                    pytest.skip("this file system does not evict pages on demand")
        for _ in range(2):  # the first time, Python loads it into the page cache
            np.testing.assert_array_equal(read(matrix), values)
        if unread[0] == min(7, len(paths)):
            break
    assert unread == [min(7, len(paths)), 0]


@pytest.mark.parametrize("kind", ["zarr", "npy"])
def test_an_array_outside_of_the_page_cache_is_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unread: list[int | None], kind: str
) -> None:
    """An attempt would start readahead."""
    monkeypatch.setattr("oocgemm.stores.files.OpenFile.cached", lambda self, offsets: False)
    values = integers(rng, (230, 310), "float64")
    np.save(tmp_path / "A.npy", values)
    matrix: Any = open_npy("A", tmp_path / "A.npy") if kind == "npy" else stored(tmp_path, values)
    np.testing.assert_array_equal(read(matrix), values)
    assert unread == []


@pytest.mark.parametrize("order", "CF")
@pytest.mark.parametrize("width", [1, 300, 1200])
def test_any_block_of_a_npy_file_is_read(
    tmp_path: Path, unread: list[int | None], order: str, width: int
) -> None:
    values = integers(rng, (90, width), "float64")
    np.save(tmp_path / "A.npy", np.asarray(values, order=order))  # type: ignore[call-overload]
    matrix = open_npy("A", tmp_path / "A.npy")
    for _ in range(30):
        (r0, r1), (c0, c1) = (sorted(rng.choice(extent + 1, 2, replace=False)) for extent in values.shape)
        out, whole = around((r0, r1), (c0, c1), "f8")
        matrix.read((r0, r1), (c0, c1), out)
        assert is_right(whole, values[r0:r1, c0:c1])
    by_rows = order == "C" or width == 1  # NumPy stores a single column by rows
    assert set(unread) == ({0} if by_rows else {None})


def test_a_truncated_npy_file_is_an_error_even_if_the_block_is_there(tmp_path: Path) -> None:
    np.save(tmp_path / "A.npy", np.zeros((50, 60)))
    matrix = open_npy("A", tmp_path / "A.npy")
    os.truncate(tmp_path / "A.npy", 20000)
    with pytest.raises(EOFError, match="truncated from 24128 bytes to 20000"):
        matrix.read((0, 2), (0, 60), np.zeros((2, 60)))


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize(
    ("kind", "options"),
    [("raw", {}), ("compressed", {"compression": "gzip"}), ("big-endian", {"dtype": ">f8"})],
)
def test_any_block_of_an_hdf5_dataset_is_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    unread: list[int | None],
    kind: str,
    options: dict[str, Any],
    library: bool,
) -> None:
    if not library:
        monkeypatch.setattr("oocgemm.stores.files.compiled", lambda: None)
    values = integers(rng, (90, 130), "float64")
    values[20:40, 30:60] = 3
    with h5py.File(tmp_path / "X.h5", "w") as file:
        dataset = file.create_dataset(
            "x", values.shape, chunks=(20, 30), fillvalue=3, **({"dtype": "f8"} | options)
        )
        for i, j in rng.permutation(list(np.ndindex(5, 5))).tolist():
            block = np.s_[20 * i : 20 * i + 20, 30 * j : 30 * j + 30]
            if (i, j) != (1, 1):  # HDF5 does not store this chunk
                dataset[block] = values[block]
    matrix = open_matrix("X", f"{tmp_path}/X.h5::/x")
    for _ in range(30):
        (r0, r1), (c0, c1) = (sorted(rng.choice(extent + 1, 2, replace=False)) for extent in values.shape)
        out, whole = around((r0, r1), (c0, c1), "f8")
        matrix.read((r0, r1), (c0, c1), out)
        assert is_right(whole, values[r0:r1, c0:c1])
    assert set(unread) == ({0, 1} if library and kind == "raw" else {None} if kind == "raw" else set())
