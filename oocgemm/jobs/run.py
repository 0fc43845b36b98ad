"""Prepare a request and run it, or only plan it.

For a small product on a GPU, opening and planning everything would take longer than the product. If A, B and
C are arrays in memory, what `prepare` returns depends on their shapes, strides and dtypes, on which of them
are pinned, on the options, and on what changes slowly: the free memory, and the files with the rates of the
machine. So a preparation is used again for a product like a recent one, for at most `RECENT` seconds.
"""

import gc
import logging
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from operator import attrgetter
from time import monotonic, perf_counter_ns, time
from traceback import clear_frames
from typing import Any, TypeVar, overload

from oocgemm import backends, planning, stores
from oocgemm.backends import Backend
from oocgemm.engine.inline import is_brief
from oocgemm.engine.prefetch import Prefetch
from oocgemm.errors import ExecutionError, OutOfMemoryError
from oocgemm.jobs import support
from oocgemm.jobs.budgets import check_memory
from oocgemm.jobs.execute import check_log, check_log_apart, execute
from oocgemm.jobs.options import Progress
from oocgemm.jobs.prepare import Output, PreparedRun, prepare
from oocgemm.jobs.request import Request, Source
from oocgemm.jobs.result import Plan, Result
from oocgemm.jobs.transforming import check_known, how_to_replace, memory_of
from oocgemm.kernels.ladder import check_plan
from oocgemm.machine import info as system
from oocgemm.planning.units import counted, format_size, format_time
from oocgemm.stores import Matrix, is_plain
from oocgemm.system.resources import available_memory
from oocgemm.system.threads import Cancel, shielded, shielded_here

# For how many seconds a preparation is used, and for how many products one is kept.
RECENT, MAX_KEPT = 0.5, 16

_NOT_OPTIONS = ("a", "b", "c", "progress", "timeline")
_of_operands = (f"{side}.{field.name}" for side in "ab" for field in fields(Source) if field.name != "given")
_options = attrgetter(
    *(field.name for field in fields(Request) if field.name not in _NOT_OPTIONS), *_of_operands
)

T = TypeVar("T")

logger = logging.getLogger("oocgemm")


@dataclass(frozen=True)
class Recent:
    """What was prepared at the time `at`. Its matrices have no arrays: it keeps none alive."""

    at: float
    engine: Backend
    plan: planning.Plan
    a: Matrix
    b: Matrix
    c: Matrix | None

    def job(self, request: Request) -> PreparedRun | None:
        """Return the job of a request for which this was found; None if it must be prepared anew."""
        given, layouts = request.c.array, self.plan.layouts
        first, second = request.a.given, request.b.given
        if self.c is not None and any(stores.overlap(given, x) for x in (first, second)):
            return None
        a, b = stores.like(self.a, first), stores.like(self.b, second)
        c = None if self.c is None else stores.like(self.c, given)
        for x, layout in ((a, layouts.a), (b, layouts.b), (c, layouts.c)):
            if x is None or not layout.contiguous_rows:
                continue
            if self.engine.is_pinned(*stores.span(x)) != layout.pinned:
                return None
        return PreparedRun(request, a, b, Output(c, None, None, None, {}), self.plan)


_recent: dict[object, Recent] = {}


def find(request: Request) -> Recent | None:
    """Return what was prepared recently for a request like this one; None if nothing was."""
    key = _key(request)
    found = None if key is None else _recent.get(key)
    return None if found is None or monotonic() - found.at > RECENT else found


def remember(job: PreparedRun, engine: Backend) -> None:
    """Keep what was prepared for later products like this one, unless they must be prepared anew."""
    request, a, b, c = job.request, job.a, job.b, job.output.matrix
    if any(x is not None and stores.in_memory(x) is None for x in (a, b, c)):
        return
    as_given = stores.in_memory(a) is request.a.given and stores.in_memory(b) is request.b.given
    # A correction and scales are computed from the elements of the operands.
    if as_given and not request.gram and job.plan.steps and not job.has_numbers:
        key = _key(request) if engine.name == "cuda" else None
        if key is not None:
            if len(_recent) >= MAX_KEPT:
                _recent.clear()
            kept = stores.like(a, None), stores.like(b, None), None if c is None else stores.like(c, None)
            _recent[key] = Recent(monotonic(), engine, job.plan, *kept)


def forget() -> None:
    """Forget what was prepared."""
    _recent.clear()


