"""The workers of a dask cluster. This is the only module that imports dask.distributed.

Each worker computes one part at a time: the scheduler would otherwise send it a queue of parts, and all of
them would fail when the worker dies. dask's own retries are off, since the coordinator gives a lost part to
another worker.
"""

from collections.abc import Callable, Collection
from typing import Any
from uuid import uuid4

from oocgemm.distributed.crew import Crew, Task
from oocgemm.errors import ExecutionError, InputError

try:
    from distributed import Client
except ImportError as error:
    raise InputError("dask clusters need the package distributed: pip install 'oocgemm[dask]'") from error

# Seconds in which a scheduler must answer, and in which it must have a worker.
MAX_CONNECT, MAX_WAIT = 8.0, 5.0


def connect(address: str | None = None, file: str | None = None) -> Any:
    """Connect to a scheduler by its address, or by the file that ``dask scheduler --scheduler-file`` writes.

    Raises `InputError` if none answers.
    """
    where = f"at {address}" if file is None else f"of {file}"
    try:
        client: Any = Client  # its constructor has no types
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
        if not isinstance(client, Client) or client.asynchronous:
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
            # Not `scheduler_info`: a periodic callback can replace its answer by one without workers.
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
