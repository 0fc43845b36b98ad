"""The library: matmul, gemm and plan on arrays that need not fit anywhere."""

import os
import platform
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter_ns, time
from typing import Any

import numpy as np

from oocgemm import backends, cache, stores
from oocgemm.backends.base import numpy_dtype
from oocgemm.backends.ladder import check_plan
from oocgemm.backends.memory import available_memory
from oocgemm.errors import BackendError, ExecutionError, InputError
from oocgemm.executor import Progress, Run
from oocgemm.plan import (
    COMPUTES,
    DTYPES,
    Budgets,
    DType,
    GemmProblem,
    Layouts,
    MachineModel,
    Op,
    Plan,
    TileShape,
    default_model,
    make_plan,
)
from oocgemm.staging import Staging
from oocgemm.stores import Matrix, Output
from oocgemm.timeline import Report, Timeline, report, write_log
from oocgemm.units import format_size, parse_size

Size = int | str
Transpose = Op | str | bool


@dataclass(frozen=True)
class Result:
    """What a run leaves: the product, how it was planned, and what happened.

    `out` is the array that holds C: the given one, an ndarray, or the zarr array or memory map at its path.
    """

    out: Any
    plan: Plan
    report: Report
    timeline: Timeline


@dataclass(frozen=True)
class _Job:
    """Everything known before anything is done."""

    a: Matrix
    b: Matrix
    c: Matrix | None
    plan: Plan


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
    compute: str = "native",
    out_dtype: Any = None,
    device_memory: Size | None = None,
    host_memory: Size | None = None,
    tile: TileShape | str | None = None,
    chunks: tuple[int, int] | None = None,
    compressor: str | None = None,
    overwrite: bool = False,
    timeline: str | os.PathLike[str] | None = None,
    progress: Callable[[Plan], Progress] | None = None,
) -> Result:
    """``C = alpha op(A) @ op(B) + beta C``, streamed through bounded memory.

    Args:
        a, b: two-dimensional operands of one dtype (float16, float32, float64, complex64 or complex128, in memory
            also ml_dtypes' bfloat16): zarr arrays, ndarrays, memory maps, or paths of zarr arrays or .npy files.
            op(A) is m x k, op(B) k x n.
        c: where C goes, and with beta != 0 where it comes from: an m x n array, or a path. A path with nothing
            there is created (zarr, or .npy by that ending). None for a new ndarray.
        alpha, beta: scalars; beta = 0 never reads C, alpha = 0 never reads A and B. Real for real dtypes.
        trans_a, trans_b: "N" (or False), "T" (or True), "C" for the conjugate transpose; done on the fly.
        backend: "cuda", "host", or "auto": cuda where a device answers.
        device: number of the CUDA device.
        kernel: "cublas" or a rung of `oocgemm.backends.ladder` on cuda, "blas" on host; "auto" for the fastest that
            `oocgemm tune` has measured, cuBLAS where it has measured nothing.
        compute: "native", or for float32 operands "tf32" or "bf16": on cuda they may be rounded to 11 or 8 bits before
            they are multiplied, which is faster and less exact; sums stay float32.
        out_dtype: C's dtype: the operands', as by default, or the one that their product is accumulated in, which is
            float32 for float16 and bfloat16.
        device_memory: hard bound on device memory, in bytes or as "2GiB"; 90% of what is free by default.
            On the host backend this is memory too: it holds the five buffers.
        host_memory: hard bound on host memory for staging; half of what is available by default.
        tile: "WxHxR" to choose the tile (w x h) and panel depth (r) by hand.
        chunks, compressor: for a new zarr array; chunks near 8 MiB that divide the tile, and none.
        overwrite: allow a path that holds a matching array already.
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
        _check_log(timeline)
    a, b, c = (stores.located(*operand) for operand in (("A", a), ("B", b), ("C", c)))
    backends.load(backend)
    stores.load(a, b, c)
    origin = perf_counter_ns()
    started = time()
    engine = backends.open_backend(backend, device)
    backends.check_kernel(engine.name, kernel)
    budgets = _budgets(engine.name, device_memory, host_memory, engine.free_memory)
    known = backends.identity(engine)
    job = _prepare(
        *(a, b, c, alpha, beta, trans_a, trans_b, engine.name, known, budgets, tile, chunks, compressor),
        *(overwrite, compute, out_dtype),
    )
    engine.check(job.plan, kernel)
    if timeline is not None:
        _check_log_apart(os.fsdecode(timeline), job, c)
    plan = job.plan
    output = _output(job, c, chunks, compressor)
    staging = session = None
    failed = False
    try:
        staging = Staging(plan, {"A": job.a, "B": job.b, "C": output.matrix})
        session = engine.open(plan, kernel)
        run = Run(plan, session, staging, origin, progress(plan) if progress else None)
        run.execute()
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
        tuple(sorted(run.spans, key=lambda s: s.id)),
        wall,
        {
            "started": started,
            "plan": plan.to_dict(),
            "backend": {"name": engine.name, "kernel": kernel} | engine.describe(),
            "operands": {"A": job.a.describe(), "B": job.b.describe(), "C": output.matrix.describe()},
            "held": held,
            "rates": _rates(job, output.matrix),
            "machine": _machine(),
            "versions": _versions(),
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
    backends.check_kernel(name, kernel)
    a, b, c = (stores.located(*operand) for operand in (("A", a), ("B", b), ("C", c)))

    def free() -> int:
        if name == "cuda":
            raise InputError(
                "planning for cuda touches no device: say how much memory it has with --device-memory"
            )
        return available_memory()

    budgets = _budgets(name, device_memory, host_memory, free)
    # Which GPU it will be is not known: the one last calibrated is meant.
    known = backends.identity(backends.open_backend(name)) if name == "host" else None
    planned = _prepare(
        *(a, b, c, alpha, beta, trans_a, trans_b, name, known, budgets, tile, chunks, compressor, overwrite),
        *(compute, out_dtype),
    ).plan
    if name == "cuda":
        check_plan(kernel, planned)
    else:
        backends.open_backend(name).check(planned, kernel)
    return planned


def info() -> dict[str, Any]:
    """What there is to work with: versions, processor, device, and what is missing with the way to get it."""
    found: dict[str, Any] = {"versions": _versions(), "machine": _machine()}
    found["machine"]["memory"] = format_size(found["machine"]["memory"])
    found["machine"]["available"] = format_size(available_memory())
    host = backends.open_backend("host")
    found["host backend"] = host.describe() | {"rates": _model("host", backends.identity(host)).name}
    missing = backends.missing_for_cuda()
    if missing is None:
        try:
            cuda = backends.open_backend("cuda")
            rates = _model("cuda", backends.identity(cuda)).name
            found["cuda backend"] = cuda.describe() | {
                "free": format_size(cuda.free_memory()),
                "rates": rates,
            }
        except BackendError as error:
            missing = str(error)
    if missing is not None:
        found["cuda backend"] = {"missing": missing}
    return found


def _prepare(
    a: Any,
    b: Any,
    c: Any,
    alpha: complex,
    beta: complex,
    trans_a: Transpose,
    trans_b: Transpose,
    backend: str,
    device: str | None,
    budgets: Budgets,
    tile: TileShape | str | None,
    chunks: tuple[int, int] | None,
    compressor: str | None,
    overwrite: bool,
    compute: str,
    out_dtype: Any,
) -> _Job:
    """Open and check everything, and plan. Writes nothing."""
    left, right = stores.open_matrix("A", a), stores.open_matrix("B", b)
    ops = _op("trans_a", trans_a), _op("trans_b", trans_b)
    problem = _problem(left, right, alpha, beta, *ops, compute, out_dtype)
    existing = _existing_output(c, problem, overwrite)
    if existing is None and c is not None and problem.c_dtype == "bfloat16":
        raise InputError(
            f"C at {os.fspath(c)} cannot hold bfloat16: pass out_dtype='float32' (--out-dtype float32), or an array"
        )
    for operand in (left, right):
        if existing is not None and stores.same_place(existing, operand):
            raise InputError(
                f"C is the same array as {operand.name} or overlaps it, which would be overwritten while it is still read: "
                "give C a place of its own"
            )
        if existing is None and stores.is_path(c):
            stores.check_apart("C", os.fspath(c), operand)
    if compressor is not None:
        stores.check_compressor(compressor)
    if existing is not None and (chunks or compressor):
        raise InputError("C exists: --chunks and --compressor are for an array that is to be created")
    layouts = Layouts(
        left.layout.oriented(problem.trans_a),
        right.layout.oriented(problem.trans_b),
        existing.layout if existing is not None else stores.new_layout(c, problem, chunks, compressor),
    )
    writes = _stored_on(existing) if existing is not None else set()
    if existing is None and c is not None:
        writes = {"elsewhere" if "://" in os.fspath(c) else cache.file_system(c)}
    reads = _stored_on(left, right, existing if problem.reads_c else None)
    machine = _model(backend, device, reads, writes)
    return _Job(left, right, existing, make_plan(problem, budgets, machine, layouts, _tile(tile)))


def _check_log(timeline: str | os.PathLike[str]) -> None:
    path = Path(timeline).absolute()
    if not path.parent.is_dir():
        raise InputError(f"the timeline's folder {path.parent} does not exist")
    if path.is_dir():
        raise InputError(f"the timeline's path {path} is a folder: give the path of a file")


def _check_log_apart(timeline: str, job: _Job, c: Any) -> None:
    """Refuse to log over an operand or the result."""
    for matrix in (job.a, job.b, job.c):
        if matrix is not None:
            stores.check_apart("the timeline", timeline, matrix)
    if stores.is_path(c) and os.path.realpath(timeline) == os.path.realpath(c):
        raise InputError(f"the timeline at {timeline} would lie in C: give it a place of its own")


def _problem(
    a: Matrix,
    b: Matrix,
    alpha: complex,
    beta: complex,
    trans_a: Op,
    trans_b: Op,
    compute: str,
    out_dtype: Any,
) -> GemmProblem:
    if a.dtype != b.dtype:
        raise InputError(f"A is of dtype {a.dtype} and B of {b.dtype}: convert one of them")
    m, k = a.shape[::-1] if trans_a.swaps else a.shape
    k_b, n = b.shape[::-1] if trans_b.swaps else b.shape
    if k != k_b:
        raise InputError(
            f"shapes do not match: op(A) is {m} x {k} and op(B) is {k_b} x {n}; the columns of op(A) must be as "
            "many as the rows of op(B)"
        )
    dtype = DTYPES[a.dtype.name]
    alpha, beta = (_scalar(*s, dtype.is_complex) for s in (("alpha", alpha), ("beta", beta)))
    names = dtype.name, dtype.name, dtype.accumulator, _out_dtype(out_dtype, dtype)
    if dtype.name not in COMPUTES.get(compute, ()):
        fitting = ", ".join(name for name, dtypes in COMPUTES.items() if dtype.name in dtypes)
        raise InputError(f"{dtype.name} operands cannot be computed in {compute!r}: choose among {fitting}")
    return GemmProblem(m, n, k, *names, alpha, beta, trans_a, trans_b, compute)


def _out_dtype(given: Any, operands: DType) -> str:
    """C's dtype by name."""
    if given is None:
        return operands.name
    try:
        name = str(np.dtype(given).name)
    except TypeError:
        name = str(given)
    possible = dict.fromkeys((operands.name, operands.accumulator))
    if name not in possible:
        raise InputError(
            f"C cannot be of dtype {name} where the operands are of {operands.name}: choose among {', '.join(possible)}"
        )
    return name


