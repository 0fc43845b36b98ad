"""Start and keep threads, run work that signals cannot interrupt, and shorten the GIL's switch interval.

`wake` creates the context of a CUDA device in a thread, while the main thread imports modules. This module
also identifies processes (`process_start`), since it does not import NumPy, which starts threads.
"""

import ctypes
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from oocgemm.errors import ExecutionError

T = TypeVar("T")

# During a run, a thread releases the GIL to a waiting thread after at most this many seconds. With Python's
# default of 5 ms, the GPU could become idle while the thread that submits GPU work waits.
SWITCH_INTERVAL = 0.2e-3
# While a thread waits for a run, it polls for signals at least once in this many seconds. A signal that
# arrives just before the thread blocks does not wake the thread.
SIGNAL_INTERVAL = 0.25
# Maximum number of idle threads that are kept for later runs, and the name of such a thread.
MAX_IDLE = 2
IDLE = "oocgemm-idle"
# The functions that return and set the handler of a signal. Those of the module `signal` also turn numbers
# into enums, which takes 0.1 ms for all signals.
_handler: Callable[[int], Any] = import_module("_signal").getsignal
_set_handler: Callable[[int, Any], Any] = import_module("_signal").signal
_SIGNALS = range(1, signal.NSIG)
_woken = set[int]()


def start(thread: threading.Thread) -> None:
    """Start a thread. Raises `ExecutionError` if the system cannot start another one."""
    try:
        thread.start()
    except RuntimeError as error:
        raise ExecutionError(f"the system cannot start the thread {thread.name}: {refusal(error)}") from error


def refusal(error: RuntimeError) -> str:
    """Return a text that says why the system could not start a thread, and which resource limit to raise."""
    limit, used = resource.getrlimit(resource.RLIMIT_AS)[0], 0
    if limit == resource.RLIM_INFINITY:
        return f"{error}: raise the limit on processes (ulimit -u), or end other processes"
    with suppress(OSError):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    address_space = f"{used >> 20} of the {limit >> 20} MiB of address space are in use"
    return f"{error}, {address_space}: raise the limit (ulimit -v)"


