"""Failures of a GPU: the CUDA backend on a fake cupy that fails on demand."""

import ctypes
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call, patch

import numpy as np
import pytest

from oocgemm import backends
from oocgemm.backends import registry
from oocgemm.backends.base import InPlace
from oocgemm.errors import BackendError, OutOfMemoryError
from oocgemm.planning import (
    Budgets,
    GemmProblem,
    Kind,
    Layouts,
    Operation,
    Plan,
    TileShape,
    default_model,
    make_plan,
)
from oocgemm.system.memory import allocate

ARENA, FREE, NO_MEMORY, LAUNCH_FAILED = 0x10000000, 5 << 20, 2, 719
PROPERTIES = {
    "name": b"a stand-in",
    "major": 9,
    "minor": 0,
    "multiProcessorCount": 132,
    "sharedMemPerBlockOptin": 232448,
    "maxThreadsPerMultiProcessor": 2048,
    "totalGlobalMem": 1 << 37,
}
CUPY = ("cupy", "cupy.cuda", "cupy_backends", "cupy_backends.cuda", "cupy_backends.cuda.libs")


class CudaError(RuntimeError):
    """The error that cupy raises for the runtime; `status` is CUDA's error number."""

    def __init__(self, status: int) -> None:
        super().__init__(f"CUDA error {status}")
        self.status = status


class DriverError(RuntimeError):
    """The error that cupy raises for the driver."""


class CublasError(RuntimeError):
    """The error that cupy raises for cuBLAS."""


@pytest.fixture
def device() -> Iterator[SimpleNamespace]:
    """Import the backend's modules on a fake cupy; tests program its `runtime`, `cublas` and `driver`."""

    def check_status(status: int) -> None:
        if status:
            raise CudaError(status)

    runtime = MagicMock(CUDARuntimeError=CudaError)
    runtime.getDeviceCount.return_value = 1
    runtime.getDeviceProperties.return_value = PROPERTIES
    runtime.memGetInfo.return_value = FREE, 1 << 37
    runtime.malloc.return_value = ARENA
    cublas = MagicMock(CUBLASError=CublasError)
    driver = MagicMock(check_status=check_status, CUDADriverError=DriverError)
    cupy = MagicMock()
    cupy.cuda.runtime, cupy.cuda.driver = runtime, driver
    stood_in = dict.fromkeys(CUPY, cupy) | {"cupy.cuda": cupy.cuda}
    stood_in["cupy_backends.cuda.libs"] = MagicMock(cublas=cublas)
    with patch.dict(sys.modules, stood_in), patch.dict(vars(backends)):
        for name in [name for name in sys.modules if name.startswith("oocgemm.backends.cuda")]:
            del sys.modules[name]
        vars(backends).pop("cuda", None)
        with patch.object(registry, "missing_for_cuda", lambda: None):
            cuda, calls = (
                importlib.import_module(f"oocgemm.backends.cuda.{name}") for name in ("backend", "calls")
            )
            yield SimpleNamespace(
                runtime=runtime, cublas=cublas, cupy=cupy, backend=cuda.CudaBackend, calls=calls
            )


@pytest.fixture
def plan() -> Plan:
    problem = GemmProblem(64, 64, 64, "float64", "float64", "float64", "float64")
    budgets, layouts = Budgets(1 << 28, 1 << 28), Layouts()
    return make_plan(problem, budgets, default_model("cuda", 2), layouts, TileShape(32, 32, 32))


def idle(device: SimpleNamespace) -> bool:
    """Return whether each cuBLAS handle is idle, exactly once."""
    left = sys.modules["oocgemm.backends.cuda.multiplier"]._idle.values()
    return bool(sum(map(len, left)) == device.cublas.create.call_count)


def released(device: SimpleNamespace) -> bool:
    """Return whether the arena is freed and all cuBLAS handles are idle."""
    runtime = device.runtime
    freed = call(ARENA) in runtime.free.mock_calls or not runtime.malloc.called
    return freed and idle(device)


