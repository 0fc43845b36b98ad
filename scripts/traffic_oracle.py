"""The least bytes that any plan of the scheme brings over a link: by search, without the planner.

What is searched: every integral tiling (every count of tiles down and across; equal tiles dominate), both
directions of the walk, bands of every size, and how the memory that a tile leaves is dealt out to panels of A
and of B. One accumulator, two panels of each operand at least, as deep as the plan's.

How a tiling is judged: by what *no* replacement policy can beat. A run over tiles in bands of rows touches the
panels of op(A) of a band once for each column, and those of op(B) once for each row. With slots for s panels,
at most s of the panels that a pass touches can be there when the pass begins, so that

- each pass over a band's A but the first finds at most s of them,
- of a column of B each tile but the band's first finds at most s, and the first tiles of all columns of a band
  together at most s that the bands before have left.

Everything else must be loaded. Walks that turn back attain this (tests hold it against Belady's replacement,
simulated), so that it is the oracle's figure, not a mere estimate, wherever a band is one row.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """A product in elements of one size, `r` the depth of a panel; memories in bytes, net of what is set aside; the
    most steps that are let count."""

    m: int
    n: int
    k: int
    itemsize: int
    r: int
    device: int
    host: int | None = None  # of the link from the stores; None for that to the device
    most_steps: float = float("inf")

    @property
    def flipped(self) -> "Case":
        """The same with A and B changing places."""
        return replace(self, m=self.n, n=self.m)


def extents(extent: int) -> NDArray[np.int64]:
    """Extents of equal tiles, for every count of them."""
    counts = np.arange(1, extent + 1)
    return np.unique(-(-extent // counts))[::-1]


def least_panels(case: Case) -> tuple[float, dict[str, int]]:
    """Fewest bytes of panels over the link, and the tiling that needs no more."""
    best, how = float("inf"), {}
    for axis, c in enumerate((case, case.flipped)):
        found, w, h, band = _by_rows(c, best)
        if found < best:
            best = found
            how = {"w": w if axis == 0 else h, "h": h if axis == 0 else w, "axis": axis, "band": band}
    return best, how


def _by_rows(c: Case, best: float) -> tuple[float, int, int, int]:
    """The best walk in bands of rows, if it beats `best`."""
    h = extents(c.n)
    across = -(-c.n // h)
    widths = extents(c.m)
    found = best, 0, 0, 0
    # Every so many widths first: what they reach spares looking closely at most others.
    coarse = widths[:: max(1, len(widths) // 32)]
    for banded, some in ((False, coarse), (False, widths), (True, coarse), (True, widths)):
        for w in map(int, some):
            down = -(-c.m // w)
            free, host_free = _free(c, w, h)
            fits = (free >= 0) & (down * across * -(-c.k // c.r) <= c.most_steps)
            fits = np.flatnonzero(fits if host_free is None else fits & (host_free >= 0))
            bands = extents(down) if banded else np.ones(1, np.int64)
            floor = _floor(c, w, h[fits], across[fits], bands[:, None])
            at_band, at = np.nonzero(floor < found[0])
            if not len(at):
                continue
            at, band = fits[at], bands[at_band]
            host = None if host_free is None else host_free[at]
            moved = _loads(c, w, h[at], across[at], band, free[at], host)
            least = int(np.argmin(moved))
            if moved[least] < found[0]:
                found = float(moved[least]), w, int(h[at[least]]), int(band[least])
    return found


def _free(c: Case, w: Any, h: Any) -> tuple[Any, Any]:
    """What a tile and two panels of each operand leave of the device; one of each, and a row of C, of the host."""
    pair = c.r * (w + h) * c.itemsize
    host = None if c.host is None else c.host - pair - h * c.itemsize
    return c.device - w * h * c.itemsize - 2 * pair, host


def _floor(c: Case, w: int, h: Any, across: Any, band: Any) -> Any:
    """What cannot be beaten even if all memory held panels, cut as finely as one likes."""
    size = c.itemsize
    a, b, down = c.m * c.k * size, c.k * c.n * size, -(-c.m // w)
    bands = -(-down // band)
    held = c.device - w * h * size + (0 if c.host is None else c.host)
    # What may be kept, by how much a byte of it saves: a band of A, a column of B, and all of B.
    row = np.minimum(np.minimum(band * w, c.m) * c.k * size, a), (across - 1) * bands
    column = np.minimum(c.k * h * size, b), (down - bands) * across + bands - 1
    whole = np.maximum(0, b - column[0]), bands - 1
    found: Any = 0
    for order in ((row, column, whole), (column, row, whole), (column, whole, row)):
        left, saved = held, 0
        for most, slope in order:
            kept = np.minimum(left, most)
            left, saved = left - kept, saved + kept * slope
        found = np.maximum(found, saved)
    return np.maximum(a + b, across * a + down * b - found)


def _loads(c: Case, w: int, h: Any, across: Any, band: Any, free: Any, host_free: Any) -> Any:
    """Bytes of panels over the link, at best over the ways to deal out what is free on each tier."""
    least: Any = np.inf
    steps = -(-c.k // c.r)
    for device in _deals(c, w, h, across, band, steps, free, 2):
        if host_free is None:
            least = np.minimum(least, _moved(c, w, h, across, band, *device))
        else:
            for host in _deals(c, w, h, across, band, steps, host_free, 1):
                a, b = (np.maximum(x, y) for x, y in zip(device, host, strict=True))
                least = np.minimum(least, _moved(c, w, h, across, band, a, b))
    return least


def _deals(
    c: Case, w: int, h: Any, across: Any, band: Any, steps: int, free: Any, base: int
) -> list[tuple[Any, Any]]:
    """Slots of A and B: what is free goes to a band's A, a column's B and all of B, in each possible order. Each
    slot of one of these saves the same as the next, so that no other division saves more (but for the parts of a
    slot that are left over)."""
    a_panel, b_panel = w * c.r * c.itemsize, h * c.r * c.itemsize
    deals = []
    for order in (("a", "column", "all"), ("column", "a", "all"), ("column", "all", "a")):
        a, b, left = base + 0 * across, base + 0 * across, np.maximum(free, 0)
        for kind in order:
            if kind == "a":
                more = np.clip(band * steps - a, 0, left // a_panel)
                a, left = a + more, left - more * a_panel
            else:
                most = steps if kind == "column" else across * steps
                more = np.clip(most - b, 0, left // b_panel)
                b, left = b + more, left - more * b_panel
        deals.append((a, b))
    return deals


def _moved(c: Case, w: int, h: Any, across: Any, band: Any, a_slots: Any, b_slots: Any) -> Any:
    """Bytes loaded into that many slots when nothing that can be found again is loaded again."""
    size = c.itemsize
    down = -(-c.m // w)
    whole, rest = np.divmod(down, band)
    bands = whole + (rest > 0)
    a_once, b_once = c.m * c.k * size, c.k * c.n * size
    a_held, b_held = a_slots * (w * c.r * size), b_slots * (h * c.r * size)
    heights = [(whole, np.minimum(band * w, c.m)), (1, np.maximum(0, c.m - whole * band * w))]
    a_found = sum(count * np.minimum(a_held, rows * c.k * size) for count, rows in heights)
    a_found = np.minimum(a_found, a_once)
    columns = (across - 1) * np.minimum(b_held, c.k * h * size)
    columns = columns + np.minimum(b_held, c.k * (c.n - (across - 1) * h) * size)
    b_found = (down - bands) * columns + (bands - 1) * np.minimum(b_held, b_once)
    return a_once * across - (across - 1) * a_found + b_once * down - b_found
