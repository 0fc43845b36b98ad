"""Execute the operations of a job, make C durable, and release everything."""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from oocgemm import stores
from oocgemm.engine.executor import Observer, Run
from oocgemm.engine.inline import InlineRun
from oocgemm.engine.mirror import outside_kept
from oocgemm.engine.prefetch import Prefetch
from oocgemm.engine.short import is_short
from oocgemm.engine.staging import Staging
from oocgemm.errors import ExecutionError, OocGemmError
from oocgemm.jobs import output
from oocgemm.jobs.borderline import settle
from oocgemm.jobs.options import Progress
from oocgemm.jobs.prepare import PreparedRun
from oocgemm.jobs.recording import recorder
from oocgemm.jobs.sampling import check_pass, check_samples, needs_samples
from oocgemm.jobs.transforms import on_device
from oocgemm.planning import Plan
from oocgemm.planning.units import counted
from oocgemm.stores import Collecting
from oocgemm.stores.base import Retries
from oocgemm.system.resources import CpuTimes, used_since
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
            prefetch.begin(job.plan, job.read, job.output.matrix)
        target = cleanup.enter_context(open_target(job))
        log = recorder(job, target.matrix, known)
        cleanup.callback(log.close)
        facts: dict[str, Any] = {"held": {"device": 0, "host": 0}, "retried": [], "checks": None}
        kernels, cpu = list[str](), list[CpuTimes | None]()
        if prefetch is not None:
            session, operands = prefetch.session, job.read | {"C": target.matrix}
            session.use_in_place({x: stores.memory(operands[x]) for x in job.plan.in_place})
            session.use_transforms(on_device(job.plan.problem, job.a, job.b), job.finishing)
            if job.factor is not None:
                session.use_factor(job.factor)
            staging = Staging(job.plan, operands, session.pin, session.host_arena, prefetch.retries)
            cleanup.callback(staging.close)
            observe = _observer(log, progress(job.plan) if progress else None)
            # Other programs hardly slow down a run of the GPU alone. To read the times takes 0.3 ms.
            if job.plan.prediction.total > MIN_CPU_WALL / (1 if job.plan.setting.enqueues else 10):
                observe = _reading_cpu(cpu, observe)
            with outside_kept(job.plan, target.matrix):
                facts["checks"] = _stream(job.plan, prefetch, staging, target, observe, log, origin, cancel)
            _note(staging.retried, facts["retried"])
            facts["held"] = {"device": session.device_bytes(), "host": staging.arena.nbytes}
            kernels = session.kernels_used()
            if needs_samples(job):
                staging.close()
                opened.close()  # its memory is free for the samples
            elif not (is_short(job.plan) or _frees_little(job.plan)):
                cleanup.enter_context(_freeing(staging, opened))
        if isinstance(target.matrix, Collecting):
            retries = Retries()
            settle(job, target.matrix, retries, cancel)
            _note(retries.made, facts["retried"])
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


def _frees_little(plan: Plan) -> bool:
    """Return whether C is in memory and nothing is unpinned, so that a thread for that would gain nothing."""
    return plan.layouts.c.in_memory and all(map(plan.slots.streams, "ABC"))


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
    prefetch: Prefetch,
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
        numbered = log.spans, prefetch.begun
        one = kind(part, prefetch.session, staging, origin, observe, target.finished, checks, *numbered)
        try:
            one.execute(cancel)
        finally:
            target.written = target.written or one.wrote

    if not plan.problem.checked:
        run(plan, None)
        return None
    from oocgemm.integrity.checksums.check import Checks

    checks = Checks(plan, SEED, prefetch.session)
    run(plan, checks)
    again = None
    if checks.failed:
        logger.warning("computed again, since checksums differ: %s", counted(len(checks.failed), "tile"))
        failing = checks.failing()
        again = Checks(failing, SEED + 1, prefetch.session, checks.failed)
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
