"""Products of float64 or float32 panels by way of their residues, in NumPy: `oocgemm.planning.emulation` at work.

The host has no int8 products worth having: residues are multiplied as float32, in parts so short that every sum is
exact. This is for being right on small sizes. Panels are scaled and split in `prepare`, once; `multiply` takes the
product, row strip by row strip.

    room:  planes of A [N][m][pitch]  planes of B [N][n][pitch]  exponents of A [m], of B [n]  log2 of norms of rows

N is the most moduli of the dtype. The rows of B's planes are columns of op(B), so that both operands lie along k.
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

_PIECE = 1 << 16  # elements of a panel that are looked at in one go
_SIDE = 256  # of a block of C
_DEPTH = 1 << 10  # products of residues whose sum is exact in float32
# A row's norm is rounded; elements count that are this little below a level, too.
_BELOW = 1 - 2.0**-30


@dataclass(frozen=True, slots=True)
class Planes:
    """A panel's residues [N, rows, ld] int8, its rows' exponents, and the base-2 logarithms of their norms."""

    residues: Array
    exponents: Array
    norms: Array


@dataclass(frozen=True, slots=True)
class Prepared:
    """Two panels ready to be multiplied by way of so many moduli; 0: natively."""

    number: int
    a: Planes
    b: Planes


def views(room: Array, m: int, n: int, depth: int, dtype: str) -> tuple[Planes, Planes]:
    """What lies in a room, planes of all moduli."""
    number, across = MODULI_COUNTS[dtype][-1], pitch(depth)
    offsets = plane_offsets(number, m, n, depth)

    def at(start: int, shape: tuple[int, ...], kind: type) -> Array:
        return _of(room[start:], kind, shape)

    norms = at(offsets.facts, (m + n,), np.float64)
    return (
        Planes(
            at(offsets.a, (number, m, across), np.int8), at(offsets.a_exponents, (m,), np.int32), norms[:m]
        ),
        Planes(
            at(offsets.b, (number, n, across), np.int8), at(offsets.b_exponents, (n,), np.int32), norms[m:]
        ),
    )


def prepare(a: Array, b: Array, room: Array, dtype: str) -> Prepared:
    """Split a panel of op(A) (m x k) and one of op(B) (k x n), of whatever strides, into the planes of a room.

    With the fewest moduli that give a product as good as a native one of that dtype; none of them, and planes that
    mean nothing, where none does or an element is infinite or NaN.
    """
    (m, k), n = a.shape, b.shape[1]
    planes = views(room, m, n, k, dtype)
    panels = list(zip((a, b.T), planes, strict=True))
    seen = [look(panel, held.norms) for panel, held in panels]
    for number in MODULI_COUNTS[dtype] if all(facts.finite for facts in seen) else ():
        how = residues(number)
        for at, (panel, held) in enumerate(panels):
            seen[at] = split(panel, held, how, seen[at])
        if suffices(seen[0], seen[1], k, UNITS[dtype]):
            return Prepared(number, *planes)
    return Prepared(0, *planes)


def look(x: Array, norms: Array) -> PanelFacts:
    """What the rows of a panel are, as far as it does not hang on the number of moduli; of each row log2 of its 2-norm, -inf
    if it is zero throughout, into `norms`."""
    k = x.shape[1]
    most, least, above = 0.0, np.inf, np.full(len(LEVELS), k)
    with np.errstate(all="ignore"):
        for rows in _pieces(x):
            sizes = np.abs(x[rows], dtype=np.float64, order="C")
            top = sizes.max(axis=1, initial=0)
            if not np.isfinite(top).all():
                return PanelFacts(False, False, 0.0, 0.0, 0.0, (0,) * len(LEVELS))
            up = np.frexp(top)[1]
            np.ldexp(sizes, -up[:, None], out=sizes)  # to below 1: squares that vanish do not matter
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
    """Scale the rows of a panel to integers and write their residues and exponents; the facts, completed."""
    k = x.shape[1]
    live = np.isfinite(planes.norms)
    planes.exponents[...] = np.where(live, np.floor(how.exponent - np.where(live, planes.norms, 0)), 0)
    exact = True
    with np.errstate(all="ignore"):
        grain = float(np.exp2(-planes.exponents - planes.norms)[live].max(initial=0))
        for rows in _pieces(x):
            scaled = np.ldexp(x[rows].astype(np.float64, order="C"), planes.exponents[rows, None])
            whole = np.rint(scaled)
            # Scaling itself may have made a 0 of what was none.
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
    """A panel's rows, a few at a time."""
    several = max(1, _PIECE // max(1, x.shape[1]))
    return [slice(top, min(top + several, len(x))) for top in range(0, len(x), several)]


def workspace_bytes(n: int, depth: int) -> int:
    """Bytes that `multiply` works in, for n columns and that depth."""
    return sum(_workspace(n, depth))


def _workspace(n: int, depth: int) -> tuple[int, int, int, int]:
    """Bytes of: five blocks of C in float64, one in float32, a block of residues of A and one of B in float32."""
    across, deep = min(_SIDE, n), min(_DEPTH, pitch(depth))
    return 5 * 8 * _SIDE * across, 4 * _SIDE * across, 4 * _SIDE * deep, 4 * across * deep


def multiply(prepared: Prepared, rows: slice, alpha: float, beta: float, c: Array, workspace: Array) -> None:
    """``c = alpha op(A)[rows] @ op(B) + beta c``, c being of the panels' dtype.

    `workspace`: at least `workspace_bytes` bytes. beta = 0 overwrites c without reading it. The same bits whatever rows are
    taken together.
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
        for held, weight in zip(sums, how.weights[rank], strict=True):
            np.add(held, np.multiply(total, weight, out=spare), out=held)
    np.multiply(sums[0], how.inverse, out=total)
    np.rint(total, out=total)
    for held, modulus in zip(sums, how.modulus, strict=True):
        np.subtract(held, np.multiply(total, modulus, out=spare), out=held)
    value = sums[0]
    value += sums[1]
    value += sums[2]
    down, across = (x.exponents[at] for x, at in zip((prepared.a, prepared.b), where, strict=True))
    exponents = spare.reshape(-1).view(np.int32)[: value.size].reshape(value.shape)
    np.add(down[:, None], across, out=exponents)
    np.negative(exponents, out=exponents)
    with np.errstate(all="ignore"):  # overflow and underflow go through silently, as in BLAS
        np.ldexp(value, exponents, out=value)
        value *= c.dtype.type(alpha)
        if beta != 0:
            value += np.multiply(c, c.dtype.type(beta), out=spare, dtype=np.float64)
        c[...] = value


def _float32(space: Array, x: Array) -> Array:
    """x as float32, at the beginning of a workspace."""
    narrow = _of(space, np.float32, x.shape)
    narrow[...] = x
    return narrow


def _of(space: Array, dtype: Any, shape: tuple[int, ...]) -> Array:
    """The beginning of a workspace, as an array."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.asarray(space[:size].view(dtype).reshape(shape))
