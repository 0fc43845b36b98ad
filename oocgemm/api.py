"""The library: matmul, gemm and plan on arrays that need not fit anywhere."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from time import perf_counter_ns, time
from typing import Any

from oocgemm import backends, job, stores, system
from oocgemm.backends import Session
from oocgemm.backends.memory import available_memory
from oocgemm.checks import Checks
from oocgemm.errors import ExecutionError, InputError
from oocgemm.executor import Progress, Run
from oocgemm.job import Size, Transpose
from oocgemm.plan import Op, Plan, TileShape
from oocgemm.staging import Staging
from oocgemm.timeline import Report, Span, Timeline, report, write_log

SEED = 20261  # of the signs that checksums are taken with; any will do


@dataclass(frozen=True)
class Result:
    """What a run leaves: the product, how it was planned, and what happened.

    `out` is the array that holds C: the given one, an ndarray, or the zarr array or memory map at its path.
    """

    out: Any
    plan: Plan
    report: Report
    timeline: Timeline


def matmul(a: Any, b: Any, /, *, out: Any = None, **options: Any) -> Result:
    """``a @ b`` for two-dimensional operands of any size; NumPy's meaning, run out of core.

    Args:
        a: m x k; a zarr array, an ndarray or memory map, or the path of a zarr array or .npy file.
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
    device_memory: Size | None = None,
    host_memory: Size | None = None,
    tile: TileShape | str | None = None,
    chunks: tuple[int, int] | None = None,
    compressor: str | None = None,
    overwrite: bool = False,
    verify: bool = False,
    timeline: str | os.PathLike[str] | None = None,
    progress: Callable[[Plan], Progress] | None = None,
) -> Result:
    """``C = alpha op(A) @ op(B) + beta C``, streamed through bounded memory.

    Args:
        a, b: two-dimensional operands of one dtype (float16, float32, float64, complex64 or complex128): zarr
            arrays, ndarrays, memory maps, or paths of zarr arrays or .npy files. op(A) is m x k, op(B) k x n.
        c: where C goes, and with beta != 0 where it comes from: an m x n array, or a path. A path with nothing
            there is created (zarr, or .npy by that ending). None for a new ndarray.
        alpha, beta: scalars; beta = 0 never reads C, alpha = 0 never reads A and B. Real for real dtypes.
        trans_a, trans_b: "N" (or False), "T" (or True), "C" for the conjugate transpose; done on the fly.
        backend: "cuda", "host", or "auto": cuda where a device answers.
        device: number of the CUDA device.
        kernel: "cublas" or "tiled" on cuda, "blas" on host, "auto" for the fastest.
        device_memory: hard bound on device memory, in bytes or as "2GiB"; 90% of what is free by default.
            On the host backend this is memory too: it holds the five buffers.
        host_memory: hard bound on host memory for staging; half of what is available by default.
        tile: "WxHxR" to choose the tile (w x h) and panel depth (r) by hand.
        chunks, compressor: for a new zarr array; chunks near 8 MiB that divide the tile, and none.
        overwrite: allow a path that holds a matching array already.
        verify: hold every tile against checksums of the panels it is made from (`oocgemm.checks`) before it is written,
            and compute once more what differs. Costs a few percent at most.
        timeline: path of a log of every operation, for `oocgemm report`.
        progress: called with the plan; returns what is called with every finished operation.

    Returns:
        A `Result`.

    Raises:
        InputError: operands, output or options that cannot be used. Nothing was written.
        BudgetError: a budget that cannot hold the smallest plan; its message and `least` say what would do.
        BackendError: no such device, kernel or library.
        ExecutionError: the run failed; an output that it had created is taken away again.
    """
    if timeline is not None:
        job.check_log(timeline)
    a, b, c = (stores.located(*operand) for operand in (("A", a), ("B", b), ("C", c)))
    backends.load(backend)
    stores.load(a, b, c)
    origin = perf_counter_ns()
    started = time()
    engine = backends.open_backend(backend, device)
    if kernel not in backends.KERNELS[engine.name]:
        names = ", ".join(backends.KERNELS[engine.name])
        raise InputError(f"the {engine.name} backend has no kernel {kernel!r}: choose one of {names}")
    budgets = job.budgets(engine.name, device_memory, host_memory, engine.free_memory)
    known = backends.identity(engine)
    work = job.prepare(
        *(a, b, c, alpha, beta, trans_a, trans_b, engine.name, known, budgets, tile, chunks, compressor),
        overwrite=overwrite,
        checked=verify,
    )
    if timeline is not None:
        job.check_log_apart(os.fsdecode(timeline), work, c)
    plan = work.plan
    output = job.create_output(work, c, chunks, compressor)
    staging = session = None
    failed = False
    try:
        staging = Staging(plan, {"A": work.a, "B": work.b, "C": output.matrix})
        session = engine.open(plan, kernel)
        spans, checked = _execute(plan, session, staging, origin, progress(plan) if progress else None)
        output.matrix.sync()
        wall = perf_counter_ns() - origin
        held = {"device": session.device_bytes(), "host": staging.arena.nbytes}
    except BaseException:
        failed = True
        raise
    finally:
        with ExitStack() as cleanup:  # all of it, whatever part of it fails
            if failed:
                cleanup.callback(output.discard)
            if staging is not None:
                cleanup.callback(staging.close)
            if session is not None:
                cleanup.callback(session.close)
    recorded = Timeline(
        tuple(sorted(spans, key=lambda s: s.id)),
        wall,
        {
            "started": started,
            "plan": plan.to_dict(),
            "backend": {"name": engine.name, "kernel": kernel} | engine.describe(),
            "operands": {"A": work.a.describe(), "B": work.b.describe(), "C": output.matrix.describe()},
            "held": held,
            "checks": checked,
            "rates": job.rates(work, output.matrix),
            "machine": system.machine(),
            "versions": system.versions(),
        },
    )
    if timeline is not None:
        try:
            write_log(timeline, recorded)
        except OSError as error:
            raise ExecutionError(
                f"C is done, but its timeline cannot be written to {timeline}: {error.strerror}"
            ) from error
    return Result(getattr(output.matrix, "array", None), plan, report(recorded), recorded)


def _execute(
    plan: Plan, session: Session, staging: Staging, origin: int, progress: Progress | None
) -> tuple[list[Span], dict[str, Any] | None]:
    """Run a plan; where its problem is checked, once more for the tiles of which strips have failed."""
    spans: list[Span] = []
    checks = Checks(plan, SEED) if plan.problem.checked else None
    run = Run(plan, session, staging, origin, progress, checks=checks)
    run.execute()
    spans = run.spans
    if checks is None:
        return spans, None
    figures = checks.figures()
    if checks.failed:
        failing = {tile for tile, _ in checks.failed}
        some = replace(plan, done=plan.done | (frozenset(plan.schedule().tiles) - failing))
        again = Checks(some, SEED + 1, checks.failed)
        run = Run(some, session, staging, origin, progress, checks=again, first=len(spans))
        run.execute()
        spans += run.spans
        again.complain()
        for name, value in again.figures().items():
            figures[name] += value
    figures |= {
        "tiles": len(plan.schedule().tiles),
        "recomputed": [list(tile) for tile in sorted({tile for tile, _ in checks.failed})],
    }
    return spans, figures


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
    return job.prepare(
        *(a, b, c, alpha, beta, trans_a, trans_b, name, known, budgets, tile, chunks, compressor),
        overwrite=overwrite,
    ).plan
