"""Enumerates the ways to run a product that are worth scoring.

Each tile shape of `oocgemm.plan.shapes` is given slots: what memory a tile leaves keeps panels, of either operand on
either tier.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, isqrt

from oocgemm.plan.checking import check_bytes, panel_check_bytes
from oocgemm.plan.cost import Candidate, Layouts, MachineModel, cast_bytes, scratch_bytes, slot_bytes
from oocgemm.plan.predict import closed_loads, multiply_seconds
from oocgemm.plan.problem import GemmProblem
from oocgemm.plan.shapes import shapes
from oocgemm.plan.slots import Slots
from oocgemm.plan.tiling import TileGrid, TileShape, ceil_div, round_up
from oocgemm.plan.traversal import Traversal

STRIP_BYTES = 32 << 20  # a drained strip: long enough for the link, short enough to start writing early
STRIPS = 24
STAGED_STRIPS = 10  # each is several operations to issue
# Where panels can be kept on the host, a strip takes at most one part in so many of its budget.
HOST_SHARE = 400
CHUNK_BYTES = 8 << 20  # of a new C: cheap to allocate again and again, long enough for a disk
MOST_DRAIN = 16
# What is kept first, on the device and on the host.
PAIRS = (
    ("soonest", "soonest"),
    ("soonest", "passing"),
    ("passing", "soonest"),
    ("soonest", "band"),
    ("passing", "band"),
)


@dataclass(frozen=True, slots=True)
class Budgets:
    """Hard upper bounds, in bytes, of what a run holds on the device and on the host."""

    device: int
    host: int


def candidates(
    problem: GemmProblem,
    budgets: Budgets,
    machine: MachineModel,
    layouts: Layouts,
    tile: TileShape | None,
    io_threads: int,
) -> Iterator[Candidate]:
    """Candidates that fit the budgets; with `tile`, for that tile shape only."""
    tried = [(tile, 2)] if tile else shapes(problem, budgets.device, budgets.host, machine, layouts)
    none = True
    # What two accumulators fit into leaves more for panels with one.
    for shape, c in dict.fromkeys((shape, c) for shape, most in tried for c in range(1, most + 1)):
        several = shape.w < problem.m or shape.h < problem.n
        for axis in (0, 1) if several else (0,):
            if several or c == 1:
                found = list(_with_slots(problem, budgets, machine, layouts, shape, c, axis, io_threads))
                none = none and not found
                yield from found
    if none and tile is None:
        least = smallest(problem, layouts)
        yield from _with_slots(problem, budgets, machine, layouts, least, 1, 0, io_threads)


def _with_slots(
    problem: GemmProblem,
    budgets: Budgets,
    machine: MachineModel,
    layouts: Layouts,
    tile: TileShape,
    c: int,
    axis: int,
    io_threads: int,
) -> Iterator[Candidate]:
    """The tile with as many slots as fit: what a tile leaves over keeps panels for the tiles that follow."""
    base = _least_slots(problem, budgets, machine, layouts, tile, c, io_threads)
    if base is None:
        return
    size = slot_bytes(problem, tile, base.strip)
    down, across = ceil_div(problem.m, tile.w), ceil_div(problem.n, tile.h)
    steps = max(1, ceil_div(problem.depth, tile.r))
    checks = panel_check_bytes(problem, tile, base.strip)

    def left(slots: Slots) -> tuple[int, int]:
        """What these slots leave of the device and of the host, where checksums of what fills the device find room."""
        device = budgets.device - device_bytes(problem, machine, tile, slots, size)
        host = budgets.host - host_bytes(problem, machine, layouts, tile, slots, io_threads, size)
        share = max(check / max(1, size["device", x]) for x, check in zip("AB", checks, strict=True))
        if share:
            device = min(device, int(host / share))
        return device, host - ceil(device * share)

    base = _draining(problem, machine, layouts, tile, base, axis, steps, left(base)[0], size)
    if not machine.unified and not layouts.c.in_memory:
        base = _with_room(problem, machine, tile, base, steps, left(base)[1] // 2, size)
    free, host_free = left(base)
    reads = down * across > 0 and not machine.unified and not (layouts.a.in_memory and layouts.b.in_memory)
    grid = TileGrid.of(problem, tile)
    device = size["device", "A"], size["device", "B"]
    host = size["host", "A"] + checks[0], size["host", "B"] + checks[1]
    found: list[tuple[float, int, Candidate]] = []
    room = free if machine.unified else host_free
    for band in _bands(problem, tile, axis, steps, room, size, spills=reads):
        traversal = Traversal(axis, band)
        a, b = _filled(base.a, base.b, free, *device, down, across, steps, traversal)
        yield Candidate(tile, replace(base, a=a, b=b), traversal, io_threads=io_threads)
        if not reads:
            continue
        # Each tier may serve either operand first: what one of them keeps need not be kept by the other.
        for on_device, on_host in PAIRS if band > 1 else PAIRS[:3]:
            a, b = _filled(base.a, base.b, free, *device, down, across, steps, traversal, on_device)
            sizes = base.host_a, base.host_b, host_free, *host
            host_a, host_b = _filled(*sizes, down, across, steps, traversal, on_host)
            dealt = replace(base, a=a, b=b, host_a=host_a, host_b=host_b)
            loads = closed_loads(problem, grid, dealt, traversal)
            up, read = (loads.a_up + loads.b_up) / machine.h2d, (loads.a_read + loads.b_read) / machine.read
            least = max(up, read) + min(up, read) / 10
            found.append((least, len(found), Candidate(tile, dealt, traversal, io_threads=io_threads)))
    yield from (candidate for _, _, candidate in sorted(found)[:2])


def _with_room(
    problem: GemmProblem,
    machine: MachineModel,
    tile: TileShape,
    base: Slots,
    steps: int,
    free: int,
    size: dict[tuple[str, str], int],
) -> Slots:
    """Host slots for a whole tile of C, where they fit and it takes so long to come about that a slower store can
    take it in the meantime: the device then goes on at once."""
    w, h, r = min(tile.w, problem.m), min(tile.h, problem.n), min(tile.r, problem.depth)
    seconds = steps * multiply_seconds(problem, machine, problem.step_flops(w, h, r), w, h, r)
    more = ceil_div(w, base.strip) + 1 - base.host_c
    if (
        more <= 0
        or more * size["host", "C"] > free
        or seconds < w * h * problem.itemsizes["C"] / machine.write
    ):
        return base
    return replace(base, host_c=base.host_c + more)


def _filled(
    a: int,
    b: int,
    free: int,
    a_size: int,
    b_size: int,
    down: int,
    across: int,
    steps: int,
    traversal: Traversal,
    first: str = "soonest",
) -> tuple[int, int]:
    """Slots of A and B when what is free goes first to the panels that come round soonest, or else to those of the
    operand that passes by, or those of a whole band."""
    if traversal.axis == 1:
        rows = Traversal(0, traversal.band)
        b, a = _filled(b, a, free, b_size, a_size, across, down, steps, rows, first)
        return a, b
    band = min(traversal.band, down)
    # The other column of a band needs its panels sooner than the row does.
    wanted = [("a", band * steps), ("b", across * steps)]
    if band > 1:
        wanted.insert(1 if first == "band" else 0, ("b", steps))
    if first == "passing":
        wanted.reverse()
    for operand, most in wanted:
        if operand == "a" and across > 1 and a_size:
            more = max(0, min(most - a, free // a_size))
            a, free = a + more, free - more * a_size
        elif operand == "b" and down > 1 and b_size:
            more = max(0, min(most - b, free // b_size))
            b, free = b + more, free - more * b_size
    return a, b


def _bands(
    problem: GemmProblem,
    tile: TileShape,
    axis: int,
    steps: int,
    free: int,
    size: dict[tuple[str, str], int],
    *,
    spills: bool,
) -> list[int]:
    """One row (or column) at a time, and the widest bands of which all panels fit into what is free; where another
    tier has room too, bands that do not fit quite."""
    rows = ceil_div(problem.m, tile.w) if axis == 0 else ceil_div(problem.n, tile.h)
    kept, passing = ("A", "B") if axis == 0 else ("B", "A")
    panels = max(1, size["host", kept])
    row = free // max(1, steps)
    # Beside a column of the other operand's, and alone, where the device keeps such a column; and a band more than fits.
    fewest = {max(1, ceil_div(rows, max(1, x // panels))) for x in (row - size["host", passing], row)}
    if not spills:
        fewest = {max(fewest)}
    else:
        fewest |= {max(1, min(fewest) - 1)}
    return sorted({1, *(ceil_div(rows, count) for count in fewest)}) if rows > 1 else [1]


def device_bytes(
    problem: GemmProblem,
    machine: MachineModel,
    tile: TileShape,
    slots: Slots,
    size: dict[tuple[str, str], int],
) -> int:
    """Device memory that these slots take, and what is set aside there."""
    return (
        slots.c * size["device", "C"]
        + slots.a * size["device", "A"]
        + slots.b * size["device", "B"]
        + slots.finish * size["device", "D"]
        + machine.device_reserve
        + cast_bytes(problem, tile, machine)
    )


def host_bytes(
    problem: GemmProblem,
    machine: MachineModel,
    layouts: Layouts,
    tile: TileShape,
    slots: Slots,
    io_threads: int,
    size: dict[tuple[str, str], int],
) -> int:
    """Host memory that these slots and the scratch of so many threads take."""
    return (
        slots.host_a * size["host", "A"]
        + slots.host_b * size["host", "B"]
        + slots.host_c * size["host", "C"]
        + scratch_bytes(layouts, problem.reads_c, io_threads)
        + check_bytes(problem, tile, slots, io_threads)
        + machine.host_reserve
    )


def _least_slots(
    problem: GemmProblem,
    budgets: Budgets,
    machine: MachineModel,
    layouts: Layouts,
    tile: TileShape,
    c: int,
    io_threads: int,
) -> Slots | None:
    """Two panels of each operand, and on the host three where they fit: the third rides out jitter, one alone would
    have reading and uploading take turns."""
    unit = c_chunks(problem, layouts, tile)[0]
    row_bytes = max(1, min(tile.h, problem.n) * problem.itemsizes["C"])
    # Few strips a tile, since each is several operations; fewer rows where memory is short.
    wanted = max(STRIP_BYTES // row_bytes, ceil_div(tile.w, STRIPS if machine.unified else STAGED_STRIPS), 1)
    keeps = not machine.unified and not (layouts.a.in_memory and layouts.b.in_memory)
    share = max(1, budgets.host // HOST_SHARE // row_bytes) if keeps else tile.w
    sizes = (wanted, STRIP_BYTES // row_bytes, STRIP_BYTES // 32 // row_bytes, 1)
    strips = sorted({min(round_up(max(1, min(rows, share)), unit), tile.w) for rows in sizes}, reverse=True)
    finish = 2 if problem.finishes else 0
    for host in (0,) if machine.unified else (2, 1) if machine.shares_cores else (3, 2, 1):
        for rows in strips:
            slots = Slots(2, 2, c, host, host, host, finish, rows, 1, machine.unified)
            size = slot_bytes(problem, tile, rows)
            if (
                device_bytes(problem, machine, tile, slots, size) <= budgets.device
                and host_bytes(problem, machine, layouts, tile, slots, io_threads, size) <= budgets.host
            ):
                return slots
    return None


def _draining(
    problem: GemmProblem,
    machine: MachineModel,
    layouts: Layouts,
    tile: TileShape,
    base: Slots,
    axis: int,
    steps: int,
    free: int,
    size: dict[tuple[str, str], int],
) -> Slots:
    """As many steps strip by strip as hide the tile's leaving, and the slots for their panels, where they fit."""
    w, h, r = min(tile.w, problem.m), min(tile.h, problem.n), min(tile.r, problem.depth)
    flops = problem.step_flops(w, h, r)
    if not flops:
        return base
    step = multiply_seconds(problem, machine, flops, w, h, r) + machine.step_latency
    into_memory = min(machine.memory, machine.d2h) if layouts.c.in_memory else machine.d2h
    leaving = w * h * problem.itemsizes["C"] / (machine.write if base.unified else into_memory)
    several = w < problem.m or h < problem.n
    wanted = min(steps, MOST_DRAIN, int(leaving / step) + 1)
    for drain in range(wanted, 1, -1):
        a = b = drain + 1 if several else drain
        if (a - base.a) * size["device", "A"] + (b - base.b) * size["device", "B"] <= free:
            return replace(base, a=max(a, base.a), b=max(b, base.b), drain=drain)
    return base


