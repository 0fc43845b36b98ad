"""The fake CUDA device notices wrong uses of a GPU, and runs correct programs in any order."""

import ctypes
import importlib
import sys
import threading
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import oocgemm
from oocgemm import backends
from oocgemm.engine import executor
from oocgemm.errors import ExecutionError
from tests.support.fake_cuda import PACKAGE, Device, Fault, MisuseError, fake_cuda, libraries
from tests.support.fake_cuda.memory import Block
from tests.support.problems import integers
from tests.support.suite import each_value
from tests.support.summing import summed  # noqa: F401  imports what the kernels of checksums need

rng = np.random.default_rng(0)
A, B, C = (integers(rng, shape, "float64") for shape in ((70, 60), (60, 90), (70, 90)))
ONE, OTHER = 1, 2  # handles of two streams


@pytest.fixture
def device() -> Iterator[Device]:
    with fake_cuda() as found:
        found.new_queue(ONE)
        found.new_queue(OTHER)
        yield found


def product(beta: int = 1, **options: Any) -> oocgemm.Result:
    c = C.copy()
    given = {"backend": "cuda", "kernel": "cublas", "tile": "20x30x20"} | options
    result = oocgemm.gemm(A, B, c, beta=beta, **given)
    np.testing.assert_array_equal(c, A @ B + beta * C)
    return result


def nothing() -> None:
    pass


