"""What pictures of a run are drawn from: rows for operations side by side, rates over time, when tiles were done."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from oocgemm.timeline.metrics import length, union
from oocgemm.timeline.spans import LANES, Span, Timeline

# The order in which data flow from kind to kind: a wait along it is for what the operation uses, any other for a slot.
FLOW = ("read", "upload", "prepare", "multiply", "finish", "download", "write")


def lanes_of(spans: Iterable[Span]) -> list[str]:
    """The lanes that spans are on, in the order data flow."""
    there = {span.lane for span in spans}
    return [*(lane for lane in LANES if lane in there), *sorted(there.difference(LANES))]


def rows(spans: Sequence[Span], *, exact: bool = False) -> list[int]:
    """For each span the row of its lane it is drawn in: the first that is free, so that none covers another. Clocks of
    devices are not exact: unless `exact`, what overlaps by a little counts as one after the other."""
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
    """Units per second in equal parts of the run: bytes, or flops where spans have any."""
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
    """The share of the time between two instants in which each lane was busy, in the order data flow."""
    busy: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for span in spans:
        busy[span.lane].append((max(span.start, since), min(span.end, until)))
    return {lane: length(union(busy[lane])) / max(1, until - since) for lane in lanes_of(spans)}


def finished(spans: Iterable[Span]) -> dict[tuple[int, int], int]:
    """When the last operation of each tile that brought a part of C to its store, or computed it, ended."""
    done: dict[tuple[int, int], int] = {}
    for span in spans:
        if span.kind in ("multiply", "write"):
            done[span.tile] = max(done.get(span.tile, 0), span.end)
    return done


def limits(timeline: Timeline) -> dict[str, tuple[float, bool]]:
    """The rate of each lane that a calibration, or else the cost model, knows, and whether it was measured."""
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
