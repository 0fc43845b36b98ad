"""Run a product with many workers: survey them, plan, coordinate, and complete C.

If k is divided into slices, the partial products of all slices are one array in the folder of C's journal,
with a journal of its own. The same workers compute this array like any other product, and its run can be
resumed. The result has the same bits for any number of workers, since the slices follow from the plan:
`add_slices` adds in the order of the slices, then applies alpha and beta.
"""

import logging
import os
import shutil
import socket
import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter_ns, time
from typing import Any

import numpy as np

from oocgemm import stores
from oocgemm.backends import Backend
from oocgemm.backends.base import numpy_dtype
from oocgemm.backends.host.finish import finish
from oocgemm.distributed.attempts import RedoFiles, SharedResult, States
from oocgemm.distributed.coordinator import Coordinator
from oocgemm.distributed.crew import Cluster, Crew, OnExecutor, Threads
from oocgemm.distributed.survey import (
    Survey,
    WorkerFacts,
    blas_threads,
    check_alike,
    check_memory,
    planning_engine,
    sharers,
    with_shares,
)
from oocgemm.distributed.tasks import Given
from oocgemm.errors import BudgetError, InputError, NotFoundError
from oocgemm.jobs import output, support
from oocgemm.jobs.execute import check_log, check_log_apart, conclude, disk_errors, recorder
from oocgemm.jobs.journal import PARTIAL
from oocgemm.jobs.operands import open_operands
from oocgemm.jobs.option_groups import Progress
from oocgemm.jobs.output import Target
from oocgemm.jobs.prepare import PreparedRun, prepare
from oocgemm.jobs.request import Destination, PlaceKind, Request
from oocgemm.jobs.run import Plan as ReadyPlan
from oocgemm.jobs.run import Result
from oocgemm.jobs.stats import Findings, keeping
from oocgemm.jobs.steps import further, with_further
from oocgemm.machine import info
from oocgemm.planning import GemmProblem, Kind, Lane, Plan
from oocgemm.planning import Kind as OperationKind
from oocgemm.planning.cost.footprint import FINISH_ARRAYS, FINISH_PIECE
from oocgemm.planning.partition import Part, Slicing, bands, divide, partition
from oocgemm.planning.tiling import Range, Tile, ceil_div, length
from oocgemm.planning.units import format_time
from oocgemm.stores import Array, Matrix, Merging, pieces
from oocgemm.system.threads import Cancel
from oocgemm.timeline import Recorder, Span
from oocgemm.timeline.log import WorkerLog, merge
from oocgemm.values import dataclass

# Minimum number of elements of a block of C that is added, if chunks have fewer.
MIN_ELEMENTS = 1 << 18
# Maximum number of threads. More threads would only wait for memory.
MAX_THREADS = 8
LANES = {Kind.READ: Lane.READ, Kind.FINISH: Lane.COMPUTE, Kind.WRITE: Lane.WRITE}


# Called with the kind of an operation that has just ended, its step, its start in nanoseconds of
# `perf_counter_ns`, and its bytes.
Note = Callable[[Kind, int, int, int], None]
Compute = Callable[[PreparedRun, output.Target, tuple[Part, ...]], None]


def add_block(
    products: Matrix,
    slicing: Slicing,
    problem: GemmProblem,
    old: Array,
    rows: Range,
    cols: Range,
    note: Note,
) -> None:
    """Replace a block of C by ``alpha (P_0 + P_1 + ...) + beta C``. The sum is rounded after each addition.

    - `products`: the partial products P_q in the accumulator's dtype, stacked (`Slicing`).
    - `problem`: has alpha, beta and the dtypes.
    - `old`: the block of C, C-contiguous, at `rows` and `cols`. It is not read if beta = 0.
    - `note`: called after each operation. The step is the number of the slice.

    Raises `ExecutionError` if the dtype of C is an integer, and an element is outside its range.
    """
    # Sums of int8 products are integers that float64 represents exactly.
    total = np.zeros(old.shape, np.float64 if problem.exact else products.dtype)
    piece = np.empty(old.shape, products.dtype)
    for number in range(len(slicing.ranges)):
        top, start = number * slicing.rows, perf_counter_ns()
        products.read((rows[0] + top, rows[1] + top), cols, piece)
        note(Kind.READ, number, start, piece.nbytes)
        start = perf_counter_ns()
        with np.errstate(all="ignore"):  # Inf and NaN propagate silently, as in BLAS
            total += piece
        note(Kind.FINISH, number, start, 0)
    if problem.finishes:
        space = np.empty(FINISH_ARRAYS * min(FINISH_PIECE, total.size) * total.itemsize, np.uint8)
        finish(total, problem.alpha.real, problem.beta.real, old, space)
        return
    alpha, beta = (total.dtype.type(_scalar(problem, x)) for x in (problem.alpha, problem.beta))
    with np.errstate(all="ignore"):
        total *= alpha
        if beta:
            old *= beta
            total += old
        old[...] = total


