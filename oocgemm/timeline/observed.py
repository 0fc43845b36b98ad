"""Compute from the spans of a run the rates that the machine reached, in the terms of the machine model.

The model prices an operation as ``amount / rate * factor + fixed``: `factor` follows from shapes and layouts,
`fixed` is a latency. So a rate is computed from the time that operations took by inverting the price. Pricing
an operation with a rate and with half that rate yields both terms; no formula is repeated here.

Operations of one kind may overlap. Their rate is that of all of them together while at least one runs. The
run is divided into bins of time, and the median over the bins is taken, so that a short disturbance does not
count.

Not every operation shows what the machine can do. These are left out:

- The first read into a slot, which also faults pages in. It is the read that waits for nothing.
- Operations that the model expects to be much slower than the rate, because they are small or oddly shaped.
- On a machine whose lanes share the CPU cores, operations during which another lane ran.
- Copies of arrays that are not pinned, during which copies in the other direction ran: they share threads.
- Prepares and Multiplies of a GPU that ran at the same time: they share its cores.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from oocgemm.planning import Kind, Operation, Plan, Region, Slot, Tier
from oocgemm.planning.cost.footprint import extents
from oocgemm.planning.cost.rates import scaled, value_of
from oocgemm.planning.cost.simulate import duration
from oocgemm.planning.tiling import Layout
from oocgemm.timeline.intervals import Interval, length, union
from oocgemm.timeline.spans import Span

# An observation needs this many operations, which take this many nanoseconds together.
MIN_OPERATIONS, MIN_BUSY = 4, 10_000_000
# Maximum number of bins of time that a run is divided into.
BINS = 16
# Minimum share of the rate that the model expects of an operation, for the operation to inform about it.
MIN_EFFICIENCY = 0.5
# Maximum share of an operation's time in which a lane may run that shares what it runs on.
MAX_OVERLAP = 0.1
COPIES, ON_CORES = ("h2d", "d2h"), ("prepare", "compute")  # lanes of a GPU that share what they run on
# Kernel rates are only observed with these precisions: the model has no rates for the others.
_COMPUTES = ("native", "emulated")


@dataclass(frozen=True, slots=True)
class Observation:
    """A rate that a run reached: bytes per second, or flop/s.

    `busy` is the share of the time between the first and the last operation in which at least one ran.
    """

    rate: float
    busy: float


def observed_rates(
    plan: Plan, spans: Iterable[Span], places: Mapping[str, str], flush: float = 0.0, kernel: bool = True
) -> dict[tuple[str, str], Observation]:
    """Compute the rates that a run reached.

    Args:
        plan: the plan of the run. Its machine model prices the operations.
        spans: the spans of the run, or some of them.
        places: per operand, the id of the file system or, for operands that are decoded, of the codec.
        flush: seconds from the end of the last operation until C was durable, which count as writing.
        kernel: whether the products were computed by the library whose rates the model has.

    Returns:
        The observed rates by name and place. The name is that of a field of `MachineModel`, or of a rate in
        `MachineModel.kernels`. The place is "" for rates that do not depend on one. A rate is left out if the
        run does not show it.
    """
    found: defaultdict[tuple[str, str], list[_Priced]] = defaultdict(list)
    prices: dict[tuple[str, str], _Price | None] = {}
    spans = [span for span in spans if span.end > span.start]
    if plan.machine.shares_cores:
        spans = list(_alone(spans))
    else:
        direct = {operand for operand in "ABC" if plan.is_direct(operand)}
        alone = [span for span in _alone(_of(spans, COPIES)) if span.operand not in direct]
        alone += _alone(_of(spans, ON_CORES))
        others = [
            s for s in spans if s.lane not in COPIES + ON_CORES or (s.lane in COPIES and s.operand in direct)
        ]
        spans = others + alone
    for span in spans:
        which = span.kind, span.operand
        if which not in prices:
            prices[which] = _price(plan, Kind(span.kind), span.operand, places, kernel)
        price, amount = prices[which], span.flops or span.bytes
        if price is None or not amount or price.only not in (None, amount):
            continue
        if span.kind == "read" and not span.waits:
            continue
        work = price.per_unit * amount
        if amount / price.rate >= MIN_EFFICIENCY * (work + price.fixed):
            found[price.key].append(_Priced(span.start, span.end, work, price.fixed, price.rate))
    observations = {key: _observation(priced) for key, priced in found.items()}
    size = plan.coverage.elements * plan.problem.itemsizes["C"]
    return {
        key: replace(one, rate=size / (size / one.rate + flush)) if key[0] == "write" else one
        for key, one in observations.items()
        if one is not None
    }


@dataclass(frozen=True, slots=True)
class _Price:
    """The modelled seconds of an operation: `per_unit` * (bytes or flops) + `fixed`, at the rate `rate`.

    `only` is the number of bytes of the operations to which this applies; None if it applies to any number.
    """

    key: tuple[str, str]
    rate: float
    per_unit: float
    fixed: float
    only: int | None


@dataclass(frozen=True, slots=True)
class _Priced:
    """When an operation ran, in nanoseconds, and its modelled seconds: `work` at the rate `rate`, `fixed`."""

    start: int
    end: int
    work: float
    fixed: float
    rate: float


def _price(plan: Plan, kind: Kind, operand: str, places: Mapping[str, str], kernel: bool) -> _Price | None:
    """Return the price of an operation of a kind; None if no single rate of the model determines it."""
    if plan.problem.gram and kind not in (Kind.READ, Kind.UPLOAD):
        return None  # strips differ in width, and some are written twice
    name, place = _rate_of(plan, kind, operand, places)
    if not name or (kind is Kind.MULTIPLY and not (kernel and plan.problem.compute in _COMPUTES)):
        return None
    setting, machine = plan.setting, plan.machine
    operation = _typical(plan, kind, operand)
    amount = operation.flops or operation.bytes
    once = duration(operation, setting)
    # At half the rate, no other rate can be the slower one if it was not before.
    slow = duration(operation, replace(setting, machine=scaled(machine, {name: 0.5})))
    variable = slow - once
    if variable <= 0 or not amount:
        return None
    # A panel at the edge may have short rows, which take longer per byte.
    only = amount if kind in (Kind.READ, Kind.UPLOAD) and operand != "C" else None
    return _Price((name, place), value_of(machine, name), variable / amount, max(0.0, once - variable), only)


def _rate_of(plan: Plan, kind: Kind, operand: str, places: Mapping[str, str]) -> tuple[str, str]:
    """Return the name and the place of the rate that determines an operation's time; "" if none does."""
    layouts = plan.layouts
    layout = {"A": layouts.a, "B": layouts.b, "C": layouts.c}.get(operand, Layout())
    if kind in (Kind.READ, Kind.WRITE) and layout.requests:
        return "remote", places.get(operand, "")
    if kind is Kind.READ and not layout.in_memory:
        return ("decode" if layout.decode_bytes else "read"), places.get(operand, "")
    if kind in (Kind.UPLOAD, Kind.DOWNLOAD) and plan.slots.streams(operand) and not plan.is_direct(operand):
        if layout.page_cached and not layout.decoded:
            return "read", places.get(operand, "")
        # The rates of copies back to pageable memory and of decoding on the GPU are not in the model.
        return ("memory", "") if kind is Kind.UPLOAD and not layout.decoded else ("", "")
    # The rate of writes that encode is not in the model.
    if kind is Kind.WRITE and not (layout.in_memory or layout.encodes or layout.encoded):
        return "write", places.get(operand, "")
    simple = {
        Kind.READ: "memory",
        Kind.UPLOAD: "h2d",
        # How many bytes of a C that the GPU compresses are copied is not known.
        Kind.DOWNLOAD: "" if layout.encoded else "d2h",
        Kind.PREPARE: "prepare" if plan.problem.planes else "",  # transforms have another rate
        Kind.MULTIPLY: plan.problem.rate,
    }
    return simple.get(kind, ""), ""


