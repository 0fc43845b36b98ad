"""Prepare a request and run it, or only plan it, and return what the verbs return: plans and results.

*Recent preparations.* For a small product on a GPU, opening and planning everything would take longer than
the product. If A, B and C are arrays in memory, what `prepare` returns depends on their shapes, strides and
dtypes, on which of them are pinned, on the options, and on what changes slowly: the free memory, and the
files with the rates of the machine. So the preparation of a product is reused for later products
like it, for at most `RECENT` seconds.
"""

import gc
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import field, fields
from functools import cached_property, partial
from operator import attrgetter
from time import monotonic, perf_counter_ns, time
from traceback import clear_frames
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from oocgemm import backends, planning, stores
from oocgemm.backends import Backend
from oocgemm.engine.executor import Prefetch, is_brief
from oocgemm.errors import ExecutionError, InputError, OutOfMemoryError
from oocgemm.jobs import support
from oocgemm.jobs.execute import check_log, check_log_apart, execute
from oocgemm.jobs.option_groups import PathLike, Progress, RunOptions
from oocgemm.jobs.options import check_names
from oocgemm.jobs.prepare import Output, PreparedRun, check_memory, prepare
from oocgemm.jobs.request import Request, Source
from oocgemm.jobs.transforming import check_known, how_to_replace, memory_of
from oocgemm.machine import info as system
from oocgemm.planning.terms import ONE
from oocgemm.planning.units import counted, format_rate, format_size, format_time, parse_rate
from oocgemm.stores import Matrix, is_plain
from oocgemm.system.resources import available_memory
from oocgemm.system.threads import Cancel, shielded, shielded_here
from oocgemm.timeline import Recorder, Timeline
from oocgemm.values import dataclass

if TYPE_CHECKING:
    from oocgemm.planning.partition import Partition
    from oocgemm.timeline import Report

# Estimated memory of a timeline and its report, in bytes per span. A span is the record of one operation. For
# a run with 132,500 spans, 910 bytes per span were measured.
REPORTED_SPAN_BYTES = 1000


@dataclass(frozen=True)
class Result:
    """The result of a run. ``np.asarray(result)`` is C as an ndarray.

    Attributes:
        c: C as a `Matrix`. Every run sets it; None is for a `Result` that is made without a run.
        plan: the plan that ran.
        log: the compressed record of the run, from which `timeline` and `report` are made on first access.
        kept: the numbers of the rows of X that C has, if `corr` has left out some; None for all.
    """

    c: Matrix | None
    plan: planning.Plan
    log: Recorder
    kept: NDArray[np.int64] | None = None

    @cached_property
    def out(self) -> Any:
        """The array that holds C: the one passed in, a new ndarray, or the zarr array or memory map at C's
        path. The first access to a zarr array imports zarr and opens the array."""
        return getattr(self.c, "array", None)

    @property
    def uplo(self) -> str:
        """What the run has written: "full" for all of C, or the triangle "lower" or "upper" of it."""
        return self.plan.problem.triangle or "full"

    @cached_property
    def timeline(self) -> Timeline:
        """The times of every operation of the run. It takes about 500 bytes of memory per operation."""
        return self.log.timeline()

    @cached_property
    def report(self) -> "Report":
        """The figures of the run, such as T, the share of T in which the kernel runs, and the traffic."""
        from oocgemm.timeline import report

        return report(self.timeline)

    @property
    def report_bytes(self) -> int:
        """Estimated memory that `timeline` and `report` take, in bytes."""
        return REPORTED_SPAN_BYTES * self.log.spans

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return C as an ndarray. A zarr array is loaded; an ndarray is copied only if required.

        Raises:
            InputError: C is not available as an array.
            ValueError: `copy` is False and a copy is needed.
        """
        if self.out is None:
            raise InputError("this result has no array: open C at its path")
        return np.array(self.out, dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        return f"<Result {', '.join(self._facts())}>"

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: C, the wall time T, the rate, and what limited its speed."""
        from html import escape

        from oocgemm.reports.advice import diagnosis_lines

        rows = [*self._facts(), *diagnosis_lines(self.report, self.timeline)]
        return f"<div><b>oocgemm.Result</b><br>{'<br>'.join(map(escape, rows))}</div>"

    def _facts(self) -> list[str]:
        """Return the facts that need no timeline: C and its location, the wall time T and the rate."""
        problem, seconds = self.plan.problem, self.log.wall / 1e9
        where = type(self.out).__name__ if isinstance(self.out, np.ndarray | None) else repr(self.out)
        facts = [f"C {problem.m} x {problem.n} {problem.c_dtype} in {where}", f"T {format_time(seconds)}"]
        if self.plan.flops and seconds:
            facts.append(format_rate(self.plan.flops / seconds, "FLOP"))
        return facts