class Cancel:
    """A request to stop work, passed from one thread to the thread that does the work.

    If stopping is requested several times, the error of the first request is used.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._stop: Callable[[BaseException], object] | None = None

    def request(self, error: BaseException) -> None:
        """Request a stop because of `error`. If a signal interrupts this call, it can be repeated safely."""
        with self._lock:
            self._error = self._error or error
            error, stop = self._error, self._stop
        if stop is not None:
            stop(error)

    @contextmanager
    def calling(self, stop: Callable[[BaseException], object]) -> Iterator[None]:
        """Within the context, let each `request` also call `stop`, with the error of the first request.

        If `request` was called before, call `stop` on entry.
        """
        with self._lock:
            self._stop, error = stop, self._error
        try:
            if error is not None:
                stop(error)
            yield
        finally:
            with self._lock:
                self._stop = None


class _End:
    """An event: a thread waits until another thread has ended some work.

    `threading.Event` and `threading.Semaphore` are written in Python. If a signal handler raises an exception
    in one of their methods, their lock may stay locked. Here, nothing stays locked.
    """

    def __init__(self) -> None:
        self._reached, self._lock = False, threading.Lock()
        self._lock.acquire()

    def reach(self) -> None:
        """Let all waits return. Call this once."""
        self._reached = True
        self._lock.release()

    def wait(self) -> None:
        while not self._reached:
            self._lock.acquire(timeout=SIGNAL_INTERVAL)


def _took(tokens: "SimpleQueue[None]") -> bool:
    """Take a token out of a queue. Return False if there is none."""
    try:
        tokens.get_nowait()
    except Empty:
        return False
    return True


class _Runners:
    """Threads that each do one piece of work at a time, and are kept for further work.

    Starting a thread can take longer than a small product. At most `MAX_IDLE` idle threads are kept. They are
    daemon threads: an idle one does not keep the interpreter from exiting.
    """

    def __init__(self) -> None:
        self.forget()
        os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        """Forget all threads. After a fork, the child process has none of them."""
        self._work: SimpleQueue[tuple[Callable[[], object], _End] | None] = SimpleQueue()
        # A token for each idle thread, and one for each thread that may still become idle.
        self._idle, self._spare = SimpleQueue[None](), SimpleQueue[None]()
        for _ in range(MAX_IDLE):
            self._spare.put(None)

    def begin(self, work: Callable[[], object], end: _End) -> None:
        """Start `work`, which raises nothing, in an idle or a new thread. `end` is reached after the work.

        Raises `ExecutionError` if the system cannot start a thread. If a signal handler raises an exception
        just before the thread gets the work, one idle thread more is kept.
        """
        if _took(self._idle):
            self._spare.put(None)
        else:
            start(threading.Thread(target=self._serve, name=IDLE, daemon=True))
        self._work.put((work, end))

    def _serve(self) -> None:
        thread = threading.current_thread()
        while (item := self._work.get()) is not None:
            thread.name = "oocgemm-run"
            item[0]()
            thread.name, stays = IDLE, _took(self._spare)
            if stays:
                self._idle.put(None)
            end, item = item[1], None  # drops the last reference to the work
            end.reach()
            if not stays:
                return

    def release(self) -> None:
        while _took(self._idle):
            self._spare.put(None)
            self._work.put(None)


_runners = _Runners()


def release() -> None:
    _runners.release()


def shielded(work: Callable[[Cancel], T]) -> T:
    """Run `work` in another thread, so that no signal interrupts it, and return its result.

    Python runs signal handlers in the main thread, between any two bytecodes. If `work` ran there, an
    exception from a handler (KeyboardInterrupt) could prevent it from joining a thread that it has started.
    So the main thread only waits. If an exception interrupts the wait, this function requests `work` to stop,
    waits until it has ended, and then raises the exception.
    """
    cancel, claim, end = Cancel(), threading.Lock(), _End()
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        if not claim.acquire(blocking=False):
            return  # `shielded` was interrupted and took `claim`: do not start `work`
        try:
            results.append(work(cancel))
        except BaseException as error:
            failures.append(error)

    try:
        _runners.begin(partial(copy_context().run, run), end)
        end.wait()
    except BaseException as error:
        if claim.acquire(blocking=False):
            raise  # `run` can no longer take `claim`, so it never calls `work`
        _insist(partial(cancel.request, error))
        _insist(end.wait)
        failure = failures.pop() if failures else None
        raise error from (None if failure is error else failure)
    if failures:
        raise failures.pop()
    return results.pop()


def shielded_here(work: Callable[[Cancel], T]) -> T:
    """Run brief `work` in this thread, so that no signal interrupts it, and return its result.

    To hand work to another thread and back takes 0.1 to 0.2 ms. In the main thread, a KeyboardInterrupt that
    arrives meanwhile is raised when `work` has ended. If Python functions handle other signals, or this one
    in another way, `work` runs as in `shielded`: they might wait for a lock that this thread holds.
    """
    if threading.current_thread() is not threading.main_thread():
        return work(Cancel())
    found = [handler for handler in map(_handler, _SIGNALS) if callable(handler)]
    if found != [signal.default_int_handler] or _handler(signal.SIGINT) != found[0]:
        return shielded(work) if found else work(Cancel())
    interrupts: list[int] = []

    def note(number: int, frame: object) -> None:
        interrupts.append(number)

    try:
        _set_handler(signal.SIGINT, note)
        return work(Cancel())
    finally:
        if _handler(signal.SIGINT) is note:
            _set_handler(signal.SIGINT, signal.default_int_handler)
        if interrupts:
            raise KeyboardInterrupt


def _insist(act: Callable[[], object]) -> None:
    """Call `act`. Repeat the call whenever a signal handler interrupts it by an exception.

    `act` itself must raise nothing.
    """
    while True:
        try:
            act()
        except BaseException:  # ignore it: `shielded` raises an earlier exception
            continue
        return


class _SwitchInterval:
    """Python's switch interval, which is shortened while at least one run is in progress.

    The interval is a setting of the whole process. Concurrent runs are counted, so that the last one restores
    the previous interval.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = self._ours = 0.0

    @contextmanager
    def shortened(self) -> Iterator[None]:
        """Within the context, make threads release the GIL to a waiting thread after `SWITCH_INTERVAL`.

        The last of several contexts restores the previous interval, unless other code has set another one.
        """
        with self._lock:
            if not self._users:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before, SWITCH_INTERVAL))
                self._ours = sys.getswitchinterval()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users and sys.getswitchinterval() == self._ours:
                    sys.setswitchinterval(self._before)


short_switch_interval = _SwitchInterval().shortened


def wake(device: int) -> bool:
    """Start to create the primary context of a device, which takes 0.2 s. Return False if it was done before.

    Errors are ignored here. Opening the backend fails in the same way later, and raises them.
    """
    if device in _woken:
        return False
    _woken.add(device)
    # If the system refuses a thread, the context is created later, when the backend is opened.
    with suppress(RuntimeError):
        threading.Thread(target=_create, args=(device,), name="oocgemm-wake", daemon=True).start()
    return True


def _create(device: int) -> None:
    with suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        number, context = ctypes.c_int(), ctypes.c_void_p()
        if not driver.cuInit(0) and not driver.cuDeviceGet(ctypes.byref(number), device):
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), number)


@cache
def running_system() -> tuple[str, str]:
    """Return the id of this boot of the system, and that of the PID namespace; "" if an id is unknown."""
    boot = names = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        names = os.readlink("/proc/self/ns/pid")
    return boot, names


def process_start(pid: int, *, ended: bool = False) -> int | None:
    """Return the start time of a process, in clock ticks since the boot; None if there is no such process.

    The start time, `running_system` and the process id together identify a process: process ids are reused. A
    process that has ended, but whose parent has not waited for it, counts only if `ended`.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *numbers = text.rpartition(")")[2].split()  # the name of the command may contain spaces
    return None if state in "ZX" and not ended else int(numbers[18])
