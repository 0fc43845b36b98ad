"""The child process of a worker: ``python -m oocgemm.distributed.child``.

It reads one task, a line of JSON, from stdin, and prints its result, a line of JSON, on stdout. The task is
to compute a part (`tasks.PartSpec`), or to describe the machine (`probe`). Stdin stays open as long as the
worker wants the process to go on: a `Watch` ends the process soon after its worker or its coordinator has
ended. A process that has opened a GPU then waits for another task, at most `processes.IDLE` seconds.

The process plans nothing. It resumes the run of the coordinator: tiles outside the part count as done. Like a
resumed run, it checks that the product, the operands, the arithmetic and the plan are those in the header of
the journal.
"""

import ctypes
import errno
import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter_ns, sleep, time
from typing import TYPE_CHECKING, Any

from oocgemm.distributed import processes
from oocgemm.distributed.attempts import FenceGuard, machine
from oocgemm.distributed.tasks import Given, PartSpec
from oocgemm.errors import BackendError, ExecutionError, InputError, OocGemmError
from oocgemm.system.installed import __version__
from oocgemm.system.threads import Cancel, start

if TYPE_CHECKING:
    from oocgemm.backends import Backend

_PR_SET_PDEATHSIG = 1
# Maximum number of messages in a result.
MAX_MESSAGES = 100


def die_with_parent() -> None:
    """Let the system kill this process when the thread that started it ends, as when a worker is killed.

    If the system cannot kill the process, a `Watch` ends it.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Watch:
    """A thread that stops the run when the worker closes its end of a pipe, or has died."""

    def __init__(
        self, pipe: int, cancel: Cancel, reason: Callable[[], str | None], clean_up: Callable[[], object]
    ) -> None:
        """Start the thread.

        - `pipe`: the end of the pipe that this process reads. The worker writes nothing to it until `end` is
          called.
        - `cancel`: stops the run. If the run does not stop within `processes.PATIENCE` seconds, the thread
          calls `clean_up`, and the process exits, which is safe at any time.
        - `reason`: called every `processes.INTERVAL` seconds. It returns any other reason why the process
          should end, or None.
        """
        self._pipe, self._cancel, self._reason, self._clean_up = pipe, cancel, reason, clean_up
        self._ended, self._end = os.pipe()
        self._fired = False
        self._thread = threading.Thread(target=self._work, name="oocgemm-watchdog", daemon=True)
        start(self._thread)

    def end(self) -> bool:
        """End the thread. Return False if the thread is ending the process already."""
        os.close(self._end)
        while self._thread.is_alive() and not self._fired:
            self._thread.join(0.01)
        if not self._fired:
            os.close(self._ended)
        return not self._fired

    def _work(self) -> None:
        why = None
        while why is None:
            readable, _, _ = select.select([self._pipe, self._ended], [], [], processes.INTERVAL)
            if self._ended in readable:
                return
            worker_ended = readable and not os.read(self._pipe, 1 << 10)
            why = "its worker has ended" if worker_ended else self._reason()
        self._fired = True
        self._cancel.request(ExecutionError(f"the part was stopped: {why}"))
        sleep(processes.PATIENCE)
        self._clean_up()
        os._exit(processes.EXIT_STOPPED)


def probe(task: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a worker (`survey.WorkerFacts`) as plain data. Open A and B, and the device.

    `task` has the path and the content of a file that only machines with the coordinator's storage can see.
    """
    from oocgemm import backends
    from oocgemm.jobs.operands import open_operands
    from oocgemm.jobs.stats import keeping
    from oocgemm.system.resources import available_memory

    found: dict[str, Any] = {
        "version": __version__,
        "host": socket.gethostname(),
        "machine": machine(),
        "cores": sorted(os.sched_getaffinity(0)),
        "sees": None,
    }
    if found["version"] != task["version"]:
        return found
    with suppress(OSError):
        given = Given.unpacked(task["nonce"])
        found["sees"] = given.nonce
    if found["sees"] != task["content"]:
        return found
    request = given.request
    engine = backends.open_backend(request.where.backend, request.where.device)
    with keeping(given.findings):
        _, _, problem = open_operands(request, engine.name)
    return found | {
        "backend": engine.name,
        "kernel": engine.arithmetic(problem, request.where.kernel),
        "library": library_of(engine),
        "described": engine.describe(),
        "place": _place(engine.name, request.where.device),
        "free": engine.free_memory(),
        "available": available_memory(),
        "multiprocessors": engine.multiprocessors(),
    }


def library_of(engine: "Backend") -> str:
    """Return the names of the library and device that multiply. Equal names give products of equal bits."""
    described = engine.describe()
    if engine.name == "host":
        return f"{described['blas']}, NumPy {described['numpy']}"
    return f"{described['device']}, CUDA {described['cuda']}"


def _place(backend: str, device: int) -> str:
    """Return an id of the device on its machine. Workers that share a device have equal ids."""
    if backend == "host":
        return "host"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return visible[device].strip() if device < len(visible) and visible[device] else str(device)


