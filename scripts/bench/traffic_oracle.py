"""Find the fewest bytes that any plan can move over a link, by a search that does not use the planner.

The search covers every integral tiling and both directions of the traversal. The tiles of a tiling have equal
extents, since that is never worse than unequal ones. A traversal visits bands of tile rows, of every size,
one after the other. The memory that one tile leaves is divided between panels of A and of B in all ways.
There is one accumulator, and there are slots for at least two panels of each operand, which are as deep as
those of the plan.

The score of a tiling is a number of bytes that *no* replacement policy can beat. A traversal in bands of rows
uses the panels of op(A) of a band once per column of tiles, and those of op(B) once per row of tiles. If
there are slots for s panels of an operand, at most s of the panels that a pass uses can be in memory when the
pass starts. Therefore:

- Each pass over a band's panels of A, except the first, finds at most s of them in memory.
- Each tile of a column of tiles, except the first of a band, finds at most s of its panels of B in memory.
  The first tiles of all columns of a band together find at most s panels that earlier bands have left.

All other panels must be loaded. Traversals that alternate their direction attain this bound, as tests show by
simulating Belady's replacement policy. If a band is one row, the result is therefore exact and not only a
lower bound.
"""

from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Case:
    """A product (m, n, k) with panels `depth` deep.

    `itemsize`, `device` and `host` are in bytes. `device` and `host` are the memory that panels and tiles can
    use, without reserves. Tilings of more than `max_steps` steps are left out.
    """

    m: int
    n: int
    k: int
    itemsize: int
    depth: int
    device: int
    # None for the link to the device, on which host memory does not reduce the traffic
    host: int | None = None
    max_steps: float = float("inf")

    @property
    def flipped(self) -> "Case":
        """Return the case with A and B exchanged."""
        return replace(self, m=self.n, n=self.m)


