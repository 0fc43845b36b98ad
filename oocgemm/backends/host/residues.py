"""Products of float64 or float32 panels from their residues, in NumPy (the method is in
`oocgemm.planning.emulation`).

`prepare` scales a step's panels and splits them into residues, once. `multiply` computes the product, row
strip by row strip. The host has no fast int8 products, so residues are multiplied in float32, in parts short
enough that every sum is exact. This code is a reference for small sizes; it is not fast.

Layout of a planes slot, where N is the largest number of moduli of the dtype:

    planes of A [N][m][pitch], planes of B [N][n][pitch], exponents of A [m], of B [n], log2 of the row norms
    [m + n]

A row of B's planes is a column of op(B), so that both operands are contiguous along k.
"""

from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np

from oocgemm.backends.base import Array
from oocgemm.planning.emulation import (
    LEVELS,
    MODULI_COUNTS,
    UNITS,
    PanelFacts,
    Residues,
    pitch,
    plane_offsets,
    residues,
    suffices,
)

_PIECE = 1 << 16  # elements of a panel that are processed at a time
_SIDE = 256  # side of a block of C
_DEPTH = 1 << 10  # so many products of residues have an exact sum in float32
# A row's norm is rounded, so elements that are below a level by this little count as above it.
_BELOW = 1 - 2.0**-30


@dataclass(frozen=True, slots=True)
class Planes:
    """A panel's residues [N, rows, ld] int8, its rows' exponents, and the base-2 logarithms of their
    norms."""

    residues: Array
    exponents: Array
    norms: Array


@dataclass(frozen=True, slots=True)
class Prepared:
    """Two panels split into residues of `number` moduli; 0 if their product must be computed natively."""

    number: int
    a: Planes
    b: Planes


def views(space: Array, m: int, n: int, depth: int, dtype: str) -> tuple[Planes, Planes]:
    """Return the planes of A and B in a planes slot, as views; for all moduli of the dtype."""
    number, across = MODULI_COUNTS[dtype][-1], pitch(depth)
    offsets = plane_offsets(number, m, n, depth)

    def at(start: int, shape: tuple[int, ...], kind: type) -> Array:
        return _of(space[start:], kind, shape)

    norms = at(offsets.facts, (m + n,), np.float64)
    return (
        Planes(
            at(offsets.a, (number, m, across), np.int8), at(offsets.a_exponents, (m,), np.int32), norms[:m]
        ),
        Planes(
            at(offsets.b, (number, n, across), np.int8), at(offsets.b_exponents, (n,), np.int32), norms[m:]
        ),
    )


def prepare(a: Array, b: Array, space: Array, dtype: str) -> Prepared:
    """Split a panel of op(A) (m x k) and one of op(B) (k x n), of any strides, into residues in a planes
    slot.

    Takes the fewest moduli that make the product as accurate as a native one in `dtype`. Returns 0 moduli,
    and planes without meaning, if no number of moduli suffices or an element is Inf or NaN.
    """
    (m, k), n = a.shape, b.shape[1]
    planes = views(space, m, n, k, dtype)
    panels = list(zip((a, b.T), planes, strict=True))
    seen = [measure_rows(panel, split_panel.norms) for panel, split_panel in panels]
    for number in MODULI_COUNTS[dtype] if all(facts.finite for facts in seen) else ():
        how = residues(number)
        for at, (panel, split_panel) in enumerate(panels):
            seen[at] = split(panel, split_panel, how, seen[at])
        if suffices(seen[0], seen[1], k, UNITS[dtype]):
            return Prepared(number, *planes)
    return Prepared(0, *planes)


def measure_rows(x: Array, norms: Array) -> PanelFacts:
    """Return the facts about a panel's rows that do not depend on the number of moduli.

    Writes log2 of each row's 2-norm into `norms`: -inf for a row of zeros.
    """
    k = x.shape[1]
    most, least, above = 0.0, np.inf, np.full(len(LEVELS), k)
    with np.errstate(all="ignore"):
        for rows in _pieces(x):
            sizes = np.abs(x[rows], dtype=np.float64, order="C")
            top = sizes.max(axis=1, initial=0)
            if not np.isfinite(top).all():
                return PanelFacts(False, False, 0.0, 0.0, 0.0, (0,) * len(LEVELS))
            up = np.frexp(top)[1]
            np.ldexp(sizes, -up[:, None], out=sizes)  # to below 1: squares that underflow do not matter
            norm = np.sqrt(np.vecdot(sizes, sizes))
            norms[rows] = np.log2(norm) + up
            live = top > 0
            if live.any():
                ratio = sizes.sum(axis=1)[live] / norm[live]
                most, least = max(most, float(ratio.max())), min(least, float(ratio.min()))
                for at, level in enumerate(LEVELS):
                    count = np.count_nonzero(sizes >= (norm * (level * _BELOW / sqrt(k)))[:, None], axis=1)
                    above[at] = min(above[at], count[live].min())
    if most == 0:
        return PanelFacts(True, True, 0.0, 0.0, 0.0, (0,) * len(LEVELS))
    return PanelFacts(True, False, 0.0, most, float(least), tuple(above.tolist()))


