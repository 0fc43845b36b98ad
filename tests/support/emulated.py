"""Emulated products of panels on the host, and the same products in exact integers."""

from fractions import Fraction
from itertools import chain
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from oocgemm.backends.host.residues import Prepared, multiply, prepare, workspace_bytes
from oocgemm.planning.emulation import MODULI_COUNTS, plane_offsets

Array = NDArray[Any]

DTYPES = ["float64", "float32"]

ALL_NUMBERS = list(chain(*MODULI_COUNTS.values()))
GUARD = 77


def room_bytes(m: int, n: int, depth: int, dtype: str) -> int:
    """Return the bytes of the buffer for the residues of two panels."""
    return plane_offsets(MODULI_COUNTS[dtype][-1], m, n, depth).end


def prepared(a: Array, b: Array) -> Prepared:
    """Prepare panels in a buffer of exactly the needed size, and check that no bytes behind it change."""
    size = room_bytes(a.shape[0], b.shape[1], a.shape[1], a.dtype.name)
    slot = np.full(size + 512, GUARD, np.uint8)
    found = prepare(a, b, slot[:size], a.dtype.name)
    assert (slot[size:] == GUARD).all()
    return found


def product(
    found: Prepared,
    dtype: str,
    alpha: float = 1,
    beta: float = 0,
    c: Array | None = None,
    step: int | None = None,
) -> Array:
    """Compute alpha A B + beta C, `step` rows at a time, in a workspace of exactly the needed size."""
    m, n = len(found.a.exponents), len(found.b.exponents)
    c = np.full((m, n), np.nan, dtype) if c is None else c.copy()
    workspace = np.full(workspace_bytes(n, found.a.residues.shape[2]), GUARD, np.uint8)
    for top in range(0, m, step or max(m, 1)):
        rows = slice(top, min(top + (step or m), m))
        multiply(found, rows, alpha, beta, c[rows], workspace)
    return c


def exact(a: Array, b: Array) -> tuple[list[list[Fraction]], list[list[Fraction]]]:
    """Return A B and |A||B| as exact fractions."""
    left, right = ([[Fraction(float(e)) for e in row] for row in x] for x in (a, b.T))
    return (
        [[sum((x * y for x, y in zip(r, c, strict=True)), Fraction()) for c in right] for r in left],
        [[sum((abs(x * y) for x, y in zip(r, c, strict=True)), Fraction()) for c in right] for r in left],
    )


def integers_of(x: Array, exponents: Array) -> list[list[int]]:
    """Scale each row of a panel by its power of two, and round to integers."""
    return [
        [round(Fraction(float(e)) * Fraction(2) ** int(s)) for e in row]
        for row, s in zip(x, exponents, strict=True)
    ]


rows = st.lists(
    st.one_of(
        st.floats(-1, 1, allow_subnormal=False),
        st.sampled_from([0.0, 1.0, -1.0, 1 / 3, 0.75, 1 - 2.0**-53]),
        st.builds(lambda x, e: x * 2.0**e, st.floats(1, 2), st.integers(-80, 0)),
    ),
    min_size=16,
    max_size=40,
)