def add_slices(
    products: Matrix,
    slicing: Slicing,
    plan: Plan,
    target: Target,
    log: Recorder,
    origin: int,
    cancel: Cancel,
) -> None:
    """Compute the unfinished tiles of a plan from the partial products of its slices, in threads.

    `plan` is the plan of the whole product. C is written to `target`, and read from there if beta is not 0.
    Times in `log` are counted from `origin`, a value of `perf_counter_ns`.
    """
    stopped: list[BaseException] = []
    lock = threading.Lock()
    c, finished = target.matrix, target.finished

    def record(tile: Tile, kind: Kind, step: int, start: int, size: int) -> None:
        with lock:
            lane, now = LANES[kind].value, perf_counter_ns()
            place = log.spans, kind.value, "C", lane, "sum", 0
            log.add(Span(*place, tile, step, start - origin, now - origin, size, 0))

    def add(tile: Tile) -> None:
        for rows, cols in pieces(plan.grid.rows(tile[0]), plan.grid.cols(tile[1]), plan.chunks, MIN_ELEMENTS):
            if stopped:
                return
            block = np.empty((length(rows), length(cols)), numpy_dtype(plan.problem.c_dtype))
            note = partial(record, tile)
            if plan.problem.reads_c:
                start = perf_counter_ns()
                c.read(rows, cols, block)
                note(Kind.READ, 0, start, block.nbytes)
            add_block(products, slicing, plan.problem, block, rows, cols, note)
            start = perf_counter_ns()
            c.write(rows, cols, block)
            note(Kind.WRITE, 0, start, block.nbytes)
        if finished is not None:
            with lock:
                finished(tile, plan.grid.blocks(tile))

    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    with cancel.calling(stopped.append), ThreadPoolExecutor(threads, "oocgemm-sum") as pool:
        try:
            for done in [pool.submit(add, tile) for tile in plan.tiles]:
                done.result()
        except BaseException as error:
            stopped.append(error)
            pool.shutdown(cancel_futures=True)
    if stopped:
        raise stopped[0]


def _scalar(problem: GemmProblem, value: complex) -> complex:
    return value if numpy_dtype(problem.c_dtype).kind == "c" else value.real


def partial_products(
    job: PreparedRun, engine: Backend, parts: tuple[Part, ...], compute: Compute
) -> tuple[Matrix, Slicing]:
    """Compute the partial products of all slices of k. Return the stacked products, and the slices.

    `job` is the whole product, planned for `engine`. Each of its `parts` belongs to one slice. `compute`
    computes parts of a job, and moves their tiles into its C.
    """
    plan = job.plan
    slicing = Slicing.of(plan.grid, 1 + max(part.k_slice for part in parts))
    assert job.output.earlier is not None
    path = str(job.output.earlier.local / PARTIAL)
    request = job.request.with_options(
        c=Destination.parse(path),
        alpha=1.0,
        beta=0.0,
        out_dtype=plan.problem.acc_dtype,
        memory=None,
        device_memory=plan.budgets.device,
        host_memory=plan.budgets.host,
        tile=plan.tile,
        chunks=None,
        compressor=None,
        overwrite=False,
        resume=True,
        timeline=None,
        slicing=slicing,
    )
    stacked = prepare(request, engine, running=True)
    stacked = replace(stacked, output=replace(stacked.output, noted={**job.output.noted, "k_slices": 1}))
    with output.open_target(stacked) as target:
        if isinstance(target, output.Journaled):
            compute(stacked, target, tuple(slicing.stacked(part, plan.grid) for part in parts))
        target.seal()
    return stores.open_matrix("C", path), slicing