def split(x: Array, planes: Planes, how: Residues, facts: PanelFacts) -> PanelFacts:
    """Scale the rows of a panel to integers and write their residues and exponents into `planes`.

    Returns the facts with those that depend on the number of moduli filled in.
    """
    k = x.shape[1]
    live = np.isfinite(planes.norms)
    planes.exponents[...] = np.where(live, np.floor(how.exponent - np.where(live, planes.norms, 0)), 0)
    exact = True
    with np.errstate(all="ignore"):
        grain = float(np.exp2(-planes.exponents - planes.norms)[live].max(initial=0))
        for rows in _pieces(x):
            scaled = np.ldexp(x[rows].astype(np.float64, order="C"), planes.exponents[rows, None])
            whole = np.rint(scaled)
            # Scaling may underflow a nonzero element to 0.
            same = np.array_equal(whole, scaled) and np.count_nonzero(whole) == np.count_nonzero(x[rows])
            exact = exact and bool(same)
            integers = whole.astype(np.int64)
            del scaled, whole
            for plane, p in zip(planes.residues, how.moduli, strict=False):
                shifted = integers + p // 2
                shifted //= p
                shifted *= -p
                shifted += integers
                plane[rows, :k] = shifted
    planes.residues[:, :, k:] = 0
    return PanelFacts(True, exact, grain, facts.max_ratio, facts.min_ratio, facts.above)


def _pieces(x: Array) -> list[slice]:
    """Return slices that cover a panel's rows, a few rows at a time."""
    several = max(1, _PIECE // max(1, x.shape[1]))
    return [slice(top, min(top + several, len(x))) for top in range(0, len(x), several)]


def workspace_bytes(n: int, depth: int) -> int:
    """Return the bytes of workspace that `multiply` needs for n columns and that depth."""
    return sum(_workspace(n, depth))


def _workspace(n: int, depth: int) -> tuple[int, int, int, int]:
    """Return the bytes of five blocks of C in float64, of one in float32, and of one block of A's and of B's
    residues in float32."""
    across, deep = min(_SIDE, n), min(_DEPTH, pitch(depth))
    return 5 * 8 * _SIDE * across, 4 * _SIDE * across, 4 * _SIDE * deep, 4 * across * deep


def multiply(prepared: Prepared, rows: slice, alpha: float, beta: float, c: Array, workspace: Array) -> None:
    """Compute ``c = alpha op(A)[rows] @ op(B) + beta c`` in place, c in the dtype of the panels.

    The bits of c do not depend on how its rows are divided into calls.

    Args:
        prepared: the panels, with at least one modulus.
        rows: rows of the panel of op(A), which are also the rows of c.
        alpha, beta: scalars. beta = 0 overwrites c without reading it.
        c: (number of rows) x n.
        workspace: at least `workspace_bytes` bytes.
    """
    how = residues(prepared.number)
    first, last, _ = rows.indices(len(prepared.a.exponents))
    for top in range(first, last, _SIDE):
        for left in range(0, c.shape[1], _SIDE):
            down, across = slice(top, min(top + _SIDE, last)), slice(left, left + _SIDE)
            block = c[top - first : down.stop - first, across]
            _multiply_block(prepared, how, (down, across), alpha, beta, block, workspace)


def _multiply_block(
    prepared: Prepared,
    how: Residues,
    where: tuple[slice, slice],
    alpha: float,
    beta: float,
    c: Array,
    workspace: Array,
) -> None:
    a, b = (x.residues[:, at] for x, at in zip((prepared.a, prepared.b), where, strict=True))
    depth = a.shape[2]
    wide, narrow, left, right = np.split(workspace, np.cumsum(_workspace(c.shape[1], depth))[:3])
    total, spare, *sums = _of(wide, np.float64, (5, *c.shape))
    product = _of(narrow, np.float32, c.shape)
    for x in sums:
        x[...] = 0
    for rank, p in enumerate(how.moduli):
        total[...] = 0
        for start in range(0, depth, _DEPTH):
            part = slice(start, min(start + _DEPTH, depth))
            x, y = _float32(left, a[rank, :, part]), _float32(right, b[rank, :, part])
            total += np.matmul(x, y.T, out=product)
        np.multiply(total, 1 / p, out=spare)
        np.rint(spare, out=spare)
        spare *= p
        total -= spare
        for sum_part, weight in zip(sums, how.weights[rank], strict=True):
            np.add(sum_part, np.multiply(total, weight, out=spare), out=sum_part)
    np.multiply(sums[0], how.inverse, out=total)
    np.rint(total, out=total)
    for sum_part, modulus in zip(sums, how.modulus, strict=True):
        np.subtract(sum_part, np.multiply(total, modulus, out=spare), out=sum_part)
    value = sums[0]
    value += sums[1]
    value += sums[2]
    down, across = (x.exponents[at] for x, at in zip((prepared.a, prepared.b), where, strict=True))
    exponents = spare.reshape(-1).view(np.int32)[: value.size].reshape(value.shape)
    np.add(down[:, None], across, out=exponents)
    np.negative(exponents, out=exponents)
    with np.errstate(all="ignore"):  # overflow and underflow are silent, as in BLAS
        np.ldexp(value, exponents, out=value)
        value *= c.dtype.type(alpha)
        if beta != 0:
            value += np.multiply(c, c.dtype.type(beta), out=spare, dtype=np.float64)
        c[...] = value


def _float32(space: Array, x: Array) -> Array:
    """Copy x to the start of a workspace as float32 and return that array."""
    narrow = _of(space, np.float32, x.shape)
    narrow[...] = x
    return narrow


def _of(space: Array, dtype: Any, shape: tuple[int, ...]) -> Array:
    """Return the start of a workspace as an array of that dtype and shape."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.asarray(space[:size].view(dtype).reshape(shape))
