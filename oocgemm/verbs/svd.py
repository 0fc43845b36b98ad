"""The verb `svd`: the singular value decomposition of a tall or wide X, by its Gram matrix."""

import os
from dataclasses import replace
from typing import Any, Literal, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from oocgemm import stores
from oocgemm.errors import InputError
from oocgemm.jobs.option_groups import Operand, PathLike, PcaOptions, WritableArray
from oocgemm.jobs.options import SvdArguments, check_names, documented
from oocgemm.jobs.orthonormal import EPS, QRFactors, of_eigenvectors
from oocgemm.jobs.pca_gram import errors_of, largest, planned
from oocgemm.jobs.pca_passes import PcaPasses, PcaState
from oocgemm.jobs.run import Plan
from oocgemm.stores import Array
from oocgemm.stores.folded import as_matrix
from oocgemm.stores.transform import Transform
from oocgemm.stores.zarr_matrix import check_free, save_arrays
from oocgemm.values import dataclass

# Minimum number of further eigenvectors that are computed, so that those of equal values are not missed.
OVERSAMPLING = 10
# Maximum error of a singular value, relative to the largest one, and of elements of X V / s, relative to 1.
MAX_ERROR, MAX_LOSS = 32 * EPS, 1e-4
# Maximum number of reads of X, without that for U.
MAX_READS = 5
# Columns of P with a larger error belong to singular values that count as 0.
HIDDEN = 0.5


@dataclass(frozen=True, eq=False)
class SVD:
    """The first k singular values and vectors of an m x n matrix: X is about u @ diag(singular_values) @ vt.

    The longer one of `u` and `vt` is None unless it was asked for.

    Attributes:
        u: m x k, orthonormal columns; what the run was asked to store it in.
        singular_values: k numbers in descending order, float64.
        vt: k x n, orthonormal rows. The element of largest magnitude of the shorter vectors is positive.
        passes: how many times X was read, besides passes for a transform.
    """

    u: Any
    singular_values: NDArray[np.float64]
    vt: Any
    passes: int

    def save(self, path: PathLike) -> None:
        """Write the singular values, and the vectors that are in memory, to a new zarr group at a local path.

        Raises:
            InputError: something exists at the path, or nothing can be written there.
        """
        arrays = {"u": self.u, "singular_values": self.singular_values, "vt": self.vt}
        save_arrays(os.fspath(path), {name: x for name, x in arrays.items() if isinstance(x, np.ndarray)})