@each_value
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dtype", ["float16", "complex64"])
@pytest.mark.parametrize("threads", [False, True])
def test_a_product_is_exact_in_any_order_of_the_streams(
    seed: int, dtype: str, threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if one thread starts all operations, each as soon as it can begin."""
    a, b, c = (x.astype(dtype) for x in (A, B, C))
    if threads:
        monkeypatch.setattr(executor, "MAX_STREAMED_STEPS", -1)
    with fake_cuda(seed) as device:
        oocgemm.gemm(a, b, c, beta=2, backend="cuda", kernel="cublas", tile="20x30x20")
        device.check()
    np.testing.assert_array_equal(c, (A @ B + 2 * C).astype(dtype))


@pytest.mark.parametrize("seed", range(3))
def test_checksums_taken_on_a_device_pass(seed: int) -> None:
    with fake_cuda(seed) as device:
        result = product(beta=0, verify=True)
        device.check()
    assert result.report.checks is not None
    assert result.report.checks["recomputed"] == []
    assert result.plan.problem.checked == "device"


def test_checksums_of_an_old_c_are_taken_before_it_changes(device: Device) -> None:
    product(verify=True)


def test_checksums_of_an_old_c_are_taken_before_finish(device: Device) -> None:
    a, b, c = (x.astype(np.float16) for x in (A, B, C))
    oocgemm.gemm(a, b, c, beta=1, verify=True, backend="cuda", kernel="cublas", tile="20x30x20")


def test_a_wait_that_is_missing_in_the_backend_is_noticed(device: Device) -> None:
    backends.open_backend("cuda")
    session, calls = (importlib.import_module(f"{PACKAGE}.{name}") for name in ("session", "calls"))
    # Only the session's waits are left out: without those of the staging ring, the end of an upload may be
    # seen before its start, and the run could end with another error.
    without = SimpleNamespace(**vars(calls) | {"wait": lambda stream, event: None})
    with (
        patch.object(session, "cuda_calls", without),
        pytest.raises(ExecutionError, match="is not ordered after"),
    ):
        product()
    with pytest.raises(MisuseError, match="is not ordered after"):
        device.check()


def test_streams_overtake_each_other_unless_they_wait() -> None:
    orders = set()
    for seed in range(20):
        device, done = Device(seed), list[int]()
        for stream in (ONE, OTHER):
            device.new_queue(stream)
            for number in (1, 2):
                device.work(stream, "work", partial(done.append, 10 * stream + number))
        assert done == []  # no command runs before the host waits
        device.finish_all()
        assert done.index(11) < done.index(12)
        assert done.index(21) < done.index(22)
        orders.add(tuple(done))
    assert len(orders) > 2


@pytest.mark.parametrize("ordered", ["by an event", "by the host", "not"])
def test_accesses_must_be_ordered(device: Device, ordered: str) -> None:
    block = Block(device.memory.allocate(64), 64)
    device.work(ONE, "write", nothing, writes=[block])
    event = device.record(ONE)
    if ordered == "not":
        with pytest.raises(MisuseError, match=r"'read'.* is not ordered after .*'write'"):
            device.work(OTHER, "read", nothing, [block])
        return
    if ordered == "by an event":
        device.await_(OTHER, event)
    else:
        device.finish(event)
    device.work(OTHER, "read", nothing, [block])


def test_reads_and_other_columns_need_no_order(device: Device) -> None:
    address = device.memory.allocate(64)
    left, right = Block(address, 4, 8, 8), Block(address + 4, 4, 8, 8)
    device.work(ONE, "write", nothing, writes=[left])
    device.work(OTHER, "write", nothing, writes=[right])
    device.finish_all()
    for stream in (ONE, OTHER):
        device.work(stream, "read", nothing, [left, right])


def test_device_memory_begins_as_nan_beyond_host_addresses(device: Device) -> None:
    address = device.memory.allocate(16)
    assert np.isnan(device.memory.matrix(address, np.float64, 1, 2, 2)).all()
    assert address >> 47, "a process may map this"
    with pytest.raises(MisuseError, match="is not within one device allocation"):
        device.memory.bytes_of(Block(address, 17))


def test_copies_need_pinned_host_memory(device: Device) -> None:
    backends.open_backend("cuda")
    calls, stream = importlib.import_module(f"{PACKAGE}.calls"), sys.modules["cupy.cuda"].Stream()
    address, host = device.memory.allocate(16), np.arange(16, dtype=np.uint8)
    launch = calls.copy(address, host.ctypes.data, 16, stream)
    with pytest.raises(MisuseError, match="is not within one range of pinned host memory"):
        calls.make(launch)
    device.memory.pin(host.ctypes.data, 8)
    device.memory.pin(host.ctypes.data + 8, 8)
    with pytest.raises(MisuseError, match="is not within one range of pinned host memory"):
        calls.make(launch)
    device.memory.unpin(host.ctypes.data)
    device.memory.unpin(host.ctypes.data + 8)
    device.memory.pin(host.ctypes.data, 16)
    calls.make(launch)
    with pytest.raises(MisuseError, match="is unpinned while a copy is in flight"):
        sys.modules["cupy.cuda"].runtime.hostUnregister(host.ctypes.data)
    stream.synchronize()
    np.testing.assert_array_equal(device.memory.bytes_of(Block(address, 16))[0], host)


def test_what_is_left_on_the_device_is_noticed(device: Device) -> None:
    device.check()
    address = device.memory.allocate(16)
    with pytest.raises(AssertionError, match="16 bytes of device memory are not freed"):
        device.check()
    device.memory.free(address)
    host = np.zeros(8)
    device.memory.pin(host.ctypes.data, 64)
    with pytest.raises(AssertionError, match="still pinned"):
        device.check()


def test_a_failure_on_the_device_fails_every_later_call(device: Device) -> None:
    device.faults["launch"] = Fault(719, first=2, times=1, late=True)
    for _ in range(2):
        device.work(ONE, "launch", nothing, fault=device.enter("launch"))
    with pytest.raises(Exception, match="CUDA error 719"):
        device.finish_all()
    with pytest.raises(Exception, match="CUDA error 719"):
        device.enter("anything")


def test_copies_over_a_slow_link_take_their_time(device: Device) -> None:
    device.link_rate = 2e6
    result = product()
    spans = [span for span in result.timeline.spans if span.kind in ("upload", "download")]
    assert spans
    for span in spans:
        assert (span.end - span.start) / 1e9 >= span.bytes / device.link_rate / 2


def test_threads_that_look_up_a_function_at_once_get_the_same(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the one that only one thread has got would be freed, while C code calls it."""
    library, made, others = ctypes.PyDLL("libcuda.so.1"), libraries.Function, list[object]()

    def make(*given: Any) -> libraries.Function:
        if not others:
            others.append(None)
            others[0] = library.cuCtxSetCurrent  # by another thread meanwhile
        return made(*given)

    monkeypatch.setattr(libraries, "Function", make)
    assert library.cuCtxSetCurrent is others[0] is library.cuCtxSetCurrent


def test_freeing_a_stream_waits_for_no_lock(device: Device) -> None:
    """The thread that frees it may hold a lock for which the thread with the device's lock waits."""
    streams = [sys.modules["cupy.cuda"].Stream()]
    freeing = threading.Thread(target=streams.clear, daemon=True)
    with device.lock:
        freeing.start()
        freeing.join(10)
        assert not freeing.is_alive()


def test_a_kernel_that_the_fake_lacks_is_named(device: Device) -> None:
    with pytest.raises(NotImplementedError, match="the fake device cannot run kernel ozaki_facts"):
        sys.modules["cupy.cuda"].function.Module().get_function("ozaki_facts")


def test_nothing_of_the_fake_remains_after_it() -> None:
    def state() -> Any:
        ours = {name: module for name, module in sys.modules.items() if "cup" in name or PACKAGE in name}
        return ours, dict(vars(backends)), ctypes.CDLL, ctypes.PyDLL

    before = state()
    with fake_cuda():
        product()
        assert state() != before
    assert state() == before
