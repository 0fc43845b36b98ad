"""Data for drawing a run: rows for concurrent operations, rates over time, finishing times of tiles."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from oocgemm.timeline.metrics import length, union
from oocgemm.timeline.spans import LANES, Span, Timeline

# Kinds of operations in the order of data flow. If an operation waited for one of an earlier kind, it uses
# the data of that one. Otherwise it waited for the other to release a buffer.
FLOW = ("read", "upload", "prepare", "multiply", "finish", "download", "write")


def lanes_of(spans: Iterable[Span]) -> list[str]:
    """Return the lanes of these spans, in the order of data flow."""
    used = {span.lane for span in spans}
    return [*(lane for lane in LANES if lane in used), *sorted(used.difference(LANES))]


def rows(spans: Sequence[Span], *, exact: bool = False) -> list[int]:
    """Return for each span the row of its lane on which it is drawn.

    A span gets the first row that is free when it starts, so that no two spans of a row overlap. Times from a
    device's clock are slightly inexact. Unless `exact` is set, a span may therefore overlap the one before it
    by 5% of its own length.
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

    Spans with flops count in flop/s, all others in bytes per second. The flops or bytes of a span are spread
    evenly over its duration. `wall` is the length of the run in nanoseconds.
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
    """Return the share of the time from `since` to `until` in which each lane was busy.

    Times are in nanoseconds. The lanes are in the order of data flow.
    """
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
    """Return the highest rate that each lane can reach, and whether that rate was measured.

    The rate comes from the calibration in the header, or else from the plan's machine model. Lanes without a
    known rate are left out. Rates are in flop/s for compute and in bytes per second for all other lanes.
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
