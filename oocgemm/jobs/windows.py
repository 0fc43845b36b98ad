"""Windows of variants: which variants are near one another on a chromosome, by number or by distance."""

from itertools import pairwise
from math import inf
from typing import Any

import numpy as np

from oocgemm import stores
from oocgemm.errors import InputError
from oocgemm.jobs.steps import Within
from oocgemm.planning.cover import Band, Windows
from oocgemm.stores import Array, Genotypes, Matrix
from oocgemm.values import dataclass

# Units of distances, in the order of positions in .bim files: centimorgans, and thousands of base pairs.
UNITS = ("cm", "kb")
# A band is at most this many blocks of rows, each with the reach of its widest row.
MAX_BLOCKS = 1024


@dataclass(frozen=True, eq=False)
class Places:
    """Where variants are: the number of the chromosome of each, and its position there, which may increase.

    `positions` is None if distances are numbers of variants. `window` is the largest distance of two variants
    that are near one another, in the unit of positions.
    """

    chromosomes: Array
    positions: Array | None
    window: float

    def kept(self, numbers: Array | None) -> "Places":
        """Return the places of some variants; of all if `numbers` is None."""
        if numbers is None:
            return self
        positions = None if self.positions is None else self.positions[numbers]
        return Places(self.chromosomes[numbers], positions, self.window)

    def firsts(self) -> Array:
        """Return for each variant the number of the first variant that is near it. They do not decrease."""
        count = len(self.chromosomes)
        found, own = np.empty(count, np.int64), np.arange(count)
        if self.positions is None:
            starts = np.flatnonzero(np.diff(self.chromosomes, prepend=-1))
            first = np.repeat(starts, np.diff(starts, append=count))
            return np.maximum(first, own - int(min(self.window, count)))
        cuts = np.flatnonzero(np.diff(self.chromosomes, prepend=-1, append=-1))
        for start, stop in pairwise(cuts):
            at = self.positions[start:stop]
            first = np.searchsorted(at, at - self.window)
            # The difference of two positions decides, and at - window may have been rounded.
            last = own[: stop - start]
            while (near := (first > 0) & (at - at[first - 1] <= self.window)).any():
                first[near] -= 1
            while (far := (first < last) & (at - at[first] > self.window)).any():
                first[far] += 1
            found[start:stop] = start + first
        return found


def places(
    matrix: Matrix, axis: int, *, window: float | None, unit: str, positions: Any, chromosomes: Any
) -> Places:
    """Return where the variants along an axis of a matrix are. Raises `InputError` for a wrong window.

    Positions and chromosomes that are not given are those that .bim files have. Raises `InputError` if they
    are unknown or not in order.
    """
    real = isinstance(window, int | float | np.number) and not isinstance(window, bool)
    if window is not None and not (real and 0 <= window < inf and (unit != "variants" or window % 1 == 0)):
        what = "number of variants" if unit == "variants" else f"distance in {unit}"
        raise InputError(f"window = {window!r} is not a {what}: pass one such as 1000")
    named = matrix if isinstance(matrix, Genotypes) and matrix.variant_axis == axis else None
    count = matrix.shape[axis]
    of_each = _given("chromosomes", chromosomes, count)
    if of_each is None:
        of_each = np.zeros(count) if named is None else np.array(named.chromosomes(), str)
    numbers = np.append(0, np.cumsum(of_each[1:] != of_each[:-1]))[:count]
    found, runs = len(np.unique(of_each)), int(numbers.max(initial=-1)) + 1
    if found != runs:
        raise InputError(
            f"{matrix.name} has variants on {found} chromosomes, in {runs} runs of variants on one "
            "chromosome: sort the variants by chromosome"
        )
    reach = inf if window is None else float(window)
    at = _given("positions", positions, count)
    if unit == "variants":
        if at is not None:
            raise InputError("positions are not used with unit = 'variants': drop them, or pass unit='kb'")
        return Places(numbers, None, reach)
    if at is None:
        if named is None:
            raise InputError(
                f"unit = {unit!r} needs the positions of variants, and {matrix.name} has no .bim file with "
                "them: pass positions, a number per variant"
            )
        at = np.array(named.positions(), np.float64).reshape(count, 2)[:, UNITS.index(unit)]
        if unit == "cm" and count and not at.any():
            raise InputError(
                f"all positions in centimorgans in the .bim file of {matrix.name} (column 3) are 0: pass "
                "positions, or unit='kb'"
            )
    if at.dtype.kind not in "fiu" or not np.isfinite(at).all():
        raise InputError(
            f"positions are of dtype {at.dtype}, or not finite: pass a finite number per variant"
        )
    at = at.astype(np.float64)
    if (wrong := np.flatnonzero((np.diff(at) < 0) & (np.diff(numbers) == 0))).size:
        which = int(wrong[0]) + 1
        raise InputError(
            f"variant {which} of {matrix.name} is at position {at[which]:g}, and the one before it at "
            f"{at[which - 1]:g} (one of {wrong.size} such variants): sort the variants, or pass the "
            "chromosomes of variants"
        )
    return Places(numbers, at, 1000 * reach if unit == "kb" else reach)


def band_of(firsts: Array) -> Band:
    """Return the band that has, for each row, the columns from its first one to the diagonal."""
    count = len(firsts)
    width = int((np.arange(count) - firsts).max(initial=0))
    if (firsts == np.maximum(np.arange(count) - width, 0)).all():
        return Band(width)
    block = -(-count // MAX_BLOCKS)
    return Windows(block=block, firsts=tuple(firsts[::block].tolist()))


def within(firsts: Array, *, both: bool) -> tuple[Within, ...]:
    """Return the steps that keep the elements of a band. With `both`, also those right of the diagonal.

    Elements left of it that are not kept become NaN, which is not selected, or with `both` 0, which adds
    nothing.
    """
    first, own = firsts.astype(np.float64), np.arange(len(firsts), dtype=np.float64)
    left = Within(first, own, drops=not both)
    return (left, Within(-own, -first)) if both else (left,)


def _given(name: str, given: Any, count: int) -> Array | None:
    """Return an option with an element per variant as an array. A path is that of a .npy file."""
    if given is None:
        return None
    if stores.is_path(given):
        try:
            given = np.load(given, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise InputError(f"{name} at {given} cannot be read: {error}: pass a .npy file") from error
    found = np.asarray(given)
    if found.shape != (count,):
        raise InputError(
            f"{name} have shape {found.shape}, and there are {count} variants: pass one per variant"
        )
    return found