@dataclass(frozen=True, eq=False)
class Neighbors:
    """The rows that are most similar to each of n rows, the most similar first.

    As a result of `reduce`, it has the largest elements of each row of C: `indices` are the numbers
    of their columns, and `scores` are their values.

    Attributes:
        indices: n x topk numbers of rows, int64.
        scores: n x topk similarities to them, float32 or float64.
        run: the plan and the timeline of the run. It has no C.
    """

    indices: NDArray[np.int64]
    scores: NDArray[np.floating]
    run: Result

    def save(self, path: PathLike) -> None:
        """Write `indices` and `scores` to a new zarr group at a local path, as arrays of these names.

        Raises:
            InputError: something exists at the path, or nothing can be written there.
        """
        from oocgemm.stores.zarr_matrix import save_arrays

        save_arrays(os.fspath(path), {"indices": self.indices, "scores": self.scores} | _kept(self.run))


@dataclass(frozen=True, eq=False)
class Pairs:
    """All pairs of n rows that are similar, as a sparse n x n matrix in CSR format.

    ``scipy.sparse.csr_array((p.scores, p.indices, p.indptr), shape=(n, n))`` is this matrix. As a result of
    `reduce`, it has the elements of C that were found, and the shape of C.

    Attributes:
        indptr: n + 1 numbers: the pairs of row i are numbers indptr[i] to indptr[i + 1] - 1.
        indices: the other row of each pair, int64, in ascending order for each row.
        scores: the similarity of each pair, float32 or float64.
        run: the plan and the timeline of the run. It has no C.
    """

    indptr: NDArray[np.int64]
    indices: NDArray[np.int64]
    scores: NDArray[np.floating]
    run: Result

    @property
    def rows(self) -> NDArray[np.int64]:
        """The first row of each pair, as in COO format."""
        return np.repeat(np.arange(len(self.indptr) - 1), np.diff(self.indptr))

    def save(self, path: PathLike) -> None:
        """Write `indptr`, `indices` and `scores` to a new zarr group at a local path.

        Raises:
            InputError: something exists at the path, or nothing can be written there.
        """
        arrays = {"indptr": self.indptr, "indices": self.indices, "scores": self.scores}
        from oocgemm.stores.zarr_matrix import save_arrays

        save_arrays(os.fspath(path), arrays | _kept(self.run))


def _kept(run: Result) -> dict[str, NDArray[np.int64]]:
    """Return the array of the numbers of the kept rows, by its name; no array if no rows were left out."""
    return {} if run.kept is None else {"kept": run.kept}


@dataclass(frozen=True, repr=False)
class Plan(planning.Plan):
    """A planned product. `run` executes it; `str` describes it.

    `tile`, `footprint`, `traffic`, `prediction` and the other figures are those of `oocgemm.planning.Plan`.
    With `workers`, they are those of one worker that computes the whole product in its share of the memory.
    """

    request: Request = field(kw_only=True, compare=False)
    workers: "Partition | None" = field(kw_only=True, default=None, compare=False)

    @classmethod
    def of(cls, plan: planning.Plan, request: Request, workers: "Partition | None" = None) -> "Plan":
        """Return a plan that can run: a plan, its request, and its partition among several workers."""
        decided = {part.name: getattr(plan, part.name) for part in fields(planning.Plan)}
        return cls(**decided, request=request, workers=workers)

    def run(self, **options: Unpack[RunOptions]) -> Result:
        """Run the plan, as ``oocgemm.gemm(plan=self, **options)`` does."""
        check_names("run", options, RunOptions)
        return run_request(self.request.with_options(planned=self, **options))

    def scaling(
        self, workers: int | Iterable[int], storage_read: float | str | None = None
    ) -> "tuple[Partition, ...]":
        """Predict the product on several workers, each with the machine model and the budgets of this plan.

        Nothing is run. If the plan was made with a given tile, parts consist of such tiles. Otherwise, tiles
        may have other extents, so that there are enough for all workers.

        Args:
            workers: number of workers that there are, or several numbers.
            storage_read: what the storage delivers to all workers together, in bytes per second, such as
                ``100e9`` or ``"100GB/s"``; by default, what one worker reads.

        Returns:
            For each number of workers, a `Partition`: how many of them are worth using, the parts that they
            compute, and the predicted seconds.

        Raises:
            InputError: a number of workers is not from 1 to 1024, the rate is not positive, or an operand is
                in memory, where other processes cannot access it.
        """
        from oocgemm.planning.partition import scaling

        layouts = {"A": self.layouts.a, "B": self.layouts.b, "C": self.layouts.c}
        for operand, layout in layouts.items():
            if layout.in_memory:
                raise support.refusal(support.WORKERS, "planned in memory", name=operand)
        counts = [workers] if isinstance(workers, int) else list(workers)
        rate = None if storage_read is None else parse_rate(storage_read)
        keep_tile = self.request.tile is not None
        return scaling(self, counts, rate, keep_tile=keep_tile, whole_k=not self.request.divides_k)

    def __repr__(self) -> str:
        return f"<Plan {next(self._lines())}>"

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        """Yield the lines of `str(plan)`: product, tiles, memory, traffic, predicted time, and any note."""
        problem, tile, prediction = self.problem, self.tile, self.prediction
        factors = " @ ".join(problem.factors)
        yield f"C {problem.m} x {problem.n} {problem.c_dtype} = {factors} {problem.described_dtype}"
        down, across = self.grid.shape
        tiles, steps = f"{down} x {across} tiles", counted(self.steps, "step")
        yield f"tile {tile.m} x {tile.n}, panels {tile.k} deep: {tiles}, {steps}"
        tiers = {"device": self.footprint.device_total, "host": self.footprint.host_total}
        budgets = {"device": self.budgets.device, "host": self.budgets.host}
        used = (f"{tier} {format_size(tiers[tier])} of {format_size(budgets[tier])}" for tier in tiers)
        each = f" (device: on each of {self.devices} devices)" if self.devices > 1 else ""
        yield f"memory: {', '.join(used)}{each}"
        moved = (
            f"{link} {format_size(size)} (at least {format_size(self.least[link])})"
            for link, size in self.traffic.items()
            if size
        )
        yield f"traffic: {', '.join(moved) or 'none'}"
        if self.decoded:
            yield f"decoded by the GPU: {self.decoded}"
        if coding := self.layouts.codings.c:
            yield f"compressed by the GPU: C ({coding.codec})"
        rates = "calibrated" if self.machine.calibrated else "run `oocgemm calibrate` for better estimates"
        yield f"predicted: {format_time(prediction.total)}, {prediction.bottleneck}-bound ({rates})"
        if self.workers:
            yield f"workers: {self.workers}"
        if self.note:
            yield f"note: {self.note}"