def _key(request: Request) -> object:
    """Return what a preparation depends on, besides pinning and what changes slowly; None if on more."""
    arrays = request.a.given, request.b.given, request.c.array
    if request.c.path or not all(x is None or is_plain(x) for x in arrays):
        return None
    key = _options(request), *map(_form, arrays)
    try:
        hash(key)
    except TypeError:  # an option cannot be hashed
        return None
    return key


def _form(x: Any) -> object:
    """Return what the layout of an array depends on."""
    if x is None:
        return None
    return x.shape, x.strides, x.dtype, x.flags.num, x.ctypes.data % (x.itemsize or 1)


@dataclass(frozen=True)
class Begun:
    """A job whose first uploads have begun before all of it was checked. Its T began at the time `origin`."""

    origin: int
    engine: Backend
    job: PreparedRun
    prefetch: Prefetch


class PreparedJob:
    """A request whose backend and operands are open, checked and planned. It can run once.

    The constructor imports the packages that the request needs, and then starts the clock for T, the wall
    time of the run, unless the run has begun. It writes nothing. It raises what `prepare` raises, and
    `BackendError` if the backend is unavailable.
    """

    def __init__(self, request: Request, begun: Begun | None = None) -> None:
        self._request, self._begun = request, begun
        if request.timeline is not None:
            check_log(request.timeline)
        if begun is None:
            first = (
                request.where.devices[0] if isinstance(request.where.devices, tuple) else request.where.device
            )
            backends.load(request.where.backend, first)
            stores.load(request.a.given, request.b.given, request.c.source)
        known: dict[str, Any] = {"machine": system.machine()}
        self._origin = perf_counter_ns() if begun is None else begun.origin
        started = time()
        self._engine = _open(request) if begun is None else begun.engine
        backends.check_kernel(self._engine.name, request.where.kernel)
        described = {"name": self._engine.name, "kernel": request.where.kernel} | self._engine.describe()
        self._known = known | {"started": started, "backend": described, "devices": self._devices()}
        self._job = self._prepare() if begun is None else self._checked(begun.job)

    @property
    def plan(self) -> planning.Plan:
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
            job, prefetch = self._take_memory()
            _log_plan(job.plan)
            matrix, log = execute(job, prefetch, self._origin, self._known, progress, cancel)
        except BaseException as error:
            _clear_frames(error, handled)
            raise
        if log.failure is not None:
            raise ExecutionError(
                f"C is done, but its timeline cannot be written to {self._request.timeline}: "
                f"{log.failure.strerror}"
            ) from log.failure
        logger.info("C is done in %s", format_time(log.wall / 1e9))
        return Result(matrix, job.plan, log, job.request.a.kept)

    def _devices(self) -> list[dict[str, str]]:
        """Return the descriptions of the devices."""
        if isinstance(self._engine, backends.Devices):
            return self._engine.described()
        return [{"number": str(self._request.where.device)} | self._engine.describe()]

    def _prepare(self) -> PreparedRun:
        job = prepare(self._request, self._engine, running=True)
        remember(job, self._engine)
        resumed = job.output.resumed
        if resumed is not None and (count := resumed.header.get("k_slices", 1)) > 1:
            raise support.refusal(
                self._request.where.placement, "slices of k", c=self._request.c, count=count
            )
        return self._checked(job)

    def _checked(self, job: PreparedRun) -> PreparedRun:
        """Return a job whose kernel can run its plan, and whose log would overwrite no operand."""
        self._engine.check(job.plan, self._request.where.kernel)
        if self._request.timeline is not None:
            check_log_apart(os.fsdecode(self._request.timeline), job)
        return job

    def _take_memory(self) -> tuple[PreparedRun, Prefetch | None]:
        """Allocate the memory of the plan before anything is written; return the job and its session.

        If the plan no longer fits, since other programs have allocated memory, the job is planned once more:
        default budgets are shares of the free memory. The session is None if no tile is left to compute.
        """
        job, request = self._job, self._request
        if self._begun is not None:
            return job, self._begun.prefetch
        for last in (False, True):
            if not job.plan.steps:
                break
            try:
                return job, _opened(self._engine, job.plan, request)
            except OutOfMemoryError as error:
                if last:
                    raise
                logger.info("planning again: %s", error)
                available_memory()  # the recent answer was too high
                forget()
                job = self._prepare()
        return job, None