def test_a_device_without_room_for_the_arena_says_both_numbers(device: SimpleNamespace, plan: Plan) -> None:
    device.runtime.malloc.side_effect = CudaError(NO_MEMORY)
    said = r"the device refuses [\d.]+ [KM]iB, 5 MiB are free: pass a smaller --device-memory"
    with pytest.raises(OutOfMemoryError, match=said):
        device.backend().open(plan, "cublas")
    assert idle(device)


def test_the_limit_of_a_link_is_that_of_the_devices_address(device: SimpleNamespace) -> None:
    asked: list[str] = []

    def limit(address: str) -> float:
        asked.append(address)
        return 64e9

    device.runtime.deviceGetPCIBusId.return_value = "0000:1B:00.0"
    with patch("oocgemm.backends.cuda.pcie.link_limit", limit):
        device.runtime.deviceGetAttribute.return_value = 0
        assert device.backend().link_limit() == 64e9
        assert asked == ["0000:1B:00.0"]
        device.runtime.deviceGetAttribute.return_value = 1  # it shares page tables, by NVLink-C2C
        assert device.backend().link_limit() is None


@pytest.mark.parametrize("refuses", ["cublas", "a stream", "an event", "a kernel"])
def test_a_device_without_room_beside_the_arena_gives_it_back(
    device: SimpleNamespace, plan: Plan, refuses: str
) -> None:
    if refuses == "cublas":
        device.cublas.create.side_effect = CublasError("CUBLAS_STATUS_ALLOC_FAILED")
    elif refuses == "a stream":
        device.cupy.cuda.Stream.side_effect = CudaError(NO_MEMORY)
    elif refuses == "an event":
        device.cupy.cuda.Event.side_effect = CudaError(NO_MEMORY)
    else:  # of those that are loaded before anything runs, lest they wait for what does
        plan = replace(plan, problem=replace(plan.problem, checked="device"))
        device.cupy.cuda.nvrtc.getCUBIN.return_value = b"compiled"
        device.cupy.cuda.function.Module().load.side_effect = DriverError("CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(
        OutOfMemoryError, match=r"what the kernels take beside the buffers .*, 5 MiB are free"
    ):
        device.backend().open(plan, "cublas")
    assert refuses == "cublas" or released(device)


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_device_full_of_other_processes_is_out_of_memory(device: SimpleNamespace, name: str) -> None:
    device.runtime.free.side_effect = CudaError(NO_MEMORY)
    with pytest.raises(OutOfMemoryError, match="other processes use so much of CUDA device 0's memory"):
        backends.open_backend(name)


def test_a_device_that_does_not_answer_is_one_that_is_not_there(device: SimpleNamespace) -> None:
    device.runtime.getDeviceCount.side_effect = CudaError(100)
    with pytest.raises(BackendError, match="no CUDA device answers: CUDA error 100"):
        backends.open_backend("cuda")
    assert backends.open_backend("auto").name == "host"


def first(plan: Plan, kind: Kind) -> Operation:
    return next(operation for operation in plan.schedule() if operation.kind is kind)


def test_memory_that_cannot_be_locked_is_an_error_with_a_remedy(device: SimpleNamespace, plan: Plan) -> None:
    session = device.backend().open(plan, "cublas")
    device.runtime.hostRegister.side_effect = CudaError(NO_MEMORY)
    said = r"refuses to pin .*KiB of host memory .*--host-memory, or raise ulimit -l"
    with pytest.raises(BackendError, match=said):
        session.pin([np.ones((32, 32))])
    with pytest.raises(BackendError, match=said):
        session.submit(first(plan, Kind.UPLOAD), [np.ones((32, 32))], [])


def test_a_slot_pinned_by_its_reader_is_not_pinned_again(device: SimpleNamespace, plan: Plan) -> None:
    """Pinning in the submitting thread would delay all other submissions."""
    session, panel = device.backend().open(plan, "cublas"), np.ones((32, 32))
    session.pin([panel])
    with issued(device, {}):
        session.submit(first(plan, Kind.UPLOAD), [panel], [])
    assert device.runtime.hostRegister.call_count == 1


