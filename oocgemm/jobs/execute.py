"""Execute the operations of a job, make C durable, write its log, and release everything."""

import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from oocgemm import stores
from oocgemm.backends.base import Session
from oocgemm.engine.executor import Prefetch, Run, is_short
from oocgemm.engine.mirror import outside_kept
from oocgemm.engine.staging import Staging
from oocgemm.errors import ExecutionError, InputError, OocGemmError
from oocgemm.jobs import output
from oocgemm.jobs.option_groups import Progress
from oocgemm.jobs.prepare import PreparedRun
from oocgemm.jobs.request import Request
from oocgemm.jobs.transforming import on_device
from oocgemm.machine.info import versions
from oocgemm.planning import Plan
from oocgemm.planning.units import counted
from oocgemm.stores import Collecting, Matrix, Merging
from oocgemm.stores.base import Retries
from oocgemm.system.resources import CpuTimes, used_since
from oocgemm.system.threads import Cancel
from oocgemm.timeline import Recorder
from oocgemm.timeline.spans import MIN_CPU_WALL

if TYPE_CHECKING:
    from oocgemm.integrity.tile_checks import Checks

# Seed of the random signs in checksums. Its value does not matter; a constant makes runs repeatable.
SEED = 20261

# The figures of checksums in the report of a run that computed no tile.
NOTHING_SUMMED: dict[str, Any] = {
    "tiles": 0, "blocks": 0, "undecided": 0, "recomputed": [], "seconds": 0.0, "thread_seconds": 0.0,
    "tier": "host", "device_seconds": 0.0,
}  # fmt: skip

logger = logging.getLogger("oocgemm")


def recorder(job: PreparedRun, c: Matrix, known: dict[str, Any]) -> Recorder:
    """Start and return the log of a run. Raises `InputError` if its file cannot be created.

    `known` contains the parts of the header that describe the machine and the backend.
    """
    operands = {"A": job.a} if job.plan.problem.b.shares else {"A": job.a, "B": job.b}
    header = known | {
        "operands": {name: x.describe() for name, x in (operands | {"C": c}).items()},
        "rates": rates(job, c),
    }
    path = job.request.timeline
    try:
        return Recorder(header, path, {"plan": job.plan.to_dict, "versions": versions})
    except OSError as error:
        raise InputError(
            f"the timeline cannot be written to {path}: {error.strerror}; give another path"
        ) from error


def rates(job: PreparedRun, c: Matrix) -> dict[str, float] | None:
    """Return the calibrated rates of the kernel, the links and the stores of a run, by name.

    They are in flop/s or bytes/s. Return None instead if any of them has not been measured.
    """
    machine, problem = job.plan.machine, job.plan.problem
    old = [] if not problem.reads_c else [c if job.d is None else job.d]
    sources = [job.a, job.b, *old]
    stored = [x.layout for x in (*sources, c) if not x.layout.in_memory]
    if problem.compute not in ("native", "emulated"):
        return None  # a calibration does not measure the kernel in tf32 or bf16
    if not machine.calibrated or (stored and not machine.storage_calibrated):
        return None
    known = {"kernel": machine.kernels[problem.rate].peak}
    if not machine.unified:
        known |= {"h2d": machine.h2d, "d2h": machine.d2h}
    if any(x.layout.decode_bytes for x in sources):
        # The rate of reading is left out: it is unknown how many encoded bytes the run reads.
        known["decode"] = machine.decode
    elif not any(x.layout.in_memory or x.layout.requests for x in sources):
        known["read"] = machine.read
    if c.describe().get("direct", not c.layout.in_memory) and not c.layout.requests:
        known["write"] = machine.write
    return known


def check_places(request: Request, wanted: int) -> None:
    """Raise `InputError` if C or the log of a run cannot be created. Call this before an operand is read.

    `wanted` is the minimum number of bytes that C takes on its disk.
    """
    request.c.check_place(lambda: wanted)
    if request.timeline is not None:
        check_log(request.timeline)


