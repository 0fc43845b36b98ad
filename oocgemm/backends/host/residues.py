"""Compute products of float64 or float32 matrices from residues modulo small numbers, in NumPy.

`oocgemm.planning.emulation` describes the method. `prepare` scales two panels to integers and stores their
residues modulo several small numbers. `multiply` computes some rows of the product from the residues, in
float32 and in parts so short along k that every sum is exact. This code is a reference, and not fast.

A plane is the matrix of the residues for one modulus. The planes of an m x k panel of op(A) and a k x n panel
of op(B) are stored in one buffer, as below. N is the largest number of moduli that is tried for the dtype.
pitch is k rounded up to a multiple of 16. Each row of op(A) and each column of op(B) is scaled by a power of
two, whose exponent is stored.

    planes of op(A)                                   int8 [N][m][pitch]
    planes of op(B)                                   int8 [N][n][pitch]
    exponents of the rows of op(A)                    int32 [m]
    exponents of the columns of op(B)                 int32 [n]
    log2 of the 2-norms of these rows and columns     float64 [m + n]

The planes of op(B) are transposed, so that all planes are contiguous along k.
"""

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
from oocgemm.values import dataclass

# Number of elements of a panel that `prepare` processes at a time.
_PIECE = 1 << 16
# `multiply` computes C in blocks of this many rows and columns.
_SIDE = 256
# Number of products of residues that float32 adds up exactly. The magnitude of a product is at most 2^14, and
# float32 represents all integers up to 2^24.
_DEPTH = 1 << 10
# `measure_rows` counts the elements that are at least a limit times the norm of their row. The computed norm
# may be rounded up, so the limit is multiplied by this factor. No element is missed then.
_BELOW = 1 - 2.0**-30


@dataclass(frozen=True, slots=True)
class Planes:
    """The residues of one panel, as views of a buffer.

    `residues` is int8 [moduli, rows, pitch]. `exponents` has the exponent of each row's scale, `norms` the
    base-2 logarithm of each row's 2-norm. A row is a row of op(A) or a column of op(B).
    """

    residues: Array
    exponents: Array
    norms: Array


@dataclass(frozen=True, slots=True)
class Prepared:
    """The residues of a panel of op(A) and of a panel of op(B).

    `number` is how many moduli were used. If it is 0, residues would not be accurate enough: the panels must
    be multiplied in their own dtype.
    """

    number: int
    a: Planes
    b: Planes


def views(space: Array, m: int, n: int, depth: int, dtype: str) -> tuple[Planes, Planes]:
    """Return views of the buffer `space`, for the residues of an m x depth and a depth x n panel.

    The views have room for the largest number of moduli that is tried for `dtype`, the dtype of the panels.
    """
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
    """Split a panel of op(A) (m x k) and one of op(B) (k x n) into residues, which are written to `space`.

    The number of moduli is the smallest with which the product is as accurate as one computed in `dtype`. If
    no number suffices, or an element is Inf or NaN, the number is 0 and the residues have no meaning.

    Args:
        a, b: the panels, with any strides.
        space: bytes, in the layout that the module describes.
        dtype: of the panels, float64 or float32.
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
    """Return `PanelFacts` of a panel, from which `suffices` bounds the error of its emulated product.

    Only `split` sets the fields `exact` and `grain`, which depend on the number of moduli. This function also
    writes the base-2 logarithm of each row's 2-norm to `norms`; -inf for a row of zeros.
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
            # Scale each row by a power of two, so that all elements are below 1 and no square overflows.
            # Squares that underflow are too small to change the norm.
            np.ldexp(sizes, -up[:, None], out=sizes)
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
    """Scale the rows of a panel to integers, and write their residues and the scales' exponents to `planes`.

    Returns:
        A copy of `facts` with two more fields set: `exact` (no element was rounded) and `grain` (the
        largest ratio of a row's rounding interval to the row's 2-norm). `facts` is what `measure_rows`
        returned for the panel.
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
            # Find out whether any element was rounded, to an integer or, by the scaling, to 0. In the second
            # case, fewer elements are nonzero than before.
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
    """Divide a panel's rows into slices of at most `_PIECE` elements each, but at least one row."""
    several = max(1, _PIECE // max(1, x.shape[1]))
    return [slice(top, min(top + several, len(x))) for top in range(0, len(x), several)]


def workspace_bytes(n: int, depth: int) -> int:
    """Return the bytes of workspace that `multiply` needs for n columns of C and `depth` elements along k."""
    return sum(_workspace(n, depth))


def _workspace(n: int, depth: int) -> tuple[int, int, int, int]:
    """Return the sizes, in bytes, of the four parts of `multiply`'s workspace.

    The parts are: five blocks of C in float64; then, in float32, one block of C, one block of residues of
    op(A), and one of op(B).
    """
    across, deep = min(_SIDE, n), min(_DEPTH, pitch(depth))
    return 5 * 8 * _SIDE * across, 4 * _SIDE * across, 4 * _SIDE * deep, 4 * across * deep


def multiply(
    prepared: Prepared, rows: slice, alpha: float, beta: float, c: Array, workspace: Array, first_col: int = 0
) -> None:
    """Compute ``c = alpha op(A)[rows] @ op(B) + beta c`` in place.

    Several calls for some rows each give the same bits as one call for all rows.

    Args:
        prepared: the panels' residues. `prepared.number` is not 0.
        rows: the rows of the panel of op(A) to multiply; c has as many rows.
        alpha, beta: scalars. beta = 0 overwrites c without reading it.
        c: array with at most n columns, in the dtype of the panels.
        workspace: at least `workspace_bytes` bytes.
        first_col: the column of the panel of op(B) that belongs to the first column of c.
    """
    how = residues(prepared.number)
    first, last, _ = rows.indices(len(prepared.a.exponents))
    for top in range(first, last, _SIDE):
        for left in range(0, c.shape[1], _SIDE):
            down, right = slice(top, min(top + _SIDE, last)), min(left + _SIDE, c.shape[1])
            block = c[top - first : down.stop - first, left:right]
            across = slice(first_col + left, first_col + right)
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
    """Copy x, cast to float32, to the start of the workspace `space`; return the copy."""
    narrow = _of(space, np.float32, x.shape)
    narrow[...] = x
    return narrow


def _of(space: Array, dtype: Any, shape: tuple[int, ...]) -> Array:
    """Return the first bytes of the workspace `space` as an array of the given dtype and shape."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.asarray(space[:size].view(dtype).reshape(shape))
