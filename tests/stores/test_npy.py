""".npy files and raw chunks of which a run reads and writes only parts of rows.

The tests check the content and the resident set, also of memory maps.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import oocgemm
from oocgemm.errors import InputError
from oocgemm.planning.units import parse_size
from oocgemm.stores import Matrix, files, lines, npy, zarr_matrix
from oocgemm.stores.files import OpenFile
from oocgemm.stores.npy import create_npy, open_npy
from oocgemm.stores.zarr_matrix import ZarrMatrix
from tests.support.suite import examples

MIB = 1 << 20
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def draw_span(data: st.DataObject, extent: int) -> tuple[int, int]:
    one, other = data.draw(st.integers(0, extent)), data.draw(st.integers(0, extent))
    return min(one, other), max(one, other)


@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_block_is_read_and_written_as_numpy_does(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Vary the gaps between the parts, whether they are in the page cache, and how a block is copied."""
    draw = data.draw
    shape = draw(st.integers(0, 9)), draw(st.sampled_from([1, 5, 700, lines.MAX_LINE]))
    dtype = np.dtype(draw(st.sampled_from(["<f8", ">f8", "<f4", ">c16", "i1"])))
    values = np.random.default_rng(0).integers(-99, 99, shape).astype(dtype)
    if draw(st.booleans()):
        values = np.asfortranarray(values)
    if draw(st.booleans()):  # swap the axes, so that the first one is the longer
        values = values.T
    path = tmp_path_factory.mktemp("npy") / "X.npy"
    np.save(path, values)
    right, cached, cacheable = lines.start_reads, draw(st.booleans()), draw(st.booleans())

    def start_reads(memory: Any, places: Any, size: int, file: int, offsets: Any, flags: int = 0) -> Any:
        if flags and not cached:
            return lambda: np.zeros(len(places), np.int64)
        return right(memory, places, size, file, offsets, flags)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(lines, "start_reads", start_reads)
        patches.setattr(lines, "start_reads", start_reads)
        patches.setattr(OpenFile, "cached", lambda file, offsets: cached)
        patches.setattr(npy, "worth_caching", lambda size: cacheable)
        patches.setattr(files, "MAPPING_CORES", draw(st.sampled_from([0, 1000])))
        patches.setattr(lines, "DIRECT_BYTES", draw(st.sampled_from([1 << 12, 1 << 17, 1 << 20])))
        patches.setattr(lines, "MAX_READS", draw(st.sampled_from([3, 512])))
        matrix = open_npy("X", path, writable=True)
        patches.setattr(lines, "SCRATCH_BYTES", draw(st.sampled_from([1 << 8, 1 << 18])))
        patches.setattr(lines, "MAX_READS", draw(st.sampled_from([3, 512])))
        if draw(st.booleans()):  # as on a system without calls for asynchronous reads
            patches.setattr(lines, "_contexts", [])
            patches.setattr(lines, "_CALLS", {})
        rows, cols = draw_span(data, values.shape[0]), draw_span(data, values.shape[1])
        room = np.full((rows[1] - rows[0], cols[1] - cols[0] + 2), 7, matrix.dtype)
        out = room[:, 1:-1] if draw(st.booleans()) else np.ascontiguousarray(room[:, 1:-1])
        matrix.read(rows, cols, out)
        np.testing.assert_array_equal(out, values[slice(*rows), slice(*cols)])
        out += 1
        matrix.write(rows, cols, out)
    values[slice(*rows), slice(*cols)] += 1
    np.testing.assert_array_equal(np.load(path), values)


def far_apart(folder: Path, kind: str) -> tuple[Matrix, np.ndarray[Any, Any]]:
    """Store a matrix with rows of 128 KiB, and return it with its values.

    If the file is on a disk, it is evicted from the page cache.
    """
    values = np.random.default_rng(0).integers(-99, 99, (256, 16384)).astype("f8")
    matrix: Matrix
    if kind == "npy":
        np.save(folder / "X.npy", values)
        matrix = open_npy("X", folder / "X.npy")
    else:
        array = zarr.create_array(folder / "X", data=values, chunks=values.shape, compressors=None)
        matrix = ZarrMatrix("X", array)
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
    return matrix, values


def bytes_from_disk() -> int:
    with open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("read_bytes"))


