"""The executor: any failure stops the run and names the operation. No thread or memory is left behind."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import zarr

import oocgemm
from oocgemm import stores
from oocgemm.backends.base import Token
from oocgemm.backends.host.backend import HostSession
from oocgemm.engine import executor
from oocgemm.engine.executor import Item, Run, annotation
from oocgemm.errors import ExecutionError
from oocgemm.planning import Kind, Operation, Plan, TileShape, setting
from oocgemm.planning.search import slot_counts
from oocgemm.stores.arrays import ArrayMatrix
from oocgemm.timeline import Span
from tests.support.backends_here import staged
from tests.support.command import own_threads
from tests.support.faults import ON_DEVICE
from tests.support.faulty_runs import saved
from tests.support.suite import slow

A = np.ones((40, 30))
B = np.ones((30, 50))


@pytest.mark.parametrize("kind", [Kind.UPLOAD, Kind.MULTIPLY, Kind.DOWNLOAD])
@pytest.mark.parametrize("after", [0, 5])
def test_a_failing_device_operation_stops_the_run(
    kind: Kind, after: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right, seen = HostSession.submit, 0

    def failing(self: HostSession, operation: Operation, host: Any, tokens: Any) -> Token:
        nonlocal seen
        if operation.kind is kind:
            seen += 1
            if seen > after:
                raise RuntimeError("the launch failed")
        return right(self, operation, host, tokens)

    monkeypatch.setattr(HostSession, "submit", failing)
    with (
        staged(),
        pytest.raises(
            ExecutionError, match=rf"{kind} \w\[\d+:\d+, \d+:\d+\] of tile \(\d, \d\).*the launch failed"
        ),
    ):
        oocgemm.matmul(A, B, out=tmp_path / "C.zarr", tile="10x10x10", backend="host")
    assert own_threads() == []
    place = tmp_path / "C.zarr"
    assert not place.exists() or zarr.open_array(place).attrs["oocgemm"] == {"complete": False}


@pytest.mark.parametrize("method", ["read", "write"])
def test_a_failing_store_stops_the_run(method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right: Callable[..., None] = getattr(ArrayMatrix, method)

    def failing(self: ArrayMatrix, rows: Any, cols: Any, data: Any) -> None:
        if rows[0] >= 20 or cols[0] >= 20:
            raise OSError(28, "No space left on device")
        right(self, rows, cols, data)

    def mapped(name: str, array: Any) -> Any:
        np.save(tmp_path / name, array)
        return np.load(tmp_path / name, mmap_mode="r+")

    operands = mapped("a.npy", A), mapped("b.npy", B), mapped("c.npy", A @ B)
    monkeypatch.setattr(ArrayMatrix, method, failing)
    with pytest.raises(ExecutionError, match="No space left on device"):
        oocgemm.gemm(*operands, tile="10x10x10", backend="host")
    assert own_threads() == []


@pytest.mark.parametrize("mapped", [False, True])
def test_the_first_error_is_the_one_that_is_raised(
    mapped: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Files are read into host slots, and memory maps while they are uploaded."""
    monkeypatch.setattr(executor, "MAX_STREAMED_STEPS", -1)
    right, begun, failed = Run._fail, threading.Event(), threading.Event()
    sources = [np.load(path, mmap_mode="r") if mapped else path for path in saved(tmp_path, A, B)]
    matrix: Any = type(stores.open_matrix("A", sources[0]))

    def fail(self: Run, error: BaseException) -> None:
        right(self, error)
        failed.set()

    def failing(self: Any, rows: Any, cols: Any, out: Any) -> None:
        if self.name == "A":
            begun.wait(10)
            raise OSError("first")
        begun.set()
        failed.wait(10)
        raise OSError("later")

    monkeypatch.setattr(Run, "_fail", fail)
    monkeypatch.setattr(matrix, "read", failing)
    with pytest.raises(ExecutionError, match="first"), staged(2):
        oocgemm.matmul(*sources, tile="40x50x30", backend="host")
    assert begun.is_set()


def test_a_failing_progress_callback_fails_the_run() -> None:
    def begin(plan: Plan) -> Callable[[Span], None]:
        def step(span: Span) -> None:
            raise ValueError("no more")

        return step

    with pytest.raises(ExecutionError, match="no more"):
        oocgemm.matmul(A, B, tile="10x10x10", backend="host", progress=begin)


def test_a_failure_stops_the_queueing_of_later_operations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right, seen, total = Run._items, 0, 0

    def items(self: Run) -> Iterator[Item]:
        nonlocal seen, total
        total = sum(1 for _ in self._plan.schedule())
        for item in right(self):
            seen += 1
            yield item

    monkeypatch.setattr(Run, "_items", items)
    monkeypatch.setattr(HostSession, "submit", Mock(side_effect=RuntimeError("the launch failed")))
    with pytest.raises(ExecutionError, match="the launch failed"):
        oocgemm.matmul(A, B, tile="4x4x4", backend="host")
    assert seen < total // 2


