"""Failures of a GPU: the CUDA backend on a fake CUDA device that fails on demand."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import oocgemm
from oocgemm import backends
from oocgemm.errors import BackendError, ExecutionError, OutOfMemoryError
from oocgemm.planning import (
    Budgets,
    Kind,
    Layouts,
    Operation,
    Plan,
    TileShape,
    default_model,
    make_plan,
)
from oocgemm.system.resources import allocate
from tests.support import faults
from tests.support.command import own_threads
from tests.support.fake_cuda import PACKAGE, Device, Fault, fake_cuda
from tests.support.faulty_runs import saved
from tests.support.problems import Array
from tests.support.products import changed, product_of
from tests.support.suite import each_value, slow

NO_MEMORY, NO_DEVICE, LAUNCH_FAILED = 2, 100, 719


@pytest.fixture
def device() -> Iterator[Device]:
    with fake_cuda(capacity=5 << 20) as found:
        yield found


@pytest.fixture
def plan() -> Plan:
    problem = product_of(64, 64, 64, "float64", "float64", "float64", "float64")
    budgets, layouts = Budgets(1 << 28, 1 << 28), Layouts()
    return make_plan(problem, budgets, default_model("cuda", 2), layouts, TileShape(32, 32, 32))


def module(name: str) -> Any:
    """Return the module of the CUDA backend that defines a name."""
    for key, found in list(sys.modules.items()):
        if key.startswith(PACKAGE) and getattr(vars(found).get(name), "__module__", "") == key:
            return found
    raise LookupError(f"no module of {PACKAGE} defines {name}")


def opened(plan: Plan) -> Any:
    return backends.open_backend("cuda").open(plan, "cublas")


def panel() -> Array:
    """Return host memory for one panel, filled with ones."""
    slot: Array = allocate(8192).view(np.float64).reshape(32, 32)
    slot[...] = 1
    return slot


def first(plan: Plan, kind: Kind) -> Operation:
    return next(operation for operation in plan.schedule() if operation.kind is kind)


def pin(array: Array) -> None:
    sys.modules["cupy.cuda"].runtime.hostRegister(array.ctypes.data, array.nbytes, 0)


def cublas_is_idle(device: Device, plan: Plan) -> bool:
    """Return whether the next run reuses a cuBLAS handle instead of creating one."""
    created = device.count("cublas.create")
    opened(plan).close()
    return device.count("cublas.create") == created


def test_a_device_without_room_for_the_arena_says_both_numbers(device: Device, plan: Plan) -> None:
    device.faults["malloc"] = Fault(NO_MEMORY, times=1)
    said = r"the device refuses [\d.]+ [KM]iB, 5 MiB are free: pass a smaller --device-memory"
    with pytest.raises(OutOfMemoryError, match=said):
        opened(plan)
    assert cublas_is_idle(device, plan)


def test_the_limit_of_a_link_is_that_of_the_devices_address(device: Device) -> None:
    asked: list[str] = []

    def limit(address: str) -> float:
        asked.append(address)
        return 64e9

    runtime, backend = sys.modules["cupy.cuda"].runtime, backends.open_backend("cuda")
    with patch(f"{PACKAGE}.gpu.pci_limit", limit):
        assert backend.link_limit() == 64e9
        assert asked == [runtime.deviceGetPCIBusId(0)]
        # An attribute of 1 means that the device shares the host's page tables, by NVLink-C2C.
        with patch.object(runtime, "deviceGetAttribute", lambda *_: 1):
            assert backend.link_limit() is None


@pytest.mark.parametrize("refuses", ["cublas.create", "Stream", "Event", "Module.load"])
def test_a_device_without_room_beside_the_arena_gives_it_back(
    device: Device, plan: Plan, refuses: str
) -> None:
    # With checks, all kernels are loaded before the run: loading one later would wait for running kernels.
    if refuses == "Module.load":
        plan = replace(plan, problem=changed(plan.problem, checked="device"))
    device.faults[refuses] = Fault(NO_MEMORY)
    with pytest.raises(
        OutOfMemoryError, match=r"no room left for the kernels and their workspace .*, [\d.]+ MiB are free"
    ):
        opened(plan)
    device.faults.clear()
    assert refuses == "cublas.create" or cublas_is_idle(device, plan)
    device.check()


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_device_full_of_other_processes_is_out_of_memory(device: Device, name: str) -> None:
    device.faults["free"] = Fault(NO_MEMORY)
    with pytest.raises(OutOfMemoryError, match="other processes use nearly all memory of CUDA device 0"):
        backends.open_backend(name)


def test_a_device_that_does_not_answer_is_one_that_is_not_there(device: Device) -> None:
    device.faults["getDeviceCount"] = Fault(NO_DEVICE)
    with pytest.raises(BackendError, match="no CUDA device answers: CUDA error 100"):
        backends.open_backend("cuda")
    assert backends.open_backend("auto").name == "host"


def test_memory_that_cannot_be_locked_is_an_error_with_a_remedy(device: Device, plan: Plan) -> None:
    session = opened(plan)
    device.faults["hostRegister"] = Fault(NO_MEMORY)
    said = r"refuses to pin .*KiB of host memory .*--host-memory \(or --memory\), or raise ulimit -l"
    with pytest.raises(BackendError, match=said):
        session.pin([panel()])
    with pytest.raises(BackendError, match=said):
        session.submit(first(plan, Kind.UPLOAD), [panel()], [])
    session.close()
    device.check()


def test_a_slot_pinned_by_its_reader_is_not_pinned_again(device: Device, plan: Plan) -> None:
    """The thread that reads a panel has pinned its memory.

    Pinning in the submitting thread would delay all other submissions.
    """
    session, slot = opened(plan), panel()
    before = device.count("hostRegister")
    session.pin([slot])
    session.submit(first(plan, Kind.UPLOAD), [slot], [])
    assert device.count("hostRegister") == before + 1
    session.close()
    device.check()


def test_slots_are_pinned_in_parts_that_no_copy_straddles(
    device: Device, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buffer is pinned in several calls, so that other threads can submit operations between them."""
    backends.open_backend("cuda")
    monkeypatch.setattr(module("HostMemory"), "MAX_KEPT", 0)
    session, slot = opened(plan), panel()
    monkeypatch.setattr(module("HostMemory"), "PART", 4096)
    session.submit(first(plan, Kind.UPLOAD), [slot], [])
    begin = slot.ctypes.data
    assert device.memory.pinned == {begin: 4096, begin + 4096: 4096}
    assert device.count("cuMemcpyAsync") == 2
    session.close()
    device.check()


