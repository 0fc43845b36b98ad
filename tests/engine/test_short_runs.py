"""Short products run in one thread, with the same results, errors and records as in many threads."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oocgemm
from oocgemm import backends
from oocgemm.backends.base import Pageable, Token
from oocgemm.backends.host.backend import HostSession
from oocgemm.engine import executor
from oocgemm.errors import ExecutionError
from oocgemm.planning import Kind, Operation
from oocgemm.system import resources, threads
from tests.support.backends_here import staged
from tests.support.command import own_threads
from tests.support.fake_cuda import Device, fake_cuda

A = np.arange(40.0 * 30).reshape(40, 30) % 7
B = np.arange(30.0 * 50).reshape(30, 50) % 5
CUDA: dict[str, Any] = {
    "backend": "cuda",
    "kernel": "cublas",
    "device_memory": "96MiB",
    "host_memory": "64MiB",
}
extents = st.integers(0, 40)


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "MAX_STREAMED_STEPS", -1)


@pytest.fixture
def device() -> Iterator[Device]:
    with fake_cuda() as found:
        yield found


@pytest.mark.parametrize("verify", [False, True])
def test_one_thread_starts_the_operations_of_several_devices(verify: bool) -> None:
    x = np.random.default_rng(0).integers(-3, 4, (96, 96)).astype(float)
    with fake_cuda(devices=2) as device:
        result = oocgemm.gemm(x, x, devices=[1, 0], tile="48x48x24", verify=verify, **CUDA)
        assert executor.is_short(result.plan)
        np.testing.assert_array_equal(result.out, x @ x)
        device.check()


@given(extents, extents, extents, st.sampled_from([0, 1]), st.booleans(), st.booleans(), st.booleans())
def test_one_thread_computes_what_many_threads_compute(
    m: int, n: int, k: int, beta: int, verify: bool, slots: bool, transposed: bool
) -> None:
    rng = np.random.default_rng(m + 41 * n + 1681 * k)
    a, b = (rng.integers(-3, 4, shape).astype(float) for shape in ((k, m) if transposed else (m, k), (k, n)))
    c = rng.integers(-3, 4, (m, n)).astype(float)
    options: dict[str, Any] = {"beta": beta, "verify": verify, "trans_a": transposed, "backend": "host"}
    options["tile"] = f"{max(1, (m + 1) // 2)}x{max(1, n)}x{max(1, (k + 1) // 2)}"
    found = []
    for steps in (executor.MAX_STREAMED_STEPS, -1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(executor, "MAX_STREAMED_STEPS", steps)
            if slots:
                with staged():
                    found.append(oocgemm.gemm(a, b, c.copy(), **options))
            else:
                found.append(oocgemm.gemm(a, b, c.copy(), **options))
    expected = (a.T if transposed else a) @ b + beta * c
    for result in found:
        np.testing.assert_array_equal(result.out, expected)
    one, many = ({span.id: (span.kind, span.tile, span.waits) for span in r.timeline.spans} for r in found)
    assert one == many


def test_a_short_run_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    oocgemm.matmul(A, B, backend="host")  # starts the thread that all runs use
    started: list[str] = []
    right = threading.Thread.start

    def start(self: threading.Thread) -> None:
        started.append(self.name)
        right(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    np.testing.assert_array_equal(oocgemm.matmul(A, B, backend="host"), A @ B)
    assert started == []


@pytest.mark.usefixtures("in_threads")
def test_a_long_run_starts_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    names: set[str] = set()
    right = HostSession.submit

    def submit(self: HostSession, operation: Any, host: Any, after: Any) -> Any:
        names.add(threading.current_thread().name)
        return right(self, operation, host, after)

    monkeypatch.setattr(HostSession, "submit", submit)
    oocgemm.matmul(A, B, backend="host")
    assert names == {"oocgemm-compute-0"}


@pytest.fixture
def events(device: Device, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of a session's methods, and the ends of the copies that it began, as text."""
    backends.open_backend("cuda")  # imports the session's module
    session = sys.modules["oocgemm.backends.cuda.session"].CudaSession
    begin, submit, found = session.begin, session.submit, list[str]()

    def begun(self: Any, operation: Any, host: Any, after: Any) -> Any:
        found.append(f"begin {operation.kind}")
        ended = begin(self, operation, host, after)

        def end() -> Any:
            found.append(f"end {operation.kind}")
            return ended()

        return end

    def submitted(self: Any, operation: Any, host: Any, after: Any) -> Any:
        found.append(str(operation.kind))
        return submit(self, operation, host, after)

    monkeypatch.setattr(session, "begin", begun)
    monkeypatch.setattr(session, "submit", submitted)
    return found


def with_accumulators(tile: str, count: int) -> oocgemm.Plan:
    """Plan A @ B with a number of accumulators."""
    plan = oocgemm.plan(A, B, tile=tile, **CUDA)
    candidate = replace(plan.candidate, slots=replace(plan.slots, c=count))
    return replace(plan, candidate=candidate)


def test_every_copy_that_can_begin_does_so_before_the_run_waits_for_one(
    device: Device, events: list[str]
) -> None:
    """The threads of the ring would otherwise be idle while a product is submitted."""
    result = with_accumulators("20x50x30", 2).run()
    np.testing.assert_array_equal(result.out, A @ B)
    uploads = events.count("begin upload")
    assert events.count("multiply") == 2
    assert events[:uploads] == ["begin upload"] * uploads
    assert events[-2:] == ["end download"] * 2  # the second product does not wait for the first tile
    device.check()