def parts_again(plan: Plan, workers: int, k_slices: int) -> tuple[Part, ...]:
    """Return the parts of an interrupted run: about as many as there are workers.

    The bits of C follow from the tiles and the slices of k of the plan. Among the divisions of each slice,
    the function chooses the division whose parts read least of A and B.
    """
    if plan.has_whole_rows:
        return bands(plan.grid, workers)
    rows, cols = plan.grid.shape
    each = ceil_div(workers, k_slices)
    pairs = [(down, min(cols, ceil_div(each, down))) for down in range(1, min(rows, each) + 1)]
    down, across = min(
        pairs,
        key=lambda pair: (-min(each, pair[0] * pair[1]), pair[1] * plan.problem.m + pair[0] * plan.problem.n),
        default=(1, 1),
    )
    return divide(plan.grid, down, across, k_slices)


logger = logging.getLogger("oocgemm")


def run_distributed(request: Request, progress: Progress | None, cancel: Cancel) -> Result:
    """Compute a product with the workers that a request names, and return when C is durable.

    Nothing of C is written before the first part begins.
    """
    origin, started = perf_counter_ns(), time()
    with TemporaryDirectory(prefix="oocgemm-") as temporary, crew_of(request) as crew:
        _check_places(request)
        request = _absolute(request.with_options(workers=1, client=None, executor=None))
        stores.load(request.a.given, request.b.given, request.c.source)
        findings: Findings = {}
        with keeping(findings):
            open_operands(request, "host")
            place = Path(request.c.path) if request.into.stores_c else Path(temporary)
            survey = Survey(crew, request, findings, place)
            found = survey.run()
            check_alike(found.values())
            engine = planning_engine(found.values())
            job, parts = _plan(request.with_options(backend=engine.name), engine, found.values())
        described = {"name": engine.name, "kernel": request.where.kernel} | engine.describe()
        known: dict[str, Any] = {"machine": info.machine(), "started": started, "backend": described}
        noted = {
            "threads": blas_threads(crew, found.values(), job.output.resumed),
            "k_slices": 1 + max((part.k_slice for part in parts), default=0),
        }
        job = replace(job, output=replace(job.output, noted=noted))
        run = _Run(job, engine, crew, survey, found, findings, known, Path(temporary), origin)
        return run.complete(parts, progress, cancel)


def crew_of(request: Request) -> Crew:
    """Return the workers that a request names. Raises `InputError` if it names several kinds of workers."""
    if request.where.client is not None and request.where.executor is not None:
        raise InputError("client and executor both name workers: pass one of them")
    if request.where.client is not None:
        if request.where.workers is not None:
            raise InputError("a dask client has its workers already: drop workers")
        return Cluster(request.where.client)
    if request.where.executor is not None:
        return OnExecutor(request.where.executor, request.where.workers)
    assert request.where.workers is not None
    return Threads(request.where.workers)


def _check_places(request: Request) -> None:
    """Raise `InputError` unless A, B and C are at places that other processes can open."""
    for name, given in _places(request).items():
        for operand in stores.leaves(given):
            if not stores.is_path(operand):
                kind = type(operand).__name__
                raise support.refusal(support.WORKERS, "operand in memory", name=name, kind=kind)
            if "://" not in operand and not stores.exists(operand):
                raise NotFoundError(f"{name}: there is nothing at {operand}")
    if request.into.stores_c and request.c.kind is not PlaceKind.LOCAL:
        where = "a remote store" if request.c.kind is PlaceKind.REMOTE else "memory"
        raise support.refusal(support.WORKERS, "C elsewhere", where=where)
    if request.timeline is not None:
        check_log(request.timeline)


def _places(request: Request) -> dict[str, Any]:
    """Return the operands as the caller passed them, by name: A, B, and D if the epilogue reads it."""
    d = further(request.epilogue)
    found = dict(zip(request.into.names, (request.a.given, request.b.given), strict=True))
    return found if d is None else found | {"D": stores.located("D", d)}


