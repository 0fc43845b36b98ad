"""Enumerates the ways to run a product that are worth scoring.

Traffic falls with the tile's extents, so the tile takes nearly all of the device memory and panels are only
as deep as the kernel and the copies want: ``c w h + 2 r (w + h) <= M``. Extents are enumerated as *counts* of
tiles down and across, which gives tiles of equal size; for each depth and count down, the fewest tiles across
that fit are tried, and one more, both with panels that stream and with all panels of a tile row (or column)
kept. What memory is left then goes to more slots.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import isqrt, lcm

from oocgemm.plan.cost import Candidate, Layouts, MachineModel, cast_bytes, scratch_bytes, slot_bytes
from oocgemm.plan.predict import UNHIDDEN, closed_loads, multiply_seconds
from oocgemm.plan.problem import GemmProblem
from oocgemm.plan.slots import Slots
from oocgemm.plan.tiling import TileGrid, TileShape, ceil_div, cover_ratio, round_up
from oocgemm.plan.traversal import Traversal

STRIP_BYTES = 32 << 20  # a drained strip: long enough for the link, short enough to start writing early
STRIPS = 24
HOST_SHARE = 400  # a strip takes at most one part in so many of the host budget, where one row does
CHUNK_BYTES = 8 << 20  # of a new C: cheap to allocate again and again, long enough for a disk
DEPTHS = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192)
BEST_DEPTHS = 4
BINS = 4
THIN = 16  # of a tile that leaves the memory to the panels of a row (or column)
MOST_DRAIN = 16


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
    shapes = [(tile, 1), (tile, 2)] if tile else _shapes(problem, budgets, machine, layouts)
    none = True
    for shape, c in dict.fromkeys(shapes):
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
    free = budgets.device - device_bytes(problem, machine, tile, base, size)
    base = _draining(problem, machine, tile, base, axis, steps, free, size)
    free = budgets.device - device_bytes(problem, machine, tile, base, size)
    host_free = (
        0 if machine.unified else budgets.host - host_bytes(problem, machine, layouts, base, io_threads, size)
    )
    reads = not machine.unified and not (layouts.a.in_memory and layouts.b.in_memory)
    grid = TileGrid.of(problem, tile)
    device, host = ((size[tier, "A"], size[tier, "B"]) for tier in ("device", "host"))
    for band in _bands(problem, layouts, tile, axis, steps, free if machine.unified else host_free, size):
        traversal = Traversal(axis, band)
        a, b = _filled(base.a, base.b, free, *device, down, across, steps, traversal)
        slots = replace(base, a=a, b=b)
        yield Candidate(tile, slots, traversal, io_threads=io_threads)
        if not reads:
            continue
        # Each tier may serve either operand first: what one of them keeps need not be kept by the other.
        least = float("inf")
        for on_device, on_host in ((False, False), (False, True), (True, False)):
            a, b = _filled(base.a, base.b, free, *device, down, across, steps, traversal, on_device)
            sizes = base.host_a, base.host_b, host_free, *host
            host_a, host_b = _filled(*sizes, down, across, steps, traversal, on_host)
            dealt = replace(base, a=a, b=b, host_a=host_a, host_b=host_b)
            loads = closed_loads(problem, grid, dealt, traversal)
            up, read = (loads.a_up + loads.b_up) / machine.h2d, (loads.a_read + loads.b_read) / machine.read
            if max(up, read) + UNHIDDEN * min(up, read) < least:
                least, slots = max(up, read) + UNHIDDEN * min(up, read), dealt
        yield Candidate(tile, slots, traversal, io_threads=io_threads)


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
    passing_first: bool = False,
) -> tuple[int, int]:
    """Slots of A and B when what is free goes first to the operand whose panels come round soonest, or else to the
    one that passes by."""
    if traversal.axis == 1:
        rows = Traversal(0, traversal.band)
        b, a = _filled(b, a, free, b_size, a_size, across, down, steps, rows, passing_first)
        return a, b
    band = min(traversal.band, down)
    # The other column of a band needs its panels sooner than the row does.
    wanted = [("a", band * steps), ("b", across * steps)]
    if band > 1:
        wanted.insert(0, ("b", steps))
    if passing_first:
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
    layouts: Layouts,
    tile: TileShape,
    axis: int,
    steps: int,
    free: int,
    size: dict[tuple[str, str], int],
) -> list[int]:
    """One row (or column) at a time, and the widest bands of which all panels fit into what is free."""
    rows = ceil_div(problem.m, tile.w) if axis == 0 else ceil_div(problem.n, tile.h)
    kept, passing = ("A", "B") if axis == 0 else ("B", "A")
    fits = (free // max(1, steps) - size["host", passing]) // max(1, size["host", kept])
    if fits < 2 or rows < 2:
        return [1]
    return [1, ceil_div(rows, ceil_div(rows, fits))]


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
    wanted = max(STRIP_BYTES // row_bytes, ceil_div(tile.w, STRIPS), 1)
    # Host memory is for panels first: a strip takes no more of it than that share.
    share = max(1, budgets.host // HOST_SHARE // row_bytes)
    sizes = (wanted, STRIP_BYTES // row_bytes, STRIP_BYTES // 32 // row_bytes, 1)
    strips = sorted({min(round_up(max(1, min(rows, share)), unit), tile.w) for rows in sizes}, reverse=True)
    finish = 2 if problem.finishes else 0
    for host in (0,) if machine.unified else (2, 1) if machine.shares_cores else (3, 2, 1):
        for rows in strips:
            slots = Slots(2, 2, c, host, host, host, finish, rows, 1, machine.unified)
            size = slot_bytes(problem, tile, rows)
            if (
                device_bytes(problem, machine, tile, slots, size) <= budgets.device
                and host_bytes(problem, machine, layouts, slots, io_threads, size) <= budgets.host
            ):
                return slots
    return None


def _draining(
    problem: GemmProblem,
    machine: MachineModel,
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
    leaving = w * h * problem.itemsizes["C"] / (machine.write if base.unified else machine.d2h)
    several = w < problem.m or h < problem.n
    # With one accumulator the first steps of the next tile hide a part too.
    wanted = min(steps, MOST_DRAIN, int(leaving / step / (2 if base.c == 1 and several else 1)) + 1)
    for drain in range(wanted, 1, -1):
        kept = drain + 1 if several else drain
        changing = 2 * drain if base.c == 1 and several else kept
        a, b = (kept, changing) if axis == 0 else (changing, kept)
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
    """As many as the machine wants, but scratch for decoding takes at most half of the host budget."""
    threads = machine.io_threads
    while threads > 1 and scratch_bytes(layouts, problem.reads_c, threads) > budgets.host // 2:
        threads -= 1
    return threads


def _alignments(problem: GemmProblem, layouts: Layouts) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What tile extents along m and along n may be multiples of: the chunks of C, which they must be (or a
    number that suits the kernel and gives a new C good chunks), and what suits reading A or B as well."""
    units = []
    for extent, must, wish in (
        (problem.m, layouts.c.write_chunk[0], layouts.a.read_chunk[0]),
        (problem.n, layouts.c.write_chunk[1], layouts.b.read_chunk[1]),
    ):
        unit = 128 if must == 1 and extent > 1024 else must
        # A new C wants chunks that divide its tiles.
        fine = unit if layouts.c.free_chunks else min(unit, lcm(must, 8))
        units.append(tuple(dict.fromkeys((unit, fine, lcm(unit, wish)))))
    return units[0], units[1]


