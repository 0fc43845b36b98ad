"""Survey the workers, and refuse those that cannot compute the product. Nothing of C is written.

`planning_engine` returns a backend to plan with, in a process that may not have the device of the workers.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from uuid import uuid4

from oocgemm.backends import Backend, Session, open_backend
from oocgemm.backends.base import Array, Swept
from oocgemm.backends.host.blas import CHOICE
from oocgemm.distributed import processes as in_worker
from oocgemm.distributed.attempts import machine
from oocgemm.distributed.crew import Crew, Task
from oocgemm.distributed.processes import DIED
from oocgemm.distributed.tasks import Given
from oocgemm.errors import BackendError, InputError, OutOfMemoryError
from oocgemm.jobs.prepare import budgets_of
from oocgemm.jobs.request import Request
from oocgemm.jobs.resume import Earlier
from oocgemm.jobs.stats import Findings
from oocgemm.kernels.ladder import check_plan
from oocgemm.planning import Budgets, GemmProblem, Plan
from oocgemm.planning.units import format_size, parse_size
from oocgemm.system.installed import __version__
from oocgemm.values import dataclass

# Environment variables with the number of threads of a BLAS. Workers of dask set them to 1.
THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
# Seconds in which a worker must answer. Starting Python and CUDA from a network file system can take long.
MAX_ANSWER = 60.0
# Number of pings that measure the offset of a clock.
PINGS = 8
# Poll interval for answers, in seconds, and how often a worker is asked if its child process dies.
PAUSE, MAX_ASKED = 0.02, 3


class DiedError(BackendError):
    """Raised for a worker whose child process has died."""


@dataclass(frozen=True)
class WorkerFacts:
    """Facts about a worker: its machine, its device and its arithmetic.

    - `host`: the name of its machine. `machine` is an id of the running system, `cores` its usable cores.
    - `backend`, `kernel`, `library`: they multiply. If they are equal, products are equal bit for bit.
    - `described`: names and versions of device and libraries. `multiprocessors` are those of the device.
    - `place`: identifies the device on the machine. `free` is its free memory, `available` that of the host.
    - `offset_ns`: the worker's wall clock minus that of this machine. `error_ns` is its maximum error.
    """

    worker: str
    host: str
    machine: str
    cores: tuple[int, ...]
    backend: str
    kernel: str
    library: str
    described: Mapping[str, str]
    place: str
    free: int
    available: int
    multiprocessors: int
    offset_ns: int = 0
    error_ns: int = 0

    @property
    def arithmetic(self) -> tuple[str, str, str]:
        return self.backend, self.kernel, self.library


class Survey:
    """Asks workers for their facts (`WorkerFacts`).

    For a moment, the survey creates a file next to C or, if the result is in memory, in a temporary folder.
    The file has the `Given` of the workers. A worker that can read it sees the same storage as this process.
    """

    def __init__(self, crew: Crew, request: Request, findings: Findings, folder: Path) -> None:
        self._crew, self._folder = crew, folder
        self._content = uuid4().hex
        self._given = Given.of(request, findings, self._content)

    @contextmanager
    def nonce(self) -> Iterator[Path]:
        """Create a file that workers must see, and delete it at the end of the context."""
        folder = self._folder
        while not folder.is_dir():
            folder = folder.parent
        if not os.access(folder, os.W_OK):
            raise InputError(
                f"C: no file can be created in {folder}: make it writable, or give C another path"
            )
        path = folder / f".oocgemm-{self._content}"
        try:
            try:
                self.write(path)
            except OSError as error:
                raise InputError(
                    f"C: no file can be created in {folder} ({error.strerror}): repair the disk, or give C "
                    "another path"
                ) from error
            yield path
        finally:
            with suppress(OSError):  # the disk fails: the file stays
                path.unlink(missing_ok=True)

    def write(self, path: Path) -> None:
        """Write the file that workers must see. `path` is on the storage of C."""
        path.write_bytes(self._given.packed())

    def ask(self, name: str, nonce: Path) -> Task:
        """Ask one worker. `read` returns the answer when the task is done."""
        task = {
            "task": "probe",
            "version": __version__,
            "nonce": str(nonce),
            "content": self._content,
            "environment": environment_of(None),
        }
        return self._crew.submit(name, in_worker.run, json.dumps(task))

    def read(self, name: str, task: Task, nonce: Path) -> WorkerFacts:
        """Return the facts from a worker. Raises `InputError` or `BackendError` if it cannot take part."""
        try:
            answer = task.result()
        except (Exception, CancelledError) as error:
            raise BackendError(
                f"{name} cannot run oocgemm ({type(error).__name__}: {error}): install oocgemm {__version__} "
                "where the worker runs"
            ) from error
        where = f"{name} on {answer['host']}" if "host" in answer else name
        if "error" in answer:
            kind = InputError if answer["fatal"] else DiedError if answer["error"] == DIED else BackendError
            raise kind(f"{where}: {answer['message']}")
        if answer["version"] != __version__:
            raise InputError(
                f"{where} has oocgemm {answer['version']}, this process has {__version__}: install the same "
                "version"
            )
        if answer["sees"] != self._content:
            raise InputError(
                f"{where} does not see {nonce.parent}, where C would be: give paths on storage that all "
                "workers share, mounted at the same place"
                + ("" if self._given.request.into.stores_c else " (TMPDIR, for results in memory)")
            )
        known = {field: answer[field] for field in WorkerFacts.__dataclass_fields__ if field in answer}
        return WorkerFacts(worker=name, **(known | {"cores": tuple(answer["cores"])}))

    def run(self) -> dict[str, WorkerFacts]:
        """Ask all workers, and return their facts by name. Raises the first error."""
        names = list(self._crew.names())
        asked = Counter(names)
        found: dict[str, WorkerFacts] = {}
        with self.nonce() as nonce:
            tasks = {name: self.ask(name, nonce) for name in names}
            until = time.monotonic() + MAX_ANSWER
            while tasks:
                for name in [name for name, task in tasks.items() if task.done()]:
                    try:
                        found[name] = self.read(name, tasks.pop(name), nonce)
                    except DiedError:
                        if asked[name] == MAX_ASKED:
                            raise
                        asked[name] += 1
                        tasks[name] = self.ask(name, nonce)
                if self._crew.grows:
                    present = self._crew.names()
                    tasks = {name: task for name, task in tasks.items() if name in present}
                if tasks and time.monotonic() > until:
                    raise BackendError(
                        f"{next(iter(tasks))} has not answered for {MAX_ANSWER:.0f} s: it is busy with "
                        "another task, or cannot be reached; wait, or stop that worker"
                    )
                time.sleep(PAUSE)
        if not found:
            raise InputError(f"there is no worker: {self._crew.remedy}")
        return {name: self.timed(found[name]) for name in names if name in found}

    def timed(self, found: WorkerFacts) -> WorkerFacts:
        """Return the facts with the offset of the worker's clock, from the shortest of several pings."""
        if found.machine == machine():
            return found
        best = found.offset_ns, 2**62
        for _ in range(PINGS):
            before = time.time_ns()
            there: int = self._crew.submit(found.worker, in_worker.ping, "").result()
            after = time.time_ns()
            best = min(
                best, (there - (before + after) // 2, (after - before + 1) // 2), key=lambda pair: pair[1]
            )
        return replace(found, offset_ns=best[0], error_ns=best[1])


def environment_of(threads: int | None) -> dict[str, str | None]:
    """Return the variables of a worker's environment that change for a child process; None unsets a variable.

    `threads` is the number of threads of the child's BLAS; None stands for all cores.
    """
    number = None if threads is None else str(threads)
    return {CHOICE: os.environ.get(CHOICE)} | dict.fromkeys(THREADS, number)


def check_alike(found: Collection[WorkerFacts]) -> None:
    """Raise `InputError` if workers multiply by different libraries or devices."""
    first, *others = found
    for other in others:
        if other.arithmetic != first.arithmetic:
            raise InputError(
                f"{first.worker} on {first.host} multiplies by {_described(first)}, {other.worker} on "
                f"{other.host} by {_described(other)}. The bits of C would depend on which worker computes "
                "what: use workers of one kind, or choose a --backend that all have"
            )


def _described(found: WorkerFacts) -> str:
    return f"{found.backend} ({found.library}, kernel {found.kernel})"


def sharers(found: Collection[WorkerFacts]) -> dict[str, tuple[int, int, int]]:
    """Return per worker how many workers share its host memory, its device and its cores, itself included."""
    machines = Counter(x.machine for x in found)
    devices = Counter((x.machine, x.place) for x in found)
    cores = Counter((x.machine, x.cores) for x in found)
    return {
        x.worker: (machines[x.machine], devices[x.machine, x.place], cores[x.machine, x.cores]) for x in found
    }


def with_shares(request: Request, found: Collection[WorkerFacts]) -> Request:
    """Return the request with its memory budgets divided among the workers that share a host or a device.

    All workers get the budgets of the worker with the least memory, since they follow one plan.
    """
    shared = sharers(found)
    if request.budgets.memory is not None and all(one.backend == "host" for one in found):
        each_ram = parse_size(request.budgets.memory) // max(ram for ram, _, _ in shared.values())
        return request.with_options(memory=each_ram)
    each = []
    for one in found:
        ram, device, _ = shared[one.worker]
        given = request.budgets.device_memory, request.budgets.all_host_memory
        whole = budgets_of(one.backend, partial(int, one.free), *given, one.available)
        each.append(Budgets(whole.device // device, whole.host // ram))
    host = min(one.host for one in each)
    name = "host_memory" if request.budgets.memory is None else "memory"
    return request.with_options(device_memory=min(one.device for one in each), **{name: host})


def check_memory(plan: Plan, found: Collection[WorkerFacts]) -> None:
    """Raise `OutOfMemoryError` if a worker has too little free memory for its share of a plan."""
    shared = sharers(found)
    unified = plan.machine.unified
    host = plan.footprint.host_total + (plan.footprint.device_total if unified else 0)
    for one in found:
        ram, device, _ = shared[one.worker]
        needs = [(host * ram, one.available, "host", ram)]
        option = "memory" if plan.budgets.memory else "host-memory"
        needs += [] if unified else [(plan.footprint.device_total * device, one.free, "device", device)]
        for needed, free, tier, count in needs:
            if needed > free:
                raise OutOfMemoryError(
                    f"{count} workers on {one.host} ({one.worker} is one of them) need {format_size(needed)} "
                    f"of {tier} memory together, {format_size(free)} are free: pass a smaller "
                    f"--{'device-memory' if tier == 'device' else option}, or use fewer workers"
                )


def blas_threads(crew: Crew, found: Collection[WorkerFacts], earlier: Earlier | None) -> int:
    """Return how many threads the BLAS of every worker must use. With other numbers, bits may differ.

    A resumed run uses as many threads as the earlier run. Raises `InputError` if a worker has too few cores.
    """
    asked = next((os.environ[name] for name in THREADS if crew.local and name in os.environ), "")
    shares = sharers(found)
    threads = max(1, min(len(one.cores) // shares[one.worker][2] for one in found))
    if earlier is not None:
        threads = earlier.header.get("threads") or min(len(one.cores) for one in found)
    elif asked.isdecimal() and int(asked):
        threads = int(asked)
    check_cores(found, threads)
    return threads


def check_cores(found: Collection[WorkerFacts], threads: int) -> None:
    """Raise `InputError` if the BLAS of a worker cannot use this number of threads."""
    for one in found:
        if one.backend == "host" and len(one.cores) < threads:
            raise InputError(
                f"{one.worker} on {one.host} has {len(one.cores)} cores, but C is computed with {threads} "
                f"threads of the BLAS, so its bits could differ: use workers with at least {threads} cores"
            )


def planning_engine(found: Collection[WorkerFacts]) -> Backend:
    """Return the backend to plan with. It has the properties of the workers' devices."""
    first = next(iter(found))
    if first.backend == "host":
        return open_backend("host")
    return _Described(first, min(one.free for one in found))


class _Described:
    """The backend of other processes: it has the properties that planning needs, and cannot run a plan."""

    def __init__(self, found: WorkerFacts, free: int) -> None:
        self.name = found.backend
        self._found = found
        self._free = free

    def device_count(self) -> int:
        return 1

    def free_memory(self) -> int:
        return self._free

    def multiprocessors(self) -> int:
        return self._found.multiprocessors

    def is_pinned(self, address: int, size: int) -> bool:
        return False

    def link_limit(self) -> float | None:
        return None

    def describe(self) -> dict[str, str]:
        return dict(self._found.described)

    def check(self, plan: Plan, kernel: str) -> None:
        check_plan(kernel, plan)

    def arithmetic(self, problem: GemmProblem, kernel: str) -> str:
        return self._found.kernel

    def moments(self, given: Swept, axis: int, host: int, device: int) -> None:
        return None

    def decomposed(self, s: Array, width: int, device: int) -> None:
        return None

    def open(self, plan: Plan, kernel: str, beside: Sequence[Session] = ()) -> Session:
        raise NotImplementedError("a plan of a distributed run is run by its workers")
