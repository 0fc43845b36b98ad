"""The verbs `corr` and `cov`: correlations and covariances of the rows or columns of a matrix."""

from dataclasses import replace
from typing import Any, Literal, Unpack, overload

from oocgemm import stores
from oocgemm.errors import InputError
from oocgemm.jobs.execute import check_places
from oocgemm.jobs.operands import of_lines, op_of
from oocgemm.jobs.option_groups import CorrelationOptions, Operand, Output, SimilarityOptions
from oocgemm.jobs.options import (
    CoefficientOptions,
    CorrArguments,
    CovArguments,
    check_choices,
    check_names,
    documented,
)
from oocgemm.jobs.ranks import ranked
from oocgemm.jobs.request import Between, Request, parse_gram
from oocgemm.jobs.run import Neighbors, Pairs, Plan, Result, outcome
from oocgemm.jobs.steps import Coefficients
from oocgemm.jobs.transforming import memory_of, opened, readable, varying_lines
from oocgemm.verbs.pairwise import pairwise as in_pairs
from oocgemm.verbs.similarity import between, check_options, selected, selection_of


@overload
def corr(
    x: Operand,
    out: Output = None,
    *,
    axis: int = 0,
    topk: None = None,
    threshold: None = None,
    dry_run: Literal[False] = False,
    **options: Unpack[CoefficientOptions],
) -> Result: ...
@overload
def corr(
    x: Operand,
    *,
    axis: int = 0,
    topk: int,
    dry_run: Literal[False] = False,
    **options: Unpack[CoefficientOptions],
) -> Neighbors: ...
@overload
def corr(
    x: Operand,
    *,
    axis: int = 0,
    threshold: float,
    dry_run: Literal[False] = False,
    **options: Unpack[CoefficientOptions],
) -> Pairs: ...
@overload
def corr(
    x: Operand, out: Output = None, *, dry_run: Literal[True], **options: Unpack[CorrArguments]
) -> Plan: ...
@documented("corr", CorrelationOptions)
def corr(
    x: Operand,
    out: Output = None,
    *,
    axis: int = 0,
    topk: int | None = None,
    threshold: float | None = None,
    y: Operand | None = None,
    constant: str = "nan",
    method: str = "pearson",
    pairwise: bool = False,
    dry_run: bool = False,
    **options: Unpack[CorrelationOptions],
) -> Result | Neighbors | Pairs | Plan:
    """Compute correlation coefficients of the rows of X, as `numpy.corrcoef` or `scipy.stats.spearmanr` do.

    With `y`, compute those of each row of X with each row of Y, as SciPy's ``1 - cdist(X, Y,
    "correlation")``. Each row is centered and scaled in float64 when it is read. It is rounded to float32
    unless X is float64.

    Args:
        x: a real two-dimensional operand as for `gemm`. Missing genotypes of a .bed
            file are replaced by the means of their variants.
        out: where the coefficients are stored, as for `gram`. By default a new ndarray.
        {options}

    Returns:
        A `Result` with both triangles of the coefficients, which are exact mirror images, or, with `y`, with
            the m x n coefficients of m rows with n rows. With `topk` the `Neighbors`, with `threshold` the
            `Pairs`. No coefficient is outside [-1, 1]. With `dry_run`, the `Plan`, which counts all rows.

    Raises:
        InputError, BudgetError, BackendError, ExecutionError: as `gemm` does.

    >>> import oocgemm
    >>> oocgemm.corr([[1.0, 2.0, 3.0], [6.0, 4.0, 2.0]], backend="host").out.round(6)
    array([[ 1., -1.],
           [-1.,  1.]])
    """
    check_choices("corr", constant=constant, method=method)
    if method == "spearman":
        own: dict[str, Any] = {"topk": topk, "threshold": threshold, "constant": constant, "dry_run": dry_run}
        found: Result | Neighbors | Pairs | Plan = _of_ranks(x, out, axis, y, own, options, pairwise=pairwise)
        return found
    if pairwise and constant != "nan":
        raise InputError(
            f"constant = {constant!r} is about whole rows, and with pairwise every pair of rows has its own "
            "elements: drop constant (--constant), or drop pairwise"
        )
    if y is not None and constant == "drop":
        raise InputError(
            "constant = 'drop' leaves rows of one operand out, and with y there are two: pass constant='nan' "
            "or 'raise' (--constant raise)"
        )
    if topk is None and threshold is None:
        request = _gram("corr", x, y, out, axis, {"epilogue": (Coefficients(),)}, options)
    elif out is not None:
        raise InputError("the result of topk or threshold is kept in memory: drop out")
    else:
        check_options("corr", options, SimilarityOptions)
        chosen = replace(selection_of(topk, threshold), absolute=threshold is not None)
        if y is None:
            chosen = replace(chosen, cosine=not pairwise)
            request = replace(_gram("corr", x, None, None, axis, {}, options), into=chosen)
        else:
            chosen = replace(chosen, names=("X", "Y"), same=False, excludes_self=False)
            request = _gram("corr", x, y, None, axis, {"epilogue": (Coefficients(),)}, options)
            request = replace(request, into=chosen)
    if pairwise:
        request = in_pairs(request, "correlation")
    else:
        request = request.with_operands(standardize="scale", impute=True)
        request = request if dry_run else with_constant(request, constant)
    return outcome(request, (lambda found: found) if request.into.stores_c else selected, dry_run=dry_run)