def _typical(plan: Plan, kind: Kind, operand: str) -> Operation:
    """Return an operation of a full step, panel or strip, whose slots have no meaning."""
    problem, (m, n, k) = plan.problem, extents(plan.problem, plan.tile)
    rows, cols, depth, nothing = (0, m), (0, n), (0, k), (0, 0)
    sizes = problem.itemsizes
    panel_a = Region(Slot(Tier.DEVICE, "A", 0), 0, m * k)
    match kind, operand:
        case (Kind.MULTIPLY, _):
            flops = problem.step_flops(m, n, k)
            return Operation(kind, operand, (0, 0), 0, (panel_a,), (), rows, cols, depth, flops=flops)
        case (Kind.PREPARE, _):
            size = problem.prepared_bytes(m, n, k)
            return Operation(kind, operand, (0, 0), 0, (), (), rows, cols, depth, size)
        case (_, "A"):
            return Operation(kind, "A", (0, 0), 0, (), (), rows, nothing, depth, m * k * sizes["A"])
        case (_, "B"):
            return Operation(kind, "B", (0, 0), 0, (), (), nothing, cols, depth, k * n * sizes["B"])
    strip = min(m, plan.slots.strip)
    return Operation(kind, "C", (0, 0), 0, (), (), (0, strip), cols, nothing, strip * n * sizes["C"])


