"""The child process of a worker: ``python -m oocgemm.distributed.part``.

It reads one task, a line of JSON, from stdin, and prints its result, a line of JSON, on stdout. The task is
to compute a part (`spec.PartSpec`), or to describe the machine (`probe`). Stdin stays open as long as the
worker wants the process to go on.

A process that has opened a GPU then waits for another task, at most `IDLE` seconds.

The process plans nothing. It resumes the run of the coordinator: tiles outside the part count as done. So it
checks what a resumed run checks: the product, the operands, the arithmetic and the plan must be those in the
header of the journal.
"""

import errno
import json
import os
import select
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter_ns, time
from typing import Any

from oocgemm.distributed import watchdog
from oocgemm.distributed.fence import Guard
from oocgemm.distributed.spec import PartSpec, request_of
from oocgemm.errors import BackendError, InputError, OocGemmError
from oocgemm.system.threads import Cancel

# Longest list of messages in a result.
MAX_MESSAGES = 100


def compute(spec: PartSpec) -> dict[str, Any]:
    """Compute a part. Return plain data: its operations and what went wrong without failing.

    Raises what `oocgemm.gemm` raises.
    """
    from oocgemm import backends, stores
    from oocgemm.distributed.attempts import LOG, AttemptTarget, clean_up
    from oocgemm.distributed.probe import library_of
    from oocgemm.engine.prefetch import Prefetch
    from oocgemm.jobs.budgets import check_memory
    from oocgemm.jobs.execute import execute
    from oocgemm.jobs.prepare import prepare_part
    from oocgemm.machine import info

    cancel = Cancel()
    guard = Guard(Path(spec.fence), spec.epoch, spec.attempt)
    folder = Path(spec.folder)
    watch = watchdog.Watch(sys.stdin.fileno(), cancel, guard.reason_to_end, partial(clean_up, folder))
    request = request_of(dict(spec.request) | {"timeline": str(folder / LOG)})
    sliced: dict[str, Any] = {}
    if request.slicing is not None:
        tile, rows = spec.header["candidate"]["tile"]["m"], request.slicing.rows
        number = spec.rows[0] * tile // rows
        request = replace(request, slicing=replace(request.slicing, number=number))
        sliced = {"k_slice": number, "first_tile_row": number * rows // tile}
    backends.load(request.backend, request.device)
    stores.load(request.a, request.b, request.c.source)
    origin, started = perf_counter_ns(), time()
    engine = backends.open_backend(request.backend, request.device)
    if (library := library_of(engine)) != spec.library:
        raise BackendError(f"{library} multiplies here, the run was planned for {spec.library}")
    job = prepare_part(request, engine, _earlier(spec))
    engine.check(job.plan, request.kernel)
    check_memory(job.plan, request)
    prefetch = Prefetch(engine.open(job.plan, request.kernel)) if job.plan.steps else None
    described = {"name": engine.name, "kernel": request.kernel} | engine.describe()
    known: dict[str, Any] = {"machine": info.machine(), "started": started, "backend": described} | sliced
    try:
        _, log = execute(job, prefetch, origin, known, None, cancel, partial(AttemptTarget, folder=folder))
    finally:
        clean_up(folder)
    return {
        "kernels": log.header["backend"]["multiplied by"],
        "held": log.header["held"],
        "retried": log.header["retried"][:MAX_MESSAGES],
        "checks": log.header["checks"],
        "stays": watch.end() and engine.name in watchdog.STAYING,
    }


def _earlier(spec: PartSpec) -> Any:
    """Return the run to resume: that of the coordinator, with all tiles done except those to compute."""
    from oocgemm.jobs.journal import Record
    from oocgemm.jobs.resume import Earlier

    down, across = spec.header["tiles"]
    rows, cols = range(*spec.rows), range(*spec.cols)
    outside = {(i, j) for i in range(down) for j in range(across) if i not in rows or j not in cols}
    done = frozenset(outside | set(spec.done))
    record = Record(dict(spec.header), done, {}, frozenset(), 0, None, 0)
    return Earlier(Path(spec.fence).parent, record, resumed=True)


def _failure(error: BaseException) -> dict[str, Any]:
    """Describe an error as plain data. `fatal` tells that the part would fail in every other process too."""
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
    watchdog.die_with_parent()
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is for the coordinator, which then ends this process
    answer = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries may print
    stays, code = True, 0
    while stays:
        if not select.select([sys.stdin.fileno()], [], [], watchdog.IDLE)[0]:
            code = watchdog.EXIT_IDLE
            break
        if not (text := _line(sys.stdin.fileno())):
            break  # the worker needs no more tasks, or has ended
        result = _do(json.loads(text))
        stays = result.get("stays", False)
        os.write(answer, json.dumps(result).encode() + b"\n")
    os._exit(code)  # destroying all objects, and a CUDA context, would take time


def _do(task: dict[str, Any]) -> dict[str, Any]:
    """Do a task. Return its result as plain data."""
    try:
        if task["task"] == "part":
            return compute(PartSpec.of(task))
        from oocgemm.distributed.probe import probe

        result = probe(task)
        return result | {"stays": result.get("backend") in watchdog.STAYING}
    except (OocGemmError, MemoryError, OSError) as error:
        return _failure(error)


def _line(descriptor: int) -> bytes:
    """Read a line without reading beyond it. Return what there is if the writer ends before."""
    parts = []
    while part := os.read(descriptor, 1 << 16):
        parts.append(part)
        if part.endswith(b"\n"):
            break
    return b"".join(parts)


if __name__ == "__main__":
    main()
