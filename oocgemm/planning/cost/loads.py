"""Estimate with formulas how many bytes of panels of A and B a candidate loads."""

from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.schedule.operation import Slots
from oocgemm.planning.schedule.placement import Loads
from oocgemm.planning.schedule.traversal import Traversal
from oocgemm.planning.tiling import TileGrid, ceil_div


def estimate_loads(problem: GemmProblem, grid: TileGrid, slots: Slots, traversal: Traversal) -> Loads:
    """Estimate the bytes that `Schedule.loads` counts, from the fraction of uses that hit a cached panel."""
    down, across = grid.shape
    if down * across == 0:
        return Loads(0, 0, 0, 0)
    a = problem.m * problem.depth * problem.itemsizes["A"]
    b = problem.depth * problem.n * problem.itemsizes["B"]
    steps = max(1.0, problem.depth / max(1, grid.tile.k))
    a_up, b_up = _times_loaded(down, across, steps, slots.a, slots.b, traversal)
    if slots.unified:
        return Loads(a * a_up, b * b_up, a * a_up, b * b_up)
    a_read, b_read = _times_loaded(down, across, steps, slots.host_a, slots.host_b, traversal)
    return Loads(a * a_up, b * b_up, a * min(a_up, a_read), b * min(b_up, b_read))


def _times_loaded(
    down: int, across: int, steps: float, a_slots: int, b_slots: int, traversal: Traversal
) -> tuple[float, float]:
    """Estimate how many times op(A) and op(B) are loaded into a cache of `a_slots` and `b_slots` panels.

    `steps` is the number of panels along k. If the last one is thinner than the others, it counts as a
    fraction of a panel, since the panels that stay cached are full ones.
    """
    if traversal.axis == 1:
        b, a = _times_loaded(across, down, steps, b_slots, a_slots, traversal.along_rows)
        return a, b
    band = min(traversal.band, down)
    bands = ceil_div(down, band)
    # The hit rate depends on how many panels of the operand are used before the same ones are used again:
    # - A, from one tile column to the next: the panels of all tile rows of the band, band * steps.
    # - B, from one tile row to the next within a band: the panels of one tile column, `steps`.
    # - B, from one band to the next: the panels of all tile columns, across * steps.
    a = 1 + (across - 1) * (1 - _hit_rate(a_slots, band * steps))
    b = 1 + (bands - 1) * (1 - _hit_rate(b_slots, across * steps))
    return a, b + bands * (band - 1) * (1 - _hit_rate(b_slots, steps))


def _hit_rate(slots: int, panels: float) -> float:
    """Return the fraction of uses that find their panel in a cache with `slots` slots.

    The same `panels` panels are used again and again, alternately forwards and backwards. At each turn, the
    cached panels are the ones that are used next. The other panels are loaded again.
    """
    return min(1.0, slots / panels)
