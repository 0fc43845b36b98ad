#!/usr/bin/env python
"""How accurate products from exact int8 products are, beside native ones, over data made to be hard for them.

For each kind of data the largest error of an element, in units of u (|A||B|) of that element (and the least subnormal
number, for what underflows), of the emulated product and of the backend's native one. Two things are asked: no error
above k, which is what bounds a native product; and none above twice the native product's largest, except below 2.

Among the data are the scalings that grade an implementation by Demmel and others (*How to grade the accuracy of an
implementation of the BLAS*): of rows, of columns, and along k of A by D and B by 1 / D, which a native product does not
notice and fixed-point schemes do. The reference is summed in extended precision, in parts, for some of the rows.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Product = Callable[[Array, Array], Array]
UNIT = {"float64": 2.0**-53, "float32": 2.0**-24}
SPREADS = (4, 10, 20, 40, 60)
_PART = 64  # of k, in the reference


@dataclass(frozen=True)
class Size:
    """Of C = A B, and how many of its rows are looked at."""

    m: int
    n: int
    k: int
    rows: int


def panels(size: Size, dtype: str) -> Iterator[tuple[str, Array, Array]]:
    """Kinds of data by name: A (m x k) and B (k x n)."""
    for name, a, b in _wide_panels(size):
        with np.errstate(all="ignore"):  # what float32 has no number for becomes 0 or Inf, as it is to be
            yield name, a.astype(dtype), b.astype(dtype)


def _wide_panels(size: Size) -> Iterator[tuple[str, Array, Array]]:  # noqa: PLR0915  a list of cases
    rng = np.random.default_rng(1)
    left, right = (size.m, size.k), (size.k, size.n)

    def normal() -> tuple[Array, Array]:
        return rng.standard_normal(left), rng.standard_normal(right)

    def powers(shape: Any, spread: float) -> Array:
        return np.exp2(rng.uniform(-spread, 0, shape))

    yield "normal", *normal()
    yield "uniform, positive", rng.random(left), rng.random(right)
    yield "uniform", rng.uniform(-1, 1, left), rng.uniform(-1, 1, right)
    yield "exponential", rng.exponential(size=left), rng.exponential(size=right)
    yield "signs of thirds", rng.choice([-1, 1], left) / 3, rng.choice([-1, 1], right) / 3
    yield "thirds", np.full(left, 1 / 3), np.full(right, 1 / 3)
    yield "tenths", rng.integers(1, 10, left) / 10, rng.integers(1, 10, right) / 10
    yield "small integers", rng.integers(-9, 10, left), rng.integers(-9, 10, right)
    checkered = 1 - 2 * (np.add.outer(np.arange(size.m), np.arange(size.k)) % 2)
    yield "alternating signs", checkered * rng.random(left), rng.random(right)
    for sigma in (1, 3, 10):
        yield f"lognormal {sigma}", rng.lognormal(0, sigma, left), rng.lognormal(0, sigma, right)
    for spread in SPREADS:
        a, b = normal()
        yield f"elements 2^{spread}", a * powers(left, spread), b * powers(right, spread)
        yield f"rows and columns 2^{spread}", a * powers((size.m, 1), spread), b * powers(size.n, spread)
        along = powers(size.k, spread)
        yield f"along k, one 2^{spread}", a * along, b
        yield f"along k, both 2^{spread}", a * along, b * along[:, None]
        yield f"along k, D and 1/D 2^{spread}", a * along, b / along[:, None]
        step = np.where(np.arange(size.k) < size.k // 2, 1.0, 2.0**-spread)
        yield f"halves against 2^{spread}", a * step, b * step[::-1, None]
        some = np.where(rng.random(left) < 4 / size.k, 2.0**spread, 1)
        yield f"outliers 2^{spread}", a * some, b
        yield f"outliers along k 2^{spread}", a * np.where(np.arange(size.k) == 7, 2.0**spread, 1), b
    for power in (0.25, 0.5, 1, 2):
        along = (1 + np.arange(size.k)) ** -float(power)
        a, b = normal()
        yield f"power {power} against", a * along, b * along[::-1, None]
    a, b = (np.sort(np.abs(x), axis=axis) for x, axis in zip(normal(), (1, 0), strict=True))
    yield "sorted against", a * rng.choice([-1, 1], left), b[::-1] * rng.choice([-1, 1], right)
    a, b = normal()
    half = size.k // 2
    a[:, half : 2 * half], b[half : 2 * half] = (
        a[:, :half],
        -b[:half] * (1 + 2.0**-20 * rng.random((half, 1))),
    )
    yield "cancellation", a, b
    a, b = normal()
    yield (
        "cancellation to nothing",
        np.concatenate([a[:, :half]] * 2, 1),
        np.concatenate([b[:half], -b[:half]]),
    )
    i, j = np.ogrid[1 : size.m + 1, 1 : size.k + 1]
    yield "Hilbert", 1.0 / (i + j - 1), rng.standard_normal(right)
    yield (
        "cosines",
        np.cos(np.pi * i * (j - 0.5) / size.k),
        np.cos(np.ogrid[1 : size.k + 1][:, None] * np.ogrid[: size.n]),
    )
    a, b = normal()
    for share in (0.5, 0.02):
        yield f"sparse {share}", a * (rng.random(left) < share), b * (rng.random(right) < share)
    yield "one-hot", (np.arange(size.k) == rng.integers(0, size.k, (size.m, 1))) / 3, b
    zeros_a, zeros_b = a.copy(), b.copy()
    zeros_a[::3], zeros_b[:, ::4] = 0, 0
    yield "zero rows and columns", zeros_a, zeros_b
    yield "zeros", a * 0, b
    yield "subnormal", a * 2.0**-1060, b * 2.0**40
    yield "subnormal in float32", a * 2.0**-140, b * 2.0**20
    yield "some subnormal", np.where(rng.random(left) < 0.1, 2.0**-1070, a), b
    yield "underflow", a * 2.0**-540, b * 2.0**-520
    far = np.where(np.arange(size.m) % 2, 1e-300, 1e300)[:, None]
    yield "huge and tiny rows", a * far, b
    yield "huge and tiny rows in float32", a * np.cbrt(np.cbrt(far)), b / 1e3
    for name, value in (("Inf", np.inf), ("NaN", np.nan)):
        broken = a.copy()
        broken[1, 2] = value
        yield name, broken, b


def reference(a: Array, b: Array) -> tuple[Array, Array]:
    """A B and |A||B| in extended precision."""
    assert np.finfo(np.longdouble).nmant >= 63, "this needs a long double of 64 bits"
    wide = np.longdouble
    product, size = (np.zeros((a.shape[0], b.shape[1]), wide) for _ in range(2))
    with np.errstate(all="ignore"):
        for start in range(0, a.shape[1], _PART):
            x, y = a[:, start : start + _PART].astype(wide), b[start : start + _PART].astype(wide)
            product += x @ y
            size += np.abs(x) @ np.abs(y)
    return product, size


def error(c: Array, product: Array, size: Array) -> float:
    """The largest error in units of u (|A||B|); infinite where an Inf or a NaN is, or is not, where one should be."""
    limits = np.finfo(c.dtype)
    with np.errstate(all="ignore"):
        wanted = np.where(np.abs(product) > limits.max, np.inf, product)
        there, sure = np.isfinite(c), np.isfinite(size) & (size < float(limits.max) / 4)
        if (there != np.isfinite(wanted))[sure].any() or there[~np.isfinite(wanted)].any():
            return float("inf")
        off = np.abs(c.astype(product.dtype) - product)
        units = UNIT[c.dtype.name] * size + limits.smallest_subnormal
        return float((off / units)[sure & there].max(initial=0))


def judge(size: Size, dtype: str, product: Product, native: Product) -> Iterator[dict[str, Any]]:
    """For each kind of data: both errors, and whether the emulated one may be as large."""
    for name, a, b in panels(size, dtype):
        rows = np.unique(np.linspace(0, size.m - 1, size.rows).astype(int))
        if np.isfinite(a).all():
            wanted = reference(a[rows], b)
        else:
            rows = np.arange(min(size.m, size.rows))  # the broken one is among them
            wanted = reference(a[rows], b)
        with np.errstate(all="ignore"):
            found, beside = (error(multiply(a, b)[rows], *wanted) for multiply in (product, native))
        yield {
            "data": name,
            "error": found,
            "native": beside,
            "bounded": found <= size.k,
            "as_good": found <= max(2.0, 2 * beside),
        }