def run_again(
    request: Request, recent: Recent, origin: int, progress: Progress | None, cancel: Cancel
) -> Result | None:
    """Run a request that is like a recent one. Return None if it must be prepared anew.

    The GPU begins to copy blocks before the rest of the run is prepared. Call it as `PreparedJob.run`, which
    it calls. T begins at the time `origin`.
    """
    job = recent.job(request)
    if job is None:
        return None
    try:
        prefetch = _opened(recent.engine, job.plan, request)
    except OutOfMemoryError:
        return None
    with ExitStack() as undo:
        undo.push(lambda kind, error, trace: prefetch.close(failed=error is not None))
        prefetch.begin(job.plan, job.read, job.output.matrix)
        prepared = PreparedJob(request, Begun(origin, recent.engine, job, prefetch))
        undo.pop_all()
    return prepared.run(progress, cancel)


def _opened(engine: Backend, plan: planning.Plan, request: Request) -> Prefetch:
    """Allocate the memory of a plan. Raises `OutOfMemoryError`."""
    check_memory(plan, request)
    return Prefetch(engine.open(plan, request.where.kernel))


def _open(request: Request) -> Backend:
    """Open the device or the devices of a request."""
    if request.where.devices is None:
        return backends.open_backend(request.where.backend, request.where.device)
    return backends.open_devices(request.where.backend, request.where.devices)


def _log_plan(plan: planning.Plan) -> None:
    """Log the tile, the steps and the budgets of a plan before it runs."""
    if not logger.isEnabledFor(logging.INFO):
        return
    budgets = f"{format_size(plan.budgets.device)} and {format_size(plan.budgets.host)}"
    logger.info("tile %s, %s, budgets %s", plan.tile, counted(plan.steps, "step"), budgets)
    if plan.done:
        logger.info("done already: %s", counted(len(plan.done), "tile"))


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


@overload
def outcome(request: Request, *, dry_run: bool) -> Result | Plan: ...
@overload
def outcome(request: Request, shape: Callable[[Result], T], *, dry_run: bool) -> T | Plan: ...
def outcome(request: Request, shape: Callable[[Result], Any] = lambda found: found, *, dry_run: bool) -> Any:
    """Run a request, and return its result in the shape that a verb gives it; with `dry_run`, the plan."""
    return plan_request(request) if dry_run else shape(run_request(request))


def plan_request(request: Request) -> Plan:
    """Plan a request without a device."""
    name = backends.resolve(request.where.backend)
    if request.where.backend == "auto" and name == "host":
        backends.fall_back(backends.missing_for_cuda())
    backends.check_kernel(name, request.where.kernel)
    request = request.with_options(backend=name)
    engine: Backend | None = None
    if name == "host":
        given = request.where.devices
        engine = (
            backends.open_backend(name, request.where.device)
            if given is None
            else backends.open_devices(name, given)
        )
    planned = prepare(request, engine, running=False).plan
    if engine is None:
        check_plan(request.where.kernel, planned)
    else:
        engine.check(planned, request.where.kernel)
    return Plan.of(planned, request)


def run_request(request: Request) -> Result:
    """Run a request, and return its result."""
    _check_genotypes(request)
    if request.where.is_distributed:
        from oocgemm.distributed.distribute import run_distributed

        return _run(request, partial(run_distributed, request))
    if (recent := find(request)) is not None:
        again = partial(run_again, request, recent, perf_counter_ns())
        if (result := _run(request, again, brief=is_brief(recent.plan))) is not None:
            return result
    job = PreparedJob(request)
    return _run(request, job.run, brief=is_brief(job.plan))


def _check_genotypes(request: Request) -> None:
    """Raise `InputError` if a product would multiply the codes of missing genotypes in a .bed file."""
    if not request.decode or request.a.impute or request.chain is not None or request.a.known is not None:
        return
    names = ["X"] if request.gram else ["A", "B"]
    for name, operand, transform in zip(
        names, (request.a.given, request.b.given), (request.a.transform, request.b.transform), strict=False
    ):
        remedy = how_to_replace("" if request.gram else name)
        if request.selection is not None or request.reduction is not None:
            remedy = "store a copy in which they are replaced"
        check_known(name, operand, transform, partial(memory_of, request), remedy)


def _run(request: Request, run: Callable[[Progress | None, Cancel], T], *, brief: bool = False) -> T:
    """Call `run` with the progress callback of a request, where no signal interrupts it."""
    shield = shielded_here if brief else shielded
    with _display(request.progress) as progress:
        return shield(partial(run, progress))


def _display(progress: Progress | bool | None) -> AbstractContextManager[Progress | None]:
    """Return a context manager for a run's progress callback: the built-in display if `progress` is True."""
    if progress is True:
        from oocgemm.reports.progress import progress_display  # imports rich, which is slow

        return progress_display(True)
    return nullcontext(progress or None)
