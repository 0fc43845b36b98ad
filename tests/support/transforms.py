"""Transforms of small integers whose results are exact, and what NumPy gives for them."""

from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from oocgemm import Transform
from oocgemm.backends.base import known_dtypes, numpy_dtype

Array = NDArray[Any]
CODE = -3
# A dtype in storage, and the casts to try.
KINDS = [
    (stored, cast)
    for stored, casts in {
        "int8": (None, "float16", "bfloat16", "float32", "float64"),
        "int32": (None, "float32", "float16"),
        "int64": (None, "float64"),
        "float16": (None, "float32"),
        "float32": (None, "float16", "float64"),
        "float64": (None, "float32"),
        "bfloat16": (None, "float32"),
    }.items()
    for cast in casts
    if {stored, cast} <= {None, "int32", "int64", *known_dtypes()}
]


@st.composite
def cases(draw: st.DrawFn, m: int, k: int, *, columns: bool) -> tuple[Array, Transform, Array]:
    """Draw a matrix with k indices along k, a transform with exact results, and the transformed matrix.

    The matrix has `m` rows and k columns, or with `columns` k rows and `m` columns. All numbers are small
    integers, and halves after the scaling.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    stored, cast = draw(st.sampled_from(KINDS))
    values = rng.integers(-2, 3, (m, k)).astype(np.float64)
    lost = rng.random((m, k)) < draw(st.sampled_from([0, 0.2]))
    code: float | None = draw(st.sampled_from([None, CODE]))
    if code is not None and stored.startswith(("f", "b")):
        code = draw(st.sampled_from([CODE, float("nan")]))
    if code is None:
        lost[...] = False
    raw = np.where(lost, 0 if code is None else code, values).astype(numpy_dtype(stored))
    center = draw(st.sampled_from([None, rng.integers(-2, 3, k).astype(np.float64)]))
    scale = draw(st.sampled_from([None, rng.choice([0.5, -1, 2], k)]))
    expected = np.where(lost, 0, values)
    expected = (expected - (0 if center is None else center)) / (1 if scale is None else scale)
    made = Transform(missing=code, impute=0, center=center, scale=scale, cast=cast)
    return (raw.T, made, expected.T) if columns else (raw, made, expected)


def genotypes(rng: np.random.Generator, people: int, places: int, missing: float = 0.05) -> Array:
    """Draw int8 genotypes 0, 1 and 2, and -1 where they are missing. No column has equal elements only."""
    frequencies = rng.uniform(0.2, 0.8, places)
    found = rng.binomial(2, frequencies, (people, places)).astype(np.int8)
    found[rng.random(found.shape) < missing] = -1
    found[0], found[1] = 0, 2
    return found


def standardised(x: Array, scale: str | None = "k") -> Array:
    """Return genotypes with missing ones replaced by means, centred and scaled by column, in float64."""
    known = np.where(x == -1, np.nan, x.astype(np.float64))
    mean = np.nanmean(known, axis=0)
    p = mean / 2
    divisor = {"k": np.nanstd(known, axis=0), "hwe": np.sqrt(2 * p * (1 - p)), None: 1.0}[scale]
    return np.where(x == -1, 0, (known - mean) / divisor)