def test_strips_of_different_widths_do_not_overwrite_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Narrow and wide tiles alternate in one buffer.

    Slow writes make it likely that a buffer is reused too early.
    """
    right = ArrayMatrix.write

    def slow(self: ArrayMatrix, rows: Any, cols: Any, data: Any) -> None:
        time.sleep(0.005)
        right(self, rows, cols, data)

    monkeypatch.setattr(ArrayMatrix, "write", slow)
    monkeypatch.setattr(slot_counts, "STRIP_BYTES", 1)
    monkeypatch.setattr(slot_counts, "STRIPS", 20)
    rng = np.random.default_rng(0)
    a, b = rng.integers(-3, 4, (120, 40)).astype(float), rng.integers(-3, 4, (40, 130)).astype(float)
    c = rng.integers(-3, 4, (120, 130)).astype(float)
    expected = a @ b + c
    with staged():
        oocgemm.gemm(a, b, c, beta=1, backend="host", tile=TileShape(100, 100, 20))
    np.testing.assert_array_equal(c, expected)


@pytest.mark.parametrize("compressor", [*slow(("none",)), "zstd"])
def test_a_new_c_written_in_many_strips_is_whole(
    compressor: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(slot_counts, "STRIP_BYTES", 1)
    monkeypatch.setattr(setting, "CHUNK_BYTES", 8 * 64)
    a, b = np.arange(70.0 * 60).reshape(70, 60) % 7, np.arange(60.0 * 90).reshape(60, 90) % 5
    for tile in ("70x90x20", "32x48x20", "37x41x20"):
        place = tmp_path / f"{tile}.zarr"
        with staged(io_threads=4):
            result = oocgemm.gemm(a, b, c=place, tile=tile, compressor=compressor, backend="host")
        assert result.plan.tile.m > result.plan.slots.strip
        np.testing.assert_array_equal(zarr.open_array(place)[:], a @ b)


def test_a_chunk_file_truncated_during_a_run_is_an_error(tmp_path: Path) -> None:
    array = zarr.create_array(tmp_path / "A", data=A, chunks=(10, 10), compressors=None)
    assert isinstance(array, zarr.Array)
    (tmp_path / "A" / "c" / "2" / "1").write_bytes(b"\0" * 99)
    with pytest.raises(ExecutionError, match="99 bytes instead of 800"):
        oocgemm.matmul(tmp_path / "A", B, backend="host")


def test_chunk_files_are_renamed_into_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = []
    right = os.replace

    def replace(source: Any, target: Any) -> None:
        replaced.append(target)
        right(source, target)

    monkeypatch.setattr(os, "replace", replace)
    oocgemm.matmul(A, B, out=tmp_path / "C", backend="host")
    assert replaced
    assert not list((tmp_path / "C").rglob("*.partial"))


def test_operations_are_nvtx_ranges_where_nvtx_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    @contextmanager
    def annotate(name: str) -> Iterator[None]:
        names.append(name)
        yield

    monkeypatch.setitem(sys.modules, "nvtx", SimpleNamespace(annotate=annotate))
    monkeypatch.setattr(executor, "annotation", annotation.__wrapped__)  # not the cached one
    with staged():
        spans = oocgemm.gemm(A, B, tile="10x10x10", backend="host").timeline.spans
        assert len(names) == len(spans)
        kinds = sorted((name.split()[0], name.split()[1][0]) for name in names)
        assert kinds == sorted((span.kind, span.operand) for span in spans)
        names.clear()
        monkeypatch.setitem(sys.modules, "nvtx", None)  # import nvtx fails as if it were not installed
        assert np.array_equal(oocgemm.matmul(A, B, tile="10x10x10", backend="host"), A @ B)
        assert names == []


@pytest.mark.parametrize("beta", [0, 1])
@pytest.mark.parametrize("verify", [False, True])
def test_the_thread_that_ends_a_wait_submits_what_is_ready(
    beta: int, verify: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Asynchronous operations have no threads of their own.

    Operations of a stream are submitted in the order of the schedule, one at a time, each after all its
    waits.
    """
    monkeypatch.setattr(HostSession, "asynchronous", ON_DEVICE)
    right, at_once = HostSession.submit, threading.Lock()
    done: list[Operation] = []
    names: set[str] = set()

    def submit(self: HostSession, operation: Operation, host: Any, tokens: Any) -> Token:
        assert at_once.acquire(blocking=False)
        try:
            token = right(self, operation, host, tokens)
            time.sleep(rng.choice([0, 0, 0.0005]))
        finally:
            at_once.release()
        done.append(operation)
        names.add(threading.current_thread().name)
        return token

    monkeypatch.setattr(HostSession, "submit", submit)
    rng = np.random.default_rng(3)
    a, b = rng.integers(-3, 4, (70, 60)).astype(float), rng.integers(-3, 4, (60, 90)).astype(float)
    c = rng.integers(-3, 4, (70, 90)).astype(float)
    np.save(tmp_path / "C.npy", c)
    options: dict[str, Any] = {"beta": beta, "tile": "20x30x10", "verify": verify, "overwrite": True}
    with staged(2):
        paths = *saved(tmp_path, a, b, by_columns=True), tmp_path / "C.npy"
        plan = oocgemm.gemm(*paths, backend="host", **options).plan
    np.testing.assert_array_equal(np.load(paths[2]), a @ b + beta * c)
    for stream in {operation.stream for operation in done}:
        wanted = [o for o in plan.schedule() if o.stream == stream and o.kind not in (Kind.READ, Kind.WRITE)]
        assert [o for o in done if o.stream == stream] == wanted
    assert not names & {f"oocgemm-{lane}-0" for lane in ("h2d", "compute", "d2h")}
    # The main thread submits nothing, since a signal may interrupt it anywhere.
    assert threading.main_thread().name not in names


