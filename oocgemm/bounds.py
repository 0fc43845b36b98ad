"""How far a product may be from the exact one, and sums in double precision that it is held against.

With u the unit roundoff, a sum of n products in any order errs in each element by at most gamma_n |A| |B|,
gamma_n = n u / (1 - n u) (Higham, *Accuracy and Stability of Numerical Algorithms*, 2002, section 3.5).
"""

from typing import Any

import numpy as np

from oocgemm.backends.base import Array

# Squares between these lose nothing to underflow and overflow that matters.
SMALLEST, LARGEST = 1e-270, 1e290
DOUBLE = 2.0**-53


def roundoff(dtype: str) -> float:
    """Unit roundoff of a dtype, or of the parts of a complex one."""
    return float(np.finfo(dtype).eps) / 2


def gamma(n: float, u: float) -> float:
    """Relative error of n rounded operations in a row; infinite where it bounds nothing.

    >>> gamma(0, 1e-16), gamma(1e20, 1e-16)
    (0.0, inf)
    """
    return n * u / (1 - n * u) if n * u < 1 else float("inf")


def sum_error(n: float, u: float) -> float:
    """Relative error of a sum of n terms: gamma_n, or 6 sqrt(n) u where that is less.

    The latter holds with high probability for rounding errors of mean 0 (Higham and Mary, *A new approach to
    probabilistic rounding error analysis*, 2019), and for the lengths summed in one go here even where each goes the
    same way.
    """
    return min(gamma(n, u), 6 * float(np.sqrt(n)) * u)


def growth(dtype: str) -> float:
    """How much more the products of a dtype's elements err than real ones: complex ones are four, added up."""
    return 4.0 if np.dtype(dtype).kind == "c" else 1.0


def norms(x: Array) -> Array:
    """2-norms of a double-precision array along its last axis, safe from overflow and underflow; NaN or Inf where it
    holds either."""
    most = np.abs(x).max(axis=-1, initial=0)
    scaled = x / np.where(most > 0, most, 1)[..., None]
    return np.asarray(most * np.sqrt(np.vecdot(scaled, scaled).real))


def block_norms(blocks: Array) -> Array:
    """Frobenius norms of double-precision blocks (number, rows, columns), likewise; columns should lie side by side."""
    flat = blocks.view(np.float64) if blocks.dtype.kind == "c" else blocks
    squares = np.vecdot(flat, flat).sum(axis=-1)
    if squares.min() > SMALLEST and squares.max() < LARGEST:
        return np.asarray(np.sqrt(squares))
    return norms(norms(blocks))


def signed(x: Array, blocks: Array) -> Array:
    """For each of some double-precision blocks (number, rows, columns) the sum of its rows times the signs x."""
    if blocks.dtype.kind == "c":  # in parts: NumPy would make the signs complex first
        real, imaginary = (np.einsum("gi,gij->gj", x, part) for part in (blocks.real, blocks.imag))
        return np.asarray(real + 1j * imaginary)
    return np.asarray(np.einsum("gi,gij->gj", x, blocks))


def signs(seed: int, axis: int, extent: int) -> Array:
    """Random signs, 1.0 or -1.0, for the rows (axis 0) or columns (axis 1) of a product."""
    drawn: Array = np.random.default_rng((seed, axis)).integers(0, 2, extent, np.int8)
    return drawn * 2.0 - 1.0


def wide_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Double precision, complex for complex."""
    return np.dtype(np.complex128 if dtype.kind == "c" else np.float64)
