"""Work that signals do not interrupt, and settings of the process that concurrent runs share."""

import dis
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from inspect import currentframe
from types import FrameType
from typing import Any

import numpy as np
import pytest

import oocgemm
from oocgemm.system import threads
from oocgemm.system.threads import SWITCH_INTERVAL, Cancel, shielded, shielded_here, short_switch_interval
from tests.support.command import own_threads
from tests.support.suite import examples

# Modules in whose functions a signal may arrive, and the bytecodes after which Python calls its handler.
WAITING = threads.__file__, threading.__file__
INTERRUPTIBLE = "RESUME", "CALL", "JUMP_BACKWARD"
MAX_POINTS = 300
BRIEFLY, LONG = 0.02, 30.0  # seconds


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Make SIGINT raise `KeyboardInterrupt`, since worker processes of pytest-xdist ignore it by default."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the handler of SIGALRM that pytest-timeout has set."""
    right = threads._handler
    monkeypatch.setattr(threads, "_handler", lambda x: None if x == signal.SIGALRM else right(x))


def starts_a_thread(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not threading.Thread.start.__code__:
        frame = frame.f_back
    return frame is not None


def interrupted_at(number: int, act: Callable[[], object]) -> bool:
    """Call `act`, and raise `KeyboardInterrupt` at point `number` of those at which a signal may do so.

    `Thread.start` is left out: it is not safe, but a thread that is lost there has no work yet. Return
    whether this point was reached.
    """
    left, before_this = number, dict[FrameType, str]()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in WAITING or starts_a_thread(frame):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            after, before_this[frame] = before_this.get(frame, ""), name
            if after.startswith(INTERRUPTIBLE) and name != "PUSH_EXC_INFO":
                left -= 1
                if left < 0:
                    raise KeyboardInterrupt
        return trace

    before, here = sys.gettrace(), currentframe()
    assert here is not None
    here.f_trace_opcodes = True  # Python 3.12 traces bytecodes only if some frame asks for it already
    sys.settrace(trace)
    try:
        act()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def stopped_within(cancel: Cancel, seconds: float) -> bool:
    """Work until a stop is requested, or for `seconds`. Return whether it was requested."""
    stop = threading.Event()
    with cancel.calling(lambda error: stop.set()):
        return stop.wait(seconds)


def interrupt_soon() -> None:
    """Send this process a SIGINT after a tenth of a second, as Ctrl+C on a terminal does."""
    threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT]).start()