def test_an_operation_slow_to_submit_does_not_block_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Prepare that waits for the device delays only the operations that need its result.

    Here it waits until the Multiply of the previous step has been submitted.
    """
    monkeypatch.setattr(executor, "MAX_STREAMED_STEPS", -1)  # a short run has one thread for all operations
    monkeypatch.setattr(HostSession, "asynchronous", set(ON_DEVICE) - {Kind.PREPARE})
    # The first Prepare has no Multiply to wait for.
    right, multiplied = HostSession.submit, threading.Semaphore(1)

    def submit(self: HostSession, operation: Operation, host: Any, tokens: Any) -> Token:
        if operation.kind is Kind.PREPARE:
            assert multiplied.acquire(timeout=20), "nothing is issued while this waits"
        token = right(self, operation, host, tokens)
        if operation.kind is Kind.MULTIPLY:
            multiplied.release()
        return token

    monkeypatch.setattr(HostSession, "submit", submit)
    a, b = np.arange(30.0).reshape(10, 3), np.arange(36.0).reshape(3, 12)
    with staged(2):
        c = oocgemm.matmul(a, b, compute="emulated", backend="host", tile="5x6x1")
    np.testing.assert_array_equal(c, a @ b)


@pytest.mark.parametrize("beta", [0, 1])
def test_threads_of_their_own_copy_arrays_in_memory(beta: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a copy keeps its thread busy. All other operations of a device need no threads of their own."""
    monkeypatch.setattr(HostSession, "asynchronous", ON_DEVICE)
    right, names = HostSession.submit, set[tuple[Kind, str]]()

    def submit(self: HostSession, operation: Operation, host: Any, tokens: Any) -> Token:
        names.add((operation.kind, threading.current_thread().name.rpartition("-")[0]))
        return right(self, operation, host, tokens)

    monkeypatch.setattr(HostSession, "submit", submit)
    rng = np.random.default_rng(3)
    a, b = rng.integers(-3, 4, (70, 60)).astype(float), rng.integers(-3, 4, (60, 90)).astype(float)
    c = rng.integers(-3, 4, (70, 90)).astype(float)
    expected = a @ b + beta * c
    with staged(2):
        oocgemm.gemm(a, b, c, beta=beta, tile="20x30x10", backend="host")
    np.testing.assert_array_equal(c, expected)
    by_kind = {kind: {name for each, name in names if each is kind} for kind, _ in names}
    uploading = {"oocgemm-h2d", "oocgemm-h2d-c"} if beta else {"oocgemm-h2d"}
    assert by_kind.pop(Kind.UPLOAD) == uploading
    assert by_kind.pop(Kind.DOWNLOAD) == {"oocgemm-d2h"}
    assert list(by_kind) == [Kind.MULTIPLY]


def test_operations_are_submitted_in_schedule_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A Download is submitted before the next rows are multiplied, even if all Multiplies are ready."""
    monkeypatch.setattr(HostSession, "asynchronous", ON_DEVICE)
    monkeypatch.setattr(slot_counts, "STRIP_BYTES", 1)
    right = HostSession.submit
    kinds: list[Kind] = []

    def submit(self: HostSession, operation: Operation, host: Any, tokens: Any) -> Token:
        kinds.append(operation.kind)
        return right(self, operation, host, tokens)

    monkeypatch.setattr(HostSession, "submit", submit)
    a, b = np.arange(64.0 * 8).reshape(64, 8), np.arange(64.0).reshape(8, 8)
    with staged():
        result = oocgemm.gemm(*saved(tmp_path, a, b), tmp_path / "C.npy", tile="64x8x8", backend="host")
    np.testing.assert_array_equal(result.out[:], a @ b)
    rooms = min(result.plan.slots.host_c, (len(kinds) - 2) // 2)
    assert rooms >= 2
    assert kinds[2 : 2 + 2 * rooms] == [Kind.MULTIPLY, Kind.DOWNLOAD] * rooms
