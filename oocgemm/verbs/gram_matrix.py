"""The verb `gram`: the product of a matrix and its conjugate transpose."""

from typing import Literal, Unpack, overload

from oocgemm.jobs.options import (
    GramArguments,
    GramOptions,
    GramPlanOptions,
    Operand,
    Output,
    check_names,
    documented,
)
from oocgemm.jobs.request import parse_gram
from oocgemm.jobs.run import Plan, Result, outcome, plan_request


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