def check_log(timeline: str | os.PathLike[str]) -> None:
    """Raise `InputError` if no log can be created at a path."""
    path = Path(timeline).absolute()
    if not path.parent.is_dir():
        raise InputError(f"the timeline's folder {path.parent} does not exist: create it")
    if path.is_dir():
        raise InputError(f"the timeline's path {path} is a folder: give the path of a file")
    try:
        if path.exists():
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        else:
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise InputError(
            f"the timeline cannot be written to {path}: {error.strerror}; give another path"
        ) from error


def check_log_apart(timeline: str, job: PreparedRun) -> None:
    """Raise `InputError` if the log would overwrite an operand or the result."""
    for matrix in (job.a, job.b, job.output.matrix):
        if matrix is not None:
            stores.check_apart("the timeline", timeline, matrix)
    if job.request.c.is_same_path(timeline):
        raise InputError(f"the timeline at {timeline} would overwrite C: give it another path")


def execute(
    job: PreparedRun,
    prefetch: Prefetch | None,
    origin: int,
    known: dict[str, Any],
    progress: Progress | None,
    cancel: Cancel,
    open_target: Callable[[PreparedRun], output.Target] = output.open_target,
) -> tuple[stores.Matrix, Recorder]:
    """Run a planned job, from the creation of C until C is durable; return C and the log of the run.

    When this returns or raises, the session is closed and all memory is released.

    Args:
        job: what to run.
        prefetch: the backend's memory and streams, and the uploads that have begun; None if no tile is left
            to compute.
        origin: value of `perf_counter_ns` from which the wall time of the run is counted.
        known: the parts of the log's header that describe the machine and the backend.
        progress, cancel: as for `PreparedJob.run`.
        open_target: opens C for writing. A part of a distributed run does not write to C itself.
    """
    with ExitStack() as cleanup, disk_errors():
        opened = cleanup.enter_context(ExitStack())
        if prefetch is not None:
            opened.push(lambda kind, error, trace: prefetch.close(failed=error is not None))
            prefetch.begin(job.plan, job.read)
        target = cleanup.enter_context(open_target(job))
        log = recorder(job, target.matrix, known)
        cleanup.callback(log.close)
        facts: dict[str, Any] = {"held": {"device": 0, "host": 0}, "retried": [], "checks": None}
        kernels, cpu = list[str](), list[CpuTimes | None]()
        if prefetch is not None:
            session, operands = prefetch.session, job.read | {"C": target.matrix}
            session.use_in_place({x: stores.memory(operands[x]) for x in job.plan.in_place})
            session.use_numbers(on_device(job.plan.problem, job.a, job.b), job.finishing)
            if job.factor is not None:
                session.use_factor(job.factor)
            staging = Staging(job.plan, operands, session.pin, session.host_arena, prefetch.retries)
            cleanup.callback(staging.close)
            observers = [log.add, *([progress(job.plan)] if progress else [])]

            # Reading the CPU times takes 0.3 ms. Other programs hardly slow down a run of the GPU alone.
            reads_cpu = job.plan.prediction.total > MIN_CPU_WALL / (1 if job.plan.setting.enqueues else 10)

            def started() -> None:
                # Reading the CPU times before the run would delay the first operation, on some machines by
                # tens of milliseconds.
                if reads_cpu and not cpu:
                    cpu.append(CpuTimes.now())

            def run(part: Plan, checks: "Checks | None") -> None:
                given = session, staging, origin, observers, target.finished, checks
                one = Run(part, *given, log.spans, prefetch.begun, started)
                try:
                    one.execute(cancel)
                finally:
                    target.written = target.written or one.wrote

            with outside_kept(job.plan, target.matrix):
                facts["checks"] = _checked(job.plan, session, run)
            _note(staging.retried, facts["retried"])
            facts["held"] = {"device": session.device_bytes(), "host": staging.slots.arena.nbytes}
            kernels = session.kernels_used()
            # If C is in memory and nothing is unpinned, freeing the memory in a thread would gain nothing.
            frees_little = job.plan.layouts.c.in_memory and all(map(job.plan.slots.streams, "ABC"))
            if target.whole and _needs_samples(job):
                staging.close()
                opened.close()  # frees the memory of the session for the samples
            elif not (is_short(job.plan) or frees_little):
                cleanup.enter_context(_freeing(staging, opened))
        if isinstance(target.matrix, Merging):
            target.matrix = target.matrix.merged()
        if target.whole:
            conclude(job, target.matrix, facts, origin, cancel)
        target.seal()
        facts |= {
            "backend": known["backend"] | {"multiplied by": kernels},
            "cpu": used_since(cpu[0] if cpu else None),
        }
        log.finish(perf_counter_ns() - origin, facts)
        return target.matrix, log


