"""Derive every wait of a schedule from the regions that its operations read and write, and check schedules.

Of two operations in program order that access overlapping regions of a slot, the later one waits if it

- reads what the earlier one writes (RAW),
- overwrites what the earlier one reads (WAR), or
- overwrites what the earlier one writes (WAW).

No wait is written by hand anywhere in this project.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Generic, TypeVar

from oocgemm.errors import ScheduleError
from oocgemm.planning.schedule.operations import Kind, Operation, Schedule
from oocgemm.planning.schedule.slots import Slot, Tier
from oocgemm.planning.schedule.traversal import step_order
from oocgemm.planning.tiling import Range, Tile, length

T = TypeVar("T")

# Streams whose operations run one after another in program order. Reads and writes of stores may run in any
# order.
IN_ORDER = frozenset({"h2d", "h2d-c", "prepare", "compute", "d2h"})


# An access to a region: start, stop, the operation's token, its stream, and whether it writes.
_Access = tuple[int, int, T, str, bool]


class HazardTracker(Generic[T]):
    """Derive waits from operations that are admitted in program order.

    The caller chooses the tokens that stand for operations: indices in tests, completions in the executor,
    end times in the simulation. The tracker stores, per slot, the accesses that no later access has
    superseded. Its memory is therefore proportional to the number of slots.
    """

    def __init__(self) -> None:
        self._accesses: defaultdict[Slot, list[_Access[T]]] = defaultdict(list)

    def admit(self, operation: Operation, token: T) -> list[T]:
        """Return the tokens of the earlier operations that this one must wait for, in program order."""
        waits: list[T] = []
        stream = operation.stream
        in_order = stream in IN_ORDER
        # Inlined because it runs for every operation during the run.
        for slot, start, stop in operation.reads:
            kept = []
            for access in self._accesses[slot]:
                begin, end, other, its_stream, writes = access
                if writes:
                    if begin < stop and start < end:
                        waits.append(other)
                    kept.append(access)
                # In a stream that runs in order, an earlier read ends before this one: waiting for this one
                # suffices.
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
                if begin < start or stop < end:  # only a part is overwritten
                    kept.append(access)
            kept.append((start, stop, token, stream, True))
            self._accesses[slot] = kept
        return waits


def waits_of(operations: Iterable[Operation]) -> list[tuple[Operation, list[int]]]:
    """List every operation with the indices of those that it waits for, for small schedules."""
    tracker: HazardTracker[int] = HazardTracker()
    return [(operation, tracker.admit(operation, index)) for index, operation in enumerate(operations)]


def verify(schedule: Schedule, chunks: tuple[int, int] = (1, 1)) -> None:
    """Check that every operation finds its inputs in its slots and that C is written exactly once.

    The check goes through the operations in program order and tracks the contents of each slot symbolically.
    An Upload must find its block in its host slot. A Multiply must find the panels of its tile and step, and
    an accumulator with all earlier steps. A Write must find every step. No two Writes may write to the same
    one of C's `chunks`.

    The derived waits make any legal order equivalent to program order. Together with them, this check proves
    the schedule correct. Raises `ScheduleError`.
    """
    contents: dict[Slot, object] = {}
    sums: dict[Slot, dict[Range, tuple[Tile, set[int]]]] = defaultdict(dict)
    written: dict[Range, list[Range]] = defaultdict(list)
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
                    contents[op.writes[0].slot] = block
            case Kind.UPLOAD:
                _require(contents.get(op.reads[0].slot) == block, op)
                if op.operand != "C" or op.writes[0].slot.operand == "D":
                    contents[op.writes[0].slot] = block
            case Kind.PREPARE:
                for region, panel in zip(op.reads, (("A", (op.m, op.k)), ("B", (op.k, op.n))), strict=True):
                    _require(contents.get(region.slot) == panel, op)
                contents[op.writes[0].slot] = op.tile, op.step
            case Kind.MULTIPLY:
                for region in op.reads:
                    if region.slot.operand in ("A", "B"):
                        whole = schedule.grid.rows(op.tile[0])
                        expected = {"A": (whole, op.k), "B": (op.k, op.n)}[region.slot.operand]
                        _require(contents.get(region.slot) == (region.slot.operand, expected), op)
                    elif region.slot.operand == "P":
                        _require(contents.get(region.slot) == (op.tile, op.step), op)
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
                contents[op.writes[0].slot] = ("C", op.block)
            case Kind.WRITE:
                source = op.reads[0].slot
                if source.tier is Tier.DEVICE and source.operand == "C":
                    _require(sums[source].get(op.m) == (op.tile, steps), op)
                else:
                    _require(contents.get(source) == block, op)
                written[op.n].append(op.m)
                for (start, stop), chunk, extent in zip(op.block, chunks, extents, strict=True):
                    _require(start % chunk == 0 and (stop % chunk == 0 or stop == extent), op)
            case _:
                raise ScheduleError(f"no rule for {op}")
    expected_area = sum(map(grid.elements, schedule.tiles))
    area = sum(length(n) * length(m) for n, ranges in written.items() for m in ranges)
    disjoint = all(a[1] <= b[0] for ranges in written.values() for a, b in pairwise(sorted(ranges)))
    if area != expected_area or not disjoint:
        raise ScheduleError(
            f"{area} elements of C are written instead of {expected_area}, or some are written twice"
        )


def _require(condition: bool, op: Operation) -> None:
    if not condition:
        raise ScheduleError(f"{op}: a slot that it uses does not contain the data that it needs")


def _strips_in(schedule: Schedule, op: Operation) -> Iterator[Range]:
    """List the row ranges of the strips that a Multiply adds to: one, or all of its tile."""
    size = schedule.slots.strip
    for start in range(op.m[0], op.m[1], size):
        yield start, min(start + size, op.m[1])