def _scalar(name: str, value: complex, allow_complex: bool) -> complex:
    try:
        number = complex(value if np.ndim(value) == 0 else "an array")
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{name} = {value!r} is not a number") from None
    if allow_complex:
        return number
    if number.imag != 0:
        raise InputError(f"{name} = {value} is complex, but the operands are real")
    return number.real


def _op(name: str, value: Transpose) -> Op:
    if isinstance(value, bool):
        return Op.T if value else Op.N
    try:
        return Op(value)
    except ValueError:
        raise InputError(f"{name} = {value!r}: write 'N', 'T' or 'C'") from None


def _tile(value: TileShape | str | None) -> TileShape | None:
    if value is None or isinstance(value, TileShape):
        return value
    parts = str(value).lower().split("x")
    if len(parts) != 3 or not all(p.strip().isdecimal() and int(p) for p in parts):
        raise InputError(f"cannot read {value!r} as a tile: write WxHxR, such as 8192x8192x512")
    return TileShape(*(int(p) for p in parts))


def _existing_output(c: Any, problem: GemmProblem, overwrite: bool) -> Matrix | None:
    """The array at C if there is one, checked against the problem."""
    if c is None or (stores.is_path(c) and not stores.exists(os.fspath(c))):
        if problem.reads_c:
            where = "and none is given" if c is None else f"and there is nothing at {c}"
            raise InputError(f"beta = {problem.beta} needs an existing C, {where}")
        return None
    matrix = stores.open_matrix("C", c, writable=True)
    wanted = (problem.m, problem.n), numpy_dtype(problem.c_dtype)
    if (matrix.shape, matrix.dtype) != wanted:
        raise InputError(
            f"C exists with shape {matrix.shape} and dtype {matrix.dtype}, the product has shape {wanted[0]} and "
            f"dtype {wanted[1]}: give another place"
        )
    if stores.is_path(c) and not overwrite and not problem.reads_c:
        raise InputError(f"C exists at {c}: pass --overwrite to replace its contents, or give another place")
    return matrix