def test_slots_are_pinned_in_parts_that_no_copy_straddles(
    device: SimpleNamespace, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Submissions can run between the parts."""
    monkeypatch.setattr(sys.modules["oocgemm.backends.cuda.host_memory"], "PART", 4096)
    session, made = device.backend().open(plan, "cublas"), list[str]()
    panel = allocate(8192).view(np.float64).reshape(32, 32)
    with issued(device, {}, made):
        session.submit(first(plan, Kind.UPLOAD), [panel], [])
    begin = panel.ctypes.data
    expected = [call(begin, 4096, 0), call(begin + 4096, 4096, 0)]
    assert device.runtime.hostRegister.mock_calls[:2] == expected
    assert made.count("cuMemcpyAsync") == 2


@pytest.mark.parametrize(
    ("borders", "copies"), [([], 1), ([4096], 2), ([1280], 2), ([1408], 4), ([1408, 2048], 6)]
)
def test_a_zero_copy_panel_is_split_at_borders_of_pinned_ranges(
    device: SimpleNamespace, plan: Plan, borders: list[int], copies: int
) -> None:
    """Rows of 256 bytes with a pitch of 640.

    A border between rows splits the copy, a border inside a row splits the row.
    """
    session, made = device.backend().open(plan, "cublas"), list[str]()
    block = allocate(32 * 640).view(np.float64).reshape(32, 80)[:, :32]
    at = [block.ctypes.data + border for border in borders]
    with issued(device, {}, made):
        session.submit(first(plan, Kind.UPLOAD), InPlace(block, at), [])
    assert made.count("cuMemcpy2DAsync_v2") == copies
    device.runtime.hostRegister.assert_not_called()


def test_operands_are_pinned_while_no_operation_is_submitted(device: SimpleNamespace, plan: Plan) -> None:
    session = device.backend().open(plan, "cublas")
    memory, register = session._host, device.runtime.hostRegister
    thread = threading.Thread(target=session.pinner.pin, args=(4096, 4096))
    memory._waiting.add(0)  # some thread that has yet to get the driver
    with memory.submitting():
        thread.start()
        thread.join(0.05)
        register.assert_not_called()
    thread.join(0.05)
    register.assert_not_called()
    memory._waiting.discard(0)
    thread.join()
    register.assert_called_once_with(4096, 4096, 0)
    session.pinner.unpin(4096)
    device.runtime.hostUnregister.assert_called_once_with(4096)


def test_an_abandoned_operation_blocks_nobody(device: SimpleNamespace, plan: Plan) -> None:
    memory = device.backend().open(plan, "cublas")._host
    with patch.object(memory, "_driver") as driver:
        driver.acquire.side_effect = KeyboardInterrupt
        with pytest.raises(KeyboardInterrupt), memory.submitting():
            pass
    with pytest.raises(CudaError), memory.submitting():
        raise CudaError(LAUNCH_FAILED)
    memory.pinner.pin(4096, 4096)  # would wait for either


def issued(device: SimpleNamespace, status: dict[str, int], made: list[str] | None = None) -> Any:
    """Return a patch of the driver whose calls are recorded and return a status by name."""

    def driver(name: str, *types: Any) -> Callable[..., int]:
        def act(*arguments: Any) -> int:
            if made is not None:
                made.append(name)
            return status.get(name, 0)

        return act

    return patch.object(device.calls, "_cuda", driver)


@pytest.mark.parametrize(
    ("status", "kind", "address", "pinned"),
    [
        (0, 1, 8192, True),
        (0, 1, 8192 + 4096, True),
        (0, 1, 8192 + 4097, False),  # the last byte is in no locked range, or in another
        (1, 1, 8192, False),  # what the driver has never heard of
        (0, 2, 8192, False),  # memory of a device
    ],
)
def test_memory_within_one_pinned_range_counts_as_pinned(
    device: SimpleNamespace, status: int, kind: int, address: int, pinned: bool
) -> None:
    """The pinned range is 8 KiB from address 8192 on."""
    attributes = {2: kind, 11: 8192, 12: 8192}

    def ask(found: int, attribute: int, of: int) -> int:
        size = ctypes.sizeof(ctypes.c_uint if attribute == 2 else ctypes.c_size_t)
        assert of == address
        ctypes.memmove(found, attributes[attribute].to_bytes(size, sys.byteorder), size)
        return status

    with patch.object(device.calls, "_cuda", lambda name, *types: ask):
        assert device.backend().is_pinned(address, 4096) == pinned


def test_after_a_failed_launch_all_is_given_back(device: SimpleNamespace, plan: Plan) -> None:
    """Even though every CUDA call fails after the first failure."""
    session, runtime, panel = device.backend().open(plan, "cublas"), device.runtime, np.ones((32, 32))
    with issued(device, {}):
        session.submit(first(plan, Kind.UPLOAD), [panel], [])
    for name in ("deviceSynchronize", "hostUnregister", "free"):
        getattr(runtime, name).side_effect = CudaError(LAUNCH_FAILED)
    session.close()
    assert released(device)
    runtime.deviceSynchronize.assert_called_once()
    runtime.hostUnregister.assert_called_once_with(panel.ctypes.data)
    session.close()
    runtime.hostUnregister.assert_called_once()
    assert idle(device)


def test_cublas_is_kept_for_the_next_run_but_not_shared(device: SimpleNamespace, plan: Plan) -> None:
    device.cublas.create.side_effect = [11, 12]
    first_one, second = (device.backend().open(plan, "cublas") for _ in range(2))
    first_one.close()
    third = device.backend().open(plan, "cublas")
    assert [one._multiplier._blas for one in (second, third)] == [12, 11]
    for one in (second, third):
        one.close()
    assert idle(device)


@pytest.mark.parametrize("name", ["cuEventRecord", "cuMemcpyAsync", "cuStreamWaitEvent", "cuLaunchKernel"])
def test_every_status_of_a_launch_is_checked(device: SimpleNamespace, name: str) -> None:
    calls, stream = device.calls, MagicMock()

    def record() -> None:
        calls.record_around([calls.copy(1, 2, 3, stream)], MagicMock(), MagicMock(), stream)

    acts = {
        "cuStreamWaitEvent": lambda: calls.wait(stream, MagicMock()),
        "cuLaunchKernel": lambda: calls.launch(1, (1, 1, 1), (256, 1, 1), 0, ()),
    }
    with issued(device, {name: LAUNCH_FAILED}), pytest.raises(CudaError, match="CUDA error 719"):
        acts.get(name, record)()


def test_the_status_of_each_of_several_launches_is_checked(device: SimpleNamespace) -> None:
    fine, failing = (
        (lambda: 0, device.calls.driver.check_status),
        (lambda: 7, device.calls.driver.check_status),
    )
    for launches in ([failing, fine], [fine, failing]):
        with issued(device, {}), pytest.raises(CudaError, match="CUDA error 7"):
            device.calls.record_around(launches, MagicMock(), MagicMock(), MagicMock())
    with issued(device, {}), pytest.raises(CudaError, match="CUDA error 7"):
        device.calls.make(failing)


def test_a_failed_operation_raises_in_its_waiters(device: SimpleNamespace, plan: Plan) -> None:
    session = device.backend().open(plan, "cublas")
    with issued(device, {}):
        token = session.submit(first(plan, Kind.UPLOAD), [np.ones((32, 32))], [])
    token.end.synchronize.side_effect = CudaError(LAUNCH_FAILED)
    with issued(device, {"cuEventQuery": LAUNCH_FAILED}), pytest.raises(CudaError, match="CUDA error 719"):
        token.synchronize()


def test_a_stream_waits_for_host_and_device_before_its_copy(device: SimpleNamespace, plan: Plan) -> None:
    """Even if the waits end late."""
    session, block, made = device.backend().open(plan, "cublas"), np.ones((32, 32)), list[str]()
    host = MagicMock()
    host.synchronize.side_effect = lambda: made.append("the host")
    with issued(device, {}, made):
        upload = session.submit(first(plan, Kind.UPLOAD), [block], [host])
        assert made == ["the host", "cuEventRecord", "cuMemcpyAsync", "cuEventRecord"]
        made.clear()
        download = session.submit(first(plan, Kind.DOWNLOAD), [block], [upload])
        assert made == ["cuStreamWaitEvent", "cuEventRecord", "cuMemcpyAsync", "cuEventRecord"]
        made.clear()
        session.submit(first(plan, Kind.DOWNLOAD), [block], [download])
        assert "cuStreamWaitEvent" not in made
