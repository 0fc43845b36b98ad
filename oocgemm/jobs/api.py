"""The library: matmul, gemm and plan on arrays that need not fit anywhere."""

import gc
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from time import perf_counter_ns, time
from traceback import clear_frames
from typing import Any

from oocgemm import backends, stores
from oocgemm.backends import Backend, Session
from oocgemm.engine.executor import Observer, Run
from oocgemm.engine.staging import Staging
from oocgemm.errors import ExecutionError, InputError, OutOfMemoryError
from oocgemm.integrity.checks import Checks
from oocgemm.jobs import job
from oocgemm.jobs import output as target
from oocgemm.jobs.job import Size, Transpose
from oocgemm.jobs.result import Result
from oocgemm.kernels.registry import check_plan
from oocgemm.machine import info as system
from oocgemm.planning import Op, Plan, TileShape
from oocgemm.system.cpu import CpuTimes, used_since
from oocgemm.system.memory import available_memory
from oocgemm.system.threads import Cancel, shielded
from oocgemm.timeline import Recorder, Span

Progress = Callable[[Plan], Observer]

SEED = 20261  # of the signs that checksums are taken with; any will do


def matmul(a: Any, b: Any, /, *, out: Any = None, **options: Any) -> Result:
    """``a @ b`` for two-dimensional operands of any size; NumPy's meaning, run out of core.

    Args:
        a: m x k; a zarr array, an ndarray or memory map, the path of a zarr array or .npy file, or a lazy array.
        b: k x n, of a's dtype.
        out: where the m x n product goes: an array of that shape and dtype, which is overwritten, or a path
            at which there is nothing yet. None for a new ndarray.
        options: as for `gemm`.

    Returns:
        A `Result`; the product is its `out`.

    Raises:
        InputError, BudgetError, BackendError, ExecutionError: see `gemm`.
    """
    return gemm(a, b, out, **options)


