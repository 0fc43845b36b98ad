"""A run from pinned memory that is like the last one makes the same launches again."""

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import oocgemm
from oocgemm.backends.base import Array
from oocgemm.engine import executor
from oocgemm.engine.executor import Run
from oocgemm.errors import ExecutionError
from oocgemm.jobs import run as running
from oocgemm.planning import Operation
from oocgemm.system import threads
from tests.support.backends_here import CUDA
from tests.support.fake_cuda import Device, fake_cuda
from tests.support.fake_cuda.device import Fault

OPTIONS: dict[str, Any] = {
    "backend": "cuda",
    "kernel": "cublas",
    "device_memory": "96MiB",
    "host_memory": "64MiB",
    "tile": "24x32x20",
}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setattr("oocgemm.stores.arrays.MIN_ROW_BYTES", 8)  # short rows are copied directly, too
    with fake_cuda() as found:
        yield found
        oocgemm.release()
        assert not found.misuses
        assert not found.memory.allocated


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Operation]:
    """The operations whose launches are prepared."""
    from oocgemm.backends.cuda.session import CudaSession

    found: list[Operation] = []
    right = CudaSession._launches

    def prepare(self: CudaSession, op: Operation, host: Any, stream: Any) -> Any:
        found.append(op)
        return right(self, op, host, stream)

    monkeypatch.setattr(CudaSession, "_launches", prepare)
    return found


def pinned(*shapes: tuple[int, int]) -> list[Array]:
    """Return arrays of small integers, whose memory is pinned as a whole."""
    from cupy.cuda import runtime

    rng = np.random.default_rng(len(shapes))
    arrays = [rng.integers(-3, 4, shape).astype(float) for shape in shapes]
    for x in arrays:
        runtime.hostRegister(x.ctypes.data, x.nbytes, 0)
    return arrays


def product(a: Array, b: Array, c: Array, **options: Any) -> Any:
    return oocgemm.gemm(a, b, c, **OPTIONS | options)


def check(a: Array, b: Array, c: Array, **options: Any) -> Any:
    """Multiply, and compare C with NumPy's."""
    expected = options.get("beta", 0) * c + a @ b
    c[...] = c if options.get("beta") else np.nan
    result = product(a, b, c, **options)
    np.testing.assert_array_equal(c, expected)
    return result


def test_a_run_with_the_same_arrays_prepares_nothing(device: Device, started: list[Operation]) -> None:
    a, b, c = pinned((60, 50), (50, 70), (60, 70))
    first = check(a, b, c)
    assert len(started) == len(first.timeline.spans) > 20
    opened = len([name for name, _ in device.calls if name == "cublas.create"])
    for _ in range(3):
        a *= 2
        b[:, 3] -= 1
        again = check(a, b, c)
        assert [(x.kind, x.tile, x.step, x.waits) for x in again.timeline.spans] == [
            (x.kind, x.tile, x.step, x.waits) for x in first.timeline.spans
        ]
        assert min(x.start for x in again.timeline.spans) > 0
        assert all(x.start <= x.end <= again.timeline.wall for x in again.timeline.spans)
    assert len(started) == len(first.timeline.spans)
    assert opened == len([name for name, _ in device.calls if name == "cublas.create"])


def test_a_run_that_updates_c_is_repeated(device: Device, started: list[Operation]) -> None:
    a, b, c = pinned((60, 50), (50, 70), (60, 70))
    check(a, b, c, beta=2)
    count = len(started)
    check(a, b, c, beta=2)
    assert len(started) == count


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("float16", {}),
        ("float16", {"beta": 2}),
        ("int8", {}),
        ("int8", {"alpha": 3}),
        ("int8", {"out_dtype": "float64", "beta": 2}),
    ],
)
def test_a_run_that_finishes_c_is_repeated(
    device: Device, started: list[Operation], dtype: str, options: dict[str, Any]
) -> None:
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-3, 4, shape).astype(dtype) for shape in ((60, 50), (50, 70)))
    c = np.zeros((60, 70), options.get("out_dtype", "int32" if dtype == "int8" else dtype))
    for x in (a, b, c):
        sys.modules["cupy.cuda"].runtime.hostRegister(x.ctypes.data, x.nbytes, 0)
    counts = []
    for turn in range(3):
        expected = options.get("alpha", 1) * (a.astype(c.dtype) @ b.astype(c.dtype))
        expected += options.get("beta", 0) * c
        product(a, b, c, **options)
        np.testing.assert_array_equal(c, expected)
        counts.append(len(started))
        a[turn, :] -= 1
    assert counts == [counts[0]] * 3
    assert counts[0] > 20


