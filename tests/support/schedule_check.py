"""Check schedules: every operation finds its inputs in its slots, and C is written exactly once."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from oocgemm.planning.schedule.operation import Kind, Operation, Program, Slot, Tier
from oocgemm.planning.schedule.operations import Schedule, mirrored_columns
from oocgemm.planning.schedule.traversal import step_order
from oocgemm.planning.tiling import Range, Tile, length


class ScheduleError(AssertionError):
    """Raised for a schedule that could compute wrong results."""


def waits_of(operations: Iterable[Operation]) -> list[tuple[Operation, list[int]]]:
    """List every operation of a small schedule with the indices of the operations that it waits for."""
    return list(Program(operations))


def verify(schedule: Schedule, chunks: tuple[int, int] = (1, 1)) -> None:  # noqa: PLR0915
    """Check that every operation finds its inputs in its buffers (slots), and that C is written exactly once.

    The operations are checked in program order. An Upload must find its block in its host slot. A Multiply
    must find the panels of its tile and step in device slots. A Write must find a strip (some rows of a tile)
    to which every step has been added. No two Writes may write to the same chunk of C; `chunks` is the shape
    of the chunks.

    A real run executes operations in another order, but the waits of `HazardTracker` make it equivalent to
    program order. Raises `ScheduleError` if the check fails.
    """
    halves = schedule.problem.cover.halves
    contents, grid, extents = dict[Slot, object](), schedule.grid, (schedule.grid.m, schedule.grid.n)
    selected: dict[Range, set[int]] = defaultdict(set)  # tile columns that were searched, by ranges of rows
    # Of a Gram matrix: the strips that were searched, and how many elements were, by tile rows. Device and
    # tile row of what is kept, and of what has been returned.
    searched, found = set[tuple[Range, Range]](), Counter[int]()
    kept, returned = set[tuple[int, int]](), set[tuple[int, int]]()
    sums: dict[Slot, dict[Range, tuple[Tile, set[int]]]] = defaultdict(dict)
    written: dict[Range, list[Range]] = defaultdict(list)
    for op in schedule:
        steps = set(step_order(op.tile, grid.steps))
        for region in (*op.reads, *op.writes):
            _require(region.slot.index < schedule.slots.count(region.slot.tier, region.slot.operand), op)
        block = (op.operand, op.block)
        match op.kind:
            case Kind.READ:
                target = op.writes[0].slot
                if (op.operand, target.operand) != ("C", "C") or target.tier is Tier.HOST:
                    contents[target] = block
            case Kind.UPLOAD:
                _require(not op.reads or contents.get(op.reads[0].slot) == block, op)
                if op.operand != "C" or op.writes[0].slot.operand == "D":
                    contents[op.writes[0].slot] = block
            case Kind.PREPARE:
                for region, panel in zip(op.reads, _panels(schedule, op), strict=True):
                    _require(contents.get(region.slot) == panel, op)
                contents[op.writes[0].slot] = op.tile, op.step
            case Kind.MULTIPLY:
                panels = iter(_panels(schedule, op))
                for region in op.reads:
                    if region.slot.operand in ("A", "B"):
                        _require(contents.get(region.slot) == next(panels), op)
                    elif region.slot.operand == "P":
                        _require(contents.get(region.slot) == (op.tile, op.step), op)
                for strip in _strips_in(schedule, op):
                    if op.first:
                        sums[op.writes[0].slot][strip] = op.tile, set()
                    tile, done = sums[op.writes[0].slot].get(strip, (None, set()))
                    _require(tile == op.tile and op.step not in done, op)
                    done.add(op.step)
            case Kind.FINISH if halves and schedule.problem.sink.per_row:
                _require(sums[op.reads[0].slot].get(op.m) == (op.tile, steps), op)
                _require((op.m, op.n) not in searched, op)
                searched.add((op.m, op.n))
                mirrored = mirrored_columns(op.m, op.n)
                _require([length(x) > 0 for x in (op.m, mirrored)].count(True) == len(op.writes), op)
                found[op.tile[0]] += length(op.m) * length(op.n)
                found[op.tile[1]] += length(op.m) * length(mirrored)
                kept |= {(op.device, line) for line in op.tile}
                _require(not kept & returned, op)
            case Kind.DOWNLOAD | Kind.WRITE if halves and schedule.problem.sink.per_row:
                _require(op.m == grid.rows(op.tile[0]), op)
                _require((op.device, op.tile[0]) in kept, op)
                kept.remove((op.device, op.tile[0]))
                returned.add((op.device, op.tile[0]))
            case Kind.FINISH if schedule.problem.sink.per_row:
                _require(sums[op.reads[0].slot].get(op.m) == (op.tile, steps), op)
                _require(op.first == (not selected[op.m]) and op.tile[1] not in selected[op.m], op)
                selected[op.m].add(op.tile[1])
            case Kind.DOWNLOAD | Kind.WRITE if schedule.problem.sink.per_row:
                needed = grid.cover.columns(op.tile[0], grid.shape[1], grid.tile.m)
                _require(len(selected[op.m]) == length(needed), op)
                _note_written(op, written, chunks, extents)
            case Kind.FINISH | Kind.DOWNLOAD:
                for region in op.reads:
                    if region.slot.operand == "C" and region.slot.tier is Tier.DEVICE:
                        _require(sums[region.slot].get(op.strip) == (op.tile, steps), op)
                if op.kind is Kind.DOWNLOAD and schedule.slots.streams("C"):
                    finished = "C", (op.strip, schedule.grid.span(op.tile, op.strip))
                    source = op.reads[0].slot
                    _require(source.operand == "C" or contents.get(source) == finished, op)
                    _note_written(op, written, chunks, extents)
                else:
                    contents[op.writes[0].slot] = ("C", op.block)
            case Kind.WRITE:
                source = op.reads[0].slot
                if source.tier is Tier.DEVICE and source.operand == "C":
                    _require(sums[source].get(op.m) == (op.tile, steps), op)
                else:
                    _require(contents.get(source) == block, op)
                _note_written(op, written, chunks, extents)
            case _:
                raise ScheduleError(f"the checker has no rule for the operation {op}")
    if schedule.problem.sink.per_row and halves:
        rows = sum(length(grid.rows(line)) for _, line in returned)
        whole = all(found[line] == length(grid.rows(line)) * grid.n for line in range(grid.shape[0]))
        if kept or not whole or schedule.problem.sink.count(rows, 0) != schedule.elements_stored:
            raise ScheduleError("elements of C are not searched, or not returned")
        return
    twice = schedule.problem.cover.mirrored and schedule.slots.streams("C")
    stored = schedule.elements_written if twice else schedule.elements
    _check_area(written, schedule.elements_stored if schedule.problem.sink.per_row else stored)


def _panels(schedule: Schedule, op: Operation) -> tuple[object, object]:
    """Return the contents of the slots of the two panels that a Prepare or a Multiply needs."""
    rows, cols = schedule.grid.rows(op.tile[0]), schedule.grid.cols(op.tile[1])
    if schedule.problem.b.shares:
        return ("A", (rows, op.k)), ("A", (cols, op.k))
    return ("A", (rows, op.k)), ("B", (op.k, cols))


def _note_written(
    op: Operation,
    written: Mapping[Range, list[Range]],
    chunks: tuple[int, int],
    extents: tuple[int, int],
) -> None:
    """Note the block of C that an operation writes. Check that it begins and ends at borders of chunks."""
    written[op.n].append(op.m)
    for (start, stop), chunk, extent in zip(op.block, chunks, extents, strict=True):
        _require(start % chunk == 0 and (stop % chunk == 0 or stop == extent), op)


def _check_area(written: Mapping[Range, Sequence[Range]], expected: int) -> None:
    """Check that blocks of C are disjoint, and have the expected number of elements together."""
    area = sum(length(n) * length(m) for n, ranges in written.items() for m in ranges)
    disjoint = all(a[1] <= b[0] for ranges in written.values() for a, b in pairwise(sorted(ranges)))
    if area != expected or not disjoint:
        raise ScheduleError(
            f"{area} elements of C are written instead of {expected}, or some are written twice"
        )


def _require(condition: bool, op: Operation) -> None:
    if not condition:
        raise ScheduleError(f"{op}: a slot that it uses does not contain the data that it needs")


def _strips_in(schedule: Schedule, op: Operation) -> Iterator[Range]:
    """Yield the row ranges of the strips to which a Multiply adds: one strip, or all strips of its tile.

    A strip is the block of rows of a tile that is downloaded at once.
    """
    size = schedule.slots.strip
    for start in range(op.m[0], op.m[1], size):
        yield start, min(start + size, op.m[1])