def gemm(
    a: Any,
    b: Any,
    c: Any = None,
    *,
    alpha: complex = 1.0,
    beta: complex = 0.0,
    trans_a: Transpose = Op.N,
    trans_b: Transpose = Op.N,
    backend: str = "auto",
    device: int = 0,
    kernel: str = "auto",
    compute: str = "native",
    out_dtype: Any = None,
    device_memory: Size | None = None,
    host_memory: Size | None = None,
    tile: TileShape | str | None = None,
    chunks: tuple[int, int] | None = None,
    compressor: str | None = None,
    overwrite: bool = False,
    resume: bool = False,
    trust_operands: bool = False,
    verify: bool = False,
    timeline: str | os.PathLike[str] | None = None,
    progress: Progress | bool | None = None,
) -> Result:
    """``C = alpha op(A) @ op(B) + beta C``, streamed through bounded memory.

    Args:
        a, b: two-dimensional operands of one dtype (float16, float32, float64, complex64, complex128, int8 or
            ml_dtypes' bfloat16): zarr arrays, ndarrays, memory maps, or paths of zarr arrays or .npy files. Lazy arrays
            (dask, h5py, xarray, tensorstore, or any object with shape, dtype and slicing) are read chunk by chunk.
            op(A) is m x k, op(B) k x n.
        c: where C goes, and with beta != 0 where it comes from: an m x n array, or a path. A path with nothing
            there is created (zarr, or .npy by that ending). None for a new ndarray.
        alpha, beta: scalars; beta = 0 never reads C, alpha = 0 never reads A and B. Real for real dtypes,
            integers below 2^53 for a C of integers.
        trans_a, trans_b: "N" (or False), "T" (or True), "C" for the conjugate transpose; done on the fly.
        backend: "cuda", "host", or "auto": cuda where a device answers.
        device: number of the CUDA device.
        kernel: "cublas" or a rung of `oocgemm.kernels.registry` on cuda, "blas" on host; "auto" for the fastest that
            `oocgemm tune` has measured, cuBLAS where it has measured nothing.
        compute: "native", or for float32 operands "tf32" or "bf16": on cuda they may be rounded to 11 or 8 bits before
            they are multiplied, which is faster and less exact; sums stay float32. "emulated", for float64 and float32:
            by exact products of int8 residues, as accurate as native.
        out_dtype: C's dtype: the operands', as by default, or float32 for float16 and bfloat16. For int8, whose products
            are exact, int32 by default, int64, float32 or float64.
        device_memory: hard bound on device memory, in bytes or as "2GiB"; 90% of what is free by default.
            On the host backend this is memory too: it holds the five buffers.
        host_memory: hard bound on host memory for staging; half of what is available by default.
        tile: "WxHxR" to choose the tile (w x h) and panel depth (r) by hand.
        chunks, compressor: for a new zarr array; chunks near 8 MiB that divide the tile, and none.
        overwrite: allow a path that holds a matching array already.
        resume: go on with the run that has not ended at `c`, a local path, and was called with the same arguments; begin
            one if there is none, and do nothing if it has ended. Budgets may differ, and be less.
        trust_operands: resume although files of a or b have changed since. Tiles that are done are not computed again.
        verify: hold every tile against checksums of the panels it is made from (`oocgemm.integrity.checks`) before it is written,
            and compute once more what differs. A GPU takes them of what has come to it, the processor a digest of each
            panel when it is read; without a GPU the processor takes the checksums.
        timeline: path of a log of every operation, for `oocgemm report`. It is written as the run goes on, and tells of
            as much of a run that has not ended.
        progress: True shows how far the run is on stderr, a bar on a terminal and elsewhere a line every ten seconds. Or
            a callback: it is called with the plan, and returns what is called with every finished operation.

    Returns:
        A `Result`.

    Raises:
        InputError: operands, output or options that cannot be used. Nothing was written.
        BudgetError: a budget that cannot hold the smallest plan; its message and `least` say what would do.
        BackendError: no such device, kernel or library; `OutOfMemoryError` where others hold the memory that the
            budgets allow. Nothing was written.
        ExecutionError: the run failed; a sum of int8 products that C cannot hold is one reason. A C at a local path
            stays, with a journal to `resume` from, once one tile of it is done; one that was created is taken away again
            before that.
    """
    if timeline is not None:
        job.check_log(timeline)
    a, b, c = (stores.located(*operand) for operand in (("A", a), ("B", b), ("C", c)))
    backends.load(backend, device)
    stores.load(a, b, c)
    # These are for the log alone, and no part of T.
    known: dict[str, Any] = {"machine": system.machine(), "versions": system.versions()}
    origin = perf_counter_ns()
    started = time()
    engine = backends.open_backend(backend, device)
    backends.check_kernel(engine.name, kernel)
    device_known = backends.identity(engine)
    known |= {"started": started, "backend": {"name": engine.name, "kernel": kernel} | engine.describe()}

    def prepare() -> job.Job:
        budgets = job.budgets(engine.name, device_memory, host_memory, engine.free_memory)
        work = job.prepare(
            *(a, b, c, alpha, beta, trans_a, trans_b, engine.name, device_known),
            *(budgets, tile, chunks, compressor),
            overwrite=overwrite,
            resume=resume,
            trust_operands=trust_operands,
            arithmetic=lambda problem: {
                "backend": engine.name,
                "kernel": engine.arithmetic(problem, kernel),
            },
            holds=engine.is_pinned,
            checked=verify,
            compute=compute,
            out_dtype=out_dtype,
        )
        engine.check(work.plan, kernel)
        if timeline is not None:
            job.check_log_apart(os.fsdecode(timeline), work, c)
        return work

    first = prepare()

    with _display(progress) as shown:

        def run(cancel: Cancel) -> tuple[job.Job, stores.Matrix, Recorder]:
            work, session = _opened(engine, kernel, first, prepare)
            return work, *_execute(work, c, session, origin, known, timeline, shown, cancel)

        work, matrix, log = shielded(run)
    if log.failure is not None:
        raise ExecutionError(
            f"C is done, but its timeline cannot be written to {timeline}: {log.failure.strerror}"
        ) from log.failure
    return Result(getattr(matrix, "array", None), work.plan, log)


def _execute(
    work: job.Job,
    c: Any,
    session: Session | None,
    origin: int,
    known: dict[str, Any],
    path: str | os.PathLike[str] | None,
    progress: Progress | None,
    cancel: Cancel,
) -> tuple[stores.Matrix, Recorder]:
    """Run a planned job, from the creation of C until C is durable; return C and the record of the run.

    The session is closed and all memory released when this returns or raises; only C and its journal stay. The
    session is None where no step is left to run. `known` is written into the header of the log, which goes to `path`
    if there is one.
    """
    plan = work.plan
    output = staging = run = checks = again = log = None
    failed: BaseException | None = None
    cpu, held, retried, kernels = CpuTimes.now(), {"device": 0, "host": 0}, [], []
    try:
        output = target.open_target(work, c)
        header = known | {
            "plan": plan.to_dict(),
            "operands": {"A": work.a.describe(), "B": work.b.describe(), "C": output.matrix.describe()},
            "rates": job.rates(work, output.matrix),
        }
        log = _begun(header, path)
        if session is not None:
            operands = {"A": work.a, "B": work.b, "C": output.matrix}
            staging = Staging(plan, operands, session.pin, session.pinner)
            observe = _observer(log, progress(plan) if progress else None)
            checks = Checks(plan, SEED, session.checksums) if plan.problem.checked else None
            run = Run(plan, session, staging, origin, observe, output.finished, checks)
            run.execute(cancel)
            retried = staging.retried
            if checks is not None and checks.failed:
                some = checks.failing()
                again = Checks(some, SEED + 1, session.checksums, checks.failed)
                repair = Run(some, session, staging, origin, observe, output.finished, again, log.spans)
                repair.execute(cancel)
                again.complain()
            staging.release()
            held = {"device": session.device_bytes(), "host": staging.arena.nbytes}
            kernels = session.kernels_used()
        output.seal()
        facts = {
            "backend": known["backend"] | {"multiplied by": kernels},
            "held": held,
            "retried": retried,
            "checks": checks.figures(again) if checks is not None else None,
            "cpu": used_since(cpu),
        }
        log.finish(perf_counter_ns() - origin, facts)
        return output.matrix, log
    except OSError as error:
        failed = ExecutionError(f"C cannot be brought to the disk: {error}")
        raise failed from error
    except BaseException as error:
        failed = error
        raise
    finally:
        with ExitStack() as cleanup:  # all of it, whatever part of it fails, from the last to the first
            if staging is not None:
                cleanup.callback(staging.release)
            for part in (log, session, output):
                if part is not None:
                    cleanup.callback(part.close)
            if output is not None and failed is not None:
                cleanup.callback(output.abandon, written=run is not None and run.wrote)
            if staging is not None:
                cleanup.callback(staging.close)
        output = staging = run = None
        _let_go(failed)
        failed = None  # it would keep itself


