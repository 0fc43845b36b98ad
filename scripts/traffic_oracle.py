"""The fewest bytes that any plan of the scheme moves over a link, found by search without the planner.

The search covers every integral tiling (every count of tiles down and across; equal tiles dominate), both
directions of the traversal, bands of every size, and all divisions of the memory left by a tile between
panels of A and of B. There is one accumulator, and at least two panels of each operand, as deep as those of
the plan.

A tiling is scored by what *no* replacement policy can beat. A traversal in bands of rows uses the panels of
op(A) of a band once per column, and those of op(B) once per row. With slots for s panels, at most s of the
panels that a pass uses can be resident when the pass starts. Therefore:

- Each pass over a band's A, except the first, finds at most s of its panels.
- Of a column of B, each tile except the band's first finds at most s panels. The first tiles of all columns
  of a band together find at most s panels that earlier bands have left.

All other panels must be loaded. Traversals that turn back attain this bound, as tests show by simulating
Belady's replacement. Where a band is one row, the result is therefore exact and not only a lower bound.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """A product (m, n, k) with panels `depth` deep.

    `itemsize`, `device` and `host` are in bytes; the memories exclude reserves. Tilings of more than
    `max_steps` steps are left out.
    """

    m: int
    n: int
    k: int
    itemsize: int
    depth: int
    device: int
    host: int | None = None  # None for the link to the device, which host memory does not relieve
    max_steps: float = float("inf")

    @property
    def flipped(self) -> "Case":
        """Return the case with A and B exchanged."""
        return replace(self, m=self.n, n=self.m)


def extents(extent: int) -> NDArray[np.int64]:
    """Return the tile extents for every count of equal tiles, in descending order."""
    counts = np.arange(1, extent + 1)
    return np.unique(-(-extent // counts))[::-1]


def least_panels(case: Case) -> tuple[float, dict[str, int]]:
    """Return the fewest bytes of panels over the link, and the tiling that attains them."""
    best, how = float("inf"), {}
    for axis, c in enumerate((case, case.flipped)):
        found, tile_m, tile_n, band = _by_rows(c, best)
        if found < best:
            best = found
            how = {
                "m": tile_m if axis == 0 else tile_n,
                "n": tile_n if axis == 0 else tile_m,
                "axis": axis,
                "band": band,
            }
    return best, how


def _by_rows(c: Case, best: float) -> tuple[float, int, int, int]:
    """Return the best traversal in bands of rows, if it moves fewer bytes than `best`."""
    tile_n = extents(c.n)
    across = -(-c.n // tile_n)
    tile_ms = extents(c.m)
    found = best, 0, 0, 0
    # A coarse subset first: its result prunes most of the other tilings.
    coarse = tile_ms[:: max(1, len(tile_ms) // 32)]
    for banded, some in ((False, coarse), (False, tile_ms), (True, coarse), (True, tile_ms)):
        for tile_m in map(int, some):
            down = -(-c.m // tile_m)
            free, host_free = _free(c, tile_m, tile_n)
            fits = (free >= 0) & (down * across * -(-c.k // c.depth) <= c.max_steps)
            fits = np.flatnonzero(fits if host_free is None else fits & (host_free >= 0))
            bands = extents(down) if banded else np.ones(1, np.int64)
            floor = _floor(c, tile_m, tile_n[fits], across[fits], bands[:, None])
            at_band, at = np.nonzero(floor < found[0])
            if not len(at):
                continue
            at, band = fits[at], bands[at_band]
            host = None if host_free is None else host_free[at]
            moved = _loads(c, tile_m, tile_n[at], across[at], band, free[at], host)
            least = int(np.argmin(moved))
            if moved[least] < found[0]:
                found = float(moved[least]), tile_m, int(tile_n[at[least]]), int(band[least])
    return found


def _free(c: Case, tile_m: Any, tile_n: Any) -> tuple[Any, Any]:
    """Return the bytes left on each tier.

    The device has one tile and two panels of each operand; the host has one panel of each, and a row of the
    tile.
    """
    pair = c.depth * (tile_m + tile_n) * c.itemsize
    host = None if c.host is None else c.host - pair - tile_n * c.itemsize
    return c.device - tile_m * tile_n * c.itemsize - 2 * pair, host


def _floor(c: Case, tile_m: int, tile_n: Any, across: Any, band: Any) -> Any:
    """Return a lower bound: all memory is used for panels, which may be divided arbitrarily."""
    size = c.itemsize
    a, b, down = c.m * c.k * size, c.k * c.n * size, -(-c.m // tile_m)
    bands = -(-down // band)
    memory = c.device - tile_m * tile_n * size + (0 if c.host is None else c.host)
    # Candidates for residency, each as (bytes, loads saved per byte): a band of A, a column of B, the rest of
    # B.
    row = np.minimum(np.minimum(band * tile_m, c.m) * c.k * size, a), (across - 1) * bands
    column = np.minimum(c.k * tile_n * size, b), (down - bands) * across + bands - 1
    whole = np.maximum(0, b - column[0]), bands - 1
    found: Any = 0
    for order in ((row, column, whole), (column, row, whole), (column, whole, row)):
        left, saved = memory, 0
        for size_limit, slope in order:
            kept = np.minimum(left, size_limit)
            left, saved = left - kept, saved + kept * slope
        found = np.maximum(found, saved)
    return np.maximum(a + b, across * a + down * b - found)


def _loads(c: Case, tile_m: int, tile_n: Any, across: Any, band: Any, free: Any, host_free: Any) -> Any:
    """Return the fewest bytes of panels over the link, over all divisions of each tier's free memory."""
    least: Any = np.inf
    steps = -(-c.k // c.depth)
    for device in _divisions(c, tile_m, tile_n, across, band, steps, free, 2):
        if host_free is None:
            least = np.minimum(least, _moved(c, tile_m, tile_n, across, band, *device))
        else:
            for host in _divisions(c, tile_m, tile_n, across, band, steps, host_free, 1):
                a, b = (np.maximum(x, y) for x, y in zip(device, host, strict=True))
                least = np.minimum(least, _moved(c, tile_m, tile_n, across, band, a, b))
    return least


def _divisions(
    c: Case, tile_m: int, tile_n: Any, across: Any, band: Any, steps: int, free: Any, base: int
) -> list[tuple[Any, Any]]:
    """Return divisions of free memory into slots of A and of B.

    Memory goes to a band of A, a column of B and all of B, in each useful order. Within one of these every
    slot saves the same, so that no other division saves more, apart from fractions of a slot.
    """
    a_panel, b_panel = tile_m * c.depth * c.itemsize, tile_n * c.depth * c.itemsize
    divisions = []
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
        divisions.append((a, b))
    return divisions


def _moved(c: Case, tile_m: int, tile_n: Any, across: Any, band: Any, a_slots: Any, b_slots: Any) -> Any:
    """Return the bytes loaded with that many slots if every panel that can still be resident is reused."""
    size = c.itemsize
    down = -(-c.m // tile_m)
    whole, rest = np.divmod(down, band)
    bands = whole + (rest > 0)
    a_once, b_once = c.m * c.k * size, c.k * c.n * size
    a_resident, b_resident = a_slots * (tile_m * c.depth * size), b_slots * (tile_n * c.depth * size)
    band_rows = [(whole, np.minimum(band * tile_m, c.m)), (1, np.maximum(0, c.m - whole * band * tile_m))]
    a_found = sum(count * np.minimum(a_resident, rows * c.k * size) for count, rows in band_rows)
    a_found = np.minimum(a_found, a_once)
    columns = (across - 1) * np.minimum(b_resident, c.k * tile_n * size)
    columns = columns + np.minimum(b_resident, c.k * (c.n - (across - 1) * tile_n) * size)
    b_found = (down - bands) * columns + (bands - 1) * np.minimum(b_resident, b_once)
    return a_once * across - (across - 1) * a_found + b_once * down - b_found
