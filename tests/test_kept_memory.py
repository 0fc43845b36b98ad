"""Pinned host memory that the CUDA backend keeps between the runs of a process."""

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import oocgemm
from oocgemm import backends
from oocgemm.errors import BackendError
from oocgemm.planning import Plan
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