def _shapes(
    problem: GemmProblem, budgets: Budgets, machine: MachineModel, layouts: Layouts
) -> Iterator[tuple[TileShape, int]]:
    """Tile shapes worth scoring, with the accumulators they leave room for. For each depth, and one accumulator or
    two, shapes are binned by area; of each of the largest bins the one that moves least is kept: larger moves
    less, smaller starts and ends sooner."""
    units_m, units_n = _alignments(problem, layouts)
    m, n, k = problem.m, problem.n, max(1, problem.depth)
    sizes = problem.itemsizes
    a, b, acc = sizes["A"], sizes["B"], sizes["acc"]
    a_bytes, b_bytes = m * k * a, k * n * b
    chunk_a = 1 if layouts.a.partial_reads else layouts.a.read_chunk[0]
    chunk_b = 1 if layouts.b.partial_reads else layouts.b.read_chunk[1]
    cut = chunk_a > 1 or chunk_b > 1
    memory = budgets.device - machine.device_reserve
    # Narrower tiles would leave most of the memory empty, were they as long as C and all panels of B kept.
    narrowest = min(m, memory // (16 * (n * acc + k * b)))
    thin_m, thin_n = (min(x, round_up(THIN, min(unit))) for x, unit in ((m, units_m), (n, units_n)))
    extents_m = sorted({thin_m, *(w for w in _extents(m, units_m, _counts(m)) if w >= narrowest)})
    depths = _depths(problem, machine, layouts, memory)
    if not machine.unified and not (layouts.a.in_memory and layouts.b.in_memory):
        yield from ((shape, 1) for shape in _reading_shapes(problem, budgets, machine, layouts, depths))
    for r in depths:
        for c in (1, 2):
            bins: dict[tuple[int, int], tuple[float, int, int]] = {}
            for w in extents_m:
                down = ceil_div(m, w)
                for kept in range(3):  # panels of neither operand, of A's row, of B's column
                    a_held = w * k * a if kept == 1 else 2 * w * r * a
                    b_held = k * b if kept == 2 else 2 * r * b
                    most = min(n, (memory - a_held) // (c * w * acc + b_held))
                    if most < 1:
                        continue
                    extents_n = _long_extents(n, units_n, most)
                    for h in (*extents_n, thin_n) if kept == 1 and thin_n < most else extents_n:
                        across = ceil_div(n, h)
                        free = memory - c * w * h * acc - 2 * r * (w * a + h * b)
                        # What is free keeps panels of a row for the next tile, or of a column.
                        row, column = min(free, w * k * a), min(free, k * h * b)
                        found = max(
                            (across - 1) * min(a_bytes, free * down) + (down - 1) * min(b_bytes, free - row),
                            (down - 1) * min(b_bytes, free * across)
                            + (across - 1) * min(a_bytes, free - column),
                        )
                        moved = float(across * a_bytes + down * b_bytes - found)
                        if cut:
                            moved *= max(cover_ratio(m, w, chunk_a), cover_ratio(n, h, chunk_b))
                        area = kept, (w * h).bit_length()
                        best = bins.get(area)
                        if best is None or (moved, h) < best[:2]:
                            bins[area] = moved, h, w
            for kept in range(3):
                areas = sorted((x for x in bins if x[0] == kept), reverse=True)
                best_areas = areas[: BINS if kept == 0 else 2]
                if areas:  # a small tile may be what leaves room for panels
                    best_areas.append(min(areas, key=lambda x: bins[x][0]))
                for area in dict.fromkeys(best_areas):
                    _, h, w = bins[area]
                    yield TileShape(w, h, r), c


def _reading_shapes(
    problem: GemmProblem, budgets: Budgets, machine: MachineModel, layouts: Layouts, depths: Sequence[int]
) -> Iterator[TileShape]:
    """Shapes with which least is read where host memory keeps panels: the best two for each depth."""
    m, n, k = problem.m, problem.n, max(1, problem.depth)
    sizes = problem.itemsizes
    a, b, acc = sizes["A"], sizes["B"], sizes["acc"]
    a_bytes, b_bytes = m * k * a, k * n * b
    memory, host = budgets.device - machine.device_reserve, budgets.host - machine.host_reserve
    units_m, units_n = _alignments(problem, layouts)
    units_m, units_n = units_m[-2:], units_n[-2:]
    extents_m = _extents(m, units_m, [count for count in _counts(m) if count <= 48])
    for r in depths:
        scored: dict[TileShape, tuple[float, int]] = {}
        for w in extents_m:
            down = ceil_div(m, w)
            held = (2 * w * r * a, memory // 2, w * k * a)  # by panels of A
            for most in {min(n, (memory - x) // (w * acc + 2 * r * b)) for x in held}:
                if most < 1:
                    continue
                for h in _long_extents(n, units_n, most):
                    across = ceil_div(n, h)
                    free = memory - w * h * acc
                    stays = host * 0.97 - 3 * r * (w * a + h * b)
                    row, column = (w * k * a, down, a_bytes), (k * h * b, across, b_bytes)
                    read = min(
                        _read(*row, *column, free, stays),
                        _read(*column, *row, free, stays),
                    )
                    scored[TileShape(w, h, r)] = read, -w * h
        yield from sorted(scored, key=lambda shape: scored[shape])[:2]


def _read(
    row: int, down: int, a_bytes: int, column: int, across: int, b_bytes: int, device: float, host: float
) -> float:
    """Bytes read by a walk along rows of that many bytes of panels, at best over who keeps what."""
    least = float("inf")
    for keeps, other in ((device, host), (host, device), (host, max(device, host - row))):
        kept, passing = min(max(0.0, keeps), row), min(max(0.0, other), b_bytes)
        first = a_bytes * across - (across - 1) * down * kept
        least = min(least, first + b_bytes * down - (down - 1) * passing)
        band = max(1, int(keeps // row))
        if band > 1 and keeps == host:
            rest = max(device, host - band * row)
            bands = ceil_div(down, band)
            again = (down - bands) * max(0.0, b_bytes - across * min(rest, column))
            least = min(least, a_bytes + bands * b_bytes + again)
    return least


def _depths(problem: GemmProblem, machine: MachineModel, layouts: Layouts, memory: int) -> list[int]:
    """Panel depths worth trying: of round numbers, multiples of the chunks along k, and all of k, those with which a
    square tile that fills the memory would be fastest."""
    k = max(1, problem.depth)
    chunk_a, chunk_b = layouts.a.read_chunk[1], layouts.b.read_chunk[0]
    units = {chunk_a, chunk_b, lcm(chunk_a, chunk_b)}
    multiples = {unit * times for unit in units for times in (1, 2, 3, 4, 6, 8)}
    depths = sorted(d for d in {*DEPTHS, k, *multiples} if d <= k and (d >= 16 or d == k))

    def seconds(r: int) -> float:
        itemsize = max(problem.itemsizes.values())
        side = isqrt(4 * r * r + max(1, memory // itemsize)) - 2 * r  # side^2 + 4 r side = memory
        if side < 1:
            return float("inf")
        w, h = (
            max(1, min(extent, max(1, side // chunk) * chunk))
            for extent, chunk in ((problem.m, layouts.a.read_chunk[0]), (problem.n, layouts.b.read_chunk[1]))
        )
        compute = multiply_seconds(problem, machine, problem.flops, w, h, r)
        moved = problem.m * problem.n * k * itemsize * (1 / w + 1 / h)
        link = min(machine.store_rate(layouts.a, (w, r)), machine.store_rate(layouts.b, (r, h)))
        copied = moved / (link if machine.unified else min(link, machine.h2d))
        steps = ceil_div(problem.m, w) * ceil_div(problem.n, h) * ceil_div(k, r)
        cover = max(layouts.a.cover((problem.m, k), (w, r)), layouts.b.cover((k, problem.n), (r, h)))
        return max(compute, copied * cover) + 0.1 * (compute + copied * cover) + steps * machine.step_latency

    ranked = sorted(depths, key=seconds)
    return sorted(ranked[:BEST_DEPTHS])


def _counts(extent: int) -> Iterator[int]:
    """How many tiles to cut an extent into: every count up to 32, then ever sparser."""
    count = 1
    while count <= extent:
        yield count
        count = count + 1 if count < 32 else ceil_div(count * 33, 32)


@lru_cache(4096)  # depths share counts
def _long_extents(extent: int, units: tuple[int, ...], most: int) -> list[int]:
    """Tile extents that are not above `most`: in as few tiles as can be and in one more, and as long as can be."""
    fewest = ceil_div(extent, most)
    found = {x for x in _extents(extent, units, (fewest, fewest + 1)) if x <= most}
    if not found:
        found = {most // unit * unit for unit in units} - {0}
    return sorted(found)


def _extents(extent: int, units: Sequence[int], counts: Iterable[int]) -> list[int]:
    """Equal tile extents for each count, aligned to each of the units."""
    found = set()
    for count in counts:
        even = ceil_div(extent, max(count, 1))
        for unit in units:
            found.add(min(extent, round_up(max(even, 1), unit)))
    return sorted(e for e in found if e > 0)
