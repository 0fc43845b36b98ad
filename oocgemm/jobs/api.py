"""The functions of the library: matmul, gemm and plan."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from time import perf_counter_ns
from typing import Any, TypeVar, Unpack

from oocgemm import backends
from oocgemm.engine.short import is_brief
from oocgemm.errors import InputError
from oocgemm.jobs.imputing import check_known, how_to_replace
from oocgemm.jobs.options import (
    PLAN_OPTIONS,
    GramArguments,
    GramOptions,
    GramPlanOptions,
    Operand,
    Options,
    Output,
    PlanOptions,
    Progress,
    RunOptions,
    check_names,
    documented,
)
from oocgemm.jobs.plan import Plan
from oocgemm.jobs.prepare import prepare
from oocgemm.jobs.repeat import find
from oocgemm.jobs.request import Request, parse, parse_gram
from oocgemm.jobs.result import Result
from oocgemm.jobs.run import PreparedJob, run_again
from oocgemm.jobs.transforms import memory_of
from oocgemm.kernels.registry import check_plan
from oocgemm.system.threads import Cancel, shielded, shielded_here

T = TypeVar("T")


def matmul(a: Operand, b: Operand, /, *, out: Output = None, **options: Unpack[Options]) -> Any:
    """Return ``a @ b`` for matrices of any size, as `numpy.matmul` does.

    Args:
        a: m x k, an operand as for `gemm`.
        b: k x n, of a's dtype.
        out: where the product is stored: an array of the product's shape and dtype, which is overwritten, or
            a path at which nothing exists. By default a new ndarray.
        options: as for `gemm`.

    Returns:
        The array that holds the product: `out`, or the array at that path opened for reading, or a new
            ndarray.

    Raises:
        InputError, BudgetError, BackendError, ExecutionError: as `gemm` does.

    >>> import oocgemm
    >>> oocgemm.matmul([[1.0, 2.0]], [[3.0], [4.0]], backend="host")
    array([[11.]])
    """
    check_names("matmul", options, Options)
    return run_request(parse(a, b, out, options)).out


@documented(Options)
def gemm(
    a: Operand | None = None,
    b: Operand | None = None,
    c: Output = None,
    *,
    plan: Plan | None = None,
    **options: Unpack[Options],
) -> Result:
    """Compute ``C = alpha op(A) @ op(B) + beta C`` in bounded memory.

    Args:
        a, b: two-dimensional operands of one dtype: float16, float32, float64, complex64, complex128, int8,
            or ml_dtypes' bfloat16. Each is a path or URL of a zarr array, the path of a .npy file, the
            address of an HDF5 dataset (``file.h5::/name``), the path of a PLINK .bed file, an ndarray, a
            memory map, a zarr array, or a lazy array (dask, h5py, xarray, tensorstore, or any object with
            shape, dtype and slicing), which is read chunk by chunk. op(A) is m x k, op(B) is k x n.
        c: where C is stored, and read from if beta != 0: an m x n array, a path or a URL. If nothing exists
            at the path, C is created there: as a .npy file if the path ends in .npy, else as a zarr array. By
            default a new ndarray.
        plan: a plan from `oocgemm.plan` to run. It contains the operands and the options from `alpha` to
            `devices`. Pass with it only options that are listed below from `device` on.
        {options}

    Returns:
        A `Result`.

    Raises:
        InputError: operands, destination or options cannot be used. Nothing was written. `NotFoundError` for
            a path at which nothing exists.
        BudgetError: a budget is too small for any plan. The message and `least` name a size that suffices.
        BackendError: a device, kernel or library is missing. `OutOfMemoryError`: the memory that the budgets
            allow is not available. Nothing was written.
        ExecutionError: the run failed, for example because a sum of int8 products overflows C. If C is at a
            local path and at least one tile is complete, C remains, with a journal to `resume` from.
            Otherwise a C that the run created is removed.
    """
    if plan is None:
        check_names("gemm", options, Options)
        return run_request(parse(a, b, c, options))
    given = [name for name, value in (("a", a), ("b", b), ("c", c)) if value is not None]
    given += [name for name in options if name in PLAN_OPTIONS]
    if given:
        raise InputError(
            f"plan already contains {', '.join(given)}: drop them here, or pass them to oocgemm.plan instead"
        )
    check_names("gemm", options, RunOptions)
    return run_request(replace(plan.request, planned=plan, **dict[str, Any](options)))


def plan(a: Operand, b: Operand, c: Output = None, **options: Unpack[PlanOptions]) -> Plan:
    """Return the plan by which `gemm` would compute a product. No device is used, and nothing is written.

    Args:
        a, b, c: as for `gemm`. C may exist.
        options: the options of `gemm` from `alpha` to `devices`, in the order of its documentation. The cuda
            backend requires `device_memory`, since the free memory of a device is not queried.

    Returns:
        A `Plan`. Its `run` method computes the product.

    Raises:
        InputError, BudgetError: as `gemm` does.
    """
    check_names("plan", options, PlanOptions)
    return plan_request(parse(a, b, c, options))


@documented(GramArguments, GramOptions)
def gram(
    x: Operand,
    out: Output = None,
    *,
    axis: int = 0,
    uplo: str | None = None,
    **options: Unpack[GramOptions],
) -> Result:
    """Compute ``C = alpha X X^H + beta C``, a Gram matrix, at about half the work of `gemm` (SYRK, HERK).

    C is symmetric, so that only one triangle is computed. Each block of X is loaded once where `gemm` loads
    it as a block of A and as one of B. The exact results, the files and `resume` are those of `gemm`.

    Args:
        x: a two-dimensional operand as for `gemm`.
        out: where C is stored, as `c` of `gemm`: an array, a path or a URL. By default a new ndarray. With
            beta != 0, only the triangle that `uplo` names is read, with "full" the lower one.
        {options}

    Returns:
        A `Result`.

    Raises:
        InputError, BudgetError, BackendError, ExecutionError: as `gemm` does.

    >>> import oocgemm
    >>> oocgemm.gram([[1.0, 2.0], [3.0, 4.0]], backend="host").out
    array([[ 5., 11.],
           [11., 25.]])
    """
    check_names("gram", options, GramOptions)
    return run_request(parse_gram(x, out, axis, uplo, options))


def plan_gram(
    x: Operand,
    out: Output = None,
    *,
    axis: int = 0,
    uplo: str | None = None,
    **options: Unpack[GramPlanOptions],
) -> Plan:
    """Return the plan by which `gram` would compute a Gram matrix, as `plan` does for `gemm`.

    Args:
        x, out, axis, uplo: as for `gram`.
        options: those of `gram` that decide what is computed, and how.

    Returns:
        A `Plan`. Its `run` method computes C.

    Raises:
        InputError, BudgetError: as `gram` does.
    """
    check_names("plan_gram", options, GramPlanOptions)
    return plan_request(parse_gram(x, out, axis, uplo, options))


def plan_request(request: Request) -> Plan:
    """Plan a request without a device."""
    name = backends.resolve(request.backend)
    if request.backend == "auto" and name == "host":
        backends.fall_back(backends.missing_for_cuda())
    backends.check_kernel(name, request.kernel)
    request = replace(request, backend=name)
    engine: backends.Backend | None = None
    if name == "host":
        given = request.devices
        engine = (
            backends.open_backend(name, request.device)
            if given is None
            else backends.open_devices(name, given)
        )
    planned = prepare(request, engine, running=False).plan
    if engine is None:
        check_plan(request.kernel, planned)
    else:
        engine.check(planned, request.kernel)
    return Plan.of(planned, request)


def run_request(request: Request) -> Result:
    """Run a request, and return its result."""
    if request.gram and (request.is_distributed or request.devices is not None):
        raise InputError(
            "a Gram matrix is computed by one device: drop workers, client, executor and devices"
        )
    _check_genotypes(request)
    if request.is_distributed:
        from oocgemm.distributed.run import run_distributed

        return _run(request, partial(run_distributed, request))
    if (recent := find(request)) is not None:
        again = partial(run_again, request, recent, perf_counter_ns())
        if (result := _run(request, again, brief=is_brief(recent.plan))) is not None:
            return result
    job = PreparedJob(request)
    return _run(request, job.run, brief=is_brief(job.plan))


def _check_genotypes(request: Request) -> None:
    """Raise `InputError` if a product would multiply the codes of missing genotypes in a .bed file."""
    if not request.decode or request.impute or request.chain is not None or request.known is not None:
        return
    names = ["X"] if request.gram else ["A", "B"]
    for name, operand, transform in zip(
        names, (request.a, request.b), (request.transform_a, request.transform_b), strict=False
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
