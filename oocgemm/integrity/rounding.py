"""Bound the rounding errors of a product; compute sums and norms in double precision for the checks.

With unit roundoff u, a sum of n products in any order has an error of at most gamma_n |A| |B| in each
element, where gamma_n = n u / (1 - n u) (Higham, *Accuracy and Stability of Numerical Algorithms*, 2002,
section 3.5).
"""

from typing import Any

import numpy as np

from oocgemm.backends.base import Array, limits_of, numpy_dtype
from oocgemm.planning import GemmProblem
from oocgemm.planning.integers import EXACT_LIMIT

# A sum of squares between these limits is accurate: no square overflowed, and squares that underflowed are
# too small to matter. If a sum is not between them, the norm is computed from scaled elements instead.
MIN_SQUARES, MAX_SQUARES = 1e-270, 1e290
# The unit roundoff of float64.
DOUBLE = 2.0**-53
# If m n k of a matrix product is at most this, OpenBLAS computes it in the calling thread.
ONE_THREAD = 1 << 18
# The error bound of a sum of elements with random signs, divided by the 2-norm of their rounding errors.
# `Rounding` gives the probability that a correct sum exceeds the bound.
MAX_DEVIATION = 8
# Relative error that one operand gets when it is rounded, or truncated, to the precision of `--compute`.
OPERANDS = {"native": 0.0, "tf32": 2.0**-10, "bf16": 2.0**-7, "emulated": 0.0}


def gamma(n: float, u: float) -> float:
    """Return n u / (1 - n u), the relative error bound of n successive rounded operations.

    `u` is the unit roundoff. The bound is infinite if n u >= 1.

    >>> gamma(0, 1e-16), gamma(1e20, 1e-16)
    (0.0, inf)
    """
    return n * u / (1 - n * u) if n * u < 1 else float("inf")


def sum_error(n: float, u: float) -> float:
    """Return the relative error bound of a sum of n terms with unit roundoff u.

    It is the smaller of `gamma(n, u)` and 6 sqrt(n) u. The bound 6 sqrt(n) u holds with high probability if
    the rounding errors have mean 0 (Higham and Mary, *A new approach to probabilistic rounding error
    analysis*, 2019). It may fail for large n if the errors all have the same sign.
    """
    return min(gamma(n, u), 6 * float(np.sqrt(n)) * u)


class Rounding:
    """The error bound of a sum of elements of C with random signs.

    A check computes such a sum from C, and predicts it from A and B. If C is correct, these two values rarely
    differ by more than the bound.

    Let R be the vector of the rounding errors of the summed elements, |R| its 2-norm, and T `MAX_DEVIATION`.
    The signs do not depend on R. So the probability that the error of a sum exceeds T |R| is small:

    - below exp(-T / e) with random signs on rows and columns (moments of a Rademacher chaos),
    - below 2 exp(-T^2 / 2) with random signs on columns only (Hoeffding's inequality).

    The error bound is T times an upper bound of |R|, which is usually far above |R|. The actual probability
    is therefore much smaller.

    Args:
        problem: the product.
        chain: maximum number of successive rounded operations that compute one element of C.
        check_chain: number of successive rounded operations that compute and predict a sum, in double
            precision.

    Attributes:
        alpha, beta: the scalars of the product, rounded to the accumulator's dtype.
    """

    alpha: complex
    beta: complex

    def __init__(self, problem: GemmProblem, chain: int, check_chain: int) -> None:
        # If `problem.exact`, only the epilogue rounds. It computes in float64.
        accumulator = numpy_dtype("float64" if problem.exact else problem.acc_dtype)
        self._integer = numpy_dtype(problem.c_dtype).kind == "i"
        limits = np.finfo(accumulator)
        stored = limits if self._integer else limits_of(problem.c_dtype)
        # An operation on complex numbers counts as four rounded operations, because a complex product takes
        # four real products.
        factor = 4 if accumulator.kind == "c" else 1
        self._relative = (
            sum_error(factor * ((0 if problem.exact else chain) + 8), float(limits.eps) / 2)
            + 2 * OPERANDS[problem.compute]
        )
        self._check_error = sum_error(factor * (check_chain + 8), DOUBLE)
        self._stored = float(stored.eps) / 2 if problem.finishes else 0.0
        scalars = problem.applied_alpha, problem.beta
        self.alpha, self.beta = (accumulator.type(x).item() for x in scalars)
        self.multiplies = self.alpha != 0
        underflow = (problem.depth + 2) * (1 + abs(self.alpha) + abs(self.beta)) * float(limits.tiny)
        self._underflow = underflow + (float(stored.smallest_subnormal) if problem.finishes else 0.0)
        self.max_finite, self._max_stored = float(limits.max) / 16, float(stored.max) * 0.99

    def norm(self, product: Array, old: Array) -> Array:
        """Return upper bounds of norms of |alpha| |A| |B| + |beta| |C0|, where C0 is the old C.

        Each norm is over the elements of one sum. `product` has the norms of |A| |B| over the same elements,
        and `old` those of C0.
        """
        return np.asarray(abs(self.alpha) * product + (abs(self.beta) * old if self.beta else 0))

    def tolerance(self, norm: Array, stored: Array, elements: Array | float) -> Array:
        """Return the error bounds of sums of elements of C with random signs.

        If C has an integer dtype, and a sum is small enough to be exact in float64, its bound is 0.

        Args:
            norm: for each sum, the result of the method `norm`.
            stored: for each sum, the norm of the summed elements of C, as stored.
            elements: for each sum, the number of summed elements.
        """
        root = np.sqrt(elements)
        if self._integer:
            return np.where(root * norm < EXACT_LIMIT / 2, 0.0, self._check_error * root * norm)
        rounding = np.minimum(MAX_DEVIATION, root) * (self._relative * norm + self._stored * stored)
        return np.asarray(rounding + self._check_error * root * norm + elements * self._underflow)

    def may_overflow(self, product: Array, norm: Array) -> tuple[Array, Array]:
        """Return where the accumulator, and where the cast to C's dtype, could have overflowed.

        Args:
            product: for each set of elements of C, the norm of |A| |B| over these elements.
            norm: for each set, the result of the method `norm`.

        Returns:
            Two arrays with one flag per set. The first is set if the elements may be Inf or NaN, because the
            accumulator could have overflowed. The second is set if they may be Inf because of the cast.
        """
        return ~((product < self.max_finite) & (norm < self.max_finite)), ~(norm < self._max_stored)