def compute(spec: PartSpec) -> dict[str, Any]:
    """Compute a part. Return figures of the run as plain data, such as its memory and its checks."""
    from oocgemm import backends, stores
    from oocgemm.distributed.attempts import LOG, AttemptTarget, StateTarget, clean_up
    from oocgemm.engine.executor import Prefetch
    from oocgemm.jobs.execute import execute
    from oocgemm.jobs.prepare import check_memory, prepare
    from oocgemm.jobs.stats import keeping
    from oocgemm.machine import info

    cancel = Cancel()
    guard = FenceGuard(Path(spec.fence), spec.epoch, spec.attempt)
    folder = Path(spec.folder)
    watch = Watch(sys.stdin.fileno(), cancel, guard.reason_to_end, partial(clean_up, folder))
    given = Given.unpacked(spec.given)
    request = replace(given.request, timeline=str(folder / LOG))
    sliced: dict[str, Any] = {}
    if request.slicing is not None:
        tile, rows = spec.header["candidate"]["tile"]["m"], request.slicing.rows
        number = spec.rows[0] * tile // rows
        request = replace(request, slicing=replace(request.slicing, number=number))
        sliced = {"k_slice": number, "first_tile_row": number * rows // tile}
    backends.load(request.where.backend, request.where.device)
    stores.load(request.a.given, request.b.given, request.c.source)
    origin, started = perf_counter_ns(), time()
    engine = backends.open_backend(request.where.backend, request.where.device)
    if (library := library_of(engine)) != spec.library:
        raise BackendError(f"{library} multiplies here, the run was planned for {spec.library}")
    with keeping(given.findings):
        job = prepare(request, engine, running=True, earlier=_earlier(spec))
    engine.check(job.plan, request.where.kernel)
    check_memory(job.plan, request)
    prefetch = Prefetch(engine.open(job.plan, request.where.kernel)) if job.plan.steps else None
    described = {"name": engine.name, "kernel": request.where.kernel} | engine.describe()
    known: dict[str, Any] = {"machine": info.machine(), "started": started, "backend": described} | sliced
    try:
        target = AttemptTarget if request.into.stores_c else StateTarget
        _, log = execute(job, prefetch, origin, known, None, cancel, partial(target, folder=folder))
    finally:
        clean_up(folder)
    return {
        "kernels": log.header["backend"]["multiplied by"],
        "held": log.header["held"],
        "retried": log.header["retried"][:MAX_MESSAGES],
        "checks": log.header["checks"],
        "stays": watch.end() and engine.name in processes.STAYING,
    }


def _earlier(spec: PartSpec) -> Any:
    """Return the coordinator's run, to resume. All tiles count as done, except those to compute here."""
    from oocgemm.jobs.journal import Record
    from oocgemm.jobs.resume import Earlier

    down, across = spec.header["tiles"]
    rows, cols = range(*spec.rows), range(*spec.cols)
    outside = {(i, j) for i in range(down) for j in range(across) if i not in rows or j not in cols}
    done = frozenset(outside | set(spec.done))
    record = Record(dict(spec.header), done, {}, frozenset(), 0, None, 0)
    return Earlier(Path(spec.fence).parent, record, resumed=True)


def _failure(error: BaseException) -> dict[str, Any]:
    """Return an error as plain data. `fatal` tells that the part would fail in every other process too."""
    full = any(getattr(one, "errno", None) in (errno.ENOSPC, errno.EDQUOT) for one in _chain(error))
    return {
        "error": type(error).__name__,
        "message": str(error) or type(error).__name__,
        "fatal": full or isinstance(error, InputError),
    }


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def main() -> None:
    """Do the tasks on stdin, and end the process."""
    die_with_parent()
    # Ctrl-C is for the coordinator, which then ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answer = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries may print
    stays, code = True, 0
    while stays:
        if not select.select([sys.stdin.fileno()], [], [], processes.IDLE)[0]:
            code = processes.EXIT_IDLE
            break
        if not (text := _line(sys.stdin.fileno())):
            break  # the worker needs no more tasks, or has ended
        result = _do(json.loads(text))
        stays = result.get("stays", False)
        os.write(answer, json.dumps(result).encode() + b"\n")
    os._exit(code)  # destroying all objects, and a CUDA context, would take time


def _do(task: dict[str, Any]) -> dict[str, Any]:
    try:
        if task["task"] == "part":
            return compute(PartSpec.of(task))
        result = probe(task)
        return result | {"stays": result.get("backend") in processes.STAYING}
    except (OocGemmError, MemoryError, OSError) as error:
        return _failure(error)


def _line(descriptor: int) -> bytes:
    """Read and return a line, and no bytes after it. The line is incomplete if the writer has ended."""
    parts = []
    while part := os.read(descriptor, 1 << 16):
        parts.append(part)
        if part.endswith(b"\n"):
            break
    return b"".join(parts)


if __name__ == "__main__":
    main()
