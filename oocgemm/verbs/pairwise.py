"""Correlations and covariances of what both of two rows know: the terms of `corr` and `cov` with `pairwise`.

For a row x, let m be 1 where x is known, and 0 where it is missing. x is 0 there. With n and y for a second
row, these sums are needed over all columns: m n, x n, m y, x y, x^2 n and m y^2. So that nothing cancels, the
mean of what is known of a row is subtracted from it first, and sums are in float64. Genotypes are small
integers, whose sums are exact without that.
"""

from dataclasses import replace
from math import isnan, nan
from typing import Any

import numpy as np

from oocgemm import stores
from oocgemm.errors import InputError
from oocgemm.jobs.request import Request
from oocgemm.jobs.steps import Cast, Combined
from oocgemm.planning.elements import ElementStep
from oocgemm.planning.terms import Map, Terms
from oocgemm.stores import Genotypes
from oocgemm.stores.capabilities import MISSING
from oocgemm.stores.unpacked import with_nan


def known(code: float) -> Map:
    """Return the map to 1 where an element is known, and to 0 where it is `code`."""
    return (ElementStep("known", constants=(code,)),)


def or_zero(code: float) -> Map:
    """Return the map to the element, or to 0 where it is `code`."""
    return (ElementStep("or_zero", constants=(code,)),)


# The largest magnitude of a product of genotypes, or of their squares and ones.
_LARGEST = 4


def moments(code: float, *, squares: bool) -> Terms:
    """Return the terms of covariances; with `squares` those of correlations."""
    maps: tuple[Map, ...] = known(code), or_zero(code), (*or_zero(code), ElementStep("square"))
    pairs: tuple[tuple[int, int], ...] = (0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (0, 2)
    maps, pairs = (maps, pairs) if squares else (maps[:2], pairs[:4])
    return Terms(maps, maps, pairs, 0 if isnan(code) else _LARGEST)


def pairwise(request: Request, kind: str, ddof: float = 0.0) -> Request:
    """Return the request of covariances or correlations (`kind`) of what both of two rows know.

    Raises `InputError` for a transform that replaces missing elements, and for `impute`.
    """
    missing = request.a.missing
    if missing is not None and missing.impute is not None:
        raise InputError(
            f"impute = {missing.impute!r} replaces missing elements, and pairwise leaves them out: drop one "
            "of them"
        )
    if any(
        each.transform is not None and each.transform.missing is not None for each in (request.a, request.b)
    ):
        raise InputError(
            "transform replaces missing elements, and pairwise leaves them out: drop missing from the "
            "transform, or drop pairwise"
        )
    sides = {"a": request.a, "b": request.b}
    opened = {
        side: stores.open_matrix("X", each.given, decode=request.decode) for side, each in sides.items()
    }
    counts = {side: request.decode and isinstance(x, Genotypes) for side, x in opened.items()}
    squares, how = kind == "correlation", ""
    code = None if missing is None else missing.code
    if all(counts.values()) and request.a.transform is None and code in (None, MISSING):
        terms, tolerance = moments(MISSING, squares=squares), 0.0
    else:
        # Rounding errors of the sums of k numbers, and of their squares.
        k = max(max(x.shape) for x in opened.values())
        terms, tolerance, how = moments(nan, squares=squares), 4 * k * float(np.finfo(float).eps), "shift"
    combined = Combined(f"pairwise_{kind}", tolerance if squares else ddof)
    wide = any(not counts[side] and with_nan(x, None).dtype == np.float64 for side, x in opened.items())
    cast = (Cast("float64" if wide else "float32"),) if request.into.stores_c else ()
    changed: dict[str, Any] = {
        side: replace(
            each,
            standardize=how,
            absent=None if not how else code if code is not None else MISSING if counts[side] else nan,
        )
        for side, each in sides.items()
    }
    return replace(request, terms=terms, epilogue=(combined, *cast), **changed)
