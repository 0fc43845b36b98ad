"""Enumerates the ways to run a product that are worth scoring.

Each tile shape of `oocgemm.planning.search.shapes` is given slots: what memory a tile leaves keeps panels, of either operand on
either tier.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import ceil, inf, isqrt, prod

from oocgemm.planning.check_blocks import panel_checksum_bytes
from oocgemm.planning.cost.footprint import (
    Candidate,
    Layouts,
    MachineModel,
    extents,
    footprint,
    scratch_bytes,
    slot_bytes,
)
from oocgemm.planning.cost.predict import closed_loads, least_seconds, multiply_seconds, strip_rate
from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.schedule.slots import Slots
from oocgemm.planning.schedule.traversal import Traversal
from oocgemm.planning.search.shapes import shapes
from oocgemm.planning.tiling import TileGrid, TileShape, ceil_div, round_up

STRIP_BYTES = 32 << 20  # a drained strip: long enough for the link, short enough to start writing early
STRIPS = 3  # on the host: the next tile's first step hides the leaving of the last, and only the end shows it
LARGE_CHUNK = 8 << 20  # that copying takes longer than beginning and ending
STAGED_STRIPS = 10  # each is several operations to issue
BLOCK = 128  # of strips, that cuBLAS works on at a time
# Where panels can be kept on the host, a strip takes at most one part in so many of its budget, but a tile is not cut into more
# strips than this.
HOST_SHARE = 400
MAX_STRIPS = 32
# Beside a store so much slower than the link, reading and uploading may take turns if that spares memory for panels.
FAR_SLOWER = 10
CHUNK_BYTES = 8 << 20  # of a new C: cheap to allocate again and again, long enough for a disk
MAX_DRAIN = 16
SCARCE = 1 << 20  # of device memory, in which all depths and the smallest tile are tried
# What is kept first, on the device and on the host.
PAIRS = (
    ("soonest", "soonest"),
    ("soonest", "passing"),
    ("passing", "soonest"),
    ("soonest", "alone"),
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
    limit: Callable[[], float] = lambda: inf,
) -> Iterator[Candidate]:
    """Candidates that fit the budgets; with `tile`, for that tile shape only. Shapes that cannot take less than the `limit`, in
    seconds, are passed over; it is asked for before each, those that may take least coming first."""
    none = True
    # Where memory is scarce, tiles may not fit beside panels of the best depths, or only tiny ones.
    scarce = budgets.device - machine.device_reserve < SCARCE
    for every_depth in (False, True):
        tried = (
            [(tile, 2)]
            if tile
            else list(
                shapes(problem, budgets.device, budgets.host, machine, layouts, every_depth=every_depth)
            )
        )
        least = {
            shape: least_seconds(problem, shape, budgets.device, budgets.host, layouts, machine)
            for shape, _ in tried
        }
        tried.sort(key=lambda found: least[found[0]])
        # What two accumulators fit into leaves more for panels with one.
        for shape, c in dict.fromkeys((shape, c) for shape, most in tried for c in range(1, most + 1)):
            if least[shape] > limit():
                break
            if c == 1 or shape.m < problem.m or shape.n < problem.n:
                for candidate in _with_slots(problem, budgets, machine, layouts, shape, c, io_threads):
                    none = False
                    yield candidate
        if tile or not (none or scarce):
            return
    yield from _with_slots(problem, budgets, machine, layouts, smallest(problem, layouts), 1, io_threads)


def _with_slots(
    problem: GemmProblem,
    budgets: Budgets,
    machine: MachineModel,
    layouts: Layouts,
    tile: TileShape,
    c: int,
    io_threads: int,
) -> Iterator[Candidate]:
    """The tile with as many slots as fit: what a tile leaves over keeps panels for the tiles that follow."""
    base = _least_slots(problem, budgets, machine, layouts, tile, c, io_threads)
    if base is None:
        return
    size = slot_bytes(problem, tile, base.strip)
    grid = TileGrid.of(problem, tile)
    (down, across), steps = grid.shape, grid.steps
    free, host_free = _free(problem, budgets, machine, layouts, tile, base, io_threads)
    base = _draining(problem, machine, layouts, tile, base, steps, free, size)
    if not machine.unified and not layouts.c.in_memory:
        base = _with_room(problem, machine, tile, base, steps, host_free // 2, size)
    free, host_free = _free(problem, budgets, machine, layouts, tile, base, io_threads)
    reads = down * across > 0 and _keeps_on_host(machine, layouts)
    bases = [(base, host_free)]
    if reads and FAR_SLOWER * machine.read <= machine.h2d:
        strip = min(base.strip, round_up(ceil_div(base.strip, 64), c_chunks(problem, layouts, tile)[0]))
        lean = replace(base, host_a=1, host_b=1, host_c=1, strip=strip)
        bases.append((lean, _free(problem, budgets, machine, layouts, tile, lean, io_threads)[1]))
    device = size["device", "A"], size["device", "B"]
    room = free if machine.unified else host_free
    for axis in (0, 1) if down * across > 1 else (0,):
        found: list[tuple[float, bool, int, Candidate]] = []
        for band in _bands(problem, tile, axis, steps, room, size, spills=reads):
            traversal = Traversal(axis, band)
            a, b = _filled(base.a, base.b, free, *device, down, across, steps, traversal)
            yield Candidate(tile, replace(base, a=a, b=b), traversal, io_threads)
            if not reads:
                continue
            known: set[tuple[bool, int, int, int, int]] = set()
            # Each tier may serve either operand first: what one of them keeps need not be kept by the other.
            for (fewest, spare), (on_device, on_host) in product(bases, PAIRS if band > 1 else PAIRS[:4]):
                a, b = _filled(base.a, base.b, free, *device, down, across, steps, traversal, on_device)
                checks = panel_checksum_bytes(problem, tile, fewest.strip)
                host = size["host", "A"] + checks[0], size["host", "B"] + checks[1]
                sizes = fewest.host_a, fewest.host_b, spare, *host
                host_a, host_b = _filled(*sizes, down, across, steps, traversal, on_host)
                turns = fewest is not base
                if (turns, a, b, host_a, host_b) in known:
                    continue
                known.add((turns, a, b, host_a, host_b))
                dealt = replace(fewest, a=a, b=b, host_a=host_a, host_b=host_b)
                loads = closed_loads(problem, grid, dealt, traversal)
                up = (loads.a_up + loads.b_up) / machine.h2d
                read = (loads.a_read + loads.b_read) / machine.read
                read += (host_a * host[0] + host_b * host[1]) * machine.arena_seconds_per_byte
                seconds = 1.01 * (up + read) if turns else max(up, read) + min(up, read) / 10
                found.append((seconds, turns, len(found), Candidate(tile, dealt, traversal, io_threads)))
        found.sort()
        # One slot only where that moves less.
        yield from (candidate for _, turns, _, candidate in found[:2] if turns <= found[0][1])


def _with_room(
    problem: GemmProblem,
    machine: MachineModel,
    tile: TileShape,
    base: Slots,
    steps: int,
    free: int,
    size: dict[tuple[str, str], int],
) -> Slots:
    """Host slots for a whole tile of C, where they fit, the store is slower than the link, and the next tile takes so
    long that the store can take this one in the meantime: the device then goes on at once."""
    if machine.write >= machine.d2h:
        return base
    w, h, r = extents(problem, tile)
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
    operand that passes by, or those of a whole band; or to the first alone, since to fill all there is takes time too."""
    if traversal.axis == 1:
        b, a = _filled(b, a, free, b_size, a_size, across, down, steps, traversal.along_rows, first)
        return a, b
    band = min(traversal.band, down)
    # The other column of a band needs its panels sooner than the row does.
    wanted = [("a", band * steps), ("b", across * steps)]
    if band > 1:
        wanted.insert(1 if first == "band" else 0, ("b", steps))
    if first == "passing":
        wanted.reverse()
    elif first == "alone":
        del wanted[1:]
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
    rows = ceil_div(problem.m, tile.m) if axis == 0 else ceil_div(problem.n, tile.n)
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


