"""The workers of a run, and how tasks reach them: threads of this process, an executor, or a dask cluster.

Each worker of a cluster computes one part at a time. Otherwise the scheduler would send a queue of parts to a
worker, and all of these parts would fail when the worker dies. dask's own retries are off, since the
coordinator gives a lost part to another worker. This is the only module that imports dask.distributed.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from concurrent.futures import BrokenExecutor, Executor, ThreadPoolExecutor
from functools import partial
from threading import Event
from typing import Any, Protocol, Self
from uuid import uuid4

from oocgemm.distributed import processes
from oocgemm.errors import ExecutionError, InputError

# Attributes in which executors of several packages have their number of workers.
_COUNTS = ("_max_workers", "max_workers", "num_workers")
# Seconds in which a dask scheduler must answer, and seconds in which it must have a worker.
MAX_CONNECT, MAX_WAIT = 8.0, 5.0


class Task(Protocol):
    """A call in a worker, as a `concurrent.futures.Future` or a future of dask."""

    def done(self) -> bool: ...

    def result(self) -> Any: ...

    def cancel(self) -> Any: ...

    def add_done_callback(self, function: Callable[[Any], Any], /) -> Any: ...


class Crew(ABC):
    """The workers. `remedy` says in messages how the user adds a worker.

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
        """Begin ``function(text)`` in a worker, and return the task.

        `function` is in `oocgemm.distributed.processes`.
        """

    def interrupt(self) -> None:  # noqa: B027 - most crews cannot
        """Make the workers of this process end their tasks soon. No more tasks may be submitted."""

    @abstractmethod
    def stop(self) -> None:
        """Release the threads or connections of the crew. Raises nothing."""


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
            partial(function, stop=self._stop) if function is processes.run else function, text
        )

    def interrupt(self) -> None:
        self._stop.set()

    def stop(self) -> None:
        self.interrupt()
        self._pool.shutdown(wait=True, cancel_futures=True)


class OnExecutor(Crew):
    """A `concurrent.futures.Executor` of the caller, which decides which worker runs a task.

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


def connect(address: str | None = None, file: str | None = None) -> Any:
    """Return a dask client. `file` is the file with the address that ``dask scheduler`` writes."""
    where = f"at {address}" if file is None else f"of {file}"
    client = _client()
    try:
        return client(address, scheduler_file=file, timeout=MAX_CONNECT, set_as_default=False)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise InputError(
            f"no dask scheduler {where} answers ({type(error).__name__}: {error}): start one with dask "
            "scheduler, and check the address"
        ) from error


class Cluster(Crew):
    """The workers of the cluster of a dask client. The client belongs to the caller."""

    grows = True

    def __init__(self, client: Any) -> None:
        """Wait until the cluster has a worker, for at most `MAX_WAIT` seconds."""
        self._client = client
        if not isinstance(client, _client()) or client.asynchronous:
            raise InputError(
                f"client has type {type(client).__name__}: pass a dask.distributed.Client that is not "
                "asynchronous"
            )
        self.remedy = f"start one with dask worker {self._client.scheduler.address}"
        try:
            self._client.wait_for_workers(1, timeout=MAX_WAIT)
        except (OSError, TimeoutError):
            raise InputError(f"the dask scheduler has no worker: {self.remedy}") from None

    def names(self) -> Collection[str]:
        try:
            # Not `scheduler_info`: a periodic callback can replace its answer by an answer without workers.
            return list(self._client.nthreads())
        except Exception as error:  # the connection can fail in many ways
            raise ExecutionError(
                f"the dask scheduler does not answer: {error or type(error).__name__}"
            ) from error

    def submit(self, name: str, function: Callable[[str], Any], text: str) -> Task:
        key = f"oocgemm-{function.__name__}-{uuid4().hex}"
        # `pure=False` and the key: dask must not answer with the result of an earlier call.
        task: Task = self._client.submit(function, text, key=key, workers=[name], pure=False, retries=0)
        return task

    def stop(self) -> None:
        """Do nothing: the coordinator ends its child processes, and dask forgets its tasks."""


def _client() -> Any:
    """Return dask's class of clients. Raises `InputError` if dask.distributed is not installed."""
    try:
        from distributed import Client
    except ImportError as error:
        raise InputError("dask clusters need the package distributed: pip install 'oocgemm[dask]'") from error
    return Client
