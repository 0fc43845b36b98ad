"""Run a prepared job: allocate memory, execute the operations, make C durable, and release everything."""

import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from time import perf_counter_ns, time
from traceback import clear_frames
from typing import TYPE_CHECKING, Any

from oocgemm import backends, stores
from oocgemm.backends import Backend, Session
from oocgemm.engine.executor import Observer, Run, located_error
from oocgemm.engine.inline import InlineRun
from oocgemm.engine.short import is_short
from oocgemm.engine.staging import Staging
from oocgemm.errors import ExecutionError, InputError, OocGemmError, OutOfMemoryError
from oocgemm.jobs import output
from oocgemm.jobs.budgets import check_memory
from oocgemm.jobs.options import Progress
from oocgemm.jobs.prepare import Job, prepare
from oocgemm.jobs.recording import check_log, check_log_apart, recorder
from oocgemm.jobs.repeat import forget, remember, repeated
from oocgemm.jobs.request import Request
from oocgemm.jobs.result import Result
from oocgemm.jobs.sampling import check_pass, check_samples, needs_samples
from oocgemm.jobs.transforms import on_device
from oocgemm.machine import info as system
from oocgemm.machine.models import learn
from oocgemm.planning import Plan
from oocgemm.planning.units import counted, format_size, format_time
from oocgemm.stores.retries import Retries
from oocgemm.system.cpu import CpuTimes, used_since
from oocgemm.system.memory import available_memory
from oocgemm.system.threads import Cancel
from oocgemm.timeline import Recorder, Span
from oocgemm.timeline.diagnosis import MIN_CPU_WALL

if TYPE_CHECKING:
    from oocgemm.integrity.checksums.check import Checks

# Seed of the random signs in checksums. Its value does not matter; a constant makes runs repeatable.
SEED = 20261

# The figures of checksums of a run that computed no tile.
NOTHING_SUMMED: dict[str, Any] = {
    "tiles": 0, "blocks": 0, "undecided": 0, "recomputed": [], "seconds": 0.0, "thread_seconds": 0.0,
    "tier": "host", "device_seconds": 0.0,
}  # fmt: skip

logger = logging.getLogger("oocgemm")