def extents(extent: int) -> NDArray[np.int64]:
    """Return the extents of the tiles for every number of equal tiles, in descending order."""
    counts = np.arange(1, extent + 1)
    return np.unique(-(-extent // counts))[::-1]


def min_panels(case: Case) -> tuple[float, dict[str, int]]:
    """Return the fewest bytes of panels that must cross the link, and the tiling that attains them."""
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
    """Return the best traversal in bands of rows, as (bytes, tile.m, tile.n, rows of tiles per band).

    If none moves fewer bytes than `best`, return (best, 0, 0, 0).
    """
    tile_n = extents(c.n)
    across = -(-c.n // tile_n)
    tile_ms = extents(c.m)
    found = best, 0, 0, 0
    # A coarse subset of the tilings comes first: its best result rules out most of the others.
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
            best_at = int(np.argmin(moved))
            if moved[best_at] < found[0]:
                found = float(moved[best_at]), tile_m, int(tile_n[at[best_at]]), int(band[best_at])
    return found


def _free(c: Case, tile_m: Any, tile_n: Any) -> tuple[Any, Any]:
    """Return the bytes that the smallest set of slots leaves on the device and on the host.

    This set is one tile and two panels of each operand on the device, and one panel of each and one row of
    the tile on the host.
    """
    pair = c.depth * (tile_m + tile_n) * c.itemsize
    host = None if c.host is None else c.host - pair - tile_n * c.itemsize
    return c.device - tile_m * tile_n * c.itemsize - 2 * pair, host


def _floor(c: Case, tile_m: int, tile_n: Any, across: Any, band: Any) -> Any:
    """Return a lower bound on the bytes, as if all memory stored panels and could be divided arbitrarily."""
    size = c.itemsize
    a, b, down = c.m * c.k * size, c.k * c.n * size, -(-c.m // tile_m)
    bands = -(-down // band)
    memory = c.device - tile_m * tile_n * size + (0 if c.host is None else c.host)
    # What can stay in memory: a band of A, a column of B, or the rest of B. Each is (bytes, loads that one
    # resident byte saves).
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
    """Return the fewest bytes of panels over the link, over all divisions of the free memory into slots."""
    fewest: Any = np.inf
    steps = -(-c.k // c.depth)
    for device in _divisions(c, tile_m, tile_n, across, band, steps, free, 2):
        if host_free is None:
            fewest = np.minimum(fewest, _moved(c, tile_m, tile_n, across, band, *device))
        else:
            for host in _divisions(c, tile_m, tile_n, across, band, steps, host_free, 1):
                a, b = (np.maximum(x, y) for x, y in zip(device, host, strict=True))
                fewest = np.minimum(fewest, _moved(c, tile_m, tile_n, across, band, a, b))
    return fewest


def _divisions(
    c: Case, tile_m: int, tile_n: Any, across: Any, band: Any, steps: int, free: Any, base: int
) -> list[tuple[Any, Any]]:
    """Return the divisions of free memory into slots of A and of B that can be the best.

    Memory goes to a band of A, to a column of B and to all of B, in each order that can be useful. Every slot
    for the same one of these saves the same number of bytes. No other division therefore saves more, apart
    from fractions of a slot.
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
                wanted = steps if kind == "column" else across * steps
                more = np.clip(wanted - b, 0, left // b_panel)
                b, left = b + more, left - more * b_panel
        divisions.append((a, b))
    return divisions


def _moved(c: Case, tile_m: int, tile_n: Any, across: Any, band: Any, a_slots: Any, b_slots: Any) -> Any:
    """Return the bytes loaded with these numbers of slots, if every panel still in memory is reused."""
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


@dataclass(frozen=True)
class Triangle:
    """The Gram matrix of an n x k matrix, with panels `depth` deep, as `Case` is for a product."""

    n: int
    k: int
    itemsize: int
    depth: int
    device: int
    host: int | None = None
    max_lines: int = 16


def min_triangle_panels(c: Triangle) -> tuple[float, dict[str, int]]:
    """Return the fewest bytes of panels over the link, and the triangle tiling that attains them.

    The search covers square tiles of every side that gives at most `max_lines` tile rows, and every band of
    tile rows. In each, it tries columns from
    the diagonal to the left and from the left, tiles of a column in one direction and in both, and steps in
    one direction along k and in alternate ones. The panels of a line of tiles, a tile row and the column with
    its number, serve in both roles. All of the memory that one tile leaves stores panels, of which Belady's
    policy evicts one. If the matrix is one tile, this tile needs only the memory of a triangle. As in
    `min_panels`, panels are in the slots of the device or in those of the host, whichever are more.
    """
    best, how = float("inf"), {}
    steps = -(-c.k // c.depth)
    for side in map(int, extents(c.n)):
        lines = -(-c.n // side)
        tiles = lines * (lines + 1) // 2
        if lines > c.max_lines:
            break
        tile = (c.n * (c.n + 1) // 2 if lines == 1 else side * side) * c.itemsize
        panel = side * c.depth * c.itemsize
        slots = (c.device - tile) // panel
        if slots < (2 if lines == 1 else 4):
            continue
        if c.host is not None:
            slots = max(slots, c.host // panel)
        heights = [min(side, c.n - line * side) for line in range(lines)]
        # A tile finds at most `slots` of its panels cached, and every panel is loaded once.
        passes = 2 * tiles - lines - (tiles - 1) * min(2.0, slots / steps)
        if max(lines, passes) * heights[-1] * c.k * c.itemsize >= best:
            continue
        bands = [1] if slots >= lines * steps else map(int, extents(lines))
        for band, order in ((band, order) for band in bands for order in range(8)):
            loaded = _evicted(_uses(lines, band, steps, order), slots)
            moved = sum(heights[line] * min(c.depth, c.k - step * c.depth) for line, step in loaded)
            if moved * c.itemsize < best:
                best, how = float(moved * c.itemsize), {"side": side, "band": band, "order": order}
    return best, how


def _uses(lines: int, band: int, steps: int, order: int) -> list[tuple[int, int]]:
    """List the panels, each a line and a step, in the order in which the tiles of a triangle use them."""
    from_diagonal, turns, alternates = order & 1, order & 2, order & 4
    tiles, down = [], True
    for top in range(0, lines, band):
        bottom = min(top + band, lines)
        left = range(top)[:: -1 if from_diagonal else 1]
        for col in (*left, *range(top, bottom)):
            rows = range(max(top, col), bottom)
            tiles += [(row, col) for row in (rows if down or not turns else rows[::-1])]
            down = not down
    found = []
    for row, col in tiles:
        backwards = alternates and (row + col) % 2
        for step in range(steps)[:: -1 if backwards else 1]:
            found += [(line, step) for line in dict.fromkeys((row, col))]
    return found


def _evicted(uses: list[tuple[int, int]], slots: int) -> list[tuple[int, int]]:
    """Return the panels that are loaded, in order, with Belady's policy in `slots` slots."""
    never = len(uses)
    following, later = [never] * never, dict[tuple[int, int], int]()
    for position in range(never - 1, -1, -1):
        following[position] = later.get(uses[position], never)
        later[uses[position]] = position
    cached, heap, loaded = dict[tuple[int, int], int](), list[tuple[int, tuple[int, int]]](), []
    for position, panel in enumerate(uses):
        if panel not in cached:
            loaded.append(panel)
            while len(cached) >= slots:
                next_use, victim = heappop(heap)
                if cached.get(victim) == -next_use:
                    del cached[victim]
        cached[panel] = following[position]
        heappush(heap, (-following[position], panel))
    return loaded
