"""What a call asks for, checked and planned: everything that is known before anything is done."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from oocgemm import stores
from oocgemm.backends.base import numpy_dtype
from oocgemm.errors import InputError, OutOfMemoryError
from oocgemm.jobs.resume import Earlier, check_same, check_whole, identify, look, without_lost
from oocgemm.machine import info as system
from oocgemm.planning import (
    COMPUTES,
    DTYPES,
    Budgets,
    DType,
    GemmProblem,
    Layout,
    Layouts,
    Op,
    Plan,
    TileShape,
    continued,
    integers,
    make_plan,
)
from oocgemm.planning.units import format_size, parse_size
from oocgemm.stores import Matrix
from oocgemm.system import cache
from oocgemm.system.memory import available_memory

Size = int | str
Transpose = Op | str | bool


@dataclass(frozen=True)
class Job:
    """Everything known before anything is done: `c` is None if it is to be created, `earlier` where no journal is kept,
    which `identity` is for."""

    a: Matrix
    b: Matrix
    c: Matrix | None
    plan: Plan
    compressor: str | None
    earlier: Earlier | None
    identity: dict[str, Any]


def prepare(
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
    *,
    overwrite: bool,
    resume: bool | None,
    trust_operands: bool = False,
    arithmetic: Callable[[GemmProblem], dict[str, str]] = lambda problem: {},
    holds: Callable[[int, int], bool] = lambda address, size: False,
    checked: bool = False,
    compute: str = "native",
    out_dtype: Any = None,
) -> Job:
    """Open and check everything, and plan. Writes nothing. `resume` is None if nothing is to be run; with
    `trust_operands` it goes on although files of A or B have changed. `arithmetic` names
    what multiplies such a problem, as far as bits hang on it; `holds` says what memory is locked."""
    left, trans_a = stores.by_rows(stores.open_matrix("A", a), _op("trans_a", trans_a))
    right, trans_b = stores.by_rows(stores.open_matrix("B", b), _op("trans_b", trans_b))
    problem = problem_of(left, right, alpha, beta, trans_a, trans_b, compute, out_dtype)
    if problem.exact and backend == "cuda" and problem.depth <= integers.MAX_DEPTH:
        problem = replace(problem, acc_dtype="int32")
    problem = replace(problem, checked=sums_tier(backend, problem) if checked else "")
    earlier, identity = None, {}
    if resume is not None:
        check_whole(left, right)
        earlier = look(c, resume=resume, overwrite=overwrite, reads_c=problem.reads_c)
    resumed = earlier if earlier is not None and earlier.resumed else None
    existing = _existing_output(c, problem, overwrite, earlier)
    if existing is None and c is not None and problem.c_dtype == "bfloat16" and os.fspath(c).endswith(".npy"):
        raise InputError(
            f"C at {os.fspath(c)} cannot hold bfloat16: pass out_dtype='float32' (--out-dtype float32), or the path of a "
            "zarr array"
        )
    shape = _tile(tile, problem)
    if earlier is not None:
        identity = identify(problem, left, right, existing, arithmetic(problem))
    if resumed is not None:
        check_same(resumed, identity, existing, shape, chunks, compressor, trust_operands=trust_operands)
        if existing is not None and not resumed.complete:
            earlier = resumed = without_lost(resumed, existing, problem)
        chunks, compressor = (None, None) if existing is not None else _as_begun(c, resumed)
    elif resume is not None and existing is not None and problem.reads_c:
        check_whole(existing)
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
        _layout(left, holds).oriented(problem.trans_a),
        _layout(right, holds).oriented(problem.trans_b),
        _layout(existing, holds)
        if existing is not None
        else stores.new_layout(c, problem, chunks, compressor),
    )
    writes = system.stored_on(existing) if existing is not None else set()
    if existing is None and c is not None:
        writes = {"elsewhere" if "://" in os.fspath(c) else cache.file_system(c)}
    reads = system.stored_on(left, right, existing if problem.reads_c else None)
    machine = system.model(backend, device, reads, writes)
    if resumed is not None:
        plan = continued(problem, budgets, machine, layouts, resumed.candidate, resumed.done)
        if plan.grid.ramp != resumed.header["ramp"]:
            version = resumed.header["version"]
            raise InputError(
                f"this version cuts panels otherwise than oocgemm {version}: finish the run with that one"
            )
    else:
        plan = make_plan(problem, budgets, machine, layouts, shape)
    return Job(left, right, existing, plan, compressor, earlier, identity)


def _layout(matrix: stores.Matrix, holds: Callable[[int, int], bool]) -> Layout:
    """A matrix as the planner sees it, and whether its memory is locked."""
    layout = matrix.layout
    return replace(layout, held=holds(*stores.span(matrix))) if layout.wide else layout


def sums_tier(backend: str, problem: GemmProblem) -> str:
    """Which tier takes checksums: a device with memory of its own, which is read far faster than that of the host. Its
    kernels sum no integers."""
    return "device" if backend == "cuda" and not problem.exact else "host"


def rates(job: Job, c: Matrix) -> dict[str, float] | None:
    """Calibrated rates of what a run uses, for its efficiency: flop/s and bytes per second. None if any is unknown."""
    machine, problem = job.plan.machine, job.plan.problem
    sources = [job.a, job.b, *([c] if problem.reads_c else [])]
    stored = [x.layout for x in (*sources, c) if not x.layout.in_memory]
    if problem.compute not in ("native", "emulated"):
        return None  # the kernel's rate in lower precision is not measured
    if not machine.calibrated or (stored and not machine.storage_calibrated):
        return None
    known = {"kernel": machine.kernels[problem.rate].peak}
    if not machine.unified:
        known |= {"h2d": machine.h2d, "d2h": machine.d2h}
    if any(x.layout.decode_bytes for x in sources):
        known["decode"] = machine.decode  # how many bytes are read to be decoded is not known
    elif not any(x.layout.in_memory for x in sources):
        known["read"] = machine.read
    if c.describe().get("direct", not c.layout.in_memory):
        known["write"] = machine.write
    return known


def check_memory(plan: Plan) -> None:
    """Refuse a plan that takes more host memory than is available: the system may grant it, and kill this process or another
    once it is used. Raises `OutOfMemoryError` with budgets that would fit."""
    held = {"host": plan.footprint.host_total}
    if plan.machine.unified:
        held["device"] = plan.footprint.device_total
    free = available_memory()
    if sum(held.values()) <= free:
        return
    given = {"device": plan.budgets.device, "host": plan.budgets.host}
    # An eighth stays free: what is available changes from call to call.
    shares = {"device": free * 3 // 4, "host": free // 8} if plan.machine.unified else {"host": free * 7 // 8}
    sizes = {tier: f"{max(1, share >> 20)}MiB" for tier, share in shares.items() if given[tier] > share}
    arguments = ", ".join(f"{tier}_memory='{size}'" for tier, size in sizes.items())
    options = " ".join(f"--{tier}-memory {size}" for tier, size in sizes.items())
    raise OutOfMemoryError(
        f"the plan takes {format_size(sum(held.values()))} of host memory, {format_size(free)} are available: pass "
        f"{arguments} ({options})"
    )


def check_log(timeline: str | os.PathLike[str]) -> None:
    path = Path(timeline).absolute()
    if not path.parent.is_dir():
        raise InputError(f"the timeline's folder {path.parent} does not exist")
    if path.is_dir():
        raise InputError(f"the timeline's path {path} is a folder: give the path of a file")


def check_log_apart(timeline: str, job: Job, c: Any) -> None:
    """Refuse to log over an operand or the result."""
    for matrix in (job.a, job.b, job.c):
        if matrix is not None:
            stores.check_apart("the timeline", timeline, matrix)
    if stores.is_path(c) and os.path.realpath(timeline) == os.path.realpath(c):
        raise InputError(f"the timeline at {timeline} would lie in C: give it a place of its own")


def problem_of(
    a: Matrix,
    b: Matrix,
    alpha: complex,
    beta: complex,
    trans_a: Transpose,
    trans_b: Transpose,
    compute: str = "native",
    out_dtype: Any = None,
) -> GemmProblem:
    """What is to be computed of two operands. Raises `InputError` if they do not go together."""
    trans_a, trans_b = _op("trans_a", trans_a), _op("trans_b", trans_b)
    stores.check_dtypes(a, b)
    m, k = a.shape[::-1] if trans_a.swaps else a.shape
    k_b, n = b.shape[::-1] if trans_b.swaps else b.shape
    if k != k_b:
        raise InputError(
            f"shapes do not match: op(A) is {m} x {k} and op(B) is {k_b} x {n}; the columns of op(A) must be as "
            "many as the rows of op(B)"
        )
    dtype = DTYPES[a.dtype.name]
    names = dtype.name, dtype.name, dtype.accumulator, _out_dtype(out_dtype, dtype)
    alpha, beta = (_scalar(*s, dtype, names[-1]) for s in (("alpha", alpha), ("beta", beta)))
    if dtype.name not in COMPUTES.get(compute, ()):
        fitting = ", ".join(name for name, dtypes in COMPUTES.items() if dtype.name in dtypes)
        raise InputError(f"{dtype.name} operands cannot be computed in {compute!r}: choose among {fitting}")
    problem = GemmProblem(m, n, k, *names, alpha, beta, trans_a, trans_b, compute)
    if problem.exact and problem.depth > integers.DEEPEST:
        raise InputError(
            f"op(A) has {k} columns; sums of more than {integers.DEEPEST} products of int8 numbers may not be exact: multiply "
            "parts of the operands"
        )
    return problem


def _out_dtype(given: Any, operands: DType) -> str:
    """C's dtype by name."""
    if given is None:
        return operands.results[0]
    try:
        name = str(np.dtype(given).name)
    except TypeError:
        name = str(given)
    if name not in operands.results:
        raise InputError(
            f"C cannot be of dtype {name} where the operands are of {operands.name}: choose among "
            f"{', '.join(operands.results)}"
        )
    return name