@LINUX
@pytest.mark.parametrize("kind", ["npy", "raw chunk"])
@pytest.mark.usefixtures("python_reads")
def test_short_segments_are_read_without_readahead(tmp_path: Path, kind: str) -> None:
    matrix, values = far_apart(tmp_path, kind)
    out, before = np.empty((256, 256)), bytes_from_disk()
    matrix.read((0, 256), (5000, 5256), out)
    read = bytes_from_disk() - before
    np.testing.assert_array_equal(out, values[:, 5000:5256])
    # Whole pages around each part are read. Readahead would read the whole file, 64 times the parts.
    assert read <= 16 * out.nbytes


@LINUX
@pytest.mark.parametrize("kind", ["npy", "raw chunk"])
@pytest.mark.usefixtures("python_reads")
def test_files_too_large_to_cache_are_read_past_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    for module in (npy, zarr_matrix):
        monkeypatch.setattr(module, "worth_caching", lambda size: False)
    matrix, values = far_apart(tmp_path, kind)
    out = np.empty((256, 256))
    for left in range(5000, 5256, 16):
        matrix.read((0, 256), (left, left + 256), out)
        np.testing.assert_array_equal(out, values[:, left : left + 256])
    (path,) = (path for path in tmp_path.rglob("*") if path.stat().st_size > values.nbytes / 2)
    with OpenFile(path) as file:
        rows = [row * 128 << 10 for row in range(1, 256)]
        held = [file.cached([row + 8 * 5000]) for row in rows]
        # In tmpfs, files are always resident in memory, so there is no cache to bypass.
        assert sum(held) < 10 or file.cached(rows)


@pytest.mark.parametrize("kind", ["npy", "raw chunk"])
@pytest.mark.usefixtures("python_reads")
def test_all_segments_are_requested_before_one_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    matrix, values = far_apart(tmp_path, kind)
    right, requested, waiting = os.posix_fadvise, 0, lines.read_rows

    def advise(descriptor: int, offset: int, length: int, advice: int) -> None:
        nonlocal requested
        requested += advice == os.POSIX_FADV_WILLNEED
        right(descriptor, offset, length, advice)

    def read_rows(descriptor: int, rows: Any, numbers: Any, offsets: Any, flags: int = 0) -> Any:
        if flags:
            return np.zeros(len(numbers), np.int64)
        assert requested == 256
        return waiting(descriptor, rows, numbers, offsets, flags)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    monkeypatch.setattr(lines, "read_rows", read_rows)
    out = np.empty((256, 256))
    matrix.read((0, 256), (5000, 5256), out)
    np.testing.assert_array_equal(out, values[:, 5000:5256])
    assert requested == 256