class PreparedJob:
    """A request whose backend and operands are open, checked and planned. It can run once.

    The constructor imports the packages that the request needs, and then starts the clock for T, the wall
    time of the run. It writes nothing. It raises what `prepare` raises, and `BackendError` if the backend is
    unavailable.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        if request.timeline is not None:
            check_log(request.timeline)
        first = request.devices[0] if isinstance(request.devices, tuple) else request.device
        backends.load(request.backend, first)
        stores.load(request.a, request.b, request.c.source)
        known: dict[str, Any] = {"machine": system.machine()}
        self._origin = perf_counter_ns()
        started = time()
        self._engine, devices = _open(request)
        backends.check_kernel(self._engine.name, request.kernel)
        described = {"name": self._engine.name, "kernel": request.kernel} | self._engine.describe()
        self._known = known | {"started": started, "backend": described, "devices": devices}
        self._job = self._prepare()

    @property
    def plan(self) -> Plan:
        """The plan. It tells how much device and host memory the run will occupy."""
        return self._job.plan

    def run(self, progress: Progress | None, cancel: Cancel) -> Result:
        """Run the job until C is durable.

        Call it by `threads.shielded` or `threads.shielded_here`: the exception of a signal handler could
        interrupt the release of memory and threads.

        Args:
            progress: called with the plan; returns a function that is called with every finished operation.
            cancel: lets another thread stop the run. That thread passes an error, which is raised here.

        Raises:
            OutOfMemoryError: the memory of the plan cannot be allocated. Nothing was written.
            ExecutionError: the run failed.
        """
        handled = sys.exception()
        try:
            job, session = self._take_memory()
            _log_plan(job.plan)
            matrix, log = execute(job, session, self._origin, self._known, progress, cancel)
            operands = job.read | {"C": matrix}
            learn(job.plan, log, operands, self._request.kernel, self._engine)
        except BaseException as error:
            _clear_frames(error, handled)
            raise
        if log.failure is not None:
            raise ExecutionError(
                f"C is done, but its timeline cannot be written to {self._request.timeline}: "
                f"{log.failure.strerror}"
            ) from log.failure
        logger.info("C is done in %s", format_time(log.wall / 1e9))
        return Result(matrix, job.plan, log)

    def _prepare(self) -> Job:
        job = repeated(self._request, self._engine)
        if job is None:
            job = prepare(self._request, self._engine, running=True)
            remember(job, self._engine)
        resumed = job.output.resumed
        if resumed is not None and (count := resumed.header.get("k_slices", 1)) > 1:
            raise InputError(
                f"the run at {self._request.c} divides k into {count} slices, which are computed by workers: "
                "continue it with --workers 1 --resume (workers=1, resume=True)"
            )
        self._engine.check(job.plan, self._request.kernel)
        if self._request.timeline is not None:
            check_log_apart(os.fsdecode(self._request.timeline), job)
        return job

    def _take_memory(self) -> tuple[Job, Session | None]:
        """Allocate the memory of the plan before anything is written; return the job and its session.

        If the plan no longer fits, since other programs have allocated memory, the job is planned once more:
        default budgets are shares of the free memory. The session is None if no tile is left to compute.
        """
        job, request = self._job, self._request
        for last in (False, True):
            if not job.plan.steps:
                break
            try:
                check_memory(job.plan, request)
                return job, self._engine.open(job.plan, request.kernel)
            except OutOfMemoryError as error:
                if last:
                    raise
                logger.info("planning again: %s", error)
                available_memory()  # the recent answer was too high
                forget()
                job = self._prepare()
        return job, None


def _open(request: Request) -> tuple[Backend, list[dict[str, str]]]:
    """Open the device or the devices of a request. Also return their descriptions, one per device."""
    if request.devices is None:
        engine = backends.open_backend(request.backend, request.device)
        return engine, [{"number": str(request.device)} | engine.describe()]
    several = backends.open_devices(request.backend, request.devices)
    return several, several.described()


def execute(
    job: Job,
    session: Session | None,
    origin: int,
    known: dict[str, Any],
    progress: Progress | None,
    cancel: Cancel,
    open_target: Callable[[Job], output.Target] = output.open_target,
) -> tuple[stores.Matrix, Recorder]:
    """Run a planned job, from the creation of C until C is durable; return C and the log of the run.

    When this returns or raises, the session is closed and all memory is released.

    Args:
        job: what to run.
        session: the backend's memory and streams; None if no tile is left to compute.
        origin: value of `perf_counter_ns` from which the wall time of the run is counted.
        known: the parts of the log's header that describe the machine and the backend.
        progress, cancel: as for `PreparedJob.run`.
        open_target: opens C for writing. A part of a distributed run does not write to C itself.
    """
    with ExitStack() as cleanup, disk_errors():
        opened = cleanup.enter_context(ExitStack())
        if session is not None:
            opened.push(partial(_close, session))
            _upload_ahead(job, session)
        target = cleanup.enter_context(open_target(job))
        log = recorder(job, target.matrix, known)
        cleanup.callback(log.close)
        facts: dict[str, Any] = {"held": {"device": 0, "host": 0}, "retried": [], "checks": None}
        kernels, cpu = list[str](), list[CpuTimes | None]()
        if session is not None:
            operands = job.read | {"C": target.matrix}
            session.use_in_place({x: stores.memory(operands[x]) for x in job.plan.in_place})
            session.use_transforms(on_device(job.plan.problem, job.a, job.b), job.finishing)
            if job.factor is not None:
                session.use_factor(job.factor)
            staging = Staging(job.plan, operands, session.pin, session.host_arena)
            cleanup.callback(staging.close)
            observe = _observer(log, progress(job.plan) if progress else None)
            # Other programs hardly slow down a run of the GPU alone. To read the times takes 0.3 ms.
            if job.plan.prediction.total > MIN_CPU_WALL / (1 if job.plan.setting.enqueues else 10):
                observe = _reading_cpu(cpu, observe)
            facts["checks"] = _stream(job.plan, session, staging, target, observe, log, origin, cancel)
            _note(staging.retried, facts["retried"])
            facts["held"] = {"device": session.device_bytes(), "host": staging.arena.nbytes}
            kernels = session.kernels_used()
            if needs_samples(job):
                staging.close()
                opened.close()  # its memory is free for the samples
            elif not is_short(job.plan):
                cleanup.enter_context(_freeing(staging, opened))
        # Also if no tile was left to compute: the earlier run may have ended before its samples were checked,
        # or because they were wrong.
        if needs_samples(job):
            sampling, retries = perf_counter_ns(), Retries()
            if job.request.chain is None:
                sampled = check_samples(job, target.matrix, retries, cancel)
                facts["checks"] = (facts["checks"] or NOTHING_SUMMED) | sampled
            else:
                check_pass(job, target.matrix, retries, cancel)
            _note(retries.made, facts["retried"])
            facts["sampling"] = [sampling - origin, perf_counter_ns() - origin]
        target.seal()
        facts |= {
            "backend": known["backend"] | {"multiplied by": kernels},
            "cpu": used_since(cpu[0] if cpu else None),
        }
        log.finish(perf_counter_ns() - origin, facts)
        return target.matrix, log


def _note(retried: list[str], facts: list[str]) -> None:
    """Log the reads that were tried again, and add them to those in the report."""
    facts += retried
    for failed in retried:
        logger.warning("read again after a failure: %s", failed)


def _upload_ahead(job: Job, session: Session) -> None:
    """Let a session that repeats its last run begin to upload blocks, while the rest is prepared."""
    upload, c = getattr(session, "upload_ahead", None), job.output.matrix
    if upload is not None and c is not None:
        try:
            upload([*map(stores.memory, (job.a, job.b, c))])
        except Exception as error:
            raise located_error(error, "the first uploads") from error


def _close(session: Session, kind: object, error: BaseException | None, trace: object) -> None:
    session.close(failed=error is not None)


@contextmanager
def _freeing(staging: Staging, session: ExitStack) -> Iterator[None]:
    """Unpin and free all memory in a thread, while C is flushed to the disk. All operations must have ended.

    The context ends when all memory is free. If no thread can be started, the caller frees it.
    """

    def free() -> None:
        arena = staging.arena  # mapped until it is unpinned
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


def _stream(
    plan: Plan,
    session: Session,
    staging: Staging,
    target: output.Target,
    observe: Observer,
    log: Recorder,
    origin: int,
    cancel: Cancel,
) -> dict[str, Any] | None:
    """Execute every operation of a plan. Return the results of the checksums; None if the run has none.

    Tiles that fail their checksums are computed once more. Raises `ExecutionError` if one fails again.
    """

    def run(part: Plan, checks: "Checks | None") -> None:
        kind = InlineRun if is_short(part) else Run
        one = kind(part, session, staging, origin, observe, target.finished, checks, log.spans)
        try:
            one.execute(cancel)
        finally:
            target.written = target.written or one.wrote

    if not plan.problem.checked:
        run(plan, None)
        return None
    from oocgemm.integrity.checksums.check import Checks

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


def _log_plan(plan: Plan) -> None:
    """Log the tile, the steps and the budgets of a plan before it runs."""
    if not logger.isEnabledFor(logging.INFO):
        return
    budgets = f"{format_size(plan.budgets.device)} and {format_size(plan.budgets.host)}"
    logger.info("tile %s, %s, budgets %s", plan.tile, counted(plan.steps, "step"), budgets)
    if plan.done:
        logger.info("done already: %s", counted(len(plan.done), "tile"))


@contextmanager
def disk_errors() -> Iterator[None]:
    """Turn each `OSError` in the `with` block into an `ExecutionError`."""
    try:
        yield
    except OSError as error:
        if isinstance(error, OocGemmError):
            raise
        raise ExecutionError(f"C cannot be written to the disk: {error}") from error


def _observer(log: Recorder, watch: Observer | None) -> Observer:
    """Return an observer that records every finished operation, and passes it on to another observer."""

    def observe(span: Span) -> None:
        log.add(span)
        if watch is not None:
            watch(span)

    return observe


def _reading_cpu(cpu: list[CpuTimes | None], observe: Observer) -> Observer:
    """Return an observer that also puts the processor times at the first operation's end into `cpu`.

    Before the run, reading them would delay the first operation, on some machines by tens of milliseconds.
    """

    def read_first(span: Span) -> None:
        if not cpu:
            cpu.append(CpuTimes.now())
        observe(span)

    return read_first


def _clear_frames(failure: BaseException, handled: BaseException | None) -> None:
    """Clear the local variables in the stack frames of an exception, its causes and its contexts.

    They refer to the buffers of the run, which would stay allocated as long as the exception exists. The
    exception that the caller was handling when the run began is left as it is.
    """
    left, seen = [failure], {id(handled)}
    while left:
        one = left.pop()
        if id(one) not in seen:
            seen.add(id(one))
            clear_frames(one.__traceback__)
            left += [other for other in (one.__cause__, one.__context__) if other is not None]
    gc.collect()  # frees other exceptions and their frames, if only reference cycles keep them