# For how many seconds a preparation may be reused, and the maximum number of products whose preparations are
# kept.
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
    """What was prepared at the time `at`. Its matrices refer to no arrays, so that arrays can be freed."""

    at: float
    engine: Backend
    plan: planning.Plan
    a: Matrix
    b: Matrix
    c: Matrix | None

    def job(self, request: Request) -> PreparedRun | None:
        """Return the job of a request like the one prepared; None if the request must be prepared anew."""
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
    """Return the recent preparation of a request like this one; None if there is none."""
    key = _key(request)
    found = None if key is None else _recent.get(key)
    return None if found is None or monotonic() - found.at > RECENT else found


def remember(job: PreparedRun, engine: Backend) -> None:
    """Keep the preparation of a job for later products like it, unless these must be prepared anew."""
    request, a, b, c = job.request, job.a, job.b, job.output.matrix
    if any(x is not None and stores.in_memory(x) is None for x in (a, b, c)):
        return
    as_given = stores.in_memory(a) is request.a.given and stores.in_memory(b) is request.b.given
    # A correction and scales are computed from the elements of the operands.
    if as_given and not request.into.uplo and job.plan.steps and not job.has_numbers:
        key = _key(request) if engine.name == "cuda" else None
        if key is not None:
            if len(_recent) >= MAX_KEPT:
                _recent.clear()
            kept = stores.like(a, None), stores.like(b, None), None if c is None else stores.like(c, None)
            _recent[key] = Recent(monotonic(), engine, job.plan, *kept)


def forget() -> None:
    _recent.clear()


def _key(request: Request) -> object:
    """Return the options and array layouts on which a preparation depends; None if it depends on more."""
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
    """Return the properties on which the layout of an array depends."""
    if x is None:
        return None
    return x.shape, x.strides, x.dtype, x.flags.num, x.ctypes.data % (x.itemsize or 1)


@dataclass(frozen=True)
class Begun:
    """A job whose uploads have begun before the job was fully checked. Its T began at the time `origin`."""

    origin: int
    engine: Backend
    job: PreparedRun
    prefetch: Prefetch


class PreparedJob:
    """A request whose backend and operands are open, checked and planned. It can run once.

    The constructor imports the packages that the request needs, and then starts the clock for T, the wall
    time of the run, unless the run has begun. It writes nothing.
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
        interrupt the release of memory and threads. `progress` is called with the plan, and returns a
        function that is called with every finished operation. `cancel` lets another thread stop the run by an
        error, which is raised here.
        Raises `OutOfMemoryError` if the memory of the plan cannot be allocated and nothing was written, and
        `ExecutionError` if the run failed.
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

        If the plan no longer fits, since other programs have allocated memory, the job is planned once more.
        The session is None if no tile is left to compute.
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
                available_memory()  # measured again: the recent value was too high
                forget()
                job = self._prepare()
        return job, None


def run_again(
    request: Request, recent: Recent, origin: int, progress: Progress | None, cancel: Cancel
) -> Result | None:
    """Run a request that is like a recent one. Return None if it must be prepared anew.

    The GPU begins to copy blocks before the rest of the run is prepared. T begins at the time `origin`.
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
        prefetch.begin(job.plan, job.read)
        prepared = PreparedJob(request, Begun(origin, recent.engine, job, prefetch))
        undo.pop_all()
    return prepared.run(progress, cancel)