def test_an_abandoned_operation_blocks_nobody(device: Device) -> None:
    backends.open_backend("cuda")
    memory, slot = module("HostMemory").HostMemory(sys.modules["cupy.cuda"].Device(0)), panel()
    with pytest.raises(OSError, match="failed"), memory.submitting():
        raise OSError("failed")
    memory.pin_slot(slot.ctypes.data, slot.nbytes)  # would block if a lock were still held
    memory.close(keep=False)
    device.check()


def test_memory_within_one_pinned_range_counts_as_pinned(device: Device) -> None:
    backend, whole = backends.open_backend("cuda"), allocate(3 * 4096)
    begin, device_memory = whole.ctypes.data, device.memory.allocate(8192)
    pin(whole[:8192])
    pin(whole[8192:])
    assert backend.is_pinned(begin, 4096)
    assert backend.is_pinned(begin + 4096, 4096)
    assert not backend.is_pinned(begin + 4097, 4096)  # its last byte is in another pinned range
    assert not backend.is_pinned(begin + 3 * 4096 + 4096, 1)
    assert not backend.is_pinned(device_memory, 4096)


def test_after_a_failed_launch_all_is_given_back(device: Device, plan: Plan) -> None:
    """A failed run frees and unpins its memory, although every CUDA call fails after the first failure."""
    session, slot = opened(plan), panel()
    (arena,) = device.memory.pinned
    device.faults["cuMemcpyAsync"] = Fault(LAUNCH_FAILED, late=True)
    token = session.submit(first(plan, Kind.UPLOAD), [slot], [])
    with pytest.raises(RuntimeError, match="CUDA error 719"):
        token.synchronize()
    with pytest.raises(RuntimeError, match="CUDA error 719"):
        token.synchronize()
    before = len(device.calls)
    session.close()
    made = device.calls[before:]
    assert [name for name, _ in made] == ["deviceSynchronize", *["hostUnregister"] * 2, "free"]
    assert made[1][1] == (arena,)
    assert made[2][1] == (slot.ctypes.data,)
    session.close()
    assert device.count("hostUnregister") == 2


