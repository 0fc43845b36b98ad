"""Accumulate the sums of Freivalds' check, and norms that bound their rounding errors.

The sums are products of op(B), and then of op(A), with random signs.
"""

import numpy as np

from oocgemm.backends.base import Array
from oocgemm.backends.random_words import VECTORS
from oocgemm.integrity.rounding import LARGEST, ONE_THREAD, SMALLEST, norms
from oocgemm.planning.tiling import Range

# Norms are alike if the largest is at most ALIKE times the smallest.
ALIKE = 2
# Norms in this range have squares that neither overflow nor underflow.
MIN_NORM, MAX_NORM = 1e-100, 1e100
# Below this share of the norms of op(B), the norm of a row's terms may have lost squares to underflow.
MIN_SHARE = 1e-120


class Sums:
    """The products op(B) y over a range of k.

    `values` has one column per group and vector, `norms` the 2-norms of op(B)'s rows in each group.
    """

    def __init__(self, span: Range, groups: int, dtype: np.dtype[np.generic]) -> None:
        extent = span[1] - span[0]
        self.span = span
        self.values = np.zeros((extent, groups * VECTORS), dtype)
        self.norms = np.zeros((extent, groups))
        self._squares: Array | None = None
        self._largest = 0.0

    def square(self) -> None:
        """Square the norms if no square overflows or underflows, and append a column of ones."""
        self._largest = float(self.norms.max(initial=0))
        inside = (self.norms == 0) | ((self.norms > MIN_NORM) & (self.norms < MAX_NORM))
        if inside.all():
            self._squares = np.ones((len(self.norms), self.norms.shape[1] + 1))
            np.square(self.norms, out=self._squares[:, :-1])

    def terms(self, x: Array, inside: slice) -> Array:
        """Return sqrt(sum_p |x_ip norms_p|^2), the norms of the terms in rows of A's strip `x`, per group.

        They are nonfinite where x is. If the norms are alike, the result is up to twice too large, which
        saves squaring x. Where squares are out of range, the result is the larger sum of |x_ip| norms_p.
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
    """The products op(A) op(B) y over a range of C's rows.

    `terms` has the norms of the terms, `bias` the excess of partial sums over a random walk, and `nonfinite`
    flags the rows of op(A) with an Inf or NaN.
    """

    def __init__(self, span: Range, groups: int, dtype: np.dtype[np.generic]) -> None:
        extent = span[1] - span[0]
        self.span = span
        self.expected = np.zeros((extent, groups * VECTORS), dtype)
        self.terms, self.bias = np.zeros((extent, groups)), np.zeros((extent, groups))
        self.nonfinite = np.zeros(extent, bool)

    def add_final_bias(self) -> None:
        """Count the whole sum as a partial sum too: blocks of k may be too short to show a bias."""
        np.maximum(self.bias, bias_of(self.expected, self.terms), out=self.bias)


def bias_of(sums: Array, terms: Array) -> Array:
    """Estimate the excess of norms of partial sums over a random walk, from products with random signs.

    The mean size of a product is 0.8 times the norm, with a standard deviation of 0.2 times the norm. An
    excess of up to 1.5 times the random walk is ignored.
    """
    sizes = np.abs(sums).reshape(*terms.shape, VECTORS).mean(axis=2)
    return np.asarray(np.maximum(1.25 * sizes - 2.5 * terms, 0))


def product(x: Array, y: Array) -> Array:
    """Return ``x @ y``, computed in parts so small that the BLAS uses one thread."""
    out = np.empty((len(x), y.shape[1]), np.result_type(x, y))
    height = max(1, ONE_THREAD // max(1, y.size))
    for top in range(0, len(x), height):
        np.matmul(x[top : top + height], y, out=out[top : top + height])
    return out


def row_norms(x: Array) -> Array:
    """Return the 2-norms of the rows of a double-precision strip."""
    if x.strides[1] == x.itemsize or x.shape[1] == 1:
        squares = np.vecdot(x, x).real
    else:  # a transposed matrix
        squares = (x.real * x.real + x.imag * x.imag if x.dtype.kind == "c" else x * x).sum(axis=1)
    out = ~((squares > SMALLEST) & (squares < LARGEST))
    found = np.sqrt(squares)
    if out.any():
        found[out] = norms(np.ascontiguousarray(x[out]))
    return np.asarray(found)
