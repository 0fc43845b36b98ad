"""What a distributed run shows of its progress."""

from oocgemm.planning import Kind, Lane, Plan
from oocgemm.planning.tiling import Tile
from oocgemm.timeline import Span


def tile_span(plan: Plan, tile: Tile, now: int) -> Span:
    """Return a span for a whole tile that has just been finished, for progress callbacks.

    It has the flops of the tile and its bytes in C. It has no length, since another process did the work.
    """
    flops = plan.problem.step_flops(1, plan.grid.elements(tile), plan.problem.depth)
    place = Kind.WRITE.value, "C", Lane.WRITE.value, "tile", 0
    return Span(0, *place, tile, 0, now, now, plan.tile_bytes(tile), flops)
