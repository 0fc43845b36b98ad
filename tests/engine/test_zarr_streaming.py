"""Uncompressed zarr arrays in the page cache go to a GPU through the ring. Many chunks are read at a time."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import Mock, patch

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

import oocgemm
from oocgemm.backends.base import Pageable
from oocgemm.engine.staging import HostSlots, Staging
from oocgemm.errors import ExecutionError
from oocgemm.planning import Kind, Operation
from oocgemm.stores import files, lines, zarr_chunks
from oocgemm.stores.npy import NpyMatrix
from oocgemm.stores.zarr_chunks import DirectChunks
from oocgemm.stores.zarr_matrix import ZarrMatrix
from oocgemm.system.installed import compiled
from tests.support.backends_here import running_on
from tests.support.problems import integers
from tests.support.suite import each_value

rng = np.random.default_rng(0)
SHAPE = (230, 310)


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oocgemm.stores.files.MAPPING_CORES", 0)


def stored(folder: Path, values: Any, **options: Any) -> str:
    given = {"chunks": (40, 64), "compressors": None, "fill_value": 3} | options
    place = str(folder / "A.zarr")
    zarr.create_array(place, data=values, **given)
    return place


def opened(place: str) -> ZarrMatrix:
    return ZarrMatrix("A", zarr.open_array(place, mode="r"), unchanging=True)


def streams(plan: Any) -> bool:
    kinds = {(op.kind, op.operand) for op in plan.schedule()}
    assert (Kind.UPLOAD, "A") in kinds
    return (Kind.READ, "A") not in kinds


ARRAYS: dict[str, dict[str, Any]] = {
    "rows": {},
    "one row of chunks": {"chunks": (230, 64)},
    "narrow": {"chunks": (64, 3)},
    "wide": {"chunks": (3, 310)},
    "long lines": {"chunks": (50, 310)},
    "shards": {"chunks": (20, 32), "shards": (80, 64)},
    "format 2": {"zarr_format": 2},
    "big-endian": {"dtype": ">f8", "zarr_format": 2},
    "by columns": {"order": "F", "zarr_format": 2},
}


@each_value
@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("max_line", [8 << 10, 64], ids=["gaps", "no gaps"])
@pytest.mark.usefixtures("python_reads")
def test_any_block_is_read_right_without_compiled_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, max_line: int
) -> None:
    monkeypatch.setattr("oocgemm.stores.lines.MAX_GAP", max_line)
    monkeypatch.setattr(zarr_chunks, "MAX_OPEN", 3)
    monkeypatch.setattr(zarr_chunks, "MAX_LINES", 50)
    values = integers(rng, SHAPE, "float64")
    values[40:80, 64:128] = 3  # zarr does not store this chunk
    options = dict(ARRAYS[name])
    values = values.astype(options.pop("dtype", "f8"))
    matrix = opened(stored(tmp_path, values, **options))
    for _ in range(20):
        r0, r1 = sorted(rng.choice(SHAPE[0] + 1, 2, replace=False).tolist())
        c0, c1 = sorted(rng.choice(SHAPE[1] + 1, 2, replace=False).tolist())
        whole = np.full((r1 - r0 + 2, c1 - c0 + 2), -1.0)
        matrix.read((r0, r1), (c0, c1), whole[1:-1, 1:-1])
        np.testing.assert_array_equal(whole[1:-1, 1:-1], values[r0:r1, c0:c1])
        whole[1:-1, 1:-1] = -1
        assert (whole == -1).all()


@pytest.mark.usefixtures("python_reads")
def test_large_chunks_are_read_together_on_many_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = integers(rng, (700, 900), "float64")
    matrix = opened(stored(tmp_path, values, chunks=(400, 400)))
    monkeypatch.setattr(DirectChunks, "_read_file", None)
    for rows, cols in (((0, 700), (0, 900)), ((350, 420), (30, 800)), ((0, 400), (0, 400))):
        out = np.empty((rows[1] - rows[0], cols[1] - cols[0]))
        matrix.read(rows, cols, out)
        np.testing.assert_array_equal(out, values[slice(*rows), slice(*cols)])


@pytest.mark.parametrize("supported", [True, False])
@pytest.mark.usefixtures("python_reads")
def test_chunks_are_read_together_where_the_system_supports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, supported: bool
) -> None:
    alone: list[Any] = []
    right = DirectChunks._read_file

    def note(self: DirectChunks, number: Any, *rest: Any) -> None:
        alone.append(number)
        right(self, number, *rest)

    def refuse() -> int:
        raise OSError

    monkeypatch.setattr(DirectChunks, "_read_file", note)
    if not supported:
        monkeypatch.setattr(lines, "_free_context", refuse)
    values, out = integers(rng, SHAPE, "float64"), np.empty(SHAPE)
    opened(stored(tmp_path, values)).read((0, SHAPE[0]), (0, SHAPE[1]), out)
    np.testing.assert_array_equal(out, values)
    assert alone == []


@each_value
@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("trans_a", ["N", "T"])
def test_products_are_exact(tmp_path: Path, name: str, trans_a: Literal["N", "T"]) -> None:
    values = integers(rng, SHAPE, "float64")
    values[40:80, 64:128] = 3
    options = dict(ARRAYS[name])
    place = stored(tmp_path, values.astype(options.pop("dtype", "f8")), **options)
    a = values.T if trans_a == "T" else values
    b = integers(rng, (a.shape[1], 70), "float64")
    with running_on("fake-cuda") as chosen:
        result = oocgemm.gemm(place, b, trans_a=trans_a, tile="70x40x90", host_memory="3MiB", **chosen)
    np.testing.assert_array_equal(result.out, a @ b)
    assert streams(result.plan) == (name not in ("big-endian", "by columns"))


@pytest.mark.parametrize("edge", [0, 1])
def test_the_chunks_of_an_earlier_result_are_overwritten_in_place(tmp_path: Path, edge: int) -> None:
    """Except those with another name (hard link), such as in a copy of C."""
    a, b = integers(rng, (1024 + edge, 80), "float64"), integers(rng, (80, 1024 + edge), "float64")
    c, chunks = tmp_path / "C", [tmp_path / "C" / "c" / str(i) / str(j) for i in (0, 1) for j in (0, 1)]
    options: dict[str, Any] = {"overwrite": True, "host_memory": "64MiB"}
    with running_on("fake-cuda") as chosen:
        oocgemm.gemm(a, b, c, chunks=(512, 512), **options, **chosen)
        kept = chunks[0].read_bytes()
        os.link(chunks[0], tmp_path / "copy")
        before = [path.stat().st_ino for path in chunks]
        oocgemm.gemm(2 * a, b, c, **options, **chosen)
    np.testing.assert_array_equal(zarr.open_array(c, mode="r")[:], 2 * a @ b)
    assert [path.stat().st_ino == old for path, old in zip(chunks, before, strict=True)] == [
        False,
        *[True] * 3,
    ]
    assert (tmp_path / "copy").read_bytes() == kept


@pytest.mark.parametrize("threads", [True, False])
def test_slots_for_c_are_prefaulted_while_operands_are_uploaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: bool
) -> None:
    """No Read fills a host slot, so none is delayed. The first Download need not wait for the pages."""
    started, right = [], Staging.upload_source

    def upload_source(self: Staging, operation: Operation) -> Any:
        started.append(len(self.slots._prefaulted))
        return right(self, operation)

    def refuse(*given: Any) -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Staging, "upload_source", upload_source)
    if not threads:
        monkeypatch.setattr(HostSlots, "_faulting", SimpleNamespace(submit=refuse, shutdown=Mock()))
    values, b = integers(rng, SHAPE, "float64"), integers(rng, (SHAPE[1], 70), "float64")
    with running_on("fake-cuda") as chosen, patch("oocgemm.backends.cuda.host_memory.MAX_KEPT", 0):
        result = oocgemm.gemm(stored(tmp_path, values), b, tmp_path / "C", host_memory="3MiB", **chosen)
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "C", mode="r")[:], values @ b)
    assert set(started) == {result.plan.slots.host_c}


@pytest.mark.parametrize("width", [512, 1024])
def test_short_rows_of_a_chunk_are_joined_before_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """Direct I/O would take a request per row. Rows of 8 KiB are written from where they are."""
    written, right = [], os.pwritev

    def pwritev(descriptor: int, rows: Sequence[Any], at: int) -> int:
        written.append(len(rows))
        return right(descriptor, rows, at)

    monkeypatch.setattr(os, "pwritev", pwritev)
    values = files.scratch(8 * 64 * 2048, "values").view("f8").reshape(64, 2048)
    values[...] = integers(rng, values.shape, "float64")
    array = zarr.create_array(
        tmp_path / "C", shape=values.shape, dtype="f8", chunks=(32, width), compressors=None
    )
    matrix = ZarrMatrix("C", array)
    for _ in range(2):  # new files, and files that are overwritten
        matrix.write((0, 64), (0, 2048), values)
    assert set(written) == {1 if width == 512 else 32}
    np.testing.assert_array_equal(array[:], values)


def test_a_gram_matrix_is_exact(tmp_path: Path) -> None:
    values = integers(rng, SHAPE, "float64")
    with running_on("fake-cuda") as chosen:
        result = oocgemm.gram(stored(tmp_path, values), uplo="full", tile="70x70x90", **chosen)
    np.testing.assert_array_equal(result.out, values @ values.T)
    assert streams(result.plan)


@pytest.mark.parametrize(
    "why", ["compressed", "checked", "not in the page cache", "larger than the page cache"]
)
def test_other_arrays_go_through_host_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    values, b = integers(rng, SHAPE, "float64"), integers(rng, (SHAPE[1], 70), "float64")
    place = stored(tmp_path, values, **({"compressors": "auto"} if why == "compressed" else {}))
    if why == "not in the page cache":
        monkeypatch.setattr("oocgemm.stores.files.OpenFile.cached", lambda self, offsets: False)
    if why == "larger than the page cache":
        monkeypatch.setattr("oocgemm.stores.files.MAX_CACHED_SHARE", 0)
    with running_on("fake-cuda") as chosen:
        result = oocgemm.gemm(place, b, verify=why == "checked", **chosen)
    np.testing.assert_array_equal(result.out, values @ b)
    assert not streams(result.plan)


@pytest.mark.parametrize("cached", [True, False])
def test_a_plan_is_run_as_planned_when_the_page_cache_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    values, b = integers(rng, SHAPE, "float64"), integers(rng, (SHAPE[1], 70), "float64")
    place = stored(tmp_path, values)
    with running_on("fake-cuda") as chosen:
        monkeypatch.setattr("oocgemm.stores.files.OpenFile.cached", lambda self, offsets: cached)
        plan = oocgemm.plan(place, b, device_memory="128MiB", **chosen)
        monkeypatch.setattr("oocgemm.stores.files.OpenFile.cached", lambda self, offsets: not cached)
        result = plan.run()
    np.testing.assert_array_equal(result.out, values @ b)
    assert streams(result.plan) == cached


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: os.truncate(path, 100), "has 100 bytes instead of 20480: it is damaged or truncated"),
        (lambda path: os.truncate(path, 20481), "has 20481 bytes instead of 20480"),
        (os.unlink, "files were added or removed"),
    ],
    ids=["truncated", "too long", "deleted"],
)
def test_a_file_that_changes_during_a_run_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[str], None], message: str
) -> None:
    place = stored(tmp_path, integers(rng, SHAPE, "float64"))
    right, calls = Staging.upload_source, list[int]()

    def upload_source(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            change(f"{place}/c/5/4")
        return right(*given)

    monkeypatch.setattr(Staging, "upload_source", upload_source)
    with running_on("fake-cuda") as chosen, pytest.raises(ExecutionError, match=message) as raised:
        oocgemm.gemm(place, np.ones((SHAPE[1], 70)), tile="70x40x90", **chosen)
    assert "c/5/4" in str(raised.value)


@pytest.mark.skipif(compiled() is None, reason="the C sources are not compiled")
@pytest.mark.parametrize("kind", ["zarr", "npy"])
def test_python_reads_nothing_that_compiled_threads_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    values, b = integers(rng, SHAPE, "float64"), integers(rng, (SHAPE[1], 70), "float64")
    np.save(tmp_path / "A.npy", values)
    place = stored(tmp_path, values) if kind == "zarr" else str(tmp_path / "A.npy")
    monkeypatch.setattr(DirectChunks, "read", None)
    monkeypatch.setattr(NpyMatrix, "read", None)
    with running_on("fake-cuda") as chosen:
        result = oocgemm.gemm(place, b, tile="70x40x90", **chosen)
    np.testing.assert_array_equal(result.out, values @ b)


@st.composite
def blocks(draw: st.DrawFn) -> tuple[Pageable, int]:
    rows, cols, high, wide = (draw(st.integers(1, 300)) for _ in range(4))
    origin = draw(st.integers(0, high - 1)), draw(st.integers(0, wide - 1))
    dtype = np.dtype(draw(st.sampled_from(["i1", "f4", "c16"])))
    block = Pageable((rows, cols), dtype, lambda r, c, part: None, (high, wide), origin)
    return block, draw(st.integers(dtype.itemsize, 100_000))


@given(blocks(), st.booleans())
def test_pieces_cover_a_block_once_and_fit_into_a_buffer(given: tuple[Pageable, int], large: bool) -> None:
    """With `large`, chunks of any size count as large ones."""
    block, size = given
    with running_on("fake-cuda"):
        from oocgemm.backends.cuda import pageable as module

        least = (1, 1) if large else (module.MIN_ROW, module.MIN_APART)
        with patch.multiple(module, MIN_ROW=least[0], MIN_APART=least[1]):
            pieces = module.pieces(block, size)
    count = np.zeros(block.shape, int)
    for (top, bottom), (left, right), at in pieces:
        count[top:bottom, left:right] += 1
        assert 0 < (bottom - top) * (right - left) * block.dtype.itemsize <= size
        assert at == (top * block.shape[1] + left) * block.dtype.itemsize
    assert (count == 1).all()


def test_pieces_are_cut_between_chunks() -> None:
    block = Pageable((512, 8192), np.dtype("f4"), lambda r, c, part: None, (256, 256), (128, 0))
    with running_on("fake-cuda"):
        from oocgemm.backends.cuda.pageable import pieces as cut

        pieces = cut(block, 2 << 20)
    assert {rows for rows, _, _ in pieces} == {(0, 128), (128, 384), (384, 512)}
    assert {cols for _, cols, _ in pieces} == {(at, at + 2048) for at in range(0, 8192, 2048)}


@pytest.mark.parametrize("high", [512, 1024, 2048])
def test_pieces_of_large_chunks_have_whole_rows_of_one_column_of_chunks(high: int) -> None:
    block = Pageable((2500, 4096), np.dtype("f4"), lambda r, c, part: None, (high, 1024), (300, 0))
    with running_on("fake-cuda"):
        from oocgemm.backends.cuda.pageable import pieces as cut

        pieces = cut(block, 4 << 20)
    assert {cols for _, cols, _ in pieces} == {(at, at + 1024) for at in range(0, 4096, 1024)}
    # Each piece begins and ends at a border of a chunk, or is within one.
    for (top, end), _, _ in pieces:
        inside = (top + 300) // high == (end - 1 + 300) // high
        assert inside or ((top + 300) % high in (0, 300) and (end + 300) % high in (0, 2800 % high))