def test_a_product_waits_for_its_panels_alone(device: Device, events: list[str]) -> None:
    """Blocks of C that are still being copied do not keep the GPU from the next product."""
    plan = with_accumulators("5x50x30", 8)
    result = plan.run()
    np.testing.assert_array_equal(result.out, A @ B)
    assert plan.slots.a < plan.steps == events.count("multiply") == 8
    last = len(events) - events[::-1].index("multiply")
    late = events.index("begin upload", events.index("begin download"))  # a panel that finds a slot late
    assert late < last < events.index("end download")
    device.check()


@pytest.mark.parametrize("kind", [Kind.UPLOAD, Kind.MULTIPLY, Kind.DOWNLOAD])
def test_a_failing_operation_of_a_short_run_is_named(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    right = HostSession.submit

    def failing(self: HostSession, operation: Any, host: Any, after: Any) -> Any:
        if operation.kind is kind:
            raise RuntimeError("the launch failed")
        return right(self, operation, host, after)

    monkeypatch.setattr(HostSession, "submit", failing)
    with staged(), pytest.raises(ExecutionError, match=rf"{kind} \w.*of tile \(0, 0\).*the launch failed"):
        oocgemm.matmul(A, B, backend="host")
    assert own_threads() == []


def test_an_interrupt_stops_a_short_run_before_its_next_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    right, request, submitted = HostSession.submit, threads.Cancel.request, 0
    requested = threading.Event()

    def interrupted(self: HostSession, operation: Any, host: Any, after: Any) -> Any:
        nonlocal submitted
        submitted += 1
        if submitted == 1:
            os.kill(os.getpid(), signal.SIGINT)
            assert requested.wait(60)
        return right(self, operation, host, after)

    def noticed(self: threads.Cancel, error: BaseException) -> None:
        request(self, error)
        requested.set()

    monkeypatch.setattr(HostSession, "submit", interrupted)
    monkeypatch.setattr(threads.Cancel, "request", noticed)
    # A shell starts processes in the background with a SIGINT that is ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            oocgemm.matmul(A, B, tile="20x50x30", backend="host")
    finally:
        signal.signal(signal.SIGINT, before)
    assert submitted == 1


def test_free_memory_is_asked_for_once_in_a_short_call(monkeypatch: pytest.MonkeyPatch) -> None:
    oocgemm.matmul(A, B, backend="host")
    time.sleep(resources.RECENT)
    asked: list[int] = []
    right = resources._available_memory

    def ask() -> int:
        asked.append(1)
        return right()

    monkeypatch.setattr(resources, "_available_memory", ask)
    monkeypatch.setattr(resources, "RECENT", 60.0)
    oocgemm.matmul(A, B, backend="host")
    assert len(asked) <= 1


def test_release_ends_the_idle_threads() -> None:
    oocgemm.matmul(A, B, backend="host")
    idle = [thread for thread in threading.enumerate() if thread.name == threads.IDLE]
    assert 1 <= len(idle) <= threads.MAX_IDLE
    oocgemm.release()
    for thread in idle:
        thread.join(10)
        assert not thread.is_alive()
    np.testing.assert_array_equal(oocgemm.matmul(A, B, backend="host"), A @ B)


def test_many_concurrent_calls_leave_few_threads() -> None:
    def work() -> None:
        for _ in range(5):
            np.testing.assert_array_equal(oocgemm.matmul(A, B, backend="host"), A @ B)

    callers = [threading.Thread(target=work) for _ in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    until = time.monotonic() + 10
    while time.monotonic() < until:
        left = [thread for thread in threading.enumerate() if thread.name.startswith("oocgemm")]
        if len(left) <= threads.MAX_IDLE:
            break
        time.sleep(0.01)
    assert len(left) <= threads.MAX_IDLE


@pytest.mark.skipif(sys.platform != "linux", reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own() -> None:
    a = np.ones((4, 4))
    oocgemm.matmul(a, a, backend="host")
    child = os.fork()
    if not child:
        code = 1
        try:
            threads.shielded(lambda cancel: None)
            code = 0
        finally:
            os._exit(code)
    until = time.monotonic() + 30
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert status == 0
            return
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    pytest.fail("the child waits for a thread of its parent")


def test_panels_are_copied_ahead_while_the_thread_waits(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Panels that find a free slot are copied, although earlier ones have not been multiplied yet."""
    from oocgemm.backends.cuda.session import CudaSession

    begin, in_flight, most = CudaSession.begin, set[int](), list[int]()

    def noted(self: CudaSession, op: Operation, block: Pageable, after: Sequence[Token]) -> Any:
        ended = begin(self, op, block, after)
        in_flight.add(id(op))
        most.append(len(in_flight))

        def end() -> Token:
            in_flight.discard(id(op))
            return ended()

        return end

    monkeypatch.setattr(CudaSession, "begin", noted)
    a, b = np.ones((1, 1200)), np.ones((1200, 1))
    result = oocgemm.gemm(a, b, **CUDA, tile="1x1x100")
    assert np.asarray(result) == 1200
    slots = result.plan.slots
    first = slots.a + slots.b
    assert max(most[:first]) == first
    assert max(most[first:]) > 2
