"""What a distributed run shows of its progress, and the timeline of all its workers."""

from collections.abc import Iterable
from dataclasses import replace

from oocgemm.errors import InputError
from oocgemm.planning import Kind, Lane, Plan
from oocgemm.planning.tiling import Tile
from oocgemm.timeline import Recorder, Span, read_log
from oocgemm.timeline.worker_log import WorkerLog


def tile_span(plan: Plan, tile: Tile, now: int) -> Span:
    """Return a span for a whole tile that has just been finished, for progress callbacks.

    It has the flops of the tile and its bytes in C. It has no length, since another process did the work.
    """
    flops = plan.problem.step_flops(1, plan.grid.elements(tile), plan.problem.depth)
    place = Kind.WRITE.value, "C", Lane.WRITE.value, "tile", 0
    return Span(0, *place, tile, 0, now, now, plan.tile_bytes(tile), flops)


def add_logs(log: Recorder, logs: Iterable[WorkerLog]) -> None:
    """Add the spans of all attempts to the log of the run, whose header must have the field ``started``."""
    for facts in logs:
        try:
            found = read_log(facts.path)
        except InputError:  # the process died before it began its log
            continue
        shift = round((found.header["started"] - log.header["started"]) * 1e9) - facts.offset_ns
        ids = {span.id: log.spans + at for at, span in enumerate(found.spans)}
        for span in found.spans:
            start, end = (max(0, time + shift) for time in (span.start, span.end))
            waits = tuple(ids[wait] for wait in span.waits if wait in ids)
            log.add(replace(span, id=ids[span.id], start=start, end=end, waits=waits))
