"""Start threads, run work that signals cannot interrupt, and shorten the GIL's switch interval."""

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

# During a run, a thread releases the GIL to a waiting thread after at most this many seconds. With Python's
# default of 5 ms, the GPU could become idle while the thread that submits GPU work waits.
SWITCH_INTERVAL = 0.2e-3


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


def shielded(work: Callable[[Cancel], T]) -> T:
    """Run `work` in a new thread, so that no signal interrupts it, and return its result.

    Python runs signal handlers in the main thread, between any two bytecodes. If `work` ran there, an
    exception from a handler (KeyboardInterrupt) could prevent it from joining a thread that it has started.
    So the main thread only waits. If an exception interrupts the wait, this function requests `work` to stop,
    waits until it has ended, and then raises the exception.
    """
    cancel, claim, ended = Cancel(), threading.Lock(), threading.Event()
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        if not claim.acquire(blocking=False):
            return  # `shielded` was interrupted and took `claim`: do not start `work`
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
            raise  # `run` can no longer take `claim`, so it never calls `work`
        _insist(partial(cancel.request, error))
        _insist(ended.wait)
        _insist(worker.join)
        failure = failures.pop() if failures else None
        raise error from (None if failure is error else failure)
    if failures:
        raise failures.pop()
    return results.pop()


def _insist(act: Callable[[], object]) -> None:
    """Call `act`, and repeat the call whenever a signal handler interrupts it by an exception.

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
        """Within the context, make each thread release the GIL to a waiting thread after `SWITCH_INTERVAL`.

        The last of several concurrent contexts restores the previous interval, unless other code has changed
        the interval in between.
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