def _scalar(name: str, value: complex, operands: DType, c_dtype: str) -> complex:
    """Return alpha or beta as a number. Raises `InputError` for one that these operands or this C cannot take."""
    try:
        number = complex(value if np.ndim(value) == 0 else "an array")
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{name} = {value!r} is not a number") from None
    if operands.is_complex:
        _check_held(name, number, operands)
        return number
    if number.imag != 0:
        raise InputError(f"{name} = {value} is complex, but the operands are real")
    if c_dtype.startswith("int") and not (number.real.is_integer() and abs(number) < integers.LIMIT):
        raise InputError(
            f"{name} = {value} is no integer below 2^53, and the product is of dtype {c_dtype} unless told otherwise: pass "
            "out_dtype='float64' (--out-dtype float64)"
        )
    _check_held(name, number.real, operands)
    return number.real


def _check_held(name: str, number: complex, operands: DType) -> None:
    """Raise `InputError` for a scalar that overflows, or rounds to 0, in the dtype that the operands are multiplied in."""
    accumulator = numpy_dtype(operands.accumulator)
    limits = np.finfo(accumulator)
    with np.errstate(all="ignore"):
        held = accumulator.type(number)
    if np.isinf(held) and not np.isinf(number):
        limit = f"is beyond {accumulator} (at most {limits.max:.8g})"
    elif number and not held:
        limit = f"rounds to 0 in {accumulator} (at least {limits.smallest_subnormal:.8g})"
    else:
        return
    wider = "complex128" if operands.is_complex else "float64"
    raise InputError(
        f"{name} = {number:g} {limit}, which {operands.name} operands are multiplied in: convert A, B and C to {wider}"
    )