def _output(job: _Job, c: Any, chunks: tuple[int, int] | None, compressor: str | None) -> Output:
    """C, created now if it does not exist."""
    if job.c is not None:
        return Output(job.c, lambda: None)
    problem = job.plan.problem
    shape, dtype = (problem.m, problem.n), numpy_dtype(problem.c_dtype)
    if c is None:
        size = problem.m * problem.n * dtype.itemsize
        if size > available_memory():
            raise InputError(
                f"C is {format_size(size)}, more than the {format_size(available_memory())} of memory there is: "
                "give a path for it"
            )
        return Output(stores.open_matrix("C", np.empty(shape, dtype), writable=True), lambda: None)
    place = os.fspath(c)
    return stores.create_output("C", place, shape, dtype, job.plan.chunks, compressor)


def _budgets(
    backend: str, device_memory: Size | None, host_memory: Size | None, free: Callable[[], int]
) -> Budgets:
    """The budgets as given, or shares of what is free now."""
    on_host = backend == "host"
    if device_memory is not None:
        device = parse_size(device_memory)
    else:
        device = free() * 3 // 8 if on_host else free() * 9 // 10
    host = available_memory() // (8 if on_host else 2) if host_memory is None else parse_size(host_memory)
    return Budgets(device, host)


def _model(
    backend: str, device: str | None = None, reads: Collection[str] = (), writes: Collection[str] = ()
) -> MachineModel:
    """What is known of the machine: as calibrated for that device and those file systems, or else the defaults."""
    defaults = default_model(backend, len(os.sched_getaffinity(0)))
    found, note = cache.load(backend, device)
    if found is not None:
        return found.model(defaults, reads, writes)
    return replace(defaults, name="; ".join(filter(None, (defaults.name, note))))