def smallest(problem: GemmProblem, layouts: Layouts) -> TileShape:
    """The smallest tile that is ever used."""
    must = layouts.c.write_chunk
    return TileShape(
        max(1, min(problem.m, round_up(16, must[0]))),
        max(1, min(problem.n, round_up(16, must[1]))),
        max(1, min(problem.depth, 16)),
    )


def c_chunks(problem: GemmProblem, layouts: Layouts, tile: TileShape) -> tuple[int, int]:
    """Chunks of C: as they are, or for a new C about `CHUNK_BYTES` each and never more than twice that, near
    square, dividing the tile wherever tiles meet."""
    if not layouts.c.free_chunks:
        return layouts.c.write_chunk
    elements = CHUNK_BYTES // problem.itemsizes["C"]
    rows = _dividing(isqrt(elements), tile.w, problem.m)
    return rows, _dividing(max(1, elements // rows), tile.h, problem.n)


@lru_cache(4096)
def _dividing(target: int, nominal: int, extent: int) -> int:
    """The chunk extent near `target` and at most sqrt(2) times it that divides `nominal`; any such where one
    tile spans `extent`."""
    if nominal >= extent:
        return max(1, ceil_div(extent, max(1, ceil_div(extent, target))))
    divisors = [d for q in range(1, isqrt(nominal) + 1) if nominal % q == 0 for d in (q, nominal // q)]
    return max(d for d in divisors if d * d <= 2 * target * target)


def io_threads(problem: GemmProblem, budgets: Budgets, machine: MachineModel, layouts: Layouts) -> int:
    """As many as copying wants, or all cores where there is work for codecs; but scratch for these takes at most half of
    the host budget."""
    read = (layouts.a, layouts.b, layouts.c) if problem.reads_c else (layouts.a, layouts.b)
    codecs = layouts.c.encodes or any(layout.decode_bytes for layout in read)
    threads = max(machine.io_threads, machine.cores) if codecs else machine.io_threads
    while threads > 1 and scratch_bytes(layouts, problem.reads_c, threads) > budgets.host // 2:
        threads -= 1
    return threads