def _opened(engine: Backend, plan: planning.Plan, request: Request) -> Prefetch:
    check_memory(plan, request)
    return Prefetch(engine.open(plan, request.where.kernel))


def _open(request: Request) -> Backend:
    if request.where.devices is None:
        return backends.open_backend(request.where.backend, request.where.device)
    return backends.open_devices(request.where.backend, request.where.devices)


def _log_plan(plan: planning.Plan) -> None:
    if not logger.isEnabledFor(logging.INFO):
        return
    budgets = f"{format_size(plan.budgets.device)} and {format_size(plan.budgets.host)}"
    logger.info("tile %s, %s, budgets %s", plan.tile, counted(plan.steps, "step"), budgets)
    if plan.done:
        logger.info("done already: %s", counted(len(plan.done), "tile"))


def _clear_frames(failure: BaseException, handled: BaseException | None) -> None:
    """Clear the local variables in the stack frames of an exception, its causes and its contexts.

    These variables refer to the buffers of the run, which would stay allocated as long as the exception
    exists. The exception that the caller was handling when the run began is left as it is.
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
    """Run a request, and return `shape(result)`; with `dry_run`, return the plan instead."""
    return plan_request(request) if dry_run else shape(run_request(request))


def plan_request(request: Request) -> Plan:
    """Return the plan of a request. No device is used, and workers run nothing."""
    if request.where.is_distributed:
        from oocgemm.distributed.distribute import plan_for_workers

        return plan_for_workers(request, _plan_alone)
    return _plan_alone(request)


def _plan_alone(request: Request) -> Plan:
    """Return the plan of a request for one process."""
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
        from oocgemm.kernels.ladder import check_plan

        check_plan(request.where.kernel, planned)
    else:
        engine.check(planned, request.where.kernel)
    return Plan.of(planned, request)


def run_request(request: Request) -> Result:
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


def run_side_by_side(requests: Sequence[Request], lanes: int, take: Callable[[Result], None]) -> None:
    """Run requests that do not depend on each other, `lanes` of them at the same time.

    Request number p runs in lane p modulo `lanes`. `take` is called with the results, in the order of the
    requests. The first failure stops all of them, and is raised.
    """

    def run(progress: Progress | None, cancel: Cancel) -> None:
        cancels = [Cancel() for _ in range(lanes)]

        def stop(error: BaseException) -> None:
            for each in cancels:
                each.request(error)

        with ExitStack() as stack:
            pools = [
                stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix=f"oocgemm-lane-{lane}"))
                for lane in range(lanes)
            ]
            stack.enter_context(cancel.calling(stop))
            futures = [
                pools[number % lanes].submit(
                    lambda request, own: PreparedJob(request).run(progress, own),
                    request,
                    cancels[number % lanes],
                )
                for number, request in enumerate(requests)
            ]
            try:
                for future in futures:
                    take(future.result())
            except BaseException as error:
                for future in futures:
                    future.cancel()
                stop(error)
                raise

    _run(requests[0], run)


def _check_genotypes(request: Request) -> None:
    """Raise `InputError` if a product would multiply the codes of missing genotypes in a .bed file."""
    replaced = request.a.impute or request.a.known is not None or request.terms != ONE
    if replaced or not (request.decode and request.into.refuses_missing):
        return
    names = ["X"] if request.into.uplo else ["A", "B"]
    for name, operand, transform in zip(
        names, (request.a.given, request.b.given), (request.a.transform, request.b.transform), strict=False
    ):
        remedy = how_to_replace("" if request.into.uplo else name)
        if not request.into.stores_c:
            remedy = "store a copy in which they are replaced"
        check_known(name, operand, transform, partial(memory_of, request), remedy)


def _run(request: Request, run: Callable[[Progress | None, Cancel], T], *, brief: bool = False) -> T:
    """Call `run` with the progress callback of a request, and return its result. No signal interrupts it."""
    shield = shielded_here if brief else shielded
    with _display(request.progress) as progress:
        return shield(partial(run, progress))


def _display(progress: Progress | bool | None) -> AbstractContextManager[Progress | None]:
    """Return a context manager for a run's progress callback: the built-in display if `progress` is True."""
    if progress is True:
        from oocgemm.reports.progress import progress_display  # imports rich, which is slow

        return progress_display()
    return nullcontext(progress or None)
