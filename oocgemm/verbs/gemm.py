"""The verbs `matmul`, `gemm` and `gram`: products of two matrices, or of one and its conjugate transpose."""

from typing import Any, Literal, Unpack, overload

from oocgemm.errors import InputError
from oocgemm.jobs.option_groups import (
    GramOptions,
    GramPlanOptions,
    Operand,
    Options,
    Output,
    PlanOptions,
    RunOptions,
)
from oocgemm.jobs.options import PLAN_OPTIONS, GramArguments, check_names, documented
from oocgemm.jobs.request import parse, parse_gram
from oocgemm.jobs.run import Plan, Result, outcome, plan_request


def matmul(
    a: Operand, b: Operand, /, *, out: Output = None, dry_run: bool = False, **options: Unpack[Options]
) -> Any:
    """Return ``a @ b`` for matrices of any size, as `numpy.matmul` does.

    Args:
        a: m x k, an operand as for `gemm`.
        b: k x n, of a's dtype.
        out: where the product is stored: an array of the product's shape and dtype, which is overwritten, or
            a path at which nothing exists. By default a new ndarray.
        dry_run, options: as for `gemm`.

    Returns:
        The array that holds the product: `out`, or the array at that path opened for reading, or a new
            ndarray. With `dry_run`, the `Plan`.

    Raises:
        InputError, BudgetError, BackendError, ExecutionError: as `gemm` does.

    >>> import oocgemm
    >>> oocgemm.matmul([[1.0, 2.0]], [[3.0], [4.0]], backend="host")
    array([[11.]])
    """
    check_names("matmul", options, Options)
    return outcome(parse(a, b, out, options), lambda result: result.out, dry_run=dry_run)


@overload
def gemm(
    a: Operand | None = None,
    b: Operand | None = None,
    c: Output = None,
    *,
    plan: Plan | None = None,
    dry_run: Literal[False] = False,
    **options: Unpack[Options],
) -> Result: ...
@overload
def gemm(
    a: Operand | None = None,
    b: Operand | None = None,
    c: Output = None,
    *,
    plan: Plan | None = None,
    dry_run: Literal[True],
    **options: Unpack[Options],
) -> Plan: ...
@documented("gemm")
def gemm(
    a: Operand | None = None,
    b: Operand | None = None,
    c: Output = None,
    *,
    plan: Plan | None = None,
    dry_run: bool = False,
    **options: Unpack[Options],
) -> Result | Plan:
    """Compute ``C = alpha op(A) @ op(B) + beta C`` in bounded memory.

    Args:
        a, b: two-dimensional operands of float16, float32, float64, complex64, complex128, bool, integers of
            8, 16 or 32 bits, int64, or ml_dtypes' bfloat16, also of two of these dtypes. Each is a path or
            URL of a zarr array, the path of a .npy file, the address of an HDF5 dataset
            (``file.h5::/name``), the path of a PLINK .bed file, an ndarray, a memory map, a zarr array, or a
            lazy array (dask, h5py, xarray, tensorstore, or any object with shape, dtype and slicing), which
            is read chunk by chunk. op(A) is m x k, op(B) is k x n.
        c: where C is stored, and read from if beta != 0: an m x n array, a path or a URL. If nothing exists
            at the path, C is created there: as a .npy file if the path ends in .npy, else as a zarr array. By
            default a new ndarray.
        plan: a plan from `oocgemm.plan` to run. It contains the operands and the options from `alpha` to
            `devices`. Pass with it only options that are listed below from `device` on.
        {options}

    Returns:
        A `Result`; with `dry_run`, the `Plan`.

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
        return outcome(parse(a, b, c, options), dry_run=dry_run)
    given = [name for name, value in (("a", a), ("b", b), ("c", c)) if value is not None]
    given += [name for name in options if name in PLAN_OPTIONS]
    if given:
        raise InputError(
            f"plan already contains {', '.join(given)}: drop them here, or pass them to oocgemm.plan instead"
        )
    check_names("gemm", options, RunOptions)
    return plan if dry_run else plan.run(**dict[str, Any](options))


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


@overload
def gram(
    x: Operand, out: Output = None, *, dry_run: Literal[False] = False, **options: Unpack[GramArguments]
) -> Result: ...
@overload
def gram(
    x: Operand, out: Output = None, *, dry_run: Literal[True], **options: Unpack[GramArguments]
) -> Plan: ...
@documented("gram", GramOptions)
def gram(
    x: Operand,
    out: Output = None,
    *,
    axis: int = 0,
    uplo: str | None = None,
    dry_run: bool = False,
    **options: Unpack[GramOptions],
) -> Result | Plan:
    """Compute ``C = alpha X X^H + beta C``, a Gram matrix, at about half the work of `gemm` (SYRK, HERK).

    C is symmetric, so that only one triangle is computed. Each block of X is loaded once, where `gemm` loads
    it twice: as a block of A and as a block of B. The exact results, the files and `resume` are those of
    `gemm`.

    Args:
        x: a two-dimensional operand as for `gemm`.
        out: where C is stored, as `c` of `gemm`: an array, a path or a URL. By default a new ndarray. With
            beta != 0, only the triangle that `uplo` names is read, with "full" the lower one.
        {options}

    Returns:
        A `Result`; with `dry_run`, the `Plan`.

    Raises:
        InputError, BudgetError, BackendError, ExecutionError: as `gemm` does.

    >>> import oocgemm
    >>> oocgemm.gram([[1.0, 2.0], [3.0, 4.0]], backend="host").out
    array([[ 5., 11.],
           [11., 25.]])
    """
    check_names("gram", options, GramOptions)
    return outcome(parse_gram(x, out, axis, uplo, options), dry_run=dry_run)


def plan_gram(
    x: Operand,
    out: Output = None,
    *,
    axis: int = 0,
    uplo: str | None = None,
    **options: Unpack[GramPlanOptions],
) -> Plan:
    """Return the plan by which `gram` would compute a Gram matrix. No device is used; nothing is written.

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
