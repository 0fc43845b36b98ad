"""Data for drawing a run: rows of concurrent operations, rates over time, ends of tiles, the last seconds."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from oocgemm.timeline.activities import COMPUTE, kernels_of, shares_between, units_of, verdict
from oocgemm.timeline.spans import LANES, Span, Timeline, length, union

# Kinds of operations in the order of data flow. An operation waits for an earlier kind to use its data: a
# Multiply needs an uploaded panel. It waits for a later kind to reuse a slot: a Read may overwrite a panel
# only after the Upload of that panel.
FLOW = ("read", "upload", "prepare", "multiply", "finish", "download", "write")
# `recent_activity` describes the last WINDOW_NS nanoseconds. It needs the last MAX_RECENT operations.
WINDOW_NS, MAX_RECENT = 5_000_000_000, 1000


def lanes_of(spans: Iterable[Span]) -> list[str]:
    """Return the lanes that occur in these spans, in the order of data flow."""
    used = {span.lane for span in spans}
    return [*(lane for lane in LANES if lane in used), *sorted(used.difference(LANES))]


def rows(spans: Sequence[Span], *, exact: bool = False) -> list[int]:
    """Return for each span the number of the row on which it is drawn, counted from 0 within its lane.

    A span gets the first row that is free when it starts. If `exact` is set, spans of one row never overlap.
    Otherwise, they may overlap by 5% of the later span: clocks of devices are inexact, and consecutive spans
    should be drawn on one row.
    """
    free: defaultdict[tuple[int, int, str], list[int]] = defaultdict(list)
    found = [0] * len(spans)
    for index in sorted(range(len(spans)), key=lambda i: (spans[i].start, spans[i].end)):
        span = spans[index]
        ends = free[span.worker, span.device, span.lane]
        begins = span.start + (0 if exact else (span.end - span.start) // 20)
        row = next((r for r, end in enumerate(ends) if end <= begins), len(ends))
        ends[row : row + 1] = [span.end]
        found[index] = row
    return found


def rates(spans: Iterable[Span], wall: int, bins: int) -> list[float]:
    """Return the mean rate of these spans in each of `bins` equal parts of the run.

    Rates are in flop/s if the spans have flops, and in bytes per second otherwise. The flops or bytes of a
    span are spread evenly over its duration. `wall` is the length of the run in nanoseconds.
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
    """Return for each lane the share of the time from `since` to `until` in which it was busy.

    Both times are in nanoseconds. The lanes are in the order of data flow.
    """
    busy: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for span in spans:
        busy[span.lane].append((max(span.start, since), min(span.end, until)))
    return {lane: length(union(busy[lane])) / max(1, until - since) for lane in lanes_of(spans)}


def finish_times(spans: Iterable[Span]) -> dict[tuple[int, int], int]:
    """Return when the last Multiply or Write of each tile ended, in nanoseconds since the run began."""
    ends: dict[tuple[int, int], int] = {}
    for span in spans:
        if span.kind in ("multiply", "write"):
            ends[span.tile] = max(ends.get(span.tile, 0), span.end)
    return ends


def rate_limits(timeline: Timeline) -> dict[str, tuple[float, bool]]:
    """Return for each lane the highest rate that it can reach, and whether that rate was measured.

    Rates are in flop/s for the lane "compute" and in bytes per second for all others. A calibrated
    rate is preferred to that of the plan's machine model, which may be assumed. A lane without either is
    left out.

    With several devices, the limit of compute is that of all devices together. Other lanes are left out,
    because devices may share a link.
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
    if len(units := units_of(timeline)) > 1:
        count = len(kernels_of(timeline, units))
        return {lane: (count * rate, sure) for lane, (rate, sure) in known.items() if lane == COMPUTE}
    return known


def recent_activity(
    recent: Sequence[Span], *, multiplied: bool, finish: str = "accumulator"
) -> tuple[dict[str, float], str]:
    """Return for each lane the share of the last seconds in which it was busy, and what limited the run.

    The second result is a text such as ``compute-bound, 73.4%; largest stall: write 8.4%``; "" if that is
    unknown.

    Args:
        recent: the last operations to end, at most `MAX_RECENT`, the one that ended first before the others.
        multiplied: whether all multiplications have ended. Until then, one may be running, which is not yet
            in `recent` and would look like a stall. So what limited the run is computed only up to the end
            of the last Multiply in `recent`.
        finish: the cause of exposed time while a Finish ran (`oocgemm.timeline.activities.finish_cause`).
    """
    # If `recent` is full, it lacks older operations. The time before `known` is left out, since the lanes of
    # those operations would look idle.
    known = recent[0].end if len(recent) == MAX_RECENT else 0
    until = max(span.end for span in recent)
    since = max(0, until - WINDOW_NS, known)
    busy = utilisation([span for span in recent if span.end > since], since, until)
    if not multiplied:
        until = max((span.end for span in recent if span.kind == "multiply"), default=0)
    since = max(0, until - WINDOW_NS, known)
    if until <= since:
        return busy, ""
    found = verdict(shares_between(recent, since, until, finish))
    return busy, "; ".join(filter(None, (found.headline, found.beside)))
