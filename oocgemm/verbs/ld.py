"""The verb `ld`: correlations of the pairs of variants that are near one another (linkage disequilibrium)."""

import os
from dataclasses import replace
from math import sqrt
from typing import Any, Literal, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from oocgemm import stores
from oocgemm.errors import InputError
from oocgemm.jobs.option_groups import Operand, PathLike, SimilarityOptions
from oocgemm.jobs.options import LdArguments, documented
from oocgemm.jobs.request import Selection
from oocgemm.jobs.run import Plan, Result, outcome
from oocgemm.jobs.stats import keeping
from oocgemm.jobs.steps import AnyStep, Coefficients
from oocgemm.jobs.windows import band_of, within
from oocgemm.stores import Collecting
from oocgemm.stores.arrays import MOVED
from oocgemm.stores.transformed import multiplied_dtype
from oocgemm.stores.zarr_matrix import check_free, save_sparse, stored_arrays
from oocgemm.values import dataclass
from oocgemm.verbs.similarity import check_options
from oocgemm.verbs.variants import near

# Bound on the relative error of r that is computed in float64 from exact sums.
ROUNDING = 2.0**-40


@dataclass(frozen=True, eq=False)
class LD:
    """Correlations r of pairs of variants, as the upper triangle of a sparse matrix in CSR format.

    Attributes:
        indptr: n + 1 numbers for n variants: the pairs of variant i with later variants are numbers indptr[i]
            to indptr[i + 1] - 1.
        indices: the later variant of each pair, int64, in ascending order for each variant.
        r: the correlation of each pair, float32, or float64 for X in float64. With more pairs than fit in
            memory, `indices` and `r` are the zarr arrays at `out`.
        run: the plan and the timeline of the run. It has no C.
    """

    indptr: NDArray[np.int64]
    indices: NDArray[np.int64]
    r: NDArray[np.floating]
    run: Result

    def to_scipy(self) -> Any:
        """Return the pairs as a `scipy.sparse.csr_matrix` that shares the arrays."""
        from scipy.sparse import csr_matrix  # type: ignore[import-untyped]

        count = len(self.indptr) - 1
        arrays = np.asarray(self.r), np.asarray(self.indices), self.indptr
        return csr_matrix(arrays, shape=(count, count))

    def save(self, path: PathLike) -> None:
        """Write the pairs to a new zarr group at a local path, as anndata stores a `csr_matrix`.

        The group is an operand of `gemm`, and `anndata.io.sparse_dataset` opens it.

        Raises:
            InputError: something exists at the path, or nothing can be written there.
        """
        count = len(self.indptr) - 1
        save_sparse(
            os.fspath(path), (count, count), self.indptr, np.asarray(self.indices), np.asarray(self.r)
        )


@overload
def ld(x: Operand, *, dry_run: Literal[False] = False, **options: Unpack[LdArguments]) -> LD: ...
@overload
def ld(x: Operand, *, dry_run: Literal[True], **options: Unpack[LdArguments]) -> Plan: ...
@documented("ld", SimilarityOptions)
def ld(
    x: Operand,
    *,
    window: float | None = None,
    unit: str = "variants",
    positions: Any = None,
    chromosomes: Any = None,
    min_r2: float = 0.0,
    axis: int = 1,
    constant: str = "raise",
    pairwise: bool = False,
    out: PathLike | None = None,
    dry_run: bool = False,
    **options: Unpack[SimilarityOptions],
) -> LD | Plan:
    """Compute the correlations r of the pairs of variants that are near one another.

    A pair is kept if its distance is at most `window` and r^2 is at least `min_r2`. Without `window`, all
    pairs on a chromosome are compared. Tiles without a pair within the window are neither read nor computed.
    The correlations are those of `corr`. Pairs whose r^2 is near `min_r2` are computed again in float64.

    Args:
        x: genotypes as a real two-dimensional operand as for `corr`. Missing genotypes of a .bed file are
            replaced by the means of their variants.
        {options}

    Returns:
        The `LD`. With `dry_run`, the `Plan`.

    Raises:
        InputError, BudgetError, BackendError, ExecutionError: as `gemm` does. `ExecutionError` also if so
            many pairs are kept that they would take more than 40% of the available memory, and `out` is not
            given.

    >>> import oocgemm
    >>> x = [[0, 0, 2], [1, 1, 0], [2, 2, 1], [0, 1, 1]]
    >>> found = oocgemm.ld(x, window=1, min_r2=0.3, backend="host")
    >>> found.indptr.tolist(), found.indices.tolist(), found.r.round(4).tolist()
    ([0, 1, 1, 1], [1], [0.8528])
    """
    check_options("ld", options, SimilarityOptions)
    if isinstance(min_r2, bool) or not isinstance(min_r2, int | float) or not 0 <= min_r2 <= 1:
        raise InputError(f"min_r2 = {min_r2!r} is not a squared correlation: pass a number from 0 to 1")
    place = None if out is None else os.fspath(out)
    if place is not None and not dry_run:
        check_free(place)
    where = {"window": window, "unit": unit, "positions": positions, "chromosomes": chromosomes}
    with keeping({}):  # statistics are found once
        given = dict[str, Any](options)
        request, r_step, firsts = near(x, axis, constant, where, given, dry_run=dry_run, pairwise=pairwise)
        # Coefficients of standardized variants near the threshold are computed again.
        least = sqrt(min_r2) * (1 if isinstance(r_step, Coefficients) else 1 - ROUNDING)
        folder = None if place is None else os.path.dirname(os.path.abspath(place))
        into = Selection(
            threshold=least, absolute=True, names=("X", "X"), band=band_of(firsts), folder=folder
        )
        steps: tuple[AnyStep, ...] = r_step, *within(firsts, both=False)
        matrix = stores.open_matrix("X", stores.located("X", x), decode=False)
        count, wide = matrix.shape[axis], multiplied_dtype(matrix.dtype).itemsize == 8

        def paired(result: Result) -> LD:
            assert isinstance(result.c, Collecting)
            starts, columns, r = result.c.csr()
            if (kept := request.a.kept) is not None:
                counts = np.zeros(count, np.int64)
                counts[kept] = np.diff(starts)
                starts = np.append(0, np.cumsum(counts))
                for start in range(0, len(columns), MOVED):
                    part = slice(start, start + MOVED)
                    columns[part] = kept[columns[part]]
            run, dtype = replace(result, c=None), np.dtype("f8" if wide else "f4")
            if place is not None:
                save_sparse(place, (count, count), starts, columns, r, dtype)
            if isinstance(r, np.memmap):  # there are more pairs than fit in memory
                assert place is not None
                return LD(starts, *stored_arrays(place, "indices", "data"), run)
            return LD(starts, columns, r.astype(dtype, copy=False), run)

        return outcome(replace(request, into=into, epilogue=steps), paired, dry_run=dry_run)