def _absolute(request: Request) -> Request:
    """Return the request with absolute paths: workers have other working directories."""

    def absolute(operand: Any) -> Any:
        return stores.mapped(operand, lambda path: path if "://" in path else os.path.abspath(path))

    d = further(request.epilogue)
    return replace(
        request,
        a=replace(request.a, given=absolute(request.a.given)),
        b=replace(request.b, given=absolute(request.b.given)),
        c=Destination.parse(absolute(request.c.path) if request.c.path else None),
        epilogue=request.epilogue
        if d is None
        else with_further(request.epilogue, absolute(stores.located("D", d))),
    )


def plan_for_workers(request: Request, plan: Callable[[Request], ReadyPlan]) -> ReadyPlan:
    """Return the plan that workers would follow. The workers are not asked about their machines.

    Workers of this machine share its budgets. Each other worker is assumed to have its own machine and
    device, like those of this process. `plan` plans a request for one process.
    """
    with crew_of(request) as crew:
        count = len(crew.names())
        sharers = count if crew.local else 1
    _check_places(request)
    alone = plan(request)
    each = {"device_memory": alone.budgets.device // sharers, "host_memory": alone.budgets.host // sharers}
    shared = plan(request.with_options(memory=None, **each)) if sharers > 1 else alone
    keep_tile, whole_k = request.tile is not None, not request.divides_k
    chosen = partition(shared, count, keep_tile=keep_tile, whole_k=whole_k)
    if chosen.plan.tile != shared.tile:
        shared = plan(shared.request.with_options(tile=chosen.plan.tile))
    return ReadyPlan.of(shared, shared.request, chosen)


def _plan(
    request: Request, engine: Backend, found: Collection[WorkerFacts]
) -> tuple[PreparedRun, tuple[Part, ...]]:
    """Return the job with the plan that all workers share, and its parts in the order in which they begin."""
    ram, device, _ = max(sharers(found).values())
    try:
        shared = with_shares(request, found)
        job = prepare(shared, engine, running=True)
        if job.output.resumed is not None:
            parts = parts_again(job.plan, len(found), job.output.resumed.header.get("k_slices", 1))
        else:
            keep_tile, whole_k = request.tile is not None, not request.divides_k
            chosen = partition(job.plan, len(found), keep_tile=keep_tile, whole_k=whole_k)
            logger.info("%s", chosen)
            if chosen.plan.tile != job.plan.tile:
                job = prepare(replace(shared, tile=chosen.plan.tile), engine, running=True)
            parts = chosen.parts
    except BudgetError as error:
        if max(ram, device) == 1:
            raise
        if error.naming is not None:  # the user passes sizes for all workers together
            counts = {"device_memory": device}
            error = error.naming({x: size * counts.get(x, ram) for x, size in error.named.items()})
        message = f"each worker gets 1/{ram} of the host memory and 1/{device} of the device: {error}"
        raise BudgetError(message, least=error.least, needed=error.needed) from error
    engine.check(job.plan, request.where.kernel)
    if request.timeline is not None:
        check_log_apart(os.fsdecode(request.timeline), job)
    if job.plan.tiles.count:
        check_memory(job.plan, found)
    return job, parts


@dataclass
class _Run:
    """A planned run, and the workers that take part. `folder` is temporary. `known` is for the log."""

    job: PreparedRun
    engine: Backend
    crew: Crew
    survey: Survey
    found: dict[str, WorkerFacts]
    findings: Findings
    known: dict[str, Any]
    folder: Path
    origin: int
    results: list[dict[str, Any]] = field(default_factory=list)
    logs: list[WorkerLog] = field(default_factory=list)

    def complete(self, parts: tuple[Part, ...], progress: Progress | None, cancel: Cancel) -> Result:
        """Compute all unfinished tiles of parts, complete C, and return the result."""
        job, plan = self.job, self.job.plan
        facts: dict[str, Any] = {"checks": None, "retried": []}
        compute = partial(self.compute, progress=progress, cancel=cancel)
        with disk_errors(), output.open_target(job) as target:
            log = recorder(job, target.matrix, self.known)
            try:
                try:
                    if plan.tiles.count:
                        logger.info("%d workers, %d parts, tile %s", len(self.found), len(parts), plan.tile)
                        if job.output.noted["k_slices"] == 1:
                            compute(job, target, parts)
                        else:
                            self.add_products(target, parts, compute, cancel)
                    if isinstance(target.matrix, Merging):
                        target.matrix = target.matrix.merged()
                    conclude(job, target.matrix, facts, self.origin, cancel)
                    target.seal()
                    wall = perf_counter_ns() - self.origin
                finally:
                    merged = merge(log, self.logs)
                held = {
                    x: max((one["held"][x] for one in self.results), default=0) for x in ("device", "host")
                }
                log.finish(wall, _together(merged, facts) | {"held": held})
            finally:
                log.close()
        logger.info("C is done in %s", format_time(log.wall / 1e9))
        return Result(target.matrix, plan, log)

    def compute(
        self,
        job: PreparedRun,
        target: output.Target,
        parts: tuple[Part, ...],
        *,
        progress: Progress | None,
        cancel: Cancel,
    ) -> None:
        """Compute all unfinished tiles of parts of a job."""
        sidecar, header = self.folder / "states", output.header_of(job)
        result: SharedResult = States(target.matrix)
        if isinstance(target, output.Journaled):
            assert job.output.earlier is not None
            sidecar, header = job.output.earlier.local, target.header
            result = RedoFiles(target, job.plan.grid)
        sidecar.mkdir(exist_ok=True)
        budgets = job.plan.budgets
        request = job.request.with_options(
            memory=None, device_memory=budgets.device, host_memory=budgets.host
        )
        given, finished = Given.of(request, self.findings), _observer(job, progress, self.origin)
        workers = self.crew, self.survey, self.found
        coordinator = Coordinator(job, header, sidecar, result, parts, *workers, given, finished)
        try:
            coordinator.run(cancel)
        finally:
            self.results.extend(coordinator.results)
            self.logs.extend(_moved(coordinator.logs, self.folder, len(self.logs)))

    def add_products(
        self, target: output.Target, parts: tuple[Part, ...], compute: Compute, cancel: Cancel
    ) -> None:
        """Compute the partial products of all slices of k, and add them. The sum has a log of its own."""
        path, host = str(self.folder / "sum"), socket.gethostname()
        # The process that adds the partial products is the coordinator.
        self.logs.append(WorkerLog("coordinator", host, "host", 0, 0, path, len(parts), 1, lost=False))
        products, slicing = partial_products(self.job, self.engine, parts, compute)
        adding = recorder(
            replace(self.job, request=replace(self.job.request, timeline=path)),
            target.matrix,
            self.known | {"started": time(), "task": "reduce"},
        )
        begun = perf_counter_ns()
        with closing(adding):
            add_slices(products, slicing, self.job.plan, target, adding, begun, cancel)
            adding.finish(perf_counter_ns() - begun, {})


def _moved(logs: Iterable[WorkerLog], folder: Path, first: int) -> list[WorkerLog]:
    """Move logs of attempts out of the folder of C's journal, which is removed before the logs are merged.

    Return the logs with their new paths. Their new names are numbers from `first` on. A process that died
    early has left no log.
    """
    moved = []
    for number, log in enumerate(logs, first):
        path = folder / str(number)
        if os.path.exists(log.path):
            shutil.move(log.path, path)
        moved.append(replace(log, path=str(path)))
    return moved


def _together(merged: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of the workers (`merge`) and of the coordinator, combined as the facts of one run."""
    facts = own | merged | {"retried": [*merged["retried"], *own["retried"]]}
    return (
        facts if own["checks"] is None else facts | {"checks": own["checks"] | (merged.get("checks") or {})}
    )


def _observer(job: PreparedRun, progress: Progress | None, origin: int) -> Callable[[Tile], None]:
    """Return a function to call with each finished tile. It calls the progress callback of the run.

    The callback gets a span with the flops of the tile and its bytes in C. It has no length, since another
    process did the work.
    """
    plan = job.plan
    observe = None if progress is None else progress(plan)
    place = OperationKind.WRITE.value, "C", Lane.WRITE.value, "tile", 0

    def finished(tile: Tile) -> None:
        if observe is not None:
            now, depth = perf_counter_ns() - origin, plan.problem.depth
            flops = plan.problem.step_flops(1, plan.grid.elements(tile), depth)
            observe(Span(0, *place, tile, 0, now, now, plan.tile_bytes(tile), flops))

    return finished
