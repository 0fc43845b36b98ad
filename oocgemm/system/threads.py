"""Threads: start them, shield work from signals, and share process-wide settings between runs."""

import resource
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import TypeVar

from oocgemm.errors import ExecutionError

T = TypeVar("T")

# How long a thread may keep the GIL from another thread that waits for it, in seconds, while a run goes on. Python's
# own 5 ms is longer than a step.
SWITCH_INTERVAL = 0.2e-3


def start(thread: threading.Thread) -> None:
    """Start a thread. Raises `ExecutionError` where the system has no room for it."""
    try:
        thread.start()
    except RuntimeError as error:
        raise ExecutionError(f"the system refuses the thread {thread.name}: {refusal(error)}") from error


def refusal(error: RuntimeError) -> str:
    """Say why the system refuses a thread, and which limit to raise."""
    limit, used = resource.getrlimit(resource.RLIMIT_AS)[0], 0
    if limit == resource.RLIM_INFINITY:
        return f"{error}: raise the limit on processes (ulimit -u), or end others"
    with suppress(OSError):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return f"{error}, {used >> 20} of the {limit >> 20} MiB of address space are in use: raise the limit (ulimit -v)"


class Cancel:
    """A request to stop that one thread makes and another obeys. The first request counts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._stop: Callable[[BaseException], object] | None = None

    def request(self, error: BaseException) -> None:
        """Ask for a stop because of `error`. It is safe to repeat a request that was itself interrupted."""
        with self._lock:
            self._error = self._error or error
            error, stop = self._error, self._stop
        if stop is not None:
            stop(error)

    @contextmanager
    def calling(self, stop: Callable[[BaseException], object]) -> Iterator[None]:
        """Within, call `stop` with the error as soon as a stop is requested, or at once if it was requested before."""
        with self._lock:
            self._stop, error = stop, self._error
        try:
            if error is not None:
                stop(error)
            yield
        finally:
            with self._lock:
                self._stop = None


def shielded(work: Callable[[Cancel], T]) -> T:
    """Run `work` in a thread of its own, so that no signal interrupts it, and return what it returns.

    Python raises the exception of a signal handler in the main thread, between any two bytecodes: also between the
    start of a thread and the `try` that would join it. Here the main thread only waits. An exception that interrupts
    the waiting becomes a request to `work` to stop. It is raised once `work` has ended.
    """
    cancel, claim, ended = Cancel(), threading.Lock(), threading.Event()
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        if not claim.acquire(blocking=False):
            return  # the caller was interrupted before this thread began
        try:
            results.append(work(cancel))
        except BaseException as error:
            failures.append(error)
        finally:
            ended.set()

    worker = threading.Thread(target=copy_context().run, args=(run,), name="oocgemm-run")
    try:
        start(worker)
        ended.wait()
        worker.join()
    except BaseException as error:
        if claim.acquire(blocking=False):
            raise  # the thread has not begun, and will not
        _insist(partial(cancel.request, error))
        _insist(ended.wait)
        _insist(worker.join)
        failure = failures.pop() if failures else None
        raise error from (None if failure is error else failure)
    if failures:
        raise failures.pop()
    return results.pop()


def _insist(act: Callable[[], object]) -> None:
    """Do one step of stopping, however often it is interrupted. `act` raises nothing of its own."""
    while True:
        try:
            act()
        except BaseException:  # a further signal: the first one is raised at the end
            continue
        return


class _SwitchInterval:
    """The GIL's switch interval, shortened while at least one user needs it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = self._ours = 0.0

    @contextmanager
    def shortened(self) -> Iterator[None]:
        """Within, a thread keeps the GIL from others for at most `SWITCH_INTERVAL`. The last user restores the former
        interval, unless another program part has set one meanwhile."""
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