def test_few_operations_are_recorded_late(
    device: Device, started: list[Operation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run with more operations, most are recorded while others are started: one by one or repeated."""
    monkeypatch.setattr("oocgemm.engine.executor.MAX_UNRECORDED", 4)
    a, b, c = pinned((60, 50), (50, 70), (60, 70))
    recorded: list[int] = []
    ended: list[Any] = []

    def watch(plan: object) -> Any:
        ended.clear()
        return ended.append

    right = Run._record_all_but

    def record(self: Run, count: int) -> None:
        right(self, count)
        recorded.append(self._in_flight.qsize())

    monkeypatch.setattr(Run, "_record_all_but", record)
    for _ in range(2):
        recorded.clear()
        spans = check(a, b, c, progress=watch).timeline.spans
        assert max(recorded) == 4
        assert recorded[-1] == 0
        assert len(ended) == len(spans) > 20
    assert len(started) == len(spans)


def other_places(a: Array, b: Array, c: Array) -> list[Array]:
    return pinned(a.shape, b.shape, c.shape)


def swapped(a: Array, b: Array, c: Array) -> list[Array]:
    """A and B of the same shape exchange places."""
    return [b, a, c]


def another_c(a: Array, b: Array, c: Array) -> list[Array]:
    return [a, b, *pinned(c.shape)]


@pytest.mark.parametrize("change", [other_places, swapped, another_c])
def test_other_arrays_are_not_confused_with_the_last_ones(
    device: Device, started: list[Operation], change: Callable[..., list[Array]]
) -> None:
    a, b, c = pinned((50, 50), (50, 50), (50, 50))
    check(a, b, c)
    count, others = len(started), change(a, b, c)
    for arrays in (others, [a, b, c]):
        before = len(started)
        check(*arrays)
        prepared = len(started)
        assert before + len(others) < prepared <= before + count
        check(*arrays)
        assert len(started) == prepared


def copies(device: Device) -> list[str]:
    return [name for name, _ in device.calls if name.startswith("cuMemcpy")]


def test_the_first_blocks_are_uploaded_while_the_run_is_prepared(device: Device) -> None:
    a, b, c = pinned((60, 50), (50, 70), (60, 70))
    before: list[list[str]] = []

    def watch(plan: object) -> Any:
        before.append(copies(device))
        return lambda span: None

    for _ in range(2):
        device.calls.clear()
        check(a, b, c, beta=1, progress=watch)
        before.append(copies(device))
    first, whole, ahead, again = before
    assert first == []
    assert again[: len(ahead)] == ahead
    assert len(ahead) >= 2
    assert len(again) == len(whole)


@pytest.mark.parametrize("number", [1, 2])
def test_an_upload_that_fails_ahead_ends_the_run(device: Device, number: int) -> None:
    a, b, c = pinned((60, 50), (50, 70), (60, 70))
    check(a, b, c)
    name = "cuMemcpy2DAsync_v2"
    device.faults[name] = Fault(first=device.count(name) + number, times=1)
    with pytest.raises(ExecutionError, match=r"upload [AB].*CUDA error"):
        product(a, b, c)
    device.faults.clear()
    check(a, b, c)


def test_rows_that_are_farther_apart_are_not_confused(device: Device, started: list[Operation]) -> None:
    a, b = pinned((40, 40), (40, 40))
    (memory,) = pinned((80, 80))
    narrow, wide = memory.reshape(-1)[: 40 * 60].reshape(40, 60)[:, :40], memory[:40, :40]
    assert narrow.ctypes.data == wide.ctypes.data
    for c in (narrow, wide, narrow):
        check(a, b, c)


def test_another_product_in_between(device: Device, started: list[Operation]) -> None:
    a, b, c = pinned((60, 50), (50, 70), (60, 70))
    for _ in range(2):
        check(a, b, c)
        np.testing.assert_array_equal(oocgemm.matmul(a, b, **OPTIONS | {"tile": "30x30x30"}), a @ b)
    check(a, b, c)
    oocgemm.release()
    assert not device.memory.allocated
    check(a, b, c)
    oocgemm.release()
    assert not device.memory.allocated


def test_arrays_that_are_no_longer_pinned(device: Device) -> None:
    from cupy.cuda import runtime

    arrays = pinned((60, 50), (50, 70), (60, 70))

    def layouts() -> list[bool]:
        plan = check(*arrays).plan
        return [x.pinned for x in (plan.layouts.a, plan.layouts.b, plan.layouts.c)]

    assert layouts() == layouts() == [True] * 3
    runtime.hostUnregister(arrays[0].ctypes.data)
    assert layouts() == layouts() == [False, True, True]
    runtime.hostRegister(arrays[0].ctypes.data, arrays[0].nbytes, 0)
    assert layouts() == layouts() == [True] * 3


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="no CUDA device answers")
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [("cublas", "float64"), ("tiled", "float64"), ("cublas", "float16"), ("cublas", "int8")],
)
def test_a_gpu_repeats_the_last_run(
    kernel: str, dtype: str, started: list[Operation], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oocgemm.stores.arrays.MIN_ROW_BYTES", 8)
    rng = np.random.default_rng(2)
    # Few elements of A are not 0, so that no sum is rounded in float16.
    a = (rng.integers(0, 2, (600, 512)) * (rng.integers(0, 64, (600, 512)) == 0)).astype(dtype)
    b = rng.integers(-3, 4, (512, 704)).astype(dtype)
    c = np.ones((600, 704), "int32" if dtype == "int8" else dtype)
    arrays = a, b, c
    for x in arrays:
        sys.modules["cupy.cuda"].runtime.hostRegister(x.ctypes.data, x.nbytes, 0)
    options = {"kernel": kernel, "tile": "240x320x192", "device_memory": "512MiB"}
    try:
        for beta in (1, 0):
            counts = []
            for turn in range(4):
                expected = a.astype(float) @ b.astype(float) + beta * c
                result = product(a, b, c, beta=beta, **options)
                np.testing.assert_array_equal(c, expected)
                counts.append(len(started))
                b[:, turn] += 1
            assert counts == [len(result.timeline.spans)] * 4
            started.clear()
        spans = result.timeline.spans
        assert all(0 < x.start <= x.end <= result.timeline.wall for x in spans)
        assert all(spans[w].end <= x.end for x in spans for w in x.waits)
    finally:
        for x in arrays:
            sys.modules["cupy.cuda"].runtime.hostUnregister(x.ctypes.data)
        oocgemm.release()


def test_a_refused_run_changes_nothing(device: Device) -> None:
    a, b, c = pinned((60, 50), (50, 70), (60, 70))
    check(a, b, c)
    before = c.copy()

    def refuse(plan: object) -> Any:
        raise LookupError("no progress")

    with pytest.raises(LookupError):
        product(a, b, c, beta=0, progress=refuse)
    np.testing.assert_array_equal(c, before)


def test_a_failed_run_leaves_the_frames_of_the_caller_alone(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exception that the caller is handling is not one of the run's, though it is its context."""
    monkeypatch.setattr(threads, "_handler", lambda number: None)  # so that the run stays in this thread
    a, b, c = pinned((60, 50), (50, 70), (60, 70))

    def fail() -> None:
        secret = "kept"
        raise LookupError(secret)

    def refuse(plan: object) -> Any:
        assert threading.current_thread() is threading.main_thread()
        raise OSError("no progress")

    try:
        fail()
    except LookupError as error:
        with pytest.raises(ExecutionError):
            product(a, b, c, progress=refuse)
        frame = error.__traceback__.tb_next.tb_frame  # type: ignore[union-attr]
        assert frame.f_locals == {"secret": "kept"}


def test_a_session_that_cannot_be_kept_is_closed(device: Device) -> None:
    a, b, c = pinned((60, 50), (50, 70), (60, 70))
    check(a, b, c)
    device.faults["deviceSynchronize"] = Fault()
    check(a, b, c)
    device.faults.clear()
    assert not device.memory.allocated
    check(a, b, c)


def test_runs_in_threads_make_the_same_launches_again(
    device: Device, started: list[Operation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not depend on the order in which threads start operations."""
    a, b, c = pinned((60, 50), (50, 70), (60, 70))
    for steps in (-1, 64, -1):
        for name in ("MAX_ENQUEUED_STEPS", "MAX_STREAMED_STEPS"):
            monkeypatch.setattr(executor, name, steps)
        for _ in range(3):
            spans = check(a, b, c).timeline.spans
        assert len(started) == len(spans)


def test_nothing_is_repeated_after_a_failure(device: Device, started: list[Operation]) -> None:
    a, b, c = pinned((60, 50), (50, 70), (60, 70))
    check(a, b, c)
    count = len(started)
    device.faults["cuMemcpy2DAsync_v2"] = Fault(first=3)
    with pytest.raises(ExecutionError):
        product(a, b, c)
    device.faults.clear()
    running.forget()
    check(a, b, c)
    assert len(started) >= 2 * count
