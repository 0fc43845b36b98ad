"""What Freivalds' check accumulates: products of op(B) and op(A) with random signs, and norms that bound their rounding."""

import numpy as np

from oocgemm.backends.base import Array
from oocgemm.backends.random_words import VECTORS
from oocgemm.integrity.rounding import LARGEST, ONE_THREAD, SMALLEST, norms
from oocgemm.planning.tiling import Span

# Norms are alike if the largest is at most so many times the smallest.
ALIKE = 2
# Norms between these have squares that neither overflow nor underflow.
MIN_NORM, MAX_NORM = 1e-100, 1e100
# Norms of the terms of a row that are smaller, relative to the norms of op(B), may have lost squares to underflow.
MIN_SHARE = 1e-120


class Sums:
    """op(B) y for a span of k: `values` for each group's vectors, and the 2-norms of op(B)'s rows in each group."""

    def __init__(self, span: Span, groups: int, dtype: np.dtype[np.generic]) -> None:
        extent = span[1] - span[0]
        self.span = span
        self.values = np.zeros((extent, groups * VECTORS), dtype)
        self.norms = np.zeros((extent, groups))
        self._squares: Array | None = None
        self._largest = 0.0

    def square(self) -> None:
        """Square the norms, if their squares are in range. Beside them goes a column of ones."""
        self._largest = float(self.norms.max(initial=0))
        inside = (self.norms == 0) | ((self.norms > MIN_NORM) & (self.norms < MAX_NORM))
        if inside.all():
            self._squares = np.ones((len(self.norms), self.norms.shape[1] + 1))
            np.square(self.norms, out=self._squares[:, :-1])

    def terms(self, x: Array, inside: slice) -> Array:
        """Norms of the terms in rows of A's strip `x`, sqrt(sum_p |x_ip|^2 norms_p^2), in each group; not finite where x is
        not. They are at most twice as large where the norms are alike, which saves the squares of x. Where squares are out
        of range they are sums of |x_ip| norms_p, which are no less."""
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
    """A span of C's rows: op(A) op(B) y, the norms of its terms, what partial sums exceed them by, and the rows where op(A)
    holds an Inf or a NaN."""

    def __init__(self, span: Span, groups: int, dtype: np.dtype[np.generic]) -> None:
        extent = span[1] - span[0]
        self.span = span
        self.expected = np.zeros((extent, groups * VECTORS), dtype)
        self.terms, self.lean = np.zeros((extent, groups)), np.zeros((extent, groups))
        self.spoiled = np.zeros(extent, bool)

    def lean_at_last(self) -> None:
        """Count the whole sum as a partial sum too: blocks of k may be too short to show that it leans."""
        np.maximum(self.lean, lean_of(self.expected, self.terms), out=self.lean)


def lean_of(sums: Array, terms: Array) -> Array:
    """What the norms of rows of partial sums exceed those of random walks by, from their products with random signs.

    The mean size of a product is 0.8 of the norm, spread by 0.2 of it. An excess of 1.5 of a random walk is not counted.
    """
    sizes = np.abs(sums).reshape(*terms.shape, VECTORS).mean(axis=2)
    return np.asarray(np.maximum(1.25 * sizes - 2.5 * terms, 0))


def product(x: Array, y: Array) -> Array:
    """``x @ y``, in parts for which the BLAS takes no second thread."""
    out = np.empty((len(x), y.shape[1]), np.result_type(x, y))
    height = max(1, ONE_THREAD // max(1, y.size))
    for top in range(0, len(x), height):
        np.matmul(x[top : top + height], y, out=out[top : top + height])
    return out


def row_norms(x: Array) -> Array:
    """2-norms of the rows of a double-precision strip."""
    if x.strides[1] == x.itemsize or x.shape[1] == 1:
        squares = np.vecdot(x, x).real
    else:  # as a transposed matrix is stored
        squares = (x.real * x.real + x.imag * x.imag if x.dtype.kind == "c" else x * x).sum(axis=1)
    out = ~((squares > SMALLEST) & (squares < LARGEST))
    found = np.sqrt(squares)
    if out.any():
        found[out] = norms(np.ascontiguousarray(x[out]))
    return np.asarray(found)