def test_cublas_is_kept_for_the_next_run_but_not_shared(device: Device, plan: Plan) -> None:
    sessions = [opened(plan), opened(plan)]
    assert device.count("cublas.create") == 2
    for _ in range(2):
        sessions.pop(0).close()
        sessions.append(opened(plan))
        assert device.count("cublas.create") == 2
    for session in sessions:
        session.close()
    device.check()


A, B = (np.arange(40.0 * 40).reshape(40, 40) % size for size in (5, 7))
FAILING = [
    *("getDeviceCount", "malloc", "Stream", "Event", "cublas.create", "hostRegister"),
    *("cuMemcpyAsync", "cuEventRecord", "cuStreamWaitEvent", "cublasSetStream_v2", "cublasGemmEx"),
    *("cuEventElapsedTime", "Event.synchronize"),
]
CASES = [(share, name) for share in (0.0, 0.5, 1.0) for name in FAILING]
LAST = ("malloc", "cuMemcpyAsync", "cublasGemmEx", "Event.synchronize")
QUICK = [(share, name) for share, name in CASES if share == 0 or (share == 1 and name in LAST)]


def product(*operands: Any, **options: Any) -> oocgemm.Result:
    """Multiply the operands, or A and B in memory."""
    result: oocgemm.Result = oocgemm.gemm(
        *(operands or (A, B)), backend="cuda", kernel="cublas", tile="20x20x20", overwrite=True, **options
    )
    return result


@each_value
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize(("share", "name"), QUICK + slow(*(case for case in CASES if case not in QUICK)))
def test_a_run_whose_call_fails_leaves_nothing_behind(
    device: Device, name: str, share: float, stored: bool, tmp_path: Path
) -> None:
    """Make one call of a run fail: the first call of this function, one in the middle, or the last.

    Stored operands pass through host slots, and operands in memory through the ring.
    """
    device.memory.capacity = 1 << 30
    operands: tuple[Any, ...] = (*saved(tmp_path, A, B), tmp_path / "C.npy") if stored else (A, B)
    product(*operands)
    oocgemm.release()  # so that host memory is pinned again
    calls = device.count(name)
    start = calls + 1 + int(share * (calls - 1))
    device.faults[name] = Fault(LAUNCH_FAILED, first=min(start, 2 * calls - 1), times=1)
    try:
        result = product(*operands)
    except oocgemm.OocGemmError as error:
        assert "CUDA error 719" in str(error)
    else:  # a failure while cuBLAS loads its kernels may be harmless, and a second run makes fewer calls
        np.testing.assert_array_equal(result.out[:], A @ B)
    device.faults.clear()
    device.check()
    assert own_threads(kept=True) == []
    np.testing.assert_array_equal(product(*operands).out[:], A @ B)


@pytest.mark.parametrize("fails", ["read_A", "write_C"])
def test_a_store_that_fails_leaves_nothing_on_the_device(device: Device, fails: str, tmp_path: Path) -> None:
    device.memory.capacity = 1 << 30
    fault = faults.Fault(OSError("no more"), first=3)
    with faults.faulty_stores(**{fails: fault}), pytest.raises(ExecutionError, match="no more"):
        product(*saved(tmp_path, A, B), tmp_path / "C.npy")
    device.check()


@pytest.mark.parametrize("name", ["cuMemcpyAsync", "cublasGemmEx"])
def test_a_command_that_fails_on_the_device_ends_the_run(device: Device, name: str) -> None:
    device.memory.capacity = 1 << 30
    device.faults[name] = Fault(LAUNCH_FAILED, first=9, late=True)
    with pytest.raises(ExecutionError, match="CUDA error 719"):
        product()
    oocgemm.release()
    assert own_threads(kept=True) == []


