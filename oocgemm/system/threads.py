"""Start threads, shield work from signals, and share process-wide settings between runs."""

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

# Seconds that a thread may keep the GIL while another thread waits for it, during a run. Python's default of
# 5 ms is longer than a step.
SWITCH_INTERVAL = 0.2e-3


def start(thread: threading.Thread) -> None:
    """Start a thread. Raises `ExecutionError` where the system refuses it."""
    try:
        thread.start()
    except RuntimeError as error:
        raise ExecutionError(f"the system refuses the thread {thread.name}: {refusal(error)}") from error


def refusal(error: RuntimeError) -> str:
    """Explain why the system refuses a thread, and which limit to raise."""
    limit, used = resource.getrlimit(resource.RLIMIT_AS)[0], 0
    if limit == resource.RLIM_INFINITY:
        return f"{error}: raise the limit on processes (ulimit -u), or end others"
    with suppress(OSError):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    address_space = f"{used >> 20} of the {limit >> 20} MiB of address space are in use"
    return f"{error}, {address_space}: raise the limit (ulimit -v)"


class Cancel:
    """A request to stop, passed from one thread to another. The first request counts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._stop: Callable[[BaseException], object] | None = None

    def request(self, error: BaseException) -> None:
        """Request a stop because of `error`. A request that was interrupted can be repeated safely."""
        with self._lock:
            self._error = self._error or error
            error, stop = self._error, self._stop
        if stop is not None:
            stop(error)

    @contextmanager
    def calling(self, stop: Callable[[BaseException], object]) -> Iterator[None]:
        """Call `stop` with the error once a stop is requested, also if that was before this context."""
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
    """Run `work` in a thread of its own, which no signal interrupts, and return its result.

    Python raises the exception of a signal handler in the main thread, between any two bytecodes. That may be
    between the start of a thread and the `try` that would join it. Here the main thread only waits. An
    exception that interrupts the wait becomes a request to `work` to stop, and is raised once `work` has
    ended.
    """
    cancel, claim, ended = Cancel(), threading.Lock(), threading.Event()
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        if not claim.acquire(blocking=False):
            return  # the caller was interrupted before this thread started
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
            raise  # the thread has not started `work`, and will not
        _insist(partial(cancel.request, error))
        _insist(ended.wait)
        _insist(worker.join)
        failure = failures.pop() if failures else None
        raise error from (None if failure is error else failure)
    if failures:
        raise failures.pop()
    return results.pop()


def _insist(act: Callable[[], object]) -> None:
    """Complete one step of stopping, however often it is interrupted. `act` itself raises nothing."""
    while True:
        try:
            act()
        except BaseException:  # another signal: the first one is raised at the end
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
        """Within the context, a thread keeps the GIL from others for at most `SWITCH_INTERVAL`.

        The last user restores the previous interval, unless other code has changed it in between.
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
