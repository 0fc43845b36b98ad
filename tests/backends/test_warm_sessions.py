"""What sessions of the CUDA backend leave on the device for the next one: streams, kernels, an arena."""

import importlib
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import oocgemm
from oocgemm import backends
from oocgemm.planning import Budgets, Plan
from tests.support.fake_cuda import fake_cuda
from tests.support.fake_cuda.device import Device, Fault

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


def calls_of(device: Device, *names: str) -> list[str]:
    return [name for name, _ in device.calls if name in names]


CREATING = "malloc", "Stream", "cublas.create", "Module.load"


def test_the_next_run_creates_nothing_on_the_device(device: Device) -> None:
    product()
    before = calls_of(device, *CREATING, "free")
    for _ in range(3):
        np.testing.assert_array_equal(product(), A @ A)
    created = calls_of(device, *CREATING, "free")[len(before) :]
    # Uploads that overlap use a stream each. If none overlapped in the first run, a later run creates one.
    assert created.count("Stream") <= 1
    # free(0) creates the context, where a run is not like one of the last half second.
    assert {name for name in created if name != "Stream"} <= {"free"}
    assert created.count("free") <= 3
    device.check()


def test_a_large_arena_is_freed(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    product()
    monkeypatch.setattr(warm(), "MAX_BRIEF_SHARE", 0)
    product()
    before = calls_of(device, "malloc")
    product()
    assert calls_of(device, "malloc") == [*before, "malloc"]


def warm() -> Any:
    return sys.modules["oocgemm.backends.cuda.warm"]


def test_an_arena_that_is_large_for_the_device_is_kept_for_a_while(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    product()
    monkeypatch.setattr(warm(), "MAX_KEPT_SHARE", 0)
    product()
    before = calls_of(device, "malloc")
    product()
    assert calls_of(device, "malloc") == before
    assert device.memory.allocated
    backends.shrink()
    assert not device.memory.allocated
    monkeypatch.setattr(warm(), "BRIEF_SECONDS", 0.01)
    product()
    freed = time.monotonic() + 10
    while device.memory.allocated and time.monotonic() < freed:
        time.sleep(0.01)
    assert not device.memory.allocated
    device.check()


def test_a_run_that_takes_a_large_arena_stops_its_timer(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    product()
    monkeypatch.setattr(warm(), "MAX_KEPT_SHARE", 0)
    product()
    (timer,) = warm()._timers
    session = opened(a_plan())
    assert timer.finished.is_set()
    backends.shrink()
    assert device.memory.allocated
    session.close()
    oocgemm.release()
    assert not device.memory.allocated
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


@pytest.mark.parametrize("failing", ["", "cublas.create", "malloc", "cublasGemmEx"])
def test_a_run_uses_the_handle_that_was_created_in_advance(device: Device, failing: str) -> None:
    """It also runs if cuBLAS could not be loaded in advance."""
    if failing:
        device.faults[failing] = Fault(status=2, times=1)
    multiplier().preload(0)
    multiplier()._preloads[0].join()
    np.testing.assert_array_equal(product(), A @ A)
    assert device.count("cublas.create") == (2 if failing == "cublas.create" else 1)
    oocgemm.release()
    assert calls_of(device, "cublas.destroy") == ["cublas.destroy"]
    device.check()


def test_a_run_uses_its_handle_only_after_it_was_loaded(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    created, goes_on, make = threading.Event(), threading.Event(), multiplier().make

    def slow(launch: Any) -> None:
        if threading.current_thread().name == "oocgemm-preload":
            created.set()
            assert goes_on.wait(60)
            device.calls.append(("loaded", ()))
        make(launch)

    monkeypatch.setattr(multiplier(), "make", slow)
    multiplier().preload(0)
    assert created.wait(60)
    threading.Timer(0.05, goes_on.set).start()
    np.testing.assert_array_equal(product(), A @ A)
    assert calls_of(device, "cublas.create", "loaded", "cublasGemmEx")[:2] == ["cublas.create", "loaded"]


def multiplier() -> Any:
    return importlib.import_module("oocgemm.backends.cuda.multiplier")
