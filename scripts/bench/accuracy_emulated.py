#!/usr/bin/env python
"""Measure the accuracy of products emulated with int8 products, beside native products, on difficult data.

For each kind of data the script reports the largest error of any element, for the emulated and for the native
product. The unit of an error is u (|A||B|) of that element, where u is the unit roundoff of the dtype. The
smallest subnormal number is added to the unit, because results may underflow. There are two requirements:

- No error exceeds k, which is the bound for a native product of depth k.
- No error of the emulated product exceeds twice the largest error of the native product, unless it is below
  2.

The data include the scalings that grade a BLAS implementation by Demmel and others (*How to grade the
accuracy of an implementation of the BLAS*): of rows, of columns, and along k of A by D and of B by 1 / D.
They do not change the relative errors of a native product, but they do change those of fixed-point schemes.
The reference is summed in extended precision, for some of the rows.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import click
import keeping
import numpy as np
from numpy.typing import NDArray

import oocgemm

Array = NDArray[Any]
Product = Callable[[Array, Array], tuple[Array, list[str]]]
Shape = tuple[int, int]
UNIT = {"float64": 2.0**-53, "float32": 2.0**-24}
SPREADS = (4, 10, 20, 40, 60)
# Data in which each large element of A meets a small one of B. Errors are below the bound of a native
# product, but they may exceed twice its error: `suffices`, which compares with that, assumes independent
# elements.
AGAINST = "sorted against"
_PART = 64  # columns of A, and rows of B, that the reference multiplies at a time


@dataclass(frozen=True)
class Size:
    """Extents of C = A B, and the number of rows of C that are checked."""

    m: int
    n: int
    k: int
    rows: int


def panels(size: Size, dtype: str) -> Iterator[tuple[str, Array, Array]]:
    """Yield each kind of data: its name, A (m x k) and B (k x n)."""
    for kind in (_values, _spreads, _shapes, _zeros, _far):
        with np.errstate(all="ignore"):  # values outside the range of float32 become 0 or Inf on purpose
            for name, a, b in kind(np.random.default_rng(1), (size.m, size.k), (size.k, size.n)):
                yield name, a.astype(dtype), b.astype(dtype)


def _normal(rng: np.random.Generator, left: Shape, right: Shape) -> tuple[Array, Array]:
    a: Array = rng.standard_normal(left)
    b: Array = rng.standard_normal(right)
    return a, b


def _values(rng: np.random.Generator, left: Shape, right: Shape) -> Iterator[tuple[str, Array, Array]]:
    yield "normal", *_normal(rng, left, right)
    yield "uniform, positive", rng.random(left), rng.random(right)
    yield "uniform", rng.uniform(-1, 1, left), rng.uniform(-1, 1, right)
    yield "exponential", rng.exponential(size=left), rng.exponential(size=right)
    yield "signs of thirds", rng.choice([-1, 1], left) / 3, rng.choice([-1, 1], right) / 3
    yield "thirds", np.full(left, 1 / 3), np.full(right, 1 / 3)
    yield "tenths", rng.integers(1, 10, left) / 10, rng.integers(1, 10, right) / 10
    yield "small integers", rng.integers(-9, 10, left), rng.integers(-9, 10, right)
    checkered = 1 - 2 * (np.add.outer(np.arange(left[0]), np.arange(left[1])) % 2)
    yield "alternating signs", checkered * rng.random(left), rng.random(right)
    for sigma in (1, 3, 10):
        yield f"lognormal {sigma}", rng.lognormal(0, sigma, left), rng.lognormal(0, sigma, right)


def _spreads(rng: np.random.Generator, left: Shape, right: Shape) -> Iterator[tuple[str, Array, Array]]:
    def powers(shape: Any, spread: float) -> Array:
        return np.asarray(np.exp2(rng.uniform(-spread, 0, shape)))

    (m, k), n = left, right[1]
    a, b = _normal(rng, left, right)
    for spread in SPREADS:
        yield f"elements 2^{spread}", a * powers(left, spread), b * powers(right, spread)
        yield f"rows and columns 2^{spread}", a * powers((m, 1), spread), b * powers(n, spread)
        along = powers(k, spread)
        yield f"along k, one 2^{spread}", a * along, b
        yield f"along k, both 2^{spread}", a * along, b * along[:, None]
        yield f"along k, D and 1/D 2^{spread}", a * along, b / along[:, None]
        all_ways = a * along * powers((m, 1), spread), b / along[:, None] * powers(n, spread)
        yield f"rows, columns, D and 1/D 2^{spread}", *all_ways
        step = np.where(np.arange(k) < k // 2, 1.0, 2.0**-spread)
        yield f"halves against 2^{spread}", a * step, b * step[::-1, None]
        yield f"outliers 2^{spread}", a * np.where(rng.random(left) < 4 / k, 2.0**spread, 1), b
        yield f"outliers along k 2^{spread}", a * np.where(np.arange(k) == 7, 2.0**spread, 1), b


def _shapes(rng: np.random.Generator, left: Shape, right: Shape) -> Iterator[tuple[str, Array, Array]]:
    (m, k), n = left, right[1]
    a, b = _normal(rng, left, right)
    for power in (0.25, 0.5, 1, 2):
        along = (1 + np.arange(k)) ** -float(power)
        yield f"power {power} against", a * along, b * along[::-1, None]
    by_size = np.sort(np.abs(a), axis=1), np.sort(np.abs(b), axis=0)[::-1]
    yield AGAINST, *(x * rng.choice([-1, 1], x.shape) for x in by_size)
    half = k // 2
    folded = np.concatenate([a[:, :half], a[:, :half]], axis=1)
    off = 1 + 2.0**-20 * rng.random((half, 1))
    yield "cancellation", folded, np.concatenate([b[:half], -b[:half] * off])
    yield "cancellation to nothing", folded, np.concatenate([b[:half], -b[:half]])
    i, j = np.ogrid[1 : m + 1, 1 : k + 1]
    yield "Hilbert", 1.0 / (i + j - 1), b
    yield "cosines", np.cos(np.pi * i * (j - 0.5) / k), np.cos(np.outer(np.arange(1, k + 1), np.arange(n)))


def _zeros(rng: np.random.Generator, left: Shape, right: Shape) -> Iterator[tuple[str, Array, Array]]:
    a, b = _normal(rng, left, right)
    for share in (0.5, 0.02):
        yield f"sparse {share}", a * (rng.random(left) < share), b * (rng.random(right) < share)
    yield "one-hot", (np.arange(left[1]) == rng.integers(0, left[1], (left[0], 1))) / 3, b
    yield "zeros", a * 0, b
    a[::3], b[:, ::4] = 0, 0
    yield "zero rows and columns", a, b


def _far(rng: np.random.Generator, left: Shape, right: Shape) -> Iterator[tuple[str, Array, Array]]:
    """Yield data near the limits of each dtype's range, and data beyond them, which overflow or underflow."""
    a, b = _normal(rng, left, right)
    for dtype, low, far in (("float64", 1060, 996), ("float32", 140, 96)):
        yield f"subnormal in {dtype}", a * 2.0**-low, b * 2.0 ** (low // 2)
        yield f"some subnormal in {dtype}", np.where(rng.random(left) < 0.1, a * 2.0**-low, a), b
        yield f"underflow in {dtype}", a * 2.0 ** -(low // 2), b * 2.0 ** -(low // 2)
        rows = np.where(np.arange(left[0]) % 2, 2.0**-far, 2.0**far)[:, None]
        yield f"huge and tiny rows in {dtype}", a * rows, b
        yield f"overflow in {dtype}", a * rows, b * 2.0 ** (low // 4)
    for value in (np.inf, np.nan):
        nonfinite = a.copy()
        nonfinite[0, 2] = value
        yield str(value), nonfinite, b


def reference(a: Array, b: Array) -> tuple[Array, Array]:
    """Return A B and |A||B| in extended precision."""
    assert np.finfo(np.longdouble).nmant >= 63, "this needs a long double of 64 bits"
    wide = np.longdouble
    rows, cols = ~np.isfinite(a).all(axis=1), ~np.isfinite(b).all(axis=0)
    # Arithmetic on NaN is up to a hundred times slower on some processors. Therefore the product is computed
    # without NaN, which is put in afterwards.
    a, b = (np.where(np.isfinite(x), x, 0) for x in (a, b))
    product, size = (np.zeros((a.shape[0], b.shape[1]), wide) for _ in range(2))
    with np.errstate(all="ignore"):
        for start in range(0, a.shape[1], _PART):
            x, y = a[:, start : start + _PART].astype(wide), b[start : start + _PART].astype(wide)
            product += x @ y
            size += np.abs(x) @ np.abs(y)
    for found in (product, size):
        found[rows], found[:, cols] = np.nan, np.nan
    return product, size


def error(c: Array, product: Array, size: Array) -> float:
    """Return the largest error, in units of u (|A||B|), where u is the unit roundoff.

    It is infinite if an Inf or NaN of C is missing or unexpected.
    """
    limits = np.finfo(c.dtype)
    with np.errstate(all="ignore"):
        wanted = np.where(np.abs(product) > limits.max, np.inf, product)
        there, sure = np.isfinite(c), np.isfinite(size) & (size < float(limits.max) / 4)
        if (there != np.isfinite(wanted))[sure].any() or there[~np.isfinite(wanted)].any():
            return float("inf")
        off = np.abs(c.astype(product.dtype) - product)
        units = UNIT[c.dtype.name] * size + limits.smallest_subnormal
        return float((off / units)[sure & there].max(initial=0))


def streamed(backend: str, compute: str, **options: Any) -> Product:
    """Return a function that computes A B with the library.

    It returns C and the names of the kernels that ran.
    """

    def multiply(a: Array, b: Array) -> tuple[Array, list[str]]:
        result = oocgemm.gemm(a, b, backend=backend, compute=compute, **options)
        return np.asarray(result.out), result.timeline.header["backend"]["multiplied by"]

    return multiply


def judge(size: Size, dtype: str, emulated: Product, native: Product) -> Iterator[dict[str, Any]]:
    """Yield for each kind of data the errors of both products, and which requirements are met."""
    rows = np.unique(np.linspace(0, size.m - 1, size.rows).astype(int))
    for name, a, b in panels(size, dtype):
        wanted = reference(a[rows], b)
        (c, by), (beside, _) = emulated(a, b), native(a, b)
        off, usual = (error(x[rows], *wanted) for x in (c, beside))
        yield {
            "data": name,
            "error": off,
            "native": usual,
            "multiplied by": by,
            "bounded": off <= size.k,
            "as_good": off <= max(2.0, 2 * usual),
        }


@click.command()
@click.option("--backend", default="host", show_default=True, type=click.Choice(["host", "cuda"]))
@click.option("--size", "sizes", default=["256x256x4096"], show_default=True, multiple=True, help="MxNxK.")
@click.option("--dtype", "dtypes", default=list(UNIT), multiple=True, type=click.Choice(list(UNIT)))
@click.option("--rows", default=32, show_default=True, help="Rows of C that are checked.")
@keeping.output
def main(
    backend: str, sizes: tuple[str, ...], dtypes: tuple[str, ...], rows: int, output: Path | None
) -> None:
    """Measure the errors of emulated and native products on every kind of data."""
    unbounded = []
    for text, dtype in product(sizes, dtypes):
        m, n, k = map(int, text.split("x"))
        found = []
        for one in judge(
            Size(m, n, k, rows), dtype, streamed(backend, "emulated"), streamed(backend, "native")
        ):
            fails = [what for what in ("bounded", "as_good") if not one[what]]
            note = f", not {' nor '.join(fails)}" if fails else ""
            click.echo(f"{text} {dtype} {one['error']:9.3f} {one['native']:9.3f} {one['data']}{note}")
            found.append(one)
            unbounded += [one["data"]] if "bounded" in fails else []
        keeping.keep(output, f"{backend} {text} {dtype}", {"numpy": np.__version__, "kinds": found})
    if unbounded:
        raise click.ClickException(f"errors above the bound of a native product: {', '.join(unbounded)}")


if __name__ == "__main__":
    main()