@overload
def svd(
    x: Operand,
    k: int | None = None,
    out: PathLike | None = None,
    *,
    dry_run: Literal[False] = False,
    **options: Unpack[SvdArguments],
) -> SVD: ...
@overload
def svd(
    x: Operand,
    k: int | None = None,
    out: PathLike | None = None,
    *,
    dry_run: Literal[True],
    **options: Unpack[SvdArguments],
) -> Plan: ...
@documented("svd", PcaOptions)
def svd(
    x: Operand,
    k: int | None = None,
    out: PathLike | None = None,
    *,
    u: WritableArray | PathLike | bool | None = None,
    dry_run: bool = False,
    **options: Unpack[PcaOptions],
) -> SVD | Plan:
    """Find singular values and vectors of X, in float64, to the accuracy of `numpy.linalg.svd`.

    X is read once for its Gram matrix, and one to three times more if singular values below some 1/16 of the
    largest one are wanted. Their errors are below 100 units of rounding of the largest one. Columns are not
    centered: `pca` does that.

    Args:
        x: a real two-dimensional operand as for `gemm`. Five matrices of the size of its smaller Gram matrix
            must fit into host memory, or sixteen for all singular values.
        k: the number of singular values, the largest ones. None: all.
        out: path of a new zarr group, to which the result is also saved (`SVD.save`). A run that was killed
            starts again: remove an unfinished `u` before.
        {options}

    Returns:
        The `SVD`; with `dry_run`, the `Plan` of the first read.

    Raises:
        InputError, BudgetError, BackendError, ExecutionError: as `gemm` does. `InputError` also if X has NaN
            or Inf elements, or if `u` is wanted of singular values that are so small that float64 does not
            give their vectors.

    >>> import oocgemm
    >>> oocgemm.svd([[3.0, 0.0], [0.0, 4.0], [0.0, 0.0]], backend="host").singular_values
    array([4., 3.])
    """
    check_names("svd", options, PcaOptions)
    shape = stores.open_matrix("X", x, decode=options.get("decode", True)).shape
    is_tall, most = shape[0] >= shape[1], min(shape)
    if k is not None and (isinstance(k, bool) or not isinstance(k, int | np.integer) or not 1 <= k <= most):
        raise InputError(f"k = {k!r}, and X has {shape[0]} rows and {shape[1]} columns: pass 1 to {most}")
    if not most:
        raise InputError(f"X has {shape[0]} rows and {shape[1]} columns: pass a larger X")
    count = most if k is None else int(k)
    x = x if is_tall else _turned(x, shape)
    passes = PcaPasses(x, min(most, count + OVERSAMPLING), Transform(cast="float64"), options, center=False)
    plan = planned(passes, running=not dry_run)
    if dry_run:
        return plan
    if out is not None:
        check_free(os.fspath(out), 8 * count * (1 + most + max(shape) * (u is True)))
    state, factors, reads = _factors(passes, count)
    values, vt, factor = _decomposed(factors, count, refined=reads > 1)
    long = None
    if u is not None and u is not False:
        loss = np.linalg.norm(factor, axis=0) * factors.size * EPS
        if loss.max(initial=0) > MAX_LOSS:
            good = int((loss <= MAX_LOSS).sum())
            raise InputError(
                f"singular value {good + 1} of {count} is {values[good]:.3g}, and the largest one is "
                f"{values[0]:.3g}: float64 gives its vector in u with an error of {loss[good]:.1g}, and at "
                f"most {MAX_LOSS:g} is allowed: pass k={good} (--components {good}), or drop u"
            )
        factor = np.ldexp(factor, state.exponent)
        long = passes.projected(replace(state, exponent=0), factor, None if u is True else u)
        reads += 1
    values = np.ldexp(values, -state.exponent)
    if is_tall:
        found = SVD(long, values, vt, reads)
    else:
        found = SVD(vt.T, values, long.T if isinstance(long, np.ndarray) else long, reads)
    if out is not None:
        found.save(out)
    return found


def _turned(x: Operand, shape: tuple[int, int]) -> Operand:
    """Return the transpose of a wide X."""
    found = as_matrix(x, rows=(1,), cols=(0,))
    try:
        stores.open_matrix("X", found)
    except InputError:
        raise InputError(
            f"X has {shape[0]} rows and {shape[1]} columns, and {stores.store_of(x).kind} cannot be read as "
            "its transpose, which svd does for more columns than rows: store the transpose"
        ) from None
    return found


def _factors(passes: PcaPasses, count: int) -> tuple[PcaState, QRFactors, int]:
    """Return the factors of X, and how often it was read."""
    state, gram = passes.gram(passes.begin(0, centered=True))
    values, vectors = largest(gram, count, passes.columns, 0, passes.decomposed)
    top = max(0.0, float(values[0]))
    length = passes.matrix.shape[0]
    errors = errors_of(gram, vectors, top or 1.0, length, np.dtype(np.float64))
    factors, reads = of_eigenvectors(values[: vectors.shape[1]], vectors, errors, top), state.subspace.passes
    del gram
    for _ in range(1, MAX_READS):
        # The error of s^2 / s_j^2 is known, for |p_j| = 1 / s_j.
        chosen = factors.errors > 2 * MAX_ERROR * np.linalg.norm(factors.p, axis=0) * factors.size
        if not chosen[:count].any():
            break
        factors = factors.refined(chosen, passes.product(state, factors.p[:, chosen]))
        reads += 1
    return state, factors, reads


def _decomposed(factors: QRFactors, count: int, *, refined: bool) -> tuple[Array, Array, Array]:
    """Return singular values s, V^T, and a factor F for which U = X F."""
    if refined:
        # Where nothing is known of |X p|, it is below the noise.
        known = np.where(factors.errors < HIDDEN, 1.0, 0.0)
        left, values, vt = np.linalg.svd(factors.r * known[:, None], full_matrices=False)
    else:  # the rows of R are orthogonal
        values = np.linalg.norm(factors.r, axis=1)
        left, vt = np.eye(len(values)), factors.r / values[:, None] if values.any() else factors.p.T
    rows = vt[:count]
    signs = np.where(rows[np.arange(count), np.abs(rows).argmax(axis=1)] < 0, -1.0, 1.0)
    return values[:count], rows * signs[:, None], factors.p @ left[:, :count] * signs