def _display(progress: Progress | bool | None) -> AbstractContextManager[Progress | None]:
    """The progress display if `progress` is True, or the caller's own."""
    if progress is True:
        from oocgemm.reports.progress import progress_display  # it imports rich

        return progress_display(True)
    return nullcontext(progress or None)


def _begun(header: dict[str, Any], path: str | os.PathLike[str] | None) -> Recorder:
    try:
        return Recorder(header, path)
    except OSError as error:
        raise InputError(f"the timeline cannot be written to {path}: {error.strerror}") from error


def _observer(log: Recorder, watch: Observer | None) -> Observer:
    """Tells the log, and whoever watches, of every operation that has ended."""

    def observe(span: Span) -> None:
        log.add(span)
        if watch is not None:
            watch(span)

    return observe


def _opened(
    engine: Backend, kernel: str, work: job.Job, prepare: Callable[[], job.Job]
) -> tuple[job.Job, Session | None]:
    """Take the memory that a job needs, before anything is written; return the job and its session.

    Other programs may take memory between the query of what is free and the allocation. Then the job is planned once
    more, which helps where the budgets are ours to choose.
    """
    for last in (False, True):
        if not work.plan.steps:
            break
        try:
            job.check_memory(work.plan)
            return work, engine.open(work.plan, kernel)
        except OutOfMemoryError:
            if last:
                raise
            work = prepare()
    return work, None


def _let_go(failure: BaseException | None) -> None:
    """Free the slots, which would be kept for as long as a failure is: the frames look into them that it went through, and those
    that it came of or came up beside."""
    if failure is None:
        return
    left, seen = [failure], set[int]()
    while left:
        one = left.pop()
        if id(one) not in seen:
            seen.add(id(one))
            clear_frames(one.__traceback__)
            left += [other for other in (one.__cause__, one.__context__) if other is not None]
    gc.collect()  # failures that were not the first


def plan(
    a: Any,
    b: Any,
    c: Any = None,
    *,
    alpha: complex = 1.0,
    beta: complex = 0.0,
    trans_a: Transpose = Op.N,
    trans_b: Transpose = Op.N,
    backend: str = "auto",
    kernel: str = "auto",
    compute: str = "native",
    out_dtype: Any = None,
    device_memory: Size | None = None,
    host_memory: Size | None = None,
    tile: TileShape | str | None = None,
    chunks: tuple[int, int] | None = None,
    compressor: str | None = None,
    overwrite: bool = True,
) -> Plan:
    """What `gemm` would do with the same arguments, without doing it: no device is touched, nothing written.

    Since no device is asked how much of its memory is free, the cuda backend needs `device_memory` here.
    """
    name = backends.resolve(backend)
    if backend == "auto" and name == "host":
        backends.fall_back(backends.missing_for_cuda())
    backends.check_kernel(name, kernel)
    a, b, c = (stores.located(*operand) for operand in (("A", a), ("B", b), ("C", c)))

    def free() -> int:
        if name == "cuda":
            raise InputError(
                "planning for cuda touches no device: say how much memory it has with --device-memory"
            )
        return available_memory()

    budgets = job.budgets(name, device_memory, host_memory, free)
    # Which GPU it will be is not known: the one last calibrated is meant.
    known = backends.identity(backends.open_backend(name)) if name == "host" else None
    planned = job.prepare(
        *(a, b, c, alpha, beta, trans_a, trans_b, name, known, budgets, tile, chunks, compressor),
        overwrite=overwrite,
        resume=None,
        compute=compute,
        out_dtype=out_dtype,
    ).plan
    if name == "cuda":
        check_plan(kernel, planned)
    else:
        backends.open_backend(name).check(planned, kernel)
    return planned