@pytest.fixture
def own_runners(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep the threads of a test apart. An interrupt just before one gets its work leaves it idle."""
    runners = threads._Runners()
    monkeypatch.setattr(threads, "_runners", runners)
    before = set(threading.enumerate())
    yield
    left = set(threading.enumerate()) - before
    for _ in left:
        runners._work.put(None)
    for thread in left:
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.usefixtures("own_runners")
def test_an_interrupt_at_any_point_leaves_no_work_and_no_lock() -> None:
    working = threading.Event()

    def work(cancel: Cancel) -> None:
        working.set()
        stopped_within(cancel, BRIEFLY)
        working.clear()

    number = 0
    while interrupted_at(number, lambda: shielded(work)):
        assert not working.is_set(), f"interrupted at point {number}"
        number += 1
        assert number < MAX_POINTS
    assert number > 10
    assert sys.exception() is None


def test_a_signal_stops_shielded_work_and_is_raised() -> None:
    asked: list[bool] = []
    interrupt_soon()
    with pytest.raises(KeyboardInterrupt):
        shielded(lambda cancel: asked.append(stopped_within(cancel, LONG)))
    assert asked == [True]


def test_signals_while_work_stops_do_not_abandon_it() -> None:
    ended: list[bool] = []

    def work(cancel: Cancel) -> None:
        stopped_within(cancel, LONG)
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
        ended.append(True)

    interrupt_soon()
    with pytest.raises(KeyboardInterrupt):
        shielded(work)
    assert ended == [True]


def test_shielded_work_returns_or_raises_as_if_called() -> None:
    def fail(cancel: Cancel) -> None:
        raise LookupError("nothing there")

    assert shielded(lambda cancel: 3) == 3
    with pytest.raises(LookupError, match="nothing there"):
        shielded(fail)


def test_an_error_while_stopping_is_the_cause_of_the_interrupt() -> None:
    def work(cancel: Cancel) -> None:
        stopped_within(cancel, LONG)
        raise OSError("disk full")

    interrupt_soon()
    with pytest.raises(KeyboardInterrupt) as raised:
        shielded(work)
    assert str(raised.value.__cause__) == "disk full"


@pytest.mark.usefixtures("no_timer")
def test_an_interrupt_of_brief_work_is_raised_at_its_end() -> None:
    ended: list[bool] = []

    def work(cancel: Cancel) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        ended.append(stopped_within(cancel, BRIEFLY))
        raise OSError("disk full")

    with pytest.raises(KeyboardInterrupt) as raised:
        shielded_here(work)
    assert ended == [False]
    assert str(raised.value.__context__) == "disk full"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("no_timer")
def test_brief_work_runs_in_this_thread_and_returns_or_raises() -> None:
    def fail(cancel: Cancel) -> None:
        raise LookupError("nothing there")

    assert shielded_here(lambda cancel: threading.current_thread()) is threading.current_thread()
    with pytest.raises(LookupError, match="nothing there"):
        shielded_here(fail)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("no_timer")
def test_a_handler_that_brief_work_sets_is_kept() -> None:
    try:
        shielded_here(lambda cancel: signal.signal(signal.SIGINT, signal.SIG_IGN))
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert shielded_here(lambda cancel: threading.current_thread()) is threading.current_thread()
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.usefixtures("no_timer")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_work_leaves_a_thread_that_other_handlers_may_interrupt(number: signal.Signals) -> None:
    """A handler might wait for a lock that the work holds. What `siginterrupt` has set stays."""
    lock, called = threading.Lock(), list[int]()

    def handler(number: int, frame: object) -> None:
        with lock:
            called.append(number)

    def work(cancel: Cancel) -> threading.Thread:
        with lock:
            os.kill(os.getpid(), number)
            stopped_within(cancel, BRIEFLY)
        return threading.current_thread()

    before = signal.signal(number, handler)
    try:
        assert shielded_here(work) is not threading.current_thread()
        assert called == [number]
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)


def test_outside_of_the_main_thread_handlers_stay() -> None:
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.append(shielded_here(lambda cancel: signal.getsignal(signal.SIGINT)))
    )
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


def test_interrupted_runs_leave_no_thread_and_no_setting() -> None:
    """The signals arrive at times that are spread over the whole run."""
    a = np.ones((300, 300))
    interval = sys.getswitchinterval()
    oocgemm.matmul(a, a, tile="50x50x50", backend="host")  # the first run imports modules and starts threads
    started = time.perf_counter()
    oocgemm.matmul(a, a, tile="50x50x50", backend="host")
    seconds = time.perf_counter() - started
    interrupts = 0
    runs = examples(40, quick=16)
    for number in range(runs):
        timer = threading.Timer(seconds * number / (0.875 * runs), os.kill, [os.getpid(), signal.SIGINT])
        try:
            timer.start()
            oocgemm.matmul(a, a, tile="50x50x50", backend="host")
            timer.cancel()
            timer.join()
        except KeyboardInterrupt:
            interrupts += 1
        assert own_threads() == []
        assert sys.getswitchinterval() == interval
    assert interrupts > runs / 8


def test_overlapping_users_restore_the_switch_interval() -> None:
    interval = sys.getswitchinterval()
    first, second = short_switch_interval(), short_switch_interval()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL)
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == interval


def test_a_switch_interval_set_meanwhile_is_kept() -> None:
    interval = sys.getswitchinterval()
    try:
        with short_switch_interval():
            sys.setswitchinterval(0.003)
        assert sys.getswitchinterval() == pytest.approx(0.003)
    finally:
        sys.setswitchinterval(interval)