@pytest.mark.parametrize("name", ["cuEventRecord", "cuMemcpyAsync", "cuStreamWaitEvent", "cuLaunchKernel"])
def test_every_status_of_a_launch_is_checked(device: Device, name: str) -> None:
    backends.open_backend("cuda")
    calls, cuda = module("record_around"), sys.modules["cupy.cuda"]
    stream, event = cuda.Stream(), cuda.Event()
    to, source = device.memory.allocate(8), device.memory.allocate(8)
    acts = {
        "cuStreamWaitEvent": lambda: calls.wait(stream, event),
        "cuLaunchKernel": lambda: calls.launch(1, (1, 1, 1), (256, 1, 1), 0, ()),
    }
    copy = calls.copy(to, source, 8, stream)
    device.faults[name] = Fault(LAUNCH_FAILED)
    with pytest.raises(RuntimeError, match="CUDA error 719"):
        acts.get(name, lambda: calls.record_around([copy], event, event, stream))()


def test_the_status_of_each_of_several_launches_is_checked(device: Device) -> None:
    backends.open_backend("cuda")
    calls, cuda = module("record_around"), sys.modules["cupy.cuda"]
    fine, failing = ((lambda: 0, cuda.driver.check_status), (lambda: 7, cuda.driver.check_status))
    for launches in ([failing, fine], [fine, failing]):
        with pytest.raises(RuntimeError, match="CUDA error 7"):
            calls.record_around(launches, cuda.Event(), cuda.Event(), cuda.Stream())
    with pytest.raises(RuntimeError, match="CUDA error 7"):
        calls.make(failing)


def test_a_stream_waits_for_host_and_device_before_its_copy(device: Device, plan: Plan) -> None:
    """A copy is submitted while what it waits for is still running."""
    session, slot = opened(plan), panel()
    session.pin([slot])

    class Host:
        def synchronize(self) -> None:
            device.enter("the host")

    def submitted(kind: Kind, after: list[Any]) -> tuple[Any, list[str]]:
        before = len(device.calls)
        token = session.submit(first(plan, kind), [slot], after)
        return token, [name for name, _ in device.calls[before:] if name.startswith(("cu", "the"))]

    upload, made = submitted(Kind.UPLOAD, [Host()])
    assert made == ["the host", "cuEventRecord", "cuMemcpyAsync", "cuEventRecord"]
    download, made = submitted(Kind.DOWNLOAD, [upload])
    assert made == ["cuStreamWaitEvent", "cuEventRecord", "cuMemcpyAsync", "cuEventRecord"]
    _, made = submitted(Kind.DOWNLOAD, [download])
    assert "cuStreamWaitEvent" not in made
    session.close()
    device.check()


def test_a_multiply_waits_for_checksums_of_an_old_c_alone(device: Device, plan: Plan) -> None:
    """The checksums of panels are computed while the Multiply runs, so it does not wait for them."""
    problem = changed(plan.problem, beta=1, checked="device")
    checked = make_plan(
        problem, Budgets(1 << 28, 1 << 28), default_model("cuda", 2), Layouts(), TileShape(32, 32, 32)
    )
    session = opened(checked)
    session.checksums.begin(0)
    uploads = {op.operand: op for op in reversed(list(checked.schedule())) if op.kind is Kind.UPLOAD}
    slots = {x: panel() for x in uploads}
    tokens = {x: session.submit(op, [slots[x]], []) for x, op in uploads.items()}
    before, compute = len(device.calls), session._streams["compute"]
    with compute:
        session.submit(first(checked, Kind.MULTIPLY), [], list(tokens.values()))
    calls = [given for name, given in device.calls[before:] if name == "cuStreamWaitEvent"]
    awaited = {event for stream, event, _ in calls if stream == compute.ptr}
    assert {x for x, token in tokens.items() if token.end.ptr in awaited} == {"C"}
    assert {x for x, token in tokens.items() if token.own.end.ptr in awaited} == {"A", "B"}
    session.close()
    device.check()
