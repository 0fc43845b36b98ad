"""The verb `neighbors`: the nearest rows to each row of a matrix."""

import os
from dataclasses import replace
from math import isfinite
from typing import Literal, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from oocgemm.errors import InputError
from oocgemm.jobs.codes import COUNTS, check_bits, counting
from oocgemm.jobs.nearest import CountedSearch, Search
from oocgemm.jobs.option_groups import Operand, PathLike, SimilarityOptions
from oocgemm.jobs.options import NeighborsArguments, check_choices, documented
from oocgemm.jobs.request import Selection
from oocgemm.jobs.run import Plan, Result, plan_request
from oocgemm.jobs.stats import keeping
from oocgemm.jobs.steps import AnyStep, Cosines, Distance, Scale
from oocgemm.values import dataclass
from oocgemm.verbs.similarity import between, check_options, selection_of


@dataclass(frozen=True, eq=False)
class Nearest:
    """The nearest rows to each of m rows, the nearest first. Equally near rows are in ascending order.

    Attributes:
        indices: m x topk numbers of rows, int64. With `radius`, the numbers for all rows one after the other.
        distances: the distances to them, of the same shape, float32 or float64.
        indptr: with `radius`, m + 1 numbers: those of row i are numbers indptr[i] to indptr[i + 1] - 1.
            Otherwise None.
        run: the plan and the timeline of the run. It has no C.
    """

    indices: NDArray[np.int64]
    distances: NDArray[np.floating]
    indptr: NDArray[np.int64] | None
    run: Result

    def save(self, path: PathLike) -> None:
        """Write `indices`, `distances` and, if there is one, `indptr` to a new zarr group at a local path.

        Raises:
            InputError: something exists at the path, or nothing can be written there.
        """
        from oocgemm.stores.zarr_matrix import save_arrays

        starts = {} if self.indptr is None else {"indptr": self.indptr}
        save_arrays(os.fspath(path), {"indices": self.indices, "distances": self.distances} | starts)


@overload
def neighbors(
    x: Operand, *, dry_run: Literal[False] = False, **options: Unpack[NeighborsArguments]
) -> Nearest: ...
@overload
def neighbors(x: Operand, *, dry_run: Literal[True], **options: Unpack[NeighborsArguments]) -> Plan: ...
@documented("neighbors", SimilarityOptions)
def neighbors(
    x: Operand,
    *,
    y: Operand | None = None,
    topk: int | None = None,
    radius: float | None = None,
    metric: str = "euclidean",
    bits: int | None = None,
    bitorder: str = "big",
    exclude_self: bool = True,
    dry_run: bool = False,
    **options: Unpack[SimilarityOptions],
) -> Nearest | Plan:
    """Find the nearest rows of X, or of Y, to each row of X. All pairs are compared. Pass `topk` or `radius`.

    Products of rows, less their mean, give candidates. Their distances are computed again in
    float64 from the elements. If rounding errors of the products may have hidden a nearer row, the
    candidates of this row are found again by products in float64. Jaccard and Hamming distances come from
    exact counts.

    Args:
        x: a real two-dimensional operand as for `gemm`, m x k. Missing genotypes of a .bed file are replaced
            by the means of their variants, but refused by the metric hamming.
        {options}

    Returns:
        The `Nearest`. Their distances are those of the elements, rounded once: to float32, but to float64 for
            float64 and int8 operands, and with the metrics jaccard and hamming. A row is missing only if it
            is as near as the last one that was found, within the rounding errors of products in float64.
            With `dry_run`, the `Plan`.

    Raises:
        InputError, BudgetError, BackendError, ExecutionError: as `gemm` does. `ExecutionError` also if so
            many rows are within `radius` that they would take more than 40% of the available memory.

    >>> import oocgemm
    >>> found = oocgemm.neighbors([[0.0], [3.0], [10.0]], topk=1, backend="host")
    >>> found.indices.tolist(), found.distances.tolist()
    ([[1], [0], [1]], [[3.0], [3.0], [7.0]])
    """
    check_options("neighbors", options, SimilarityOptions)
    check_choices("neighbors", metric=metric, bitorder=bitorder)
    check_bits(metric, bits, options)
    if (topk is None) == (radius is None):
        raise InputError("pass either topk, a number of rows to find for each row, or radius")
    if radius is not None and not (isinstance(radius, int | float) and isfinite(radius) and radius >= 0):
        raise InputError(f"radius = {radius!r} is not a distance: pass a number such as 0.5")
    chosen = Selection() if topk is None else selection_of(topk, None)
    same = y is None
    names = ("X", "X" if same else "Y")
    into = Selection(chosen.topk, excludes_self=exclude_self and same, names=names, same=same)
    steps: tuple[AnyStep, ...] = (Cosines(),) if metric == "cosine" else (Distance(-1.0),)
    if same and metric == "cosine":
        into, steps = replace(into, cosine=True), ()
    given = {**options, "epilogue": steps}
    request = between(("X", x), (names[1], x if y is None else y), None, 0, into, given)
    request = request.with_operands(impute=True)
    search: Search | CountedSearch = Search(request, into, metric, radius)
    if metric in COUNTS:
        request, counted = counting(request, names, metric, bits, bitorder)
        request = replace(request, epilogue=(counted, Scale(value=-1)))
        search = CountedSearch(request, into, radius)
    if dry_run:
        return plan_request(search.candidates())
    with keeping({}):  # several passes need the same statistics
        return Nearest(*search.run())
