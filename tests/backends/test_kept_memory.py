"""Pinned host memory that the CUDA backend keeps between the runs of a process: host slots, and the ring."""

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oocgemm
from oocgemm import Plan, backends
from oocgemm.planning.cost.footprint import ring_shape
from oocgemm.system import pool
from tests.support.command import own_threads
from tests.support.fake_cuda import fake_cuda
from tests.support.fake_cuda.device import Device, Fault
from tests.support.faulty_runs import saved
from tests.support.problems import Array

NO_MEMORY = 2  # cudaErrorMemoryAllocation
A = np.arange(64.0 * 64).reshape(64, 64) % 7
BUDGETS: dict[str, Any] = {"device_memory": "256MiB", "host_memory": "64MiB"}

Multiply = Callable[..., Array]


@pytest.fixture
def device() -> Iterator[Device]:
    with fake_cuda() as device:
        yield device


@pytest.fixture(params=["memory", "stored"])
def product(request: pytest.FixtureRequest, tmp_path: Path) -> Multiply:
    """Return a function that multiplies A by A, in memory (through the ring) or stored (host slots)."""
    operands: list[Any] = [A, A]
    if request.param == "stored":
        operands = [*saved(tmp_path, A, A, by_columns=True), tmp_path / "C.npy"]

    def multiply(**options: Any) -> Array:
        fixed: dict[str, Any] = {"backend": "cuda", "kernel": "cublas", "overwrite": True}
        return np.array(oocgemm.gemm(*operands, **fixed | BUDGETS | options).out[:])

    return multiply


def opened(plan: Plan) -> Any:
    return backends.open_backend("cuda").open(plan, "cublas")


def a_plan(*operands: Any) -> Plan:
    return oocgemm.plan(*(operands or (A, A)), backend="cuda", kernel="cublas", **BUDGETS)


def stored_plan(folder: Path) -> Plan:
    return a_plan(*saved(folder, A, A, by_columns=True), folder / "C.npy")


def host_memory() -> Any:
    """Return the module of the CUDA backend on the fake device that keeps memory."""
    backends.open_backend("cuda")
    return sys.modules["oocgemm.backends.cuda.host_memory"]


def test_the_next_run_finds_its_memory_pinned(device: Device, product: Multiply) -> None:
    pinned = []
    for _ in range(3):
        np.testing.assert_array_equal(product(), A @ A)
        pinned.append((dict(device.memory.pinned), sorted(own_threads(kept=True))))
    assert pinned[0] == pinned[1] == pinned[2]
    assert device.count("hostRegister") == len(pinned[0][0]) > 0
    assert device.count("hostUnregister") == 0
    device.check()


def test_release_unpins_the_memory(device: Device, product: Multiply) -> None:
    product()
    assert device.memory.pinned
    for _ in range(2):
        oocgemm.release()
        assert not device.memory.pinned
        assert own_threads(kept=True) == []
    np.testing.assert_array_equal(product(), A @ A)
    device.check()


