"""Store op(B) y and op(A) (op(B) y) for Freivalds' check, and norms that bound their rounding errors.

y is a vector of random signs. The check compares op(A) (op(B) y) with C y (`oocgemm.integrity.freivalds`).
"""

import numpy as np

from oocgemm.backends.base import Array
from oocgemm.backends.checksums import VECTORS
from oocgemm.integrity.rounding import MAX_SQUARES, MIN_SQUARES, ONE_THREAD, norms
from oocgemm.planning.tiling import Range

# If the norms of some rows of op(B) differ by at most this factor, `Sums.terms` uses the largest for all of
# them. This saves time, and makes the error bound at most ALIKE times larger.
ALIKE = 2
# `Sums.square` squares norms only if all of them are 0 or between these limits: other squares could overflow
# or underflow.
MIN_NORM, MAX_NORM = 1e-100, 1e100
# If a result of `Sums.terms` is below MIN_SHARE times the largest norm of a row of op(B), squares may have
# underflowed. The result is then replaced by an upper bound that needs no squares.
MIN_SHARE = 1e-120


class Sums:
    """The products op(B) y with random sign vectors y, for the range `span` of k.

    The columns of C, and so of op(B), are divided into groups. Each group has `VECTORS` vectors, which are
    zero outside the group's columns.

    Attributes:
        span: the range of indices along k, that is, of rows of op(B).
        values: the products, with one row per index along k and one column per vector.
        norms: the 2-norm of each row of op(B) within the columns of each group: shape (indices, groups).
    """

    def __init__(self, span: Range, groups: int, dtype: np.dtype[np.generic]) -> None:
        extent = span[1] - span[0]
        self.span = span
        self.values = np.zeros((extent, groups * VECTORS), dtype)
        self.norms = np.zeros((extent, groups))
        self._squares: Array | None = None
        self._largest = 0.0

    def square(self) -> None:
        """Square the norms for the method `terms`, unless a square would overflow or underflow.

        A column of ones is appended to the squares. With it, `terms` also gets the sum of squares of each row
        of op(A), which is nonfinite if the row has an Inf or NaN.
        """
        self._largest = float(self.norms.max(initial=0))
        inside = (self.norms == 0) | ((self.norms > MIN_NORM) & (self.norms < MAX_NORM))
        if inside.all():
            self._squares = np.ones((len(self.norms), self.norms.shape[1] + 1))
            np.square(self.norms, out=self._squares[:, :-1])

    def terms(self, x: Array, inside: slice) -> Array:
        """Return sqrt(sum_p |x_ip norms_pg|^2), or a larger value, for each row i of `x` and each group g.

        `x` is a part of op(A). Its columns p correspond to the rows `inside` of `norms`. The expression is
        the 2-norm of the products a_ip b_pj over these p and over the columns j of group g. A value that may
        be larger is returned in two cases:

        - If the norms of each group are alike, the largest one replaces the others. This is faster, and the
          result is at most `ALIKE` times too large.
        - If squares could overflow or underflow, the result is sum_p |x_ip| norms_pg.

        The result is nonfinite if `x` has an Inf or NaN, or if squares of `x` overflow.
        """
        sizes = self.norms[inside]
        largest = sizes.max(axis=0)
        if (largest <= ALIKE * sizes.min(axis=0)).all():
            return np.asarray(row_norms(x)[:, None] * largest)
        if self._squares is None:
            return np.asarray(np.abs(x) @ sizes)
        squares = x * x if x.dtype.kind != "c" else x.real * x.real + x.imag * x.imag
        found = product(squares, self._squares[inside])
        if not np.isfinite(found[:, -1]).all():
            return np.full((len(x), self.norms.shape[1]), np.nan)
        terms = np.sqrt(found[:, :-1])
        small = (terms < MIN_SHARE * self._largest).any(axis=1)
        if small.any():
            terms[small] = np.abs(x[small]) @ sizes
        return np.asarray(terms)


class Rows:
    """The products op(A) op(B) y with random sign vectors y, for the rows `span` of C.

    Attributes:
        span: the range of rows.
        expected: the products, one column per vector.
        terms: for each row i and each group of columns j of C, the 2-norm of all terms a_ip b_pj
            (`Sums.terms`).
        bias: for each row and group, the result of `bias_of`: positive if most terms have the same sign.
        nonfinite: flags of the rows of op(A) with an Inf or NaN.
    """

    def __init__(self, span: Range, groups: int, dtype: np.dtype[np.generic]) -> None:
        extent = span[1] - span[0]
        self.span = span
        self.expected = np.zeros((extent, groups * VECTORS), dtype)
        self.terms, self.bias = np.zeros((extent, groups)), np.zeros((extent, groups))
        self.nonfinite = np.zeros(extent, bool)

    def add_final_bias(self) -> None:
        """Replace `bias` by the estimate from sums over the whole of k, where that is larger.

        The earlier estimates are from parts of k, which may be too short to show a common sign of the terms.
        """
        np.maximum(self.bias, bias_of(self.expected, self.terms), out=self.bias)


def bias_of(sums: Array, terms: Array) -> Array:
    """Estimate by how much larger partial sums of op(A) op(B) are than sums of terms with random signs.

    A term is a product a_ip b_pj. A partial sum adds the terms of one element (i, j) over a part of k. If
    most terms have the same sign, partial sums are larger, and so are their rounding errors.

    Args:
        sums: for each row i and each group of columns, the products of the partial sums with `VECTORS`
            vectors of random signs.
        terms: for each row and group, the 2-norm of the terms. The partial sums have about the same 2-norm if
            the terms have random signs.

    Returns:
        For each row and group, the 2-norm of the partial sums, estimated from `sums`, minus 2.5 times
        `terms`; 0 if that is negative. The factor 2.5 allows for the error of the estimate.
    """
    # The mean of the absolute values of `sums` is about 0.8 times the 2-norm of the partial sums.
    sizes = np.abs(sums).reshape(*terms.shape, VECTORS).mean(axis=2)
    return np.asarray(np.maximum(1.25 * sizes - 2.5 * terms, 0))


def product(x: Array, y: Array) -> Array:
    """Return ``x @ y``, computed in parts so small that the BLAS uses only the calling thread."""
    out = np.empty((len(x), y.shape[1]), np.result_type(x, y))
    height = max(1, ONE_THREAD // max(1, y.size))
    for top in range(0, len(x), height):
        np.matmul(x[top : top + height], y, out=out[top : top + height])
    return out


def row_norms(x: Array) -> Array:
    """Return the 2-norms of the rows of a double-precision matrix, without overflow or underflow."""
    if x.strides[1] == x.itemsize or x.shape[1] == 1:
        squares = np.vecdot(x, x).real
    else:  # not vecdot, which is slow on rows that are not contiguous, as in a transposed matrix
        squares = (x.real * x.real + x.imag * x.imag if x.dtype.kind == "c" else x * x).sum(axis=1)
    out = ~((squares > MIN_SQUARES) & (squares < MAX_SQUARES))
    found = np.sqrt(squares)
    if out.any():
        found[out] = norms(np.ascontiguousarray(x[out]))
    return np.asarray(found)
