"""The function `similarity`: the most similar rows of each row of a matrix."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import isnan
from typing import Unpack, overload

import numpy as np
from numpy.typing import NDArray

from oocgemm import stores
from oocgemm.errors import InputError
from oocgemm.jobs.api import run_request
from oocgemm.jobs.destination import Destination
from oocgemm.jobs.options import (
    METRICS,
    OPTIONS,
    SELECTION_OPTIONS,
    Operand,
    PathLike,
    SelectionOptions,
    SimilarityArguments,
    check_names,
    documented,
)
from oocgemm.jobs.request import Request, Selection
from oocgemm.jobs.result import Result
from oocgemm.stores.sparse import SparseMatrix
from oocgemm.stores.zarr_matrix import check_free, save_arrays


@dataclass(frozen=True, eq=False)
class Neighbors:
    """The rows that are most similar to each of n rows, the most similar first.

    As a result of `reduce`, it has the largest elements of each row of C: `indices` are the numbers
    of their columns, and `scores` are their values.

    Attributes:
        indices: n x topk numbers of rows, int64.
        scores: n x topk similarities to them, float32 or float64.
        run: the plan and the timeline of the run. It has no C.
    """

    indices: NDArray[np.int64]
    scores: NDArray[np.floating]
    run: Result

    def save(self, path: PathLike) -> None:
        """Write `indices` and `scores` to a new zarr group at a local path, as arrays of these names.

        Raises:
            InputError: something exists at the path, or nothing can be written there.
        """
        save_arrays(os.fspath(path), {"indices": self.indices, "scores": self.scores} | _kept(self.run))


@dataclass(frozen=True, eq=False)
class Pairs:
    """All pairs of n rows that are similar, as a sparse n x n matrix in CSR format.

    ``scipy.sparse.csr_array((p.scores, p.indices, p.indptr), shape=(n, n))`` is this matrix. As a result of
    `reduce`, it has the elements of C that were found, and the shape of C.

    Attributes:
        indptr: n + 1 numbers: the pairs of row i are numbers indptr[i] to indptr[i + 1] - 1.
        indices: the other row of each pair, int64, in ascending order for each row.
        scores: the similarity of each pair, float32 or float64.
        run: the plan and the timeline of the run. It has no C.
    """

    indptr: NDArray[np.int64]
    indices: NDArray[np.int64]
    scores: NDArray[np.floating]
    run: Result

    @property
    def rows(self) -> NDArray[np.int64]:
        """The first row of each pair, as in COO format."""
        return np.repeat(np.arange(len(self.indptr) - 1), np.diff(self.indptr))

    def save(self, path: PathLike) -> None:
        """Write `indptr`, `indices` and `scores` to a new zarr group at a local path.

        Raises:
            InputError: something exists at the path, or nothing can be written there.
        """
        arrays = {"indptr": self.indptr, "indices": self.indices, "scores": self.scores}
        save_arrays(os.fspath(path), arrays | _kept(self.run))


def _kept(run: Result) -> dict[str, NDArray[np.int64]]:
    """Return the numbers of the rows that are numbered in a result, if rows were left out."""
    return {} if run.kept is None else {"kept": run.kept}


@overload
def similarity(
    e: Operand,
    *,
    topk: int,
    threshold: None = None,
    metric: str = "cosine",
    exclude_self: bool = True,
    **options: Unpack[SelectionOptions],
) -> Neighbors: ...
@overload
def similarity(
    e: Operand,
    *,
    topk: None = None,
    threshold: float,
    metric: str = "cosine",
    exclude_self: bool = True,
    **options: Unpack[SelectionOptions],
) -> Pairs: ...
@documented(SimilarityArguments, SelectionOptions)
def similarity(
    e: Operand,
    *,
    topk: int | None = None,
    threshold: float | None = None,
    metric: str = "cosine",
    exclude_self: bool = True,
    **options: Unpack[SelectionOptions],
) -> Neighbors | Pairs:
    """Find the rows of E that are most similar to each row of E. E E^T is computed, but not stored.

    The result is exact: all pairs of rows are compared. Pass either `topk` or `threshold`.

    Args:
        e: a real two-dimensional operand as for `gemm`, n x k. Rows are compared. Missing genotypes of a .bed
            file are replaced by the means of their variants.
        {options}

    Returns:
        With `topk`, the `Neighbors`. Their arrays take 12 * n * topk bytes, or 16 * n * topk with float64
            scores, and as much again is used to make them. With `threshold`, the `Pairs`, which take 12 or 16
            bytes per pair, and as much again is used. Scores are float32, but float64 for float64 and int8
            operands. Sums of int8 products are exact.

    Raises:
        InputError, BudgetError, BackendError, ExecutionError: as `gemm` does. `ExecutionError` also if so
            many pairs are at least `threshold` that they would take more than 40% of the available memory.

    >>> import oocgemm
    >>> found = oocgemm.similarity([[1.0, 0.0], [3.0, 1.0], [0.0, 2.0]], topk=1, backend="host")
    >>> found.indices.tolist()
    [[1], [0], [1]]
    """
    check_options("similarity", options)
    if metric not in METRICS:
        raise InputError(f"metric = {metric!r}: choose one of {', '.join(METRICS)}")
    chosen = selection_of(topk, threshold)
    chosen = replace(chosen, cosine=metric == "cosine", excludes_self=exclude_self)
    e = stores.located("E", e)
    return selected(Request(a=e, b=e, c=Destination.parse(None), selection=chosen, impute=True, **options))


def check_saving(path: str, x: Operand, topk: int | None, axis: int = 0) -> None:
    """Raise `InputError` if the `Neighbors` or `Pairs` of X cannot be saved at a path. Nothing is read.

    Args:
        path: of a new zarr group.
        x: the operand whose rows are compared, or columns if `axis` is 1.
        topk: how many rows are found for each row. None with a threshold: how many is not known before.
    """
    matrix = stores.open_matrix("X", stores.located("X", x), decode=False)
    lines, score = matrix.shape[axis], 8 if matrix.dtype in (np.float64, np.int8) else 4
    check_free(path, 0 if topk is None else lines * min(topk, lines) * (8 + score))
    stores.warn_of_folders("the result", path)


def check_options(function: str, options: Iterable[str]) -> None:
    """Raise an error for options that a function does not take."""
    for name in options:
        if name in OPTIONS - SELECTION_OPTIONS:
            raise InputError(
                f"{function} does not take the option {name}, which gemm does: drop it; one device computes "
                "the result, which is kept in memory and not resumed"
            )
    check_names(function, options, SELECTION_OPTIONS)


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


def selected(request: Request) -> Neighbors | Pairs:
    """Run a request with a selection, and return the selected elements."""
    result = run_request(request)
    run = replace(result, c=None)
    if isinstance(result.c, SparseMatrix):
        return Pairs(*result.c.csr(), run)
    kept = result.out
    return Neighbors(kept["index"].astype(np.int64), np.ascontiguousarray(kept["score"]), run)