def conclude(job: PreparedRun, result: Matrix, facts: dict[str, Any], origin: int, cancel: Cancel) -> None:
    """After all tiles are finished, decide which pairs near a threshold are kept, and check samples.

    Also call this if no tile was left to compute: the earlier run may have ended before its samples were
    checked, or because its samples were wrong. The figures of the checks are added to `facts`.
    """
    retries = Retries()
    if isinstance(result, Collecting):
        from oocgemm.jobs.verify import settle

        settle(job, result, retries, cancel)
    if _needs_samples(job):
        from oocgemm.jobs.verify import check_result

        begun = perf_counter_ns()
        if sampled := check_result(job, result, retries, cancel):
            facts["checks"] = (facts["checks"] or NOTHING_SUMMED) | sampled
        facts["sampling"] = [begun - origin, perf_counter_ns() - origin]
    _note(retries.made, facts["retried"])


def _needs_samples(job: PreparedRun) -> bool:
    """Return whether samples of the result must be checked after the run."""
    problem, request = job.plan.problem, job.request
    made = problem.checks_sums or request.into.sampled
    return request.verify and made and 0 not in (problem.m, problem.n)


def _note(retried: list[str], facts: list[str]) -> None:
    """Log the reads that were tried again, and add them to the reads listed in the report."""
    facts += retried
    for failed in retried:
        logger.warning("read again after a failure: %s", failed)


@contextmanager
def _freeing(staging: Staging, session: ExitStack) -> Iterator[None]:
    """Unpin and free all memory in a thread, while C is flushed to the disk. All operations must have ended.

    The context ends when all memory is free. If no thread can be started, the caller frees it.
    """

    def free() -> None:
        arena = staging.slots.arena  # mapped until it is unpinned
        staging.close()
        session.close()
        del arena

    with ThreadPoolExecutor(1, thread_name_prefix="oocgemm-free") as pool:
        try:
            freed = pool.submit(free)
        except RuntimeError:
            yield
            return
        yield
        freed.result()


def _checked(
    plan: Plan, session: Session, run: Callable[[Plan, "Checks | None"], None]
) -> dict[str, Any] | None:
    """Call `run` for a plan. Return the results of the checksums; None if the run has none.

    Tiles that fail their checksums are computed once more. Raises `ExecutionError` if a tile fails again.
    """
    if not plan.problem.checked:
        run(plan, None)
        return None
    from oocgemm.integrity.tile_checks import Checks

    checks = Checks(plan, SEED, session)
    run(plan, checks)
    again = None
    if checks.failed:
        logger.warning("computed again, since checksums differ: %s", counted(len(checks.failed), "tile"))
        failing = checks.failing()
        again = Checks(failing, SEED + 1, session, checks.failed)
        run(failing, again)
        again.raise_first_failure()
    return checks.figures(again)


@contextmanager
def disk_errors() -> Iterator[None]:
    """Turn each `OSError` in the `with` block into an `ExecutionError`."""
    try:
        yield
    except OSError as error:
        if isinstance(error, OocGemmError):
            raise
        raise ExecutionError(f"C cannot be written to the disk: {error}") from error
