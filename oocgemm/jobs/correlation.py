"""The functions `corr` and `cov`: correlations and covariances of the rows or columns of a matrix."""

from dataclasses import replace
from typing import Any, Unpack, overload

from oocgemm import stores
from oocgemm.errors import InputError
from oocgemm.jobs.api import run_request
from oocgemm.jobs.destination import Destination
from oocgemm.jobs.options import DenseOptions, Operand, Output
from oocgemm.jobs.request import DENSE_OPTIONS, check_names, parse_gram
from oocgemm.jobs.result import Result
from oocgemm.jobs.similarity import Neighbors, Pairs, check_options, selected, selection_of


@overload
def corr(
    x: Operand,
    out: Output = None,
    *,
    axis: int = 0,
    topk: None = None,
    threshold: None = None,
    **options: Unpack[DenseOptions],
) -> Result: ...
@overload
def corr(x: Operand, *, axis: int = 0, topk: int, **options: Unpack[DenseOptions]) -> Neighbors: ...
@overload
def corr(x: Operand, *, axis: int = 0, threshold: float, **options: Unpack[DenseOptions]) -> Pairs: ...
def corr(
    x: Operand,
    out: Output = None,
    *,
    axis: int = 0,
    topk: int | None = None,
    threshold: float | None = None,
    **options: Unpack[DenseOptions],
) -> Result | Neighbors | Pairs:
    """Compute Pearson's correlation coefficients of the rows of X, as `numpy.corrcoef` does.

    Each row is centered and scaled in float64 when it is read, and rounded to float32, or to float64 if X is.

    Args:
        x: a real two-dimensional operand as for `gemm`, or one of int32 or int64.
        out: where the coefficients are stored, as for `gram`. By default a new ndarray.
        axis: 0 (default) for the rows of X, or 1 for its columns.
        topk: do not store all coefficients. Find the rows with the largest ones for each row, as
            `similarity` does.
        threshold: do not store all coefficients. Find all pairs of different rows whose coefficient has at
            least this magnitude.
        options: with `topk` or `threshold`, those of `similarity`. Otherwise those of `gram`, except alpha,
            beta, transform and out_dtype.

    Returns:
        A `Result` with both triangles of the coefficients, which are exact mirror images; with `topk` the
            `Neighbors`, with `threshold` the `Pairs`.

    Raises:
        InputError, BudgetError, BackendError, ExecutionError: as `gemm` does. `InputError` also if all
            elements of a row are equal.

    >>> import oocgemm
    >>> oocgemm.corr([[1.0, 2.0, 3.0], [6.0, 4.0, 2.0]], backend="host").out.round(6)
    array([[ 1., -1.],
           [-1.,  1.]])
    """
    if topk is None and threshold is None:
        return _dense("corr", x, out, axis, "scale", {}, options)
    if out is not None:
        raise InputError("the result of topk or threshold is kept in memory: drop out")
    return selected_corr(x, topk, threshold, axis, **options)


def selected_corr(
    x: Operand,
    topk: int | None,
    threshold: float | None,
    axis: int = 0,
    **options: Unpack[DenseOptions],
) -> Neighbors | Pairs:
    """Compute `corr` with `topk` or `threshold`."""
    check_options("corr", options)
    chosen = replace(selection_of(topk, threshold), absolute=threshold is not None)
    trans = parse_gram(x, None, axis, "full", {}).trans_a
    given = dict[str, Any](options) | {"trans_a": trans, "standardize": "scale"}
    x = stores.located("X", x)
    return selected(chosen, given | {"a": x, "b": x, "c": Destination.parse(None)})


def cov(
    x: Operand, out: Output = None, *, axis: int = 0, ddof: int = 1, **options: Unpack[DenseOptions]
) -> Result:
    """Compute covariances of the rows of X, as `numpy.cov` does.

    Each row is centered in float64 when it is read, and rounded to float32, or to float64 if X is.

    Args:
        x, out, axis: as for `corr`.
        ddof: the sum of products is divided by the number of elements of a row minus `ddof`, by default 1.
        options: those of `gram`, except alpha, beta, transform and out_dtype.

    Returns:
        A `Result` with both triangles of the covariances, which are exact mirror images.

    Raises:
        InputError, BudgetError, BackendError, ExecutionError: as `gemm` does.

    >>> import oocgemm
    >>> oocgemm.cov([[1.0, 2.0, 3.0], [6.0, 4.0, 2.0]], backend="host").out
    array([[ 1., -2.],
           [-2.,  4.]])
    """
    shape = stores.open_matrix("X", stores.located("X", x)).shape
    divisor = shape[1 - axis] - ddof if axis in (0, 1) else 1
    if divisor <= 0:
        raise InputError(
            f"a covariance of {shape[1 - axis]} elements with ddof = {ddof} divides by {divisor}: pass a "
            "smaller ddof"
        )
    return _dense("cov", x, out, axis, "center", {"alpha": 1 / divisor}, options)


def _dense(
    function: str,
    x: Operand,
    out: Output,
    axis: int,
    how: str,
    scalars: dict[str, Any],
    options: DenseOptions,
) -> Result:
    check_names(function, options, DENSE_OPTIONS)
    given: dict[str, Any] = dict(options)
    return run_request(replace(parse_gram(x, out, axis, "full", given | scalars), standardize=how))  # type: ignore[arg-type]
