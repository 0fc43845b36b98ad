"""The function `similarity`: the most similar rows of each row of a matrix."""

import os
from dataclasses import dataclass, replace
from typing import Unpack

import numpy as np
from numpy.typing import NDArray

from oocgemm import stores
from oocgemm.errors import InputError
from oocgemm.jobs.api import run_request
from oocgemm.jobs.destination import Destination
from oocgemm.jobs.options import Operand, PathLike, SelectionOptions
from oocgemm.jobs.request import PLAN_OPTIONS, RUN_OPTIONS, SELECTION_OPTIONS, Request, Selection, check_names
from oocgemm.jobs.result import Result
from oocgemm.stores.zarr.saving import save_arrays

METRICS = ("cosine", "dot")


@dataclass(frozen=True, eq=False)
class Neighbors:
    """The rows that are most similar to each of n rows, the most similar first.

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
        save_arrays(os.fspath(path), {"indices": self.indices, "scores": self.scores})


def similarity(
    e: Operand,
    *,
    topk: int,
    metric: str = "cosine",
    exclude_self: bool = True,
    **options: Unpack[SelectionOptions],
) -> Neighbors:
    """Find the `topk` rows of E that are most similar to each row of E. E E^T is computed, but not stored.

    The result is exact: all pairs of rows are compared. Rows of equal similarity are in ascending order of
    their numbers. NaN ranks last.

    Args:
        e: a real two-dimensional operand as for `gemm`, n x k. Rows are compared.
        topk: how many rows to find for each row, at least 1. At most 2048 on cuda.
        metric: "cosine" (default): inner products of rows divided by their norms. "dot": inner products.
        exclude_self: leave out the similarity of a row to itself (default).
        options: those of `gemm` that are listed here: backend, kernel, compute, memory, device_memory,
            host_memory, tile, requests, device, timeline and progress.

    Returns:
        The `Neighbors`. Their arrays take 12 * n * topk bytes, or 16 * n * topk with float64 scores.
            As much again is used to make them. Scores are float32, but float64 for float64 and int8 operands.
            Sums of int8 products are exact.

    Raises:
        InputError, BudgetError, BackendError, ExecutionError: as `gemm` does. `InputError` also if a row is
            zero and the metric is cosine.

    >>> import oocgemm
    >>> found = oocgemm.similarity([[1.0, 0.0], [3.0, 1.0], [0.0, 2.0]], topk=1, backend="host")
    >>> found.indices.tolist()
    [[1], [0], [1]]
    """
    for name in options:
        if name in (PLAN_OPTIONS | RUN_OPTIONS) - SELECTION_OPTIONS:
            raise InputError(
                f"similarity does not take the option {name}, which gemm does: drop it; a similarity is "
                "computed by one device, kept in memory, and not resumed"
            )
    check_names("similarity", options, SELECTION_OPTIONS)
    if metric not in METRICS:
        raise InputError(f"metric = {metric!r}: choose one of {', '.join(METRICS)}")
    if isinstance(topk, bool) or not isinstance(topk, int | np.integer):
        raise InputError(f"topk = {topk!r} is not a number of rows: pass an integer, such as 50")
    e = stores.located("E", e)
    selection = Selection(int(topk), metric == "cosine", exclude_self)
    request = Request(a=e, b=e, c=Destination.parse(None), selection=selection, **options)
    result = run_request(request)
    kept = result.out
    indices, scores = kept["index"].astype(np.int64), np.ascontiguousarray(kept["score"])
    return Neighbors(indices, scores, replace(result, c=None))