def test_a_run_may_take_what_is_kept_while_it_is_released(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Taken(dict[int, object]):
        """Another thread takes what is kept just after it was looked at."""

        def __len__(self) -> int:
            found = len(self.keys())
            self.clear()
            return found

    monkeypatch.setattr(host_memory(), "_kept", Taken({0: host_memory().KeptMemory()}))
    oocgemm.release()


def test_a_run_on_another_device_may_begin_during_a_release(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_cuda(devices=2) as device:
        a_plan().run()
        multiplier = sys.modules["oocgemm.backends.cuda.multiplier"]
        monkeypatch.setattr(multiplier.cublas, "destroy", lambda handle: multiplier._idle.setdefault(1, []))
        oocgemm.release()
        device.check()


def test_a_run_with_a_small_budget_does_not_take_more(device: Device, product: Multiply) -> None:
    product(host_memory="64MiB", tile="64x64x64")
    before = sum(device.memory.pinned.values())
    budget = before - (1 << 20)
    np.testing.assert_array_equal(product(host_memory=budget, tile="32x32x32"), A @ A)
    assert 0 < sum(device.memory.pinned.values()) <= budget


@pytest.mark.parametrize("earlier", [[], ["64MiB"]])
def test_host_slots_and_ring_together_take_at_most_the_budget(
    device: Device, tmp_path: Path, earlier: list[str]
) -> None:
    """Some memory is kept by an earlier run with a larger budget."""
    x = np.random.default_rng(0).integers(-3, 4, (512, 512)).astype("float64")
    stored = saved(tmp_path, x, x, by_columns=True)[1]
    for budget in (*earlier, "5.7MiB"):
        options = BUDGETS | {"host_memory": budget, "tile": "256x256x128"}
        plan = oocgemm.plan(x, stored, backend="cuda", kernel="cublas", **options)
        np.testing.assert_array_equal(plan.run().out, x @ x)
        pinned, used = sum(device.memory.pinned.values()), dict(plan.footprint.host)
        slots = sum(used.pop(operand) for operand in "ABC")
        assert slots + used.pop("ring") <= pinned <= plan.budgets.host - sum(used.values())
    device.check()


@pytest.mark.parametrize("budget", [1 << 30, 64 << 20, 8 << 20])
def test_the_ring_pins_at_most_a_quarter_of_the_budget(device: Device, budget: int) -> None:
    options = BUDGETS | {"host_memory": budget}
    for _ in range(2):
        result = oocgemm.gemm(A, A, backend="cuda", kernel="cublas", **options)
        shape = ring_shape(result.plan.setting)
        assert shape is not None
        assert sum(device.memory.pinned.values()) == shape.bytes == result.plan.footprint.host["ring"]
        assert shape.bytes <= budget // 4
    device.check()


def test_concurrent_runs_do_not_share_host_slots(device: Device, tmp_path: Path) -> None:
    sessions = [opened(stored_plan(tmp_path)) for _ in range(2)]
    first, second = (session.host_arena for session in sessions)
    assert not np.shares_memory(first, second)
    for session in sessions:
        session.close()
    assert len(device.memory.pinned) == 1  # that of one run is kept
    device.check()


def test_concurrent_runs_do_not_share_a_ring(device: Device) -> None:
    one = oocgemm.gemm(A, A, backend="cuda", kernel="cublas", **BUDGETS)
    kept = dict(device.memory.pinned)
    session = opened(a_plan())  # takes the ring of the first run
    for _ in range(2):
        other = oocgemm.gemm(A, A, backend="cuda", kernel="cublas", **BUDGETS)
        np.testing.assert_array_equal(other.out, one.out)
        assert len(device.memory.pinned) == 2 * len(kept)
    session.close()  # a ring is kept already
    assert len(device.memory.pinned) == len(kept)
    assert not device.memory.pinned.keys() & kept.keys()
    device.check()


def test_a_run_frees_kept_memory_that_it_does_not_use(device: Device, tmp_path: Path) -> None:
    """It would come on top of the host budget of the run."""
    in_memory, stored = a_plan(), stored_plan(tmp_path)
    in_memory.run()
    session = opened(stored)
    (arena,) = device.memory.pinned
    assert arena == session.host_arena.ctypes.data
    assert own_threads(kept=True) == []
    session.close()
    session = opened(in_memory)
    assert not device.memory.pinned
    session.close()
    device.check()


def test_large_slots_are_not_kept(device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host_memory(), "MAX_KEPT", 0)
    plan = stored_plan(tmp_path)
    session = opened(plan)
    assert session.host_arena is None
    session.close()
    np.testing.assert_array_equal(plan.run().out[:], A @ A)
    assert not device.memory.pinned


def test_refused_pinning_says_what_to_do(device: Device, product: Multiply) -> None:
    device.faults["hostRegister"] = Fault(NO_MEMORY)
    said = r"refuses to pin .*MiB of host memory .*--host-memory \(or --memory\), or raise"
    with pytest.raises(oocgemm.OocGemmError, match=said):
        product()
    assert not device.memory.pinned
    device.faults.clear()
    np.testing.assert_array_equal(product(), A @ A)
    device.check()


@pytest.mark.parametrize("name", ["Stream", "Event", "hostRegister"])
def test_a_ring_that_cannot_be_opened_leaves_nothing(device: Device, name: str) -> None:
    """Some calls of a run that opens the ring fail, one per run."""
    before = device.count(name)
    a_plan().run()
    calls = device.count(name) - before
    failed = 0
    for number in range(1, calls + 1, 3):
        oocgemm.release()
        device.faults[name] = Fault(NO_MEMORY, first=device.count(name) + number, times=1)
        try:
            result = a_plan().run()
        except oocgemm.OocGemmError:
            failed += 1
        else:
            np.testing.assert_array_equal(result.out, A @ A)
        device.faults.clear()
        oocgemm.release()
        assert not device.memory.pinned
        assert own_threads(kept=True) == []
    assert failed
    device.check()


def test_threads_that_the_system_refuses_leave_nothing(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "compiled", lambda: None)
    right, shape = threading.Thread.start, ring_shape(a_plan().setting)
    assert shape is not None
    last = f"oocgemm-upload-{shape.lanes - 2}"

    def start(self: threading.Thread) -> None:
        if self.name == last:
            raise RuntimeError("can't start new thread")
        right(self)

    with monkeypatch.context() as patches:
        patches.setattr(threading.Thread, "start", start)
        with pytest.raises(oocgemm.OocGemmError, match="can't start new thread"):
            a_plan().run()
    oocgemm.release()
    assert not device.memory.pinned
    assert own_threads(kept=True) == []
    np.testing.assert_array_equal(a_plan().run().out, A @ A)
    device.check()


def test_a_run_with_large_slots_frees_what_was_kept(
    device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is kept would come on top of the host budget of the run."""
    plan = stored_plan(tmp_path)
    plan.run()
    assert device.memory.pinned
    monkeypatch.setattr(host_memory(), "MAX_KEPT", 0)
    session = opened(stored_plan(tmp_path))
    assert not device.memory.pinned
    session.close()
    device.check()


def test_a_larger_ring_is_not_used_if_the_device_transposes(device: Device) -> None:
    """The device has a buffer for each pinned buffer of the ring that the plan wants."""
    x = np.random.default_rng(0).integers(-3, 4, (300, 40)).astype("float64")
    options: dict[str, Any] = {
        "backend": "cuda",
        "kernel": "cublas",
        "device_memory": "80.6MiB",
        "host_memory": "2GiB",
    }
    oocgemm.gemm(x, x.T.copy(), **options)
    np.testing.assert_array_equal(oocgemm.gram(x, uplo="full", **options).out, x @ x.T)
    device.check()
