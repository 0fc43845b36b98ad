"""The verb `similarity`: the most similar rows of each row of a matrix."""

from collections.abc import Iterable
from dataclasses import replace
from math import isnan
from typing import Any, Literal, Unpack, overload

import numpy as np

from oocgemm import stores
from oocgemm.errors import InputError
from oocgemm.jobs import support
from oocgemm.jobs.option_groups import Operand, Output, SimilarityOptions
from oocgemm.jobs.options import (
    OPTIONS,
    ComparisonOptions,
    SimilarityArguments,
    check_choices,
    check_names,
    documented,
)
from oocgemm.jobs.request import Destination, Into, Request, Selection
from oocgemm.jobs.run import Neighbors, Pairs, Plan, Result, outcome
from oocgemm.jobs.steps import Cosines
from oocgemm.planning import Op
from oocgemm.stores import Collecting
from oocgemm.stores.zarr_matrix import check_free


@overload
def similarity(
    e: Operand,
    *,
    topk: int,
    threshold: None = None,
    dry_run: Literal[False] = False,
    **options: Unpack[ComparisonOptions],
) -> Neighbors: ...
@overload
def similarity(
    e: Operand,
    *,
    topk: None = None,
    threshold: float,
    dry_run: Literal[False] = False,
    **options: Unpack[ComparisonOptions],
) -> Pairs: ...
@overload
def similarity(e: Operand, *, dry_run: Literal[True], **options: Unpack[SimilarityArguments]) -> Plan: ...
@documented("similarity", SimilarityOptions)
def similarity(
    e: Operand,
    *,
    topk: int | None = None,
    threshold: float | None = None,
    y: Operand | None = None,
    metric: str = "cosine",
    exclude_self: bool = True,
    dry_run: bool = False,
    **options: Unpack[SimilarityOptions],
) -> Neighbors | Pairs | Plan:
    """Find the rows of E, or of Y, that are most similar to each row of E.

    E E^T, or E Y^T, is computed, but not stored. The result is exact: all pairs of rows are compared. Pass
    either `topk` or `threshold`.

    Args:
        e: a real two-dimensional operand as for `gemm`, n x k. Rows are compared. Missing genotypes of a .bed
            file are replaced by the means of their variants.
        {options}

    Returns:
        With `topk`, the `Neighbors`, with the numbers of rows of E, or of Y if it is given. Their arrays take
            12 * n * topk bytes, or 16 * n * topk with float64 scores, and as much again is used to make them.
            With `threshold`, the `Pairs`, which take 12 or 16 bytes per pair, and as much again is used.
            Scores are float32, but float64 for float64 and int8 operands. Sums of int8 products are exact.
            With `dry_run`, the `Plan`.

    Raises:
        InputError, BudgetError, BackendError, ExecutionError: as `gemm` does. `ExecutionError` also if so
            many pairs are at least `threshold` that they would take more than 40% of the available memory.

    >>> import oocgemm
    >>> found = oocgemm.similarity([[1.0, 0.0], [3.0, 1.0], [0.0, 2.0]], topk=1, backend="host")
    >>> found.indices.tolist()
    [[1], [0], [1]]
    """
    check_options("similarity", options, SimilarityOptions)
    check_choices("similarity", metric=metric)
    chosen = selection_of(topk, threshold)
    if y is not None:
        steps = {"epilogue": (Cosines(),) if metric == "cosine" else ()}
        chosen = replace(chosen, names=("E", "Y"), same=False, excludes_self=False)
        request = between(("E", e), ("Y", y), None, 0, chosen, {**options, **steps})
    else:
        chosen = replace(chosen, cosine=metric == "cosine", excludes_self=exclude_self)
        e = stores.located("E", e)
        given: dict[str, Any] = dict(options)
        transform = given.pop("transform", None)
        request = Request.of(e, e, Destination.parse(None), into=chosen, **given)
        request = request.with_operands(transform=transform)
    return outcome(request.with_operands(impute=True), selected, dry_run=dry_run)


def between(
    x: tuple[str, Operand], y: tuple[str, Operand], out: Output, axis: int, into: Into, options: Any
) -> Request:
    """Return a request whose C has an element for each row of X and each row of Y; of columns if `axis` is 1.

    `x` and `y` are names and operands. Raises `InputError` if rows of X and of Y differ in length.
    """
    if isinstance(axis, bool) or axis not in (0, 1):
        raise InputError(f"axis = {axis!r}: pass 0 to compare rows, or 1 to compare columns")
    sources = [stores.located(*each) for each in (x, y)]
    names, line = (x[0], y[0]), ("row", "column")[axis]
    first, second = (
        stores.open_matrix(*each, decode=False).shape for each in zip(names, sources, strict=True)
    )
    if first[1 - axis] != second[1 - axis]:
        raise InputError(
            f"a {line} of {names[0]} has {first[1 - axis]} elements and a {line} of {names[1]} has "
            f"{second[1 - axis]}: pass operands whose {line}s are of equal length"
        )
    given: dict[str, Any] = dict(options)
    transform = given.pop("transform", None)
    request = Request.of(sources[0], sources[1], Destination.parse(out), into=into, **given)
    ops = {"a": Op.T if axis else Op.N, "b": Op.N if axis else Op.T}
    sides = {side: replace(getattr(request, side), op=op, transform=transform) for side, op in ops.items()}
    return replace(request, **sides)


def check_saving(path: str, x: Operand, topk: int | None, axis: int = 0) -> None:
    """Raise `InputError` if the `Neighbors` or `Pairs` of X cannot be saved at a path. Nothing is read.

    Args:
        path: the path of a new zarr group.
        x: the operand whose rows are compared, or columns if `axis` is 1.
        topk: how many rows are found for each row. None with a threshold: the number is not known yet.
    """
    matrix = stores.open_matrix("X", stores.located("X", x), decode=False)
    lines, score = matrix.shape[axis], 8 if matrix.dtype in (np.float64, np.int8) else 4
    check_free(path, 0 if topk is None else lines * min(topk, lines) * (8 + score))
    stores.warn_of_folders("the result", path)


def check_options(function: str, options: Iterable[str], known: type) -> None:
    """Raise an error for options that a function does not take. `known` is the class of its options."""
    for name in options:
        if name in OPTIONS - known.__annotations__.keys():
            raise support.refusal(support.ONE, "option of gemm", function=function, name=name)
    check_names(function, options, known)


def selection_of(topk: int | None, threshold: float | None) -> Selection:
    """Return the selection by `topk` or by `threshold`. Raises `InputError` unless exactly one is given."""
    if (topk is None) == (threshold is None):
        raise InputError("pass either topk, a number of rows to find for each row, or threshold")
    if threshold is not None:
        if isinstance(threshold, bool) or not isinstance(threshold, int | float) or isnan(threshold):
            raise InputError(f"threshold = {threshold!r} is not a number: pass one such as 0.8")
        return Selection(threshold=float(threshold))
    if isinstance(topk, bool) or not isinstance(topk, int | np.integer) or topk < 1:
        raise InputError(f"topk = {topk!r} is not a number of rows: pass a positive integer, such as 50")
    return Selection(topk=int(topk))


def selected(result: Result) -> Neighbors | Pairs:
    """Return the elements that a run has selected."""
    run = replace(result, c=None)
    if isinstance(result.c, Collecting):
        return Pairs(*result.c.csr(), run)
    kept = result.out
    return Neighbors(kept["index"].astype(np.int64), np.ascontiguousarray(kept["score"]), run)