@LINUX
@pytest.mark.usefixtures("python_reads")
def test_segments_are_read_by_few_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many calls would be slow, since each releases the GIL and must then wait to take it again."""
    matrix, values = far_apart(tmp_path, "npy")
    calls, right, preadv = 0, lines._system, os.preadv

    def counted(act: Callable[..., int]) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            nonlocal calls
            calls += 1
            return act(*arguments)

        return call

    monkeypatch.setattr(lines, "_system", counted(right))
    monkeypatch.setattr(os, "preadv", counted(preadv))  # called for a part that was not read completely
    out = np.empty((256, 256))
    matrix.read((0, 256), (5000, 5256), out)
    np.testing.assert_array_equal(out, values[:, 5000:5256])
    assert calls <= 16  # for 256 parts of rows


@pytest.mark.usefixtures("python_reads")
def test_short_gaps_are_read_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(600.0 * 100).reshape(600, 100)
    np.save(tmp_path / "X.npy", values)
    matrix, right, calls = open_npy("X", tmp_path / "X.npy"), os.preadv, 0

    def preadv(*arguments: Any) -> int:
        nonlocal calls
        calls += 1
        return right(*arguments)

    monkeypatch.setattr(os, "preadv", preadv)
    out = np.empty((600, 60))
    matrix.read((0, 600), (20, 80), out)
    np.testing.assert_array_equal(out, values[:, 20:80])
    assert calls == 2  # the whole range is read in pieces of 256 KiB, gaps included


@pytest.mark.parametrize("columns", [(0, 50), (0, 4000)], ids=["short gaps", "long gaps"])
def test_a_file_cut_short_while_it_is_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: tuple[int, int]
) -> None:
    np.save(tmp_path / "X.npy", np.ones((40, 4 * columns[1])))
    matrix = open_npy("X", tmp_path / "X.npy")
    monkeypatch.setattr(type(matrix), "_check_length", lambda self, size: None)
    os.truncate(tmp_path / "X.npy", 30 * 8 * columns[1])
    with pytest.raises(EOFError, match="ends before byte"):
        matrix.read((0, 40), columns, np.empty((40, columns[1])))


def test_a_short_file_is_not_lengthened_by_a_write(tmp_path: Path) -> None:
    matrix = create_npy("X", tmp_path / "X.npy", (40, 40), np.dtype("f8"))
    os.truncate(tmp_path / "X.npy", 1000)
    with pytest.raises(EOFError, match="truncated from 12928 bytes to 1000"):
        matrix.write((0, 4), (0, 4), np.ones((4, 4)))
    assert (tmp_path / "X.npy").stat().st_size == 1000


def test_a_file_with_too_few_bytes_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "X.npy", np.ones((40, 40)))
    os.truncate(tmp_path / "X.npy", 1000)
    with pytest.raises(InputError, match="it has 1000 bytes instead of 12928"):
        open_npy("X", tmp_path / "X.npy")


def test_changes_to_a_private_map_are_kept(tmp_path: Path) -> None:
    for name in "XC":
        np.save(tmp_path / f"{name}.npy", np.ones((64, 64)))
    private, c = (np.load(tmp_path / f"{name}.npy", mmap_mode="c") for name in "XC")
    private[:] = 2
    result = oocgemm.gemm(private, np.eye(64), c, backend="host", tile="32x32x32")
    assert result.out is c
    np.testing.assert_array_equal(c, np.full((64, 64), 2))
    np.testing.assert_array_equal(private, np.full((64, 64), 2))


# A program that runs a product, or none, and prints the peak of its resident set. Budgets are far below the
# size of A and B.
CODE = """
import json, sys
import numpy, zarr, oocgemm, oocgemm.stores.zarr_matrix, oocgemm.backends.host.backend
numpy.ones((64, 64)) @ numpy.ones((64, 64))
arguments, mapped = json.loads(sys.argv[1])
for name in mapped:
    arguments[name] = numpy.load(arguments[name], mmap_mode="r+")
if arguments:
    oocgemm.gemm(**arguments)
with open("/proc/self/status") as file:
    print(next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM")))
"""
DEVICE, HOST = "40MiB", "24MiB"


def peak(arguments: dict[str, Any], mapped: str = "") -> int:
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps([arguments, mapped])],
        check=True,
        capture_output=True,
        text=True,
    )
    return int(done.stdout)


@cache
def idle() -> int:
    """Return the peak resident set of a process that multiplies nothing."""
    return peak({})


@LINUX
@pytest.mark.parametrize(
    ("trans_b", "tile", "mapped"),
    [
        pytest.param("T", None, "", id="parts of rows"),
        pytest.param("N", None, "", id="parts of rows, of both extents", marks=pytest.mark.slow),
        pytest.param("T", "100x100x6000", "", id="whole rows", marks=pytest.mark.slow),
        pytest.param("T", None, "abc", id="memory maps", marks=pytest.mark.slow),
    ],
)
def test_the_resident_set_stays_within_the_budgets(
    tmp_path: Path, trans_b: str, tile: str | None, mapped: str
) -> None:
    """Beyond the budgets, 16 MiB are allowed for the part of a file that a thread maps, and small objects."""
    values = np.random.default_rng(0).integers(-3, 4, (1500, 6000)).astype("f8")  # 69 MiB
    a, b, c = (tmp_path / f"{name}.npy" for name in "ABC")
    np.save(a, values)
    np.save(b, values if trans_b == "T" else np.ascontiguousarray(values.T))
    np.save(c, np.zeros((1500, 1500)))
    arguments: dict[str, Any] = {"a": str(a), "b": str(b), "c": str(c), "trans_b": trans_b, "tile": tile}
    arguments |= {"device_memory": DEVICE, "host_memory": HOST, "backend": "host", "overwrite": True}
    used = peak(arguments, mapped) - idle()
    assert used <= parse_size(DEVICE) + parse_size(HOST) + 16 * MIB
    single = values.astype("f4")  # in which the sums are exact too
    np.testing.assert_array_equal(np.load(c), single @ single.T)