def norms(x: Array) -> Array:
    """Return the 2-norms of a double-precision array along its last axis, without overflow or underflow.

    The norm of elements that include an Inf or NaN is nonfinite.
    """
    sizes = np.abs(x)
    largest = sizes.max(axis=-1, initial=0)
    scaled = sizes / np.where(largest > 0, largest, 1)[..., None]
    return np.asarray(largest * np.sqrt(np.vecdot(scaled, scaled)))


def block_squares(blocks: Array) -> Array:
    """Return the sum of the squares of the elements of each block.

    `blocks` has the shape (blocks, rows, columns). The function is fastest if the last axis is contiguous in
    memory.
    """
    flat = blocks.view(np.float64) if blocks.dtype.kind == "c" else blocks
    return np.asarray(np.vecdot(flat, flat).sum(axis=-1))


def block_norms(blocks: Array, squares: Array) -> Array:
    """Return the Frobenius norm of each block, for an array of shape (blocks, rows, columns).

    `squares` has the sum of squares of each block. If any of these sums has overflowed or underflowed, all
    norms are computed from scaled elements instead. The norm of a block with an Inf or NaN is nonfinite.
    """
    if squares.min() > MIN_SQUARES and squares.max() < MAX_SQUARES:
        return np.asarray(np.sqrt(squares))
    return norms(norms(blocks.astype(wide_dtype(blocks.dtype), copy=False)))


def signed(x: Array, blocks: Array) -> Array:
    """Multiply each row of each block by a sign, and return the sums over the rows of a block.

    `blocks` has the shape (blocks, rows, columns). `x` has the signs, of shape (blocks, rows). The result has
    the shape (blocks, columns).
    """
    if blocks.dtype.kind == "c":
        # Otherwise einsum would convert the signs to complex numbers, and multiply twice as often.
        real, imaginary = (np.einsum("gi,gij->gj", x, part) for part in (blocks.real, blocks.imag))
        return np.asarray(real + 1j * imaginary)
    return np.asarray(np.einsum("gi,gij->gj", x, blocks))


def add_product(c: Array, a: Array, b: Array) -> None:
    """Compute ``c += a @ b.T`` in parts so small that the BLAS uses only the calling thread.

    More threads would make it slower, because all cores are busy with the run.
    """
    deep = max(1, ONE_THREAD // (8 * max(1, len(b))))
    for left in range(0, a.shape[1], deep):
        part = b[:, left : left + deep]
        down = max(1, ONE_THREAD // part.size)
        for top in range(0, len(a), down):
            c[top : top + down] += a[top : top + down, left : left + deep] @ part.T


def wide_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return float64, or complex128 for a complex dtype."""
    return np.dtype(np.complex128 if dtype.kind == "c" else np.float64)
