"""The workers of a run, and how tasks reach them: threads of this process, or an executor of the caller."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from concurrent.futures import BrokenExecutor, Executor, ThreadPoolExecutor
from functools import partial
from threading import Event
from typing import Any, Protocol, Self

from oocgemm.distributed import worker
from oocgemm.errors import ExecutionError, InputError

# Names under which executors of several packages have their number of workers.
_COUNTS = ("_max_workers", "max_workers", "num_workers")


class Task(Protocol):
    """A call in a worker, as a `concurrent.futures.Future` or a future of dask."""

    def done(self) -> bool: ...

    def result(self) -> Any: ...

    def cancel(self) -> Any: ...

    def add_done_callback(self, function: Callable[[Any], Any], /) -> Any: ...


class Crew(ABC):
    """The workers. `remedy` says how the user adds one, for messages.

    `grows` tells whether workers may join during a run. `local` tells whether all workers are in this
    process.
    """

    remedy: str
    grows = False
    local = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @abstractmethod
    def names(self) -> Collection[str]:
        """Return the names of the workers that are present. Raises `ExecutionError` if that is unknown."""

    @abstractmethod
    def submit(self, name: str, function: Callable[[str], Any], text: str) -> Task:
        """Call ``function(text)`` in a worker. `function` is one of `oocgemm.distributed.worker`."""

    def interrupt(self) -> None:  # noqa: B027 - most crews cannot
        """Make the workers of this process end their tasks soon. No more tasks may be submitted."""

    @abstractmethod
    def stop(self) -> None:
        """Release what the crew holds. Raises nothing."""


class Threads(Crew):
    """Threads of this process, each with one child process at a time."""

    local = True

    def __init__(self, count: int) -> None:
        if count < 1:
            raise InputError(f"workers = {count}: a run needs at least 1")
        self.remedy = f"pass more than {count} as workers (--workers)"
        self._names = [f"worker {number + 1}" for number in range(count)]
        self._stop = Event()
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="oocgemm-worker")

    def names(self) -> Collection[str]:
        return self._names

    def submit(self, name: str, function: Callable[[str], Any], text: str) -> Task:
        return self._pool.submit(
            partial(function, stop=self._stop) if function is worker.run else function, text
        )

    def interrupt(self) -> None:
        self._stop.set()

    def stop(self) -> None:
        self.interrupt()
        self._pool.shutdown(wait=True, cancel_futures=True)


class OnExecutor(Crew):
    """A `concurrent.futures.Executor` of the caller. It decides which of its workers runs a task.

    The crew has one name per worker, and gives the executor one task per name at a time.
    """

    def __init__(self, executor: Executor, count: int | None) -> None:
        if not callable(getattr(executor, "submit", None)):
            raise InputError(
                f"executor has type {type(executor).__name__}: pass a concurrent.futures.Executor"
            )
        found = (getattr(executor, name, None) for name in _COUNTS)
        count = count or next((number for number in found if isinstance(number, int)), None)
        if not count:
            raise InputError(
                f"{type(executor).__name__} does not say how many workers it has: pass workers=N beside "
                "executor"
            )
        self.remedy = "give the executor more workers"
        self._executor = executor
        self._names = [f"worker {number + 1}" for number in range(count)]

    def names(self) -> Collection[str]:
        return self._names

    def submit(self, name: str, function: Callable[[str], Any], text: str) -> Task:
        try:
            return self._executor.submit(function, text)
        except (RuntimeError, BrokenExecutor) as error:
            raise ExecutionError(f"the executor takes no more tasks: {error}") from error

    def stop(self) -> None:
        """Do nothing: the executor belongs to the caller, and the coordinator ends its child processes."""
