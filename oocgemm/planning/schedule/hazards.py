"""Derives every wait of a schedule from what its operations read and write, and checks schedules.

For two operations in program order that touch overlapping regions of a slot, the later one waits

- RAW: reads what the earlier one wrote,
- WAR: overwrites what the earlier one still reads,
- WAW: overwrites what the earlier one writes.

That is all there is: no wait is written by hand anywhere in this project.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Generic, TypeVar

from oocgemm.errors import ScheduleError
from oocgemm.planning.schedule.operations import Kind, Operation, Schedule
from oocgemm.planning.schedule.slots import Slot, Tier
from oocgemm.planning.schedule.traversal import step_order
from oocgemm.planning.tiling import Span, Tile

T = TypeVar("T")

# Streams whose operations run one after the other in program order. Reads and writes of the stores need not.
IN_ORDER = frozenset({"h2d", "h2d-c", "prepare", "compute", "d2h"})


# An access to elements of a slot: from, to, by which operation, on which stream, whether it writes.
_Access = tuple[int, int, T, str, bool]


class HazardTracker(Generic[T]):
    """Walks a schedule in program order and says which earlier operations each one must wait for.

    Operations are represented by tokens of the caller's choice: indices in tests, completions in the
    executor, finishing times in the simulation. It remembers, for each slot, the accesses that nothing has
    overwritten or overtaken since: its memory is bounded by the slots.
    """

    def __init__(self) -> None:
        self._accesses: defaultdict[Slot, list[_Access[T]]] = defaultdict(list)

    def admit(self, operation: Operation, token: T) -> list[T]:
        """Tokens of the earlier operations that this one must wait for, in program order."""
        waits: list[T] = []
        stream = operation.stream
        in_order = stream in IN_ORDER
        # Flat on purpose: this is done for every operation of a run, while it runs.
        for slot, start, stop in operation.reads:
            kept = []
            for access in self._accesses[slot]:
                begin, end, other, its_stream, writes = access
                if writes:
                    if begin < stop and start < end:
                        waits.append(other)
                    kept.append(access)
                # A read of the same stream ends before this one, and need not be waited for beside it.
                elif not in_order or its_stream != stream or begin < start or stop < end:
                    kept.append(access)
            kept.append((start, stop, token, stream, False))
            self._accesses[slot] = kept
        for slot, start, stop in operation.writes:
            kept = []
            for access in self._accesses[slot]:
                begin, end, other, _, _ = access
                if begin < stop and start < end and other is not token and other not in waits:
                    waits.append(other)
                if begin < start or stop < end:  # not all of it is overwritten
                    kept.append(access)
            kept.append((start, stop, token, stream, True))
            self._accesses[slot] = kept
        return waits


def waits_of(operations: Iterable[Operation]) -> list[tuple[Operation, list[int]]]:
    """Every operation with the indices of those it waits for. For tests and pictures: it is all in memory."""
    tracker: HazardTracker[int] = HazardTracker()
    return [(operation, tracker.admit(operation, index)) for index, operation in enumerate(operations)]


def verify(schedule: Schedule, chunks: tuple[int, int] = (1, 1)) -> None:
    """Check in program order that every operation finds what it needs, and that C comes out whole.

    Follows symbolically what each slot holds: an Upload must find in its host slot the block that it names, a
    Multiply the panels of its tile and step and an accumulator with all earlier steps, a Write every step. No two
    Writes may share one of C's `chunks`.
    Together with the derived waits, which make any legal order equivalent to program order, this proves the
    schedule. Raises `ScheduleError`.
    """
    held: dict[Slot, object] = {}
    sums: dict[Slot, dict[Span, tuple[Tile, set[int]]]] = defaultdict(dict)
    written: dict[Span, list[Span]] = defaultdict(list)
    grid, extents = schedule.grid, (schedule.grid.m, schedule.grid.n)
    for op in schedule:
        steps = set(step_order(op.tile, grid.steps, grid.ramp))
        for region in (*op.reads, *op.writes):
            _require(region.slot.index < schedule.slots.count(region.slot.tier, region.slot.operand), op)
        block = (op.operand, op.block)
        match op.kind:
            case Kind.READ:
                if (
                    op.operand != "C"
                    or op.writes[0].slot.operand != "C"
                    or op.writes[0].slot.tier is Tier.HOST
                ):
                    held[op.writes[0].slot] = block
            case Kind.UPLOAD:
                _require(held.get(op.reads[0].slot) == block, op)
                if op.operand != "C" or op.writes[0].slot.operand == "D":
                    held[op.writes[0].slot] = block
            case Kind.PREPARE:
                for region, panel in zip(op.reads, (("A", (op.m, op.k)), ("B", (op.k, op.n))), strict=True):
                    _require(held.get(region.slot) == panel, op)
                held[op.writes[0].slot] = op.tile, op.step
            case Kind.MULTIPLY:
                for region in op.reads:
                    if region.slot.operand in ("A", "B"):
                        whole = schedule.grid.rows(op.tile[0])
                        expected = {"A": (whole, op.k), "B": (op.k, op.n)}[region.slot.operand]
                        _require(held.get(region.slot) == (region.slot.operand, expected), op)
                    elif region.slot.operand == "P":
                        _require(held.get(region.slot) == (op.tile, op.step), op)
                for strip in _strips_in(schedule, op):
                    if op.first:
                        sums[op.writes[0].slot][strip] = op.tile, set()
                    tile, done = sums[op.writes[0].slot].get(strip, (None, set()))
                    _require(tile == op.tile and op.step not in done, op)
                    done.add(op.step)
            case Kind.FINISH | Kind.DOWNLOAD:
                for region in op.reads:
                    if region.slot.operand == "C" and region.slot.tier is Tier.DEVICE:
                        _require(sums[region.slot].get(op.m) == (op.tile, steps), op)
                held[op.writes[0].slot] = ("C", op.block)
            case Kind.WRITE:
                source = op.reads[0].slot
                if source.tier is Tier.DEVICE and source.operand == "C":
                    _require(sums[source].get(op.m) == (op.tile, steps), op)
                else:
                    _require(held.get(source) == block, op)
                written[op.n].append(op.m)
                for (start, stop), chunk, extent in zip(op.block, chunks, extents, strict=True):
                    _require(start % chunk == 0 and (stop % chunk == 0 or stop == extent), op)
            case _:
                raise ScheduleError(f"no rule for {op}")
    expected_area = sum(_area(schedule, tile) for tile in schedule.tiles)
    area = sum((n[1] - n[0]) * (m[1] - m[0]) for n, spans in written.items() for m in spans)
    disjoint = all(a[1] <= b[0] for spans in written.values() for a, b in _pairs(sorted(spans)))
    if area != expected_area or not disjoint:
        raise ScheduleError(f"{area} elements of C are written instead of {expected_area}, or some twice")


def _require(condition: bool, op: Operation) -> None:
    if not condition:
        raise ScheduleError(f"{op}: a slot it uses does not hold what it needs")


def _strips_in(schedule: Schedule, op: Operation) -> Iterator[Span]:
    """The strips that a Multiply adds to: one, or all of its tile."""
    size = schedule.slots.strip
    for start in range(op.m[0], op.m[1], size):
        yield start, min(start + size, op.m[1])


def _area(schedule: Schedule, tile: tuple[int, int]) -> int:
    (m0, m1), (n0, n1) = schedule.grid.rows(tile[0]), schedule.grid.cols(tile[1])
    return (m1 - m0) * (n1 - n0)


def _pairs(spans: list[Span]) -> Iterable[tuple[Span, Span]]:
    return pairwise(spans)