def _op(name: str, value: Transpose) -> Op:
    if isinstance(value, bool):
        return Op.T if value else Op.N
    try:
        return Op(value)
    except ValueError:
        raise InputError(f"{name} = {value!r}: write 'N', 'T' or 'C'") from None


def _tile(value: TileShape | str | None, problem: GemmProblem) -> TileShape | None:
    """Read a tile shape, and clip it to the product."""
    if value is None or isinstance(value, TileShape):
        return value and value.within(problem)
    parts = str(value).lower().split("x")
    if len(parts) != 3 or not all(p.strip().isdecimal() and int(p) for p in parts):
        raise InputError(f"cannot read {value!r} as a tile: write WxHxR, such as 8192x8192x512")
    return TileShape(*(int(p) for p in parts)).within(problem)


def _existing_output(c: Any, problem: GemmProblem, overwrite: bool, earlier: Earlier | None) -> Matrix | None:
    """The array at C if there is one, checked against the problem."""
    if earlier is not None and earlier.anew:
        return None
    resumed = earlier is not None and earlier.resumed
    if c is None or (stores.is_path(c) and not resumed and not stores.exists(os.fspath(c))):
        if problem.reads_c:
            where = "and none is given" if c is None else f"and there is nothing at {c}"
            raise InputError(f"beta = {problem.beta} needs an existing C, {where}")
        return None
    folder = earlier.folder if earlier is not None and resumed else None
    matrix = stores.open_matrix("C", c, writable=True, folder=folder)
    wanted = (problem.m, problem.n), numpy_dtype(problem.c_dtype)
    if (matrix.shape, matrix.dtype) != wanted:
        raise InputError(
            f"C exists with shape {matrix.shape} and dtype {matrix.dtype}, the product has shape {wanted[0]} and "
            f"dtype {wanted[1]}: give another place"
        )
    if stores.is_path(c) and not overwrite and not problem.reads_c and not resumed:
        raise InputError(f"C exists at {c}: pass --overwrite to replace its contents, or give another place")
    return matrix


def _as_begun(c: Any, earlier: Earlier) -> tuple[tuple[int, int] | None, str | None]:
    """Chunks and compressor of a C that an earlier run was to create."""
    if os.fspath(c).endswith(".npy"):
        return None, None
    rows, cols = map(int, earlier.header["given"]["chunks"].split("x"))
    return (rows, cols), earlier.header["given"]["compressor"]


def create_output(job: Job, c: Any, folder: Path | None = None) -> Matrix:
    """C, created now if it does not exist; `folder` is that of its journal."""
    if job.c is not None:
        stores.reserve(job.c)
        return job.c
    problem = job.plan.problem
    shape, dtype = (problem.m, problem.n), numpy_dtype(problem.c_dtype)
    if c is None:
        size = problem.m * problem.n * dtype.itemsize
        if size > available_memory():
            raise InputError(
                f"C is {format_size(size)}, more than the {format_size(available_memory())} of memory there is: "
                "give a path for it"
            )
        return stores.open_matrix("C", np.empty(shape, dtype), writable=True)
    place = os.fspath(c)
    return stores.create_output("C", place, shape, dtype, job.plan.chunks, job.compressor, folder=folder)


def budgets(
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