def _stored_on(*matrices: Matrix | None) -> set[str]:
    """The file systems that matrices lie on, those in memory left out."""
    found = set()
    for matrix in matrices:
        if matrix is not None and not matrix.layout.in_memory:
            numbers = [i[1] for i in matrix.identities() if isinstance(i, tuple) and i[0] == "file"]
            found |= {cache.device_id(number) for number in numbers} or {"elsewhere"}
    return found


def _rates(job: _Job, c: Matrix) -> dict[str, float] | None:
    """Calibrated rates of what a run uses, for its efficiency: flop/s and bytes per second. None if any is unknown."""
    machine, problem = job.plan.machine, job.plan.problem
    sources = [job.a, job.b, *([c] if problem.reads_c else [])]
    stored = [x.layout for x in (*sources, c) if not x.layout.in_memory]
    if problem.compute != "native":
        return None  # the kernel's rate is that of native precision
    if not machine.calibrated or (stored and not machine.storage_calibrated):
        return None
    rates = {"kernel": machine.kernels[problem.a_dtype].peak}
    if not machine.unified:
        rates |= {"h2d": machine.h2d, "d2h": machine.d2h}
    if any(x.layout.decode_bytes for x in sources):
        rates["decode"] = machine.decode  # how many bytes are read to be decoded is not known
    elif not any(x.layout.in_memory for x in sources):
        rates["read"] = machine.read
    if c.describe().get("direct", not c.layout.in_memory):
        rates["write"] = machine.write
    return rates


def _machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "processor": cache.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("oocgemm", "numpy", "zarr", "cupy-cuda13x", "cupy-cuda12x"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
