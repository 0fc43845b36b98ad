"""Bound the rounding error of a product, and sum in double precision for the checks.

With unit roundoff u, a sum of n products in any order has an error of at most gamma_n |A| |B| in each
element, where gamma_n = n u / (1 - n u) (Higham, *Accuracy and Stability of Numerical Algorithms*, 2002,
section 3.5).
"""

from typing import Any

import numpy as np

from oocgemm.backends.base import Array, limits_of, numpy_dtype
from oocgemm.planning import GemmProblem
from oocgemm.planning.integers import EXACT_LIMIT

# Sums of squares in this range are accurate: no term that matters underflowed or overflowed.
SMALLEST, LARGEST = 1e-270, 1e290
DOUBLE = 2.0**-53
ONE_THREAD = 1 << 18  # multiplications up to which OpenBLAS uses one thread
T = 8  # sums of signed errors stay below T times their norm: see `Rounding`
# Relative error of one operand that is rounded, or truncated, to a reduced precision.
OPERANDS = {"native": 0.0, "tf32": 2.0**-10, "bf16": 2.0**-7, "emulated": 0.0}


def gamma(n: float, u: float) -> float:
    """Return the relative error bound of n rounded operations in a row; infinite where n u >= 1.

    >>> gamma(0, 1e-16), gamma(1e20, 1e-16)
    (0.0, inf)
    """
    return n * u / (1 - n * u) if n * u < 1 else float("inf")


def sum_error(n: float, u: float) -> float:
    """Return the relative error bound of a sum of n terms: gamma_n, or 6 sqrt(n) u if that is less.

    The latter holds with high probability for rounding errors of mean 0 (Higham and Mary, *A new approach to
    probabilistic rounding error analysis*, 2019). For the lengths that are summed in one go here it holds
    even if every error has the same sign.
    """
    return min(gamma(n, u), 6 * float(np.sqrt(n)) * u)


class Rounding:
    """The error bound of sums of a product's elements, taken with random signs.

    An element of C results from `chain` additions. The check adds `check_chain` more, in double precision.

    The errors R of some elements have a 2-norm of at most the bound of one element, times the norm of |A| |B|
    there. The signs are random. So for any R, the signed sum of R exceeds T |R| with a probability below
    exp(-T / e) with signs on rows and columns (moments of a Rademacher chaos), and below 2 exp(-T^2 / 2) with
    signs on columns only (Hoeffding). In practice it is far rarer, since rounding errors are a small part of
    their bounds.

    `alpha` and `beta` are the scalars as the accumulator's dtype rounds them.
    """

    alpha: complex
    beta: complex

    def __init__(self, problem: GemmProblem, chain: int, check_chain: int) -> None:
        # Exact sums are scaled and added to C in float64, whatever the accumulator's dtype.
        accumulator = numpy_dtype("float64" if problem.exact else problem.acc_dtype)
        self._integer = numpy_dtype(problem.c_dtype).kind == "i"
        limits = np.finfo(accumulator)
        stored = limits if self._integer else limits_of(problem.c_dtype)
        # A product of complex numbers is four real products, added up.
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
        """Return norms of |alpha| |A| |B| + |beta| |C0|, given those of |A| |B| and of the old C."""
        return np.asarray(abs(self.alpha) * product + (abs(self.beta) * old if self.beta else 0))

    def tolerance(self, norm: Array, stored: Array, elements: Array | float) -> Array:
        """Return the error bound of sums over `elements` elements each.

        `norm` is the norm of the summed terms, and `stored` that of C. For an integer C the bound is 0 as
        long as none of the sums could have been rounded.
        """
        root = np.sqrt(elements)
        if self._integer:
            return np.where(root * norm < EXACT_LIMIT / 2, 0.0, self._check_error * root * norm)
        rounding = np.minimum(T, root) * (self._relative * norm + self._stored * stored)
        return np.asarray(rounding + self._check_error * root * norm + elements * self._underflow)

    def may_overflow(self, product: Array, norm: Array) -> tuple[Array, Array]:
        """Return where a sum could have overflowed, and where an element could have overflowed C's dtype.

        An Inf or NaN proves nothing in the former, and an Inf proves nothing in the latter.
        """
        return ~((product < self.max_finite) & (norm < self.max_finite)), ~(norm < self._max_stored)


def norms(x: Array) -> Array:
    """Return the 2-norms of a double-precision array along its last axis, without overflow or underflow.

    They are nonfinite where the array is.
    """
    sizes = np.abs(x)
    largest = sizes.max(axis=-1, initial=0)
    scaled = sizes / np.where(largest > 0, largest, 1)[..., None]
    return np.asarray(largest * np.sqrt(np.vecdot(scaled, scaled)))


def block_squares(blocks: Array) -> Array:
    """Return the sum of squares of each of some blocks, of shape (blocks, rows, columns).

    Blocks whose rows are contiguous in memory are fastest.
    """
    flat = blocks.view(np.float64) if blocks.dtype.kind == "c" else blocks
    return np.asarray(np.vecdot(flat, flat).sum(axis=-1))


def block_norms(blocks: Array, squares: Array) -> Array:
    """Return the Frobenius norms of blocks, from the sums of squares, or from the elements if those overflow.

    They are nonfinite where a block is.
    """
    if squares.min() > SMALLEST and squares.max() < LARGEST:
        return np.asarray(np.sqrt(squares))
    return norms(norms(blocks.astype(wide_dtype(blocks.dtype), copy=False)))


def signed(x: Array, blocks: Array) -> Array:
    """Return, per double-precision block (number, rows, columns), the sum of its rows times the signs x."""
    if blocks.dtype.kind == "c":  # in two parts: NumPy would convert the signs to complex
        real, imaginary = (np.einsum("gi,gij->gj", x, part) for part in (blocks.real, blocks.imag))
        return np.asarray(real + 1j * imaginary)
    return np.asarray(np.einsum("gi,gij->gj", x, blocks))


def add_product(c: Array, a: Array, b: Array) -> None:
    """Compute ``c += a @ b.T`` in parts so small that the BLAS uses one thread.

    Where all cores are busy, its threads would wait for one another many times longer than the product takes.
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