def _keeps_on_host(machine: MachineModel, layouts: Layouts) -> bool:
    """Whether panels that the host keeps spare reading them again."""
    return not machine.unified and not (layouts.a.in_memory and layouts.b.in_memory)


def _free(
    problem: GemmProblem,
    budgets: Budgets,
    machine: MachineModel,
    layouts: Layouts,
    tile: TileShape,
    slots: Slots,
    io_threads: int,
) -> tuple[int, int]:
    """Bytes that the device and the host have left beside these slots and all else, the checksums included of panels
    that fill what the device has left."""
    held = footprint(problem, Candidate(tile, slots, io_threads=io_threads), layouts, machine)
    device, host = budgets.device - held.device_total, budgets.host - held.host_total
    size, checks = slot_bytes(problem, tile, slots.strip), panel_checksum_bytes(problem, tile, slots.strip)
    share = max(check / max(1, size["device", x]) for x, check in zip("AB", checks, strict=True))
    if share and min(device, host) > 0:
        device = min(device, int(host / share))
        host -= ceil(device * share)
    return device, host


def _least_slots(
    problem: GemmProblem,
    budgets: Budgets,
    machine: MachineModel,
    layouts: Layouts,
    tile: TileShape,
    c: int,
    io_threads: int,
) -> Slots | None:
    """Two panels of each operand, and on the host as many as fit: a third rides out jitter, one alone has reading and
    uploading take turns."""
    unit = c_chunks(problem, layouts, tile)[0]
    row_bytes = max(1, min(tile.n, problem.n) * problem.itemsizes["C"])
    # Few strips a tile, since each is several operations; fewer rows where memory is short.
    wanted = max(STRIP_BYTES // row_bytes, ceil_div(tile.m, STRIPS if machine.unified else STAGED_STRIPS), 1)
    if not machine.shares_cores:
        wanted = _in_waves(wanted, min(tile.n, problem.n), machine.multiprocessors)
    share = tile.m
    if _keeps_on_host(machine, layouts):
        share = max(budgets.host // HOST_SHARE // row_bytes, ceil_div(tile.m, MAX_STRIPS))
    sizes = (wanted, STRIP_BYTES // row_bytes, STRIP_BYTES // 32 // row_bytes, 1)
    strips = sorted({min(round_up(max(1, min(rows, share)), unit), tile.m) for rows in sizes}, reverse=True)
    finish = 2 if problem.finishes else 0
    two = machine.shares_cores or not _keeps_on_host(machine, layouts)
    for host in (0,) if machine.unified else (2, 1) if two else (3, 2, 1):
        for rows in strips:
            slots = Slots(
                *(2, 2, c, host, host, host, finish, rows),
                planes=2 if problem.planes else 0,
                unified=machine.unified,
            )
            if min(_free(problem, budgets, machine, layouts, tile, slots, io_threads)) >= 0:
                return slots
    return None


def _in_waves(wanted: int, width: int, multiprocessors: int) -> int:
    """Rows of a strip, so many or up to a quarter more, that a GPU is best filled by: it multiplies whole blocks, one on each
    multiprocessor at a time."""
    across, least = max(1, ceil_div(width, BLOCK)), ceil_div(wanted, BLOCK)
    counts = range(least, least + least // 4 + 1)
    return BLOCK * max(counts, key=lambda c: c * across / round_up(c * across, multiprocessors))


def _draining(
    problem: GemmProblem,
    machine: MachineModel,
    layouts: Layouts,
    tile: TileShape,
    base: Slots,
    steps: int,
    free: int,
    size: dict[tuple[str, str], int],
) -> Slots:
    """As many steps strip by strip as hide the tile's leaving, and the slots for their panels, where they fit."""
    w, h, r = extents(problem, tile)
    flops = problem.step_flops(w, h, r)
    if not flops or problem.planes:  # a panel's residues stay for one step
        return base
    step = multiply_seconds(problem, machine, flops, w, h, r) + machine.step_latency
    to_memory = (
        strip_rate(problem, machine, layouts.c, (base.strip, h)) if layouts.c.in_memory else machine.d2h
    )
    leaving = (
        w * h * problem.itemsizes["C"] / (machine.write if base.unified else min(to_memory, machine.d2h))
    )
    several = w < problem.m or h < problem.n
    wanted = min(steps, MAX_DRAIN, int(leaving / step) + 1)
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
    rows = _dividing(isqrt(elements), tile.m, problem.m)
    return rows, _dividing(max(1, elements // rows), tile.n, problem.n)


@lru_cache(4096)
def _dividing(target: int, nominal: int, extent: int) -> int:
    """The chunk extent near `target` and at most sqrt(2) times it that divides `nominal`; any such where one
    tile spans `extent`."""
    if nominal >= extent:
        return max(1, ceil_div(extent, max(1, ceil_div(extent, target))))
    divisors = [d for q in range(1, isqrt(nominal) + 1) if nominal % q == 0 for d in (q, nominal // q)]
    return max(d for d in divisors if d * d <= 2 * target * target)


def io_threads(problem: GemmProblem, budgets: Budgets, machine: MachineModel, layouts: Layouts) -> int:
    """As many as copying wants, half as many more where large chunks are copied from files, or memory is, or digests are taken, by
    threads that do not multiply, or one for each core but one where there is work for codecs; but scratch for these takes at most
    half of the host budget. Were there one for each core, those that hand out panels and launch would wait for one of them to be stopped, and
    the interpreter with them: beside an H200 sixteen threads of sixteen cores decoded 10 to 18% less than fifteen."""
    read = (layouts.a, layouts.b, layouts.c) if problem.reads_c else (layouts.a, layouts.b)
    codecs = layouts.c.encodes or any(layout.decode_bytes for layout in read)
    threads = machine.io_threads
    large = any(
        prod(layout.read_chunk) * problem.itemsizes[operand] >= LARGE_CHUNK
        for operand, layout in (("A", layouts.a), ("B", layouts.b))
    )
    more = large or problem.checked == "device" or not _keeps_on_host(machine, layouts)
    if more and not machine.shares_cores:
        threads = max(threads, min(machine.cores, threads * 3 // 2))
    if codecs:
        threads = max(threads, machine.cores if machine.shares_cores else machine.cores - 1)
    while threads > 1 and scratch_bytes(problem, layouts, threads) > budgets.host // 2:
        threads -= 1
    return threads