def _of_ranks(
    x: Operand,
    out: Output,
    axis: int,
    y: Operand | None,
    own: dict[str, Any],
    options: CorrelationOptions,
    *,
    pairwise: bool,
) -> Any:
    """Return the coefficients of the ranks of rows."""
    check_names("corr", options, CorrelationOptions)
    for name, given in (
        ("pairwise", pairwise),
        *((name, options.get(name)) for name in ("transform", "resume")),
    ):
        if given:
            reason = "ranks whole rows of elements as they are stored, in each run again"
            raise InputError(f"method = 'spearman' {reason}: drop {name} (--{name})")
    if axis not in (0, 1):
        raise InputError(f"axis = {axis!r}: pass 0 for the ranks in rows, or 1 in columns")
    if own["dry_run"]:
        return corr(x, out, axis=axis, y=y, **own, **options)
    names, given = ("X",) if y is None else ("X", "Y"), (x,) if y is None else (x, y)
    with ranked(names, given, axis, out, options) as found:
        return corr(found[0], out, y=found[1] if len(found) > 1 else None, **own, **options)


def with_constant(request: Request, constant: str) -> Request:
    """Return a request of correlations that says what happens to rows of equal elements.

    If such rows are left out, a pass over X finds them now.
    """
    if constant == "drop":
        check_places(request, 0)  # the number of kept rows is not known yet
        op, memory = op_of("trans_a", request.a.op), memory_of(request)
        x = readable(of_lines(opened("X", request), request.a, op, left=True), memory)
        return request.with_operands(kept=varying_lines(x, int(op.swaps), memory))
    return request.with_operands(constant=constant)


@overload
def cov(
    x: Operand, out: Output = None, *, dry_run: Literal[False] = False, **options: Unpack[CovArguments]
) -> Result: ...
@overload
def cov(
    x: Operand, out: Output = None, *, dry_run: Literal[True], **options: Unpack[CovArguments]
) -> Plan: ...
@documented("cov", CorrelationOptions)
def cov(
    x: Operand,
    out: Output = None,
    *,
    axis: int = 0,
    y: Operand | None = None,
    ddof: int = 1,
    pairwise: bool = False,
    dry_run: bool = False,
    **options: Unpack[CorrelationOptions],
) -> Result | Plan:
    """Compute covariances of the rows of X, as `numpy.cov` does; with `y`, of each row of X with each of Y.

    Each row is centered in float64 when it is read. It is rounded to float32 unless X is float64.

    Args:
        x, out: as for `corr`.
        {options}

    Returns:
        A `Result` with both triangles of the covariances, which are exact mirror images, or, with `y`, with
            the m x n covariances of m rows with n rows. With `dry_run`, the `Plan`.

    Raises:
        InputError, BudgetError, BackendError, ExecutionError: as `gemm` does. `InputError` also if the
            variance of a row is too small for the dtype of the result.

    >>> import oocgemm
    >>> oocgemm.cov([[1.0, 2.0, 3.0], [6.0, 4.0, 2.0]], backend="host").out
    array([[ 1., -2.],
           [-2.,  4.]])
    """
    shape = stores.open_matrix("X", stores.located("X", x), decode=False).shape
    divisor = shape[1 - axis] - ddof if axis in (0, 1) else 1
    if divisor <= 0:
        raise InputError(
            f"a covariance of {shape[1 - axis]} elements with ddof = {ddof} divides by {divisor}: pass a "
            "smaller ddof"
        )
    if pairwise:
        request = in_pairs(_gram("cov", x, y, out, axis, {}, options), "covariance", ddof)
        return outcome(request, dry_run=dry_run)
    request = _gram("cov", x, y, out, axis, {"alpha": 1 / divisor}, options)
    return outcome(request.with_operands(standardize="center", impute=True), dry_run=dry_run)


def _gram(
    function: str,
    x: Operand,
    y: Operand | None,
    out: Output,
    axis: int,
    scalars: dict[str, Any],
    options: CorrelationOptions,
) -> Request:
    """Return the request of products of the rows of X with one another, or with those of Y."""
    check_names(function, options, CorrelationOptions)
    given: dict[str, Any] = dict(options) | scalars
    if y is not None:
        return between(("X", x), ("Y", y), out, axis, Between(), given)
    return parse_gram(x, out, axis, "full", given)  # type: ignore[arg-type]
