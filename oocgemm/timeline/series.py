"""Series for drawing a run: rows for concurrent operations, rates over time, finishing times of tiles."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from oocgemm.timeline.metrics import length, union
from oocgemm.timeline.spans import LANES, Span, Timeline

# Kinds in the order of data flow. A wait for an earlier kind is a wait for data; any other wait is for a free
# slot.
FLOW = ("read", "upload", "prepare", "multiply", "finish", "download", "write")


def lanes_of(spans: Iterable[Span]) -> list[str]:
    """Return the lanes of these spans, in the order of data flow."""
    used = {span.lane for span in spans}
    return [*(lane for lane in LANES if lane in used), *sorted(used.difference(LANES))]


def rows(spans: Sequence[Span], *, exact: bool = False) -> list[int]:
    """Return for each span its row in its lane: the first free row, so that no two spans overlap.

    Device clocks are not exact. Unless `exact` is set, a span may overlap the one before it by 5% of its own
    length.
    """
    free: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
    found = [0] * len(spans)
    for index in sorted(range(len(spans)), key=lambda i: (spans[i].start, spans[i].end)):
        span = spans[index]
        ends = free[span.device, span.lane]
        begins = span.start + (0 if exact else (span.end - span.start) // 20)
        row = next((r for r, end in enumerate(ends) if end <= begins), len(ends))
        ends[row : row + 1] = [span.end]
        found[index] = row
    return found


def rates(spans: Iterable[Span], wall: int, bins: int) -> list[float]:
    """Return the rate in each of `bins` equal parts of the run.

    Spans with flops count in flop/s, all others in bytes per second.
    The amount of a span is spread evenly over the span. `wall` is in nanoseconds.
    """
    moved = [0.0] * bins
    if wall <= 0:
        return moved
    width = wall / bins
    for span in spans:
        amount = span.flops or span.bytes
        first, last = (min(bins - 1, int(t / width)) for t in (span.start, span.end))
        if first == last:
            moved[first] += amount
            continue
        per_ns = amount / (span.end - span.start)
        moved[first] += per_ns * ((first + 1) * width - span.start)
        moved[last] += per_ns * (span.end - last * width)
        for b in range(first + 1, last):
            moved[b] += per_ns * width
    return [amount / width * 1e9 for amount in moved]


def utilisation(spans: Sequence[Span], since: int, until: int) -> dict[str, float]:
    """Return each lane's busy share of the time from `since` to `until`, lanes in the order of data flow."""
    busy: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for span in spans:
        busy[span.lane].append((max(span.start, since), min(span.end, until)))
    return {lane: length(union(busy[lane])) / max(1, until - since) for lane in lanes_of(spans)}


def finish_times(spans: Iterable[Span]) -> dict[tuple[int, int], int]:
    """Return for each tile the end of its last Multiply or Write, in nanoseconds."""
    ends: dict[tuple[int, int], int] = {}
    for span in spans:
        if span.kind in ("multiply", "write"):
            ends[span.tile] = max(ends.get(span.tile, 0), span.end)
    return ends


def rate_limits(timeline: Timeline) -> dict[str, tuple[float, bool]]:
    """Return the rate limit of each lane, and whether it was measured.

    The limit comes from the calibration in the header, else from the plan's machine model. Lanes without
    either are left out. Rates are in flop/s for compute and in bytes per second for all other lanes.
    """
    calibrated = timeline.header.get("rates") or {}
    model: dict[str, Any] = timeline.header.get("plan", {}).get("model", {})
    problem = timeline.header.get("plan", {}).get("problem", {})
    emulated = "emulated " if problem.get("compute") == "emulated" else ""
    kernel = model.get("kernels", {}).get(f"{emulated}{problem.get('a_dtype')}", {}).get("peak")
    measured = {part for part in ("h2d", "prepare", "d2h", "decode") if model.get("calibrated")}
    measured |= {part for part in ("read", "write") if model.get("storage_calibrated")}
    known: dict[str, tuple[float, bool]] = {}
    for lane, part in ((lane, "kernel" if lane == "compute" else lane) for lane in LANES):
        rate = calibrated.get(part) or (kernel if part == "kernel" else model.get(part))
        if rate:
            known[lane] = float(rate), part in calibrated or part in measured
    return known
