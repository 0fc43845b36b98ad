"""Add up the products that Freivalds' check compares, and norms that bound their rounding errors.

The check compares C y with op(A) (op(B) y) for vectors y of random signs (`oocgemm.integrity.freivalds`).
"""

import numpy as np

from oocgemm.backends.base import Array
from oocgemm.backends.random_words import VECTORS
from oocgemm.integrity.rounding import MAX_SQUARES, MIN_SQUARES, ONE_THREAD, norms
from oocgemm.planning.tiling import Range

# If the largest norm of a row of op(B) is at most this many times the smallest, the largest is used for all
# rows. This saves time, and makes the error bound at most this many times larger.
ALIKE = 2
# Norms in this range have squares that neither overflow nor underflow. Other norms are not squared.
MIN_NORM, MAX_NORM = 1e-100, 1e100
# If a norm that was computed from squares is below this share of the largest norm of op(B), squares may have
# underflowed. It is then computed again without squares.
MIN_SHARE = 1e-120


class Sums:
    """The products op(B) y with random sign vectors y, for the range `span` of k.

    The columns of C are divided into groups with `VECTORS` vectors each. `values` has one row per index along
    k and one column per vector. `norms` has the 2-norm of each row of op(B) within each group.
    """

    def __init__(self, span: Range, groups: int, dtype: np.dtype[np.generic]) -> None:
        extent = span[1] - span[0]
        self.span = span
        self.values = np.zeros((extent, groups * VECTORS), dtype)
        self.norms = np.zeros((extent, groups))
        self._squares: Array | None = None
        self._largest = 0.0

    def square(self) -> None:
        """Prepare `terms`: square the norms, unless a square would overflow or underflow.

        A column of ones is appended, with which `terms` also gets the sum of squares of each row of op(A).
        """
        self._largest = float(self.norms.max(initial=0))
        inside = (self.norms == 0) | ((self.norms > MIN_NORM) & (self.norms < MAX_NORM))
        if inside.all():
            self._squares = np.ones((len(self.norms), self.norms.shape[1] + 1))
            np.square(self.norms, out=self._squares[:, :-1])

    def terms(self, x: Array, inside: slice) -> Array:
        """Return the norms of the terms that products of `x` with `values` add up, by row of x and group.

        `x` is a part of op(A) with the columns `inside`. The norm of row i is sqrt(sum_p |x_ip norms_p|^2).
        Two shortcuts return a larger value. If all norms are within a factor of `ALIKE`, the largest replaces
        all, which saves squaring x. If squares would overflow or underflow, the result is sum_p |x_ip|
        norms_p. The result is nonfinite if x has an Inf or NaN.
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
        expected: the products, one column per vector.
        terms: norms of the terms that were added up, by row and group of columns (`Sums.terms`).
        bias: by how much partial sums exceed the size that they have if their terms have no bias in sign.
        nonfinite: flags of the rows of op(A) with an Inf or NaN.
    """

    def __init__(self, span: Range, groups: int, dtype: np.dtype[np.generic]) -> None:
        extent = span[1] - span[0]
        self.span = span
        self.expected = np.zeros((extent, groups * VECTORS), dtype)
        self.terms, self.bias = np.zeros((extent, groups)), np.zeros((extent, groups))
        self.nonfinite = np.zeros(extent, bool)

    def add_final_bias(self) -> None:
        """Raise the bias to that of the sum over all of k, if it is larger.

        The partial sums may be too short to show a bias.
        """
        np.maximum(self.bias, bias_of(self.expected, self.terms), out=self.bias)


def bias_of(sums: Array, terms: Array) -> Array:
    """Estimate by how much partial sums exceed the size that they have if their terms have no bias in sign.

    Partial sums of elements of C have a norm of about `terms` if their terms have random signs. If the terms
    have a bias in sign, the norm is larger, and so are the rounding errors. `sums` are products of the
    partial sums with random sign vectors, `VECTORS` per row and group. The mean of their absolute values is
    about 0.8 times the norm, with a standard deviation of 0.2 times the norm. Because of this uncertainty, an
    excess of up to 1.5 times `terms` is ignored.
    """
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
    else:  # rows are not contiguous, as in a transposed matrix
        squares = (x.real * x.real + x.imag * x.imag if x.dtype.kind == "c" else x * x).sum(axis=1)
    out = ~((squares > MIN_SQUARES) & (squares < MAX_SQUARES))
    found = np.sqrt(squares)
    if out.any():
        found[out] = norms(np.ascontiguousarray(x[out]))
    return np.asarray(found)