def _of(spans: Iterable[Span], lanes: Collection[str]) -> list[Span]:
    return [span for span in spans if span.lane in lanes]


def _alone(spans: Sequence[Span]) -> Iterator[Span]:
    """Yield the spans during which no other lane ran, for more than `MAX_OVERLAP` of the span."""
    lanes = {span.lane for span in spans}
    others = {lane: union((s.start, s.end) for s in spans if s.lane != lane) for lane in lanes}
    for span in spans:
        if _covered(others[span.lane], span.start, span.end) <= MAX_OVERLAP * (span.end - span.start):
            yield span


def _covered(merged: Sequence[Interval], start: int, end: int) -> int:
    """Return how much of the time from `start` to `end` disjoint, ascending intervals cover."""
    total, at = 0, max(0, bisect_left(merged, (start, start)) - 1)
    while at < len(merged) and merged[at][0] < end:
        total += max(0, min(end, merged[at][1]) - max(start, merged[at][0]))
        at += 1
    return total


def _observation(priced: Sequence[_Priced]) -> Observation | None:
    """Return the rate of operations: that of the model, over the median of the bins' slowdowns."""
    merged = union((p.start, p.end) for p in priced)
    busy = length(merged)
    if len(priced) < MIN_OPERATIONS or busy < MIN_BUSY:
        return None
    first, last = merged[0][0], merged[-1][1]
    bins = max(1, min(BINS, len(priced) // MIN_OPERATIONS))
    width = (last - first) / bins
    work, fixed, own = [0.0] * bins, [0.0] * bins, [0.0] * bins
    for p in priced:
        for b in range(int((p.start - first) / width), min(bins - 1, int((p.end - first) / width)) + 1):
            inside = min(p.end, first + (b + 1) * width) - max(p.start, first + b * width)
            share = max(0.0, inside) / (p.end - p.start)
            work[b] += share * p.work
            fixed[b] += share * p.fixed
            own[b] += max(0.0, inside) / 1e9
    slowdowns = []
    for b in range(bins):
        taken = _covered(merged, round(first + b * width), round(first + (b + 1) * width)) / 1e9
        if taken * bins < 0.1 * busy / 1e9 or not work[b]:
            continue
        # Where operations overlap, their latencies do too.
        left = taken - fixed[b] * taken / own[b]
        if left > 0:
            slowdowns.append(left / work[b])
    if not slowdowns:
        return None
    return Observation(priced[0].rate / median(slowdowns), busy / (last - first))
