"""Pinned host memory that the CUDA backend keeps between the runs of a process."""

import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import oocgemm
from oocgemm import backends
from oocgemm.errors import BackendError
from oocgemm.planning import Budgets, Plan
from tests.fake_cuda import fake_cuda
from tests.fake_cuda.device import Device, Fault

NO_MEMORY = 2  # cudaErrorMemoryAllocation
A = np.arange(64.0 * 64).reshape(64, 64) % 7
BUDGETS: dict[str, Any] = {"device_memory": "256MiB", "host_memory": "64MiB"}


@pytest.fixture
def device() -> Iterator[Device]:
    with fake_cuda() as device:
        yield device


def product(**options: Any) -> Any:
    return oocgemm.matmul(A, A, backend="cuda", kernel="cublas", **BUDGETS | options)


def opened(plan: Plan) -> Any:
    return backends.open_backend("cuda").open(plan, "cublas")


def a_plan() -> Plan:
    return oocgemm.plan(A, A, backend="cuda", kernel="cublas", **BUDGETS)


def test_the_next_run_finds_its_host_slots_pinned(device: Device) -> None:
    for _ in range(3):
        np.testing.assert_array_equal(product(), A @ A)
    assert device.count("hostRegister") == 1
    device.check()


def test_release_unpins_the_memory(device: Device) -> None:
    product()
    assert device.memory.pinned
    oocgemm.release()
    assert not device.memory.pinned
    oocgemm.release()
    np.testing.assert_array_equal(product(), A @ A)
    device.check()


def test_a_run_with_a_small_budget_does_not_take_more(device: Device) -> None:
    product(host_memory="64MiB", tile="64x64x64")
    (kept,) = device.memory.pinned.values()
    product(host_memory=kept - (1 << 20), tile="32x32x32")
    (now,) = device.memory.pinned.values()
    assert now <= kept - (1 << 20)


def test_concurrent_runs_do_not_share_memory(device: Device) -> None:
    sessions = [opened(a_plan()) for _ in range(2)]
    first, second = (session.host_arena for session in sessions)
    assert not np.shares_memory(first, second)
    for session in sessions:
        session.close()
    assert len(device.memory.pinned) == 1  # that of one run is kept
    device.check()


def test_large_slots_are_not_kept(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    backends.open_backend("cuda")
    monkeypatch.setattr(sys.modules["oocgemm.backends.cuda.host_memory"], "MAX_KEPT", 0)
    session = opened(a_plan())
    assert session.host_arena is None
    session.close()
    np.testing.assert_array_equal(product(), A @ A)
    assert not device.memory.pinned


def test_refused_pinning_says_what_to_do(device: Device) -> None:
    device.faults["hostRegister"] = Fault(NO_MEMORY)
    with pytest.raises(BackendError, match=r"refuses to pin .*MiB of host memory .*--host-memory, or raise"):
        product()
    assert not device.memory.pinned
    device.faults.clear()
    np.testing.assert_array_equal(product(), A @ A)
    device.check()


def test_a_run_with_large_slots_frees_what_was_kept(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept would come on top of the host budget of the run."""
    product()
    assert device.memory.pinned
    monkeypatch.setattr(sys.modules["oocgemm.backends.cuda.host_memory"], "MAX_KEPT", 0)
    session = opened(a_plan())
    assert not device.memory.pinned
    session.close()
    device.check()


def calls_of(device: Device, *names: str) -> list[str]:
    return [name for name, _ in device.calls if name in names]


CREATING = "malloc", "Stream", "cublas.create", "Module.load"


def test_the_next_run_creates_nothing_on_the_device(device: Device) -> None:
    product()
    before = calls_of(device, *CREATING, "free")
    for _ in range(3):
        np.testing.assert_array_equal(product(), A @ A)
    created = calls_of(device, *CREATING, "free")[len(before) :]
    assert created == ["free"] * 3  # opening the backend calls free(0), which creates the context
    device.check()


def test_free_memory_contains_what_the_next_run_can_take(device: Device) -> None:
    backend = backends.open_backend("cuda")
    before = backend.free_memory()
    product()
    assert device.memory.allocated
    assert backend.free_memory() == before
    oocgemm.release()
    assert not device.memory.allocated
    assert backend.free_memory() == before
    assert calls_of(device, "cublas.destroy") == ["cublas.destroy"]


def test_a_session_that_failed_leaves_nothing(device: Device) -> None:
    session = opened(a_plan())
    streams = {stream.ptr for stream in session._streams.values()}
    session.close(failed=True)
    assert not device.memory.allocated
    later = opened(a_plan())
    assert not streams & {stream.ptr for stream in later._streams.values()}
    later.close()
    device.check()


@pytest.mark.parametrize("name", ["cuMemcpyAsync", "cublasGemmEx", "cuEventRecord"])
def test_a_failed_launch_after_warm_runs_leaves_no_memory(device: Device, name: str) -> None:
    product()
    device.faults[name] = Fault(719, first=device.count(name) + 1, times=1)
    with pytest.raises(oocgemm.ExecutionError, match="CUDA error 719"):
        product()
    assert not device.memory.allocated
    device.faults.clear()


def test_a_device_without_room_frees_the_small_arena_first(device: Device) -> None:
    product()
    kept = device.memory.allocated
    assert kept
    device.memory.capacity = 2 * kept
    large = np.ones((256, 256))
    with pytest.raises(oocgemm.OutOfMemoryError, match="the device refuses"):
        oocgemm.matmul(large, large, backend="cuda", kernel="cublas", **BUDGETS)
    assert not device.memory.allocated
    np.testing.assert_array_equal(product(), A @ A)
    device.check()


def test_a_run_with_a_small_device_budget_does_not_keep_a_larger_arena(device: Device) -> None:
    large = np.ones((512, 512))
    oocgemm.matmul(large, large, backend="cuda", kernel="cublas", **BUDGETS)
    kept = device.memory.allocated
    plan = replace(a_plan(), budgets=Budgets(kept - 1, 64 << 20))
    session = opened(plan)
    assert device.memory.allocated < kept
    session.close()
    device.check()


def test_release_during_runs_takes_only_what_is_idle(device: Device) -> None:
    done = threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(6):
                np.testing.assert_array_equal(product(), A @ A)
        except BaseException as error:
            failures.append(error)

    def disturb() -> None:
        while not done.is_set():
            oocgemm.release()

    workers, other = [threading.Thread(target=work) for _ in range(3)], threading.Thread(target=disturb)
    for thread in (*workers, other):
        thread.start()
    for thread in workers:
        thread.join()
    done.set()
    other.join()
    assert failures == []
    device.check()


def test_concurrent_runs_leave_one_arena(device: Device) -> None:
    sessions = [opened(a_plan()) for _ in range(4)]
    assert len({session._arena for session in sessions}) == 4
    one = device.memory.allocated // 4
    for session in sessions:
        session.close()
    assert device.memory.allocated == one
    device.check()
