"""Failed reads are tried again where that can help. Short and slow transfers change no product."""

import errno
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.storage import MemoryStore, WrapperStore

import oocgemm
from oocgemm.engine.staging import HostSlots
from oocgemm.stores import base
from oocgemm.stores.base import RETRY_AFTER
from tests.support import TOP
from tests.support.backends_here import staged
from tests.support.command import run
from tests.support.faults import Fault, bytewise, faulty_backend, faulty_stores, nothing_left
from tests.support.faulty_runs import CHUNK, PRODUCT, STORES, A, B, K, M, N, failure, multiply, saved, store
from tests.support.suite import each_value, thinned

pytestmark = pytest.mark.usefixtures("zarr_has_its_threads", "retries_are_soon")


@pytest.fixture(params=STORES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def a(tmp_path: Path, kind: str) -> Path:
    """Store A as the parameter `kind` says, and return its path."""
    return store(tmp_path / "A", kind)


PASSING: list[Exception] = [
    *(
        OSError(number, os.strerror(number))
        for number in (errno.EIO, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.ESTALE)
    ),
    ConnectionResetError(errno.ECONNRESET, "reset"),
    ConnectionRefusedError("refused"),
    TimeoutError("too late"),
    type("ServerDisconnectedError", (Exception,), {})("gone"),
]
LASTING: list[Exception] = [
    *(
        OSError(number, os.strerror(number))
        for number in (errno.ENOENT, errno.EACCES, errno.EROFS, errno.EMFILE, errno.ENOMEM)
    ),
    EOFError("ends too early"),
    ValueError("cannot be decoded"),
    RuntimeError("error during blosc decompression: -1"),
    MemoryError("none left"),
]


@pytest.mark.parametrize("error", thinned(PASSING, [PASSING[0], *PASSING[5:]]), ids=repr)
def test_a_failure_that_passes_costs_nothing_but_time(tmp_path: Path, error: Exception) -> None:
    fault = Fault(error, first=4, times=3)
    with nothing_left(tmp_path):
        with faulty_stores(read_A=fault):
            result = multiply(tmp_path, A)
        np.testing.assert_array_equal(result.out[:], PRODUCT)
        assert len(result.timeline.header["retried"]) == 3
        assert all("A[" in where and str(error) in where for where in result.timeline.header["retried"])
        del result


def test_how_often_and_when_it_is_tried_again_is_stated() -> None:
    *first, last = map(str, RETRY_AFTER)
    limits = TOP / "docs" / "limits.md"
    assert len(RETRY_AFTER) == 5
    assert f"tried again five times, after {', '.join(first)} and {last} s" in " ".join(
        limits.read_text().split()
    )


def test_a_persistent_failure_is_retried_as_often_as_stated(tmp_path: Path) -> None:
    fault = Fault(OSError(errno.EIO, "Input/output error"), first=1)
    with faulty_stores(read_B=fault), staged():
        said = failure(tmp_path, *saved(tmp_path, by_columns=True), tile=f"{M}x{N}x{K}")
    assert fault.calls == 1 + len(base.RETRY_AFTER)
    assert (
        "read B[0:30, 0:50] of tile (0, 0), step 0: reading B[0:30, 0:50]: OSError: [Errno 5] Input/output"
        in said
    )


@pytest.mark.parametrize("error", thinned(LASTING, [LASTING[0], *LASTING[4:]]), ids=repr)
def test_a_failure_that_lasts_is_not_tried_again(tmp_path: Path, error: Exception) -> None:
    fault = Fault(error, first=2)
    with faulty_stores(read_A=fault):
        said = failure(tmp_path, A, np.eye(K), tile=f"20x{K}x{K}")
    assert fault.calls == 2
    assert "reading A[20:40, 0:30]" in said
    assert str(error) in said


@pytest.mark.parametrize("error", [*PASSING[:1], *LASTING[:1]], ids=repr)
def test_writes_are_not_tried_again(tmp_path: Path, error: Exception) -> None:
    fault = Fault(error, first=2)
    with faulty_stores(write_C=fault), staged():
        said = failure(tmp_path, A, tile=f"20x{N}x{K}", chunks=(20, N))
    assert fault.calls == 2
    assert "tile (1, 0)" in said
    assert "writing C[20:40, 0:50]" in said


@contextmanager
def ended_early(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that the block ends before a read is tried again, which would take a long time.

    A time limit of the test would not do: a run that is stopping delays whatever interrupts it.
    """
    monkeypatch.setattr(base, "RETRY_AFTER", (20.0,) * 3)
    start = time.monotonic()
    yield
    assert time.monotonic() - start < base.RETRY_AFTER[0]


def test_a_run_that_stops_waits_for_no_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Fault(OSError(errno.EIO, "passing"))
    ending = Fault(PermissionError(errno.EACCES, "lasting"), delay=0.1)
    with ended_early(monkeypatch), faulty_stores(read_A=waiting, read_B=ending), staged(2):
        assert "lasting" in failure(tmp_path, *saved(tmp_path))
    assert 1 <= waiting.calls <= 2  # each thread reads once, and no read is tried again


def test_nothing_new_starts_once_something_has_failed(tmp_path: Path) -> None:
    others = Fault()
    with faulty_stores(read_A=Fault(ValueError("wrong"), delay=0.05), read_B=others), staged():
        assert "wrong" in failure(tmp_path, *saved(tmp_path, by_columns=True))
    assert others.calls == 0


def test_an_interrupt_ends_the_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Fault(OSError(errno.EIO, "passing"), times=1)
    # A shell may have started the tests with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupt = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    try:
        with ended_early(monkeypatch), nothing_left(tmp_path), faulty_stores(read_A=waiting):
            try:
                multiply(tmp_path, A)
            except KeyboardInterrupt:
                pass
            else:
                pytest.fail("it went on")
    finally:
        interrupt.cancel()  # if nothing waited for it, it would end the tests
        signal.signal(signal.SIGINT, before)


class Flaky(WrapperStore[MemoryStore]):
    """A remote store whose connection breaks at every fifth read."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.gets = 0

    async def get(self, key: str, *rest: Any, **options: Any) -> Any:
        self.gets += "/" in key
        if self.gets % 5 == 4:
            raise ConnectionResetError("the connection broke")
        return await super().get(key, *rest, **options)


def test_a_connection_that_breaks_is_made_again(tmp_path: Path) -> None:
    flaky = Flaky(MemoryStore())
    a = zarr.create_array(flaky, shape=A.shape, dtype="f8", chunks=(CHUNK, CHUNK))
    a[:] = A
    flaky.gets = 0
    result = multiply(tmp_path, a)
    np.testing.assert_array_equal(result.out[:], PRODUCT)
    assert result.timeline.header["retried"]


def test_a_report_tells_of_reads_that_were_tried_again(tmp_path: Path) -> None:
    np.save(tmp_path / "A.npy", A)
    np.save(tmp_path / "B.npy", B)
    with faulty_stores(read_A=Fault(TimeoutError("too late"), times=2)):
        done = run(tmp_path / "A.npy", tmp_path / "B.npy", tmp_path / "C")
    assert done.code == 0
    assert "retried 2 failed reads, the last one: reading A[" in done.out
    assert "TimeoutError: too late" in done.out


# Short reads and writes, and slow ones.


@each_value
@pytest.mark.parametrize("most", [1, 1000])
def test_short_reads_and_writes_give_the_same_product(tmp_path: Path, a: Path, most: int) -> None:
    b = store(tmp_path / "B", "raw", B)
    with bytewise(most):
        result = multiply(tmp_path, a, b)
    np.testing.assert_array_equal(result.out[:], PRODUCT)
    assert multiply(tmp_path, a, b, resume=True).plan.steps == 0  # the journal says that all tiles are done


@pytest.mark.parametrize("most", [1, 700_001, 1 << 20])
def test_short_direct_reads_give_the_same_product(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr("oocgemm.stores.files.resident", lambda address, size: False)
    rows = 512 if most > 1 else 1
    values = np.random.default_rng(0).standard_normal((rows, 512))
    monkeypatch.setattr("oocgemm.stores.files.MIN_DIRECT", 4096)
    a = zarr.create_array(tmp_path / "A", data=values, chunks=(rows, 512), compressors=None)
    with nothing_left(tmp_path), bytewise(most):
        oocgemm.matmul(tmp_path / "A", np.eye(512), out=tmp_path / "C", chunks=(rows, 512), backend="host")
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "C")[:], a[:])


@pytest.mark.parametrize("late", [False, True])
def test_whatever_is_slow_the_product_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    def prefault(self: HostSlots, start: int) -> None:
        end = time.monotonic() + 0.1
        while time.monotonic() < end:
            self.arena[start : start + self._c_sizes[1]] = 255
            time.sleep(0.001)

    monkeypatch.setattr(HostSlots, "_prefault", prefault)
    zarr.create_array(tmp_path / "C", data=PRODUCT, chunks=(CHUNK, CHUNK))
    slow = {name: Fault(delay=0.004) for name in ("read_A", "read_B", "read_C", "write_C")}
    busy = {name: Fault(delay=0.002) for name in ("upload", "multiply", "download")}
    with nothing_left(tmp_path):
        with faulty_stores(**slow), faulty_backend(late, **busy), staged(2):
            multiply(tmp_path, *saved(tmp_path), beta=2)
        assert all(fault.calls for fault in (*slow.values(), *busy.values()))
        np.testing.assert_array_equal(zarr.open_array(tmp_path / "C")[:], 3 * PRODUCT)
