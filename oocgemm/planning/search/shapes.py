"""Tile shapes worth scoring.

Traffic falls with the tile's extents, so the tile takes nearly all of the device memory and panels are only
as deep as the kernel and the copies want: ``c w h + 2 r (w + h) <= M``. Extents are enumerated as *counts* of
tiles down and across, which gives tiles of equal size; for each depth and count down, the fewest tiles across
that fit are tried, and one more, both with panels that stream and with all panels of a tile row (or column)
kept.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import inf, isqrt, lcm

from oocgemm.planning import integers
from oocgemm.planning.check_blocks import checksum_fraction
from oocgemm.planning.cost.footprint import Layouts, MachineModel, casts, panel_room
from oocgemm.planning.cost.predict import multiply_seconds
from oocgemm.planning.emulation import MAX_DEPTH, STRIP_ROWS, work_bytes
from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.tiling import TileShape, ceil_div, overread, round_up

DEPTHS = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192)
DEEPER = (16384, 32768)  # panels of bytes
BEST_DEPTHS = 4
OUTLASTING = 4  # of deep panels: loading takes at most so many times as long as issuing
BINS = 3
EVERY = 32  # count of tiles is tried
LEFT = tuple(eighths / 8 for eighths in range(7, 1, -1))  # of the last tile's extent
MORE = 3  # tiles along an extent, so that their C leaves sooner
FEW = 8  # tiles along an extent of which one less makes the others little larger
# Rows of large tiles begin at multiples of 128 bytes and more: cuBLAS is faster by 0.6% so, in float32 on an H200.
FINEST, LARGE = 32, 8192
THIN = 16  # of a tile that leaves the memory to the panels of a row (or column)


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
        suits = wish if must == 1 and 128 <= wish < extent else lcm(unit, wish)
        units.append(tuple(dict.fromkeys((unit, fine, suits))))
    return units[0], units[1]


def shapes(
    problem: GemmProblem,
    device: int,
    host: int,
    machine: MachineModel,
    layouts: Layouts,
    *,
    every_depth: bool = False,
) -> Iterator[tuple[TileShape, int]]:
    """Tile shapes worth scoring, with the accumulators they leave room for. For each of the best depths, or of all, and
    one accumulator or two, shapes are binned by area; of each of the largest bins the one that moves least is kept: larger
    moves less, smaller starts and ends sooner."""
    if 0 in (problem.m, problem.n):
        return
    units_m, units_n = _alignments(problem, layouts)
    m, n, k = problem.m, problem.n, max(1, problem.depth)
    a, b, acc = (problem.itemsizes[x] for x in ("A", "B", "acc"))
    beside = panel_room(problem, machine)
    a_bytes, b_bytes = m * k * a, k * n * b
    chunk_a = 1 if layouts.a.partial_reads else layouts.a.read_chunk[0]
    chunk_b = 1 if layouts.b.partial_reads else layouts.b.read_chunk[1]
    cut = chunk_a > 1 or chunk_b > 1
    memory = int((device - machine.device_reserve) / (1 + checksum_fraction(problem)))
    # Narrower tiles would leave most of the memory empty, were they as long as C and all panels of B kept.
    narrowest = min(m, memory // (16 * (n * acc + k * b)))
    thin_m, thin_n = (min(x, round_up(THIN, min(unit))) for x, unit in ((m, units_m), (n, units_n)))
    extents_m = sorted({thin_m, *(w for w in _extents(m, units_m, _counts(m)) if w >= narrowest)})
    usual = _depths(problem, machine, layouts, memory)[: None if every_depth else BEST_DEPTHS]
    depths = sorted({*usual, *_deeper(problem, machine, layouts)})
    if not machine.unified and not (layouts.a.in_memory and layouts.b.in_memory):
        yield from (
            (shape, 1)
            for shape in _reading_shapes(
                problem, machine, memory, host - machine.host_reserve, layouts, depths
            )
        )
    for r in depths:
        whole = round_up(k, r)  # as slots take it
        # What the slowest link would move while the steps of a tile are issued.
        per_tile = whole // r * machine.step_latency * _link(machine, layouts, (m, n, r))
        for c in (1, 2):
            bins: dict[tuple[int, int], tuple[float, int, int]] = {}
            for w in extents_m:
                down = ceil_div(m, w)
                price_a = machine.cut_price(layouts.a, (w, r))
                for kept in range(3):  # panels of neither operand, of A's row, of B's column
                    a_held = (w * whole * a if kept == 1 else 2 * w * r * a) + w * r * beside
                    b_held = (whole * b if kept == 2 else 2 * r * b) + r * beside + _work(problem, machine, w)
                    most = min(n, (memory - a_held) // (c * w * acc + b_held))
                    if most < 1:
                        continue
                    extents_n = _long_extents(n, units_n, most)
                    for h in (*extents_n, thin_n) if kept == 1 and thin_n < most else extents_n:
                        across = ceil_div(n, h)
                        free = memory - h * (c * w * acc + _work(problem, machine, w)) - (w + h) * r * beside
                        free -= 2 * r * ((kept != 1) * w * a + (kept != 2) * h * b)
                        price_b = machine.cut_price(layouts.b, (r, h))
                        moved = _moved(
                            (across, a_bytes, min(free, w * k * a), price_a),
                            (down, b_bytes, min(free, k * h * b), price_b),
                            free,
                        )
                        if cut:
                            moved *= max(overread(m, w, chunk_a), overread(n, h, chunk_b))
                        moved += down * across * per_tile
                        area = kept, (w * h).bit_length()
                        best = bins.get(area)
                        if best is None or (moved, h) < best[:2]:
                            bins[area] = moved, h, w
            for kept in range(3):
                areas = sorted((x for x in bins if x[0] == kept), reverse=True)
                best_areas = areas[: BINS if kept == 0 else 1]
                if areas:  # a small tile may be what leaves room for panels
                    best_areas.append(min(areas, key=lambda x: bins[x][0]))
                for area in dict.fromkeys(best_areas):
                    _, h, w = bins[area]
                    yield TileShape(w, h, r), c
                    # Between the counts tried something wider may fit.
                    if area[0] == 0 and ceil_div(m, w) > EVERY:
                        most = (memory - h * r * (2 * b + beside)) // (h * c * acc + r * (2 * a + beside))
                        yield TileShape(max(w, *_long_extents(m, units_m, most)), h, r), c


def _moved(a: tuple[int, int, int, float], b: tuple[int, int, int, float], free: int) -> float:
    """Bytes loaded, times their price, where what is free keeps panels of a row of tiles for the next tile, or of a column. Of each
    operand is given how many times it is loaded, its bytes, those of the panels of a row or column that are kept, and a price."""
    (across, a_bytes, row, price_a), (down, b_bytes, column, price_b) = a, b
    found = max(
        price_a * (across - 1) * min(a_bytes, free * down) + price_b * (down - 1) * min(b_bytes, free - row),
        price_b * (down - 1) * min(b_bytes, free * across)
        + price_a * (across - 1) * min(a_bytes, free - column),
    )
    return price_a * across * a_bytes + price_b * down * b_bytes - found


def with_less_last(problem: GemmProblem, layouts: Layouts, tile: TileShape) -> Iterator[TileShape]:
    """Larger tiles, as many of them, so that the last row or column of tiles is thinner: it is the one whose C leaves when
    nothing is left to hide that."""
    (*_, unit_m), (*_, unit_n) = _alignments(problem, layouts)
    for share in LEFT:
        for shape in (
            replace(tile, m=_longer(problem.m, tile.m, unit_m, share)),
            replace(tile, n=_longer(problem.n, tile.n, unit_n, share)),
        ):
            if shape != tile:
                yield shape


def with_more(problem: GemmProblem, layouts: Layouts, tile: TileShape) -> Iterator[TileShape]:
    """Smaller tiles, a few more of them along either extent: their C begins to leave sooner, and less of it is left at the end."""
    (*_, unit_m), (*_, unit_n) = _alignments(problem, layouts)
    counts = ceil_div(problem.m, tile.m), ceil_div(problem.n, tile.n)
    for down, across in product(*(range(count, min(count + MORE, FEW) + 1) for count in counts)):
        w, h = round_up(ceil_div(problem.m, down), unit_m), round_up(ceil_div(problem.n, across), unit_n)
        yield replace(tile, m=min(w, tile.m), n=min(h, tile.n))


def _longer(extent: int, nominal: int, unit: int, share: float) -> int:
    """A longer extent of tiles that leaves about this share of the last one, which is not to vanish; or what it was."""
    count = ceil_div(extent, nominal)
    if not 1 < count <= FEW:
        return nominal
    rest = extent - (count - 1) * nominal
    longer = round_up(ceil_div(extent - int(share * rest), count - 1), unit)
    return longer if nominal < longer and (count - 1) * longer < extent else nominal


def _work(problem: GemmProblem, machine: MachineModel, w: int) -> int:
    """Bytes for each column of a tile of w rows, for the residues of its elements or sums of int8 products."""
    if problem.planes:
        return work_bytes(problem.planes, w, 16) // 16
    return 4 * min(w, STRIP_ROWS) if problem.exact and not casts(problem, machine) else 0


def _reading_shapes(
    problem: GemmProblem,
    machine: MachineModel,
    memory: int,
    host: int,
    layouts: Layouts,
    depths: Sequence[int],
) -> Iterator[TileShape]:
    """Shapes with which least is read where host memory keeps panels: the best two for each depth."""
    m, n, k = problem.m, problem.n, max(1, problem.depth)
    sizes = problem.itemsizes
    a, b, acc = sizes["A"], sizes["B"], sizes["acc"]
    beside = panel_room(problem, machine)
    a_bytes, b_bytes = m * k * a, k * n * b
    units_m, units_n = _alignments(problem, layouts)
    units_m, units_n = units_m[-2:], units_n[-2:]
    extents_m = _extents(m, units_m, [count for count in _counts(m) if count <= 48])
    for r in depths:
        scored: dict[TileShape, tuple[float, int]] = {}
        for w in extents_m:
            down = ceil_div(m, w)
            held = (2 * w * r * a, memory // 2, w * k * a)  # by panels of A
            left, col = memory - w * r * beside, w * acc + r * beside + _work(problem, machine, w)
            limits = {min(n, (left - x) // (col + 2 * r * b)) for x in held}
            limits.add(min(n, (left - 2 * w * r * a) // (col + k * b)))  # the device keeps a column
            for most in limits:
                if most < 1:
                    continue
                for h in _long_extents(n, units_n, most):
                    across = ceil_div(n, h)
                    free = memory - w * h * acc
                    stays = host * 0.97 - 3 * r * (w * a + h * b)
                    price_a = machine.cut_price(layouts.a, (w, r))
                    price_b = machine.cut_price(layouts.b, (r, h))
                    row, column = (w * k * a, down, a_bytes, price_a), (k * h * b, across, b_bytes, price_b)
                    read = min(
                        _read(*row, *column, free, stays),
                        _read(*column, *row, free, stays),
                    )
                    scored[TileShape(w, h, r)] = read, -w * h
        yield from sorted(scored, key=lambda shape: scored[shape])[:2]


def _read(
    row: int,
    down: int,
    a_bytes: int,
    price_a: float,
    column: int,
    across: int,
    b_bytes: int,
    price_b: float,
    device: float,
    host: float,
) -> float:
    """Bytes read, times their price, by a walk along rows of that many bytes of panels, at best over who keeps what."""
    least = float("inf")
    for keeps, other in ((device, host), (host, device), (host, max(device, host - row))):
        kept, passing = min(max(0.0, keeps), row), min(max(0.0, other), b_bytes)
        first = a_bytes * across - (across - 1) * down * kept
        least = min(least, price_a * first + price_b * (b_bytes * down - (down - 1) * passing))
        if keeps == host and down > 1 and keeps > row:
            fewest = ceil_div(down, int(keeps // row))
            for bands in {fewest, max(1, fewest - 1)}:  # and a band more rows than fits
                band = ceil_div(down, bands)
                rest = min(max(device, host - band * row), column)
                again = (down - bands) * max(0.0, b_bytes - across * max(0.0, rest))
                spilt = (across - 1) * max(0.0, a_bytes - bands * keeps)
                least = min(least, price_a * (a_bytes + spilt) + price_b * (bands * b_bytes + again))
    return least


def _depths(problem: GemmProblem, machine: MachineModel, layouts: Layouts, memory: int) -> list[int]:
    """Panel depths worth trying: round numbers, multiples of the chunks along k, and all of k, those first with which a
    square tile that fills the memory would be fastest."""
    k = max(1, problem.depth)
    chunk_a, chunk_b = layouts.a.read_chunk[1], layouts.b.read_chunk[0]
    units = {chunk_a, chunk_b, lcm(chunk_a, chunk_b)}
    multiples = {unit * times for unit in units for times in (1, 2, 3, 4, 6, 8)}
    deepest = min([_max_depth(problem), *_deeper(problem, machine, layouts)[-1:]])
    usual = (*DEPTHS, *DEEPER) if problem.exact else DEPTHS
    depths = sorted(d for d in {*usual, deepest, *multiples} if d <= deepest and (d >= 16 or d == k))

    def seconds(r: int) -> float:
        itemsize, acc = problem.itemsizes["A"], problem.itemsizes["acc"]
        deep = r * (2 * itemsize + panel_room(problem, machine)) // (2 * acc)
        side = isqrt(4 * deep**2 + max(1, memory // acc)) - 2 * deep  # side^2 + 4 deep side = memory
        if side < 1:
            return inf
        w, h = (
            max(1, min(extent, side // chunk * chunk or side))
            for extent, chunk in ((problem.m, layouts.a.read_chunk[0]), (problem.n, layouts.b.read_chunk[1]))
        )
        compute = multiply_seconds(problem, machine, problem.flops, w, h, r)
        moved = problem.m * problem.n * k * itemsize * (1 / w + 1 / h)
        copied = moved / _link(machine, layouts, (w, h, r))
        steps = ceil_div(problem.m, w) * ceil_div(problem.n, h) * ceil_div(k, r)
        cover = max(
            layouts.a.read_amplification((problem.m, k), (w, r)),
            layouts.b.read_amplification((k, problem.n), (r, h)),
        )
        return max(compute, copied * cover) + 0.1 * (compute + copied * cover) + steps * machine.step_latency

    def whole(r: int) -> bool:
        chunks = ((layouts.a, chunk_a), (layouts.b, chunk_b))
        return r == k or all(x.partial_reads or r % chunk == 0 or chunk % r == 0 for x, chunk in chunks)

    return sorted(depths, key=lambda r: (seconds(r) == inf, not whole(r), seconds(r)))


def _deeper(problem: GemmProblem, machine: MachineModel, layouts: Layouts) -> list[int]:
    """Depths beyond the usual ones, for m and n so small that issuing a step takes longer than loading its panels. Panels for which
    loading takes several times as long as issuing are not made deeper: that only faults in memory and overlaps less."""
    each = (
        problem.m * problem.itemsizes["A"] + problem.n * problem.itemsizes["B"]
    )  # bytes per element along k
    issuing = machine.issue * (
        3 if machine.unified else 5
    )  # reads and uploads of two panels, and a multiplication
    unit = lcm(layouts.a.read_chunk[1], layouts.b.read_chunk[0])
    r, limit = round_up(DEPTHS[-1], unit if unit < DEPTHS[-1] else 1), _max_depth(problem)

    def loading(r: int) -> float:
        return r * each / _link(machine, layouts, (problem.m, problem.n, r))

    depths: list[int] = []
    while r < limit and loading(r) < (OUTLASTING if depths else 1) * issuing:
        r = min(2 * r, limit)
        depths.append(r)
    return depths


def _max_depth(problem: GemmProblem) -> int:
    """The deepest panels that a kernel of the problem sums at once."""
    k = max(1, problem.depth)
    if problem.exact:
        return min(k, integers.MAX_INT32_DEPTH // 16 * 16)
    return min(k, MAX_DEPTH) if problem.planes else k


def _link(machine: MachineModel, layouts: Layouts, panels: tuple[int, int, int]) -> float:
    """Bytes per second of the slowest link that panels of those w, h and r cross."""
    w, h, r = panels
    stores = min(machine.store_rate(layouts.a, (w, r)), machine.store_rate(layouts.b, (r, h)))
    return stores if machine.unified else min(stores, machine.h2d)


def _counts(extent: int) -> Iterator[int]:
    """How many tiles to cut an extent into: every count up to `EVERY`, then ever sparser."""
    count = 1
    while count <= extent:
        yield count
        count = count + 1 if count < EVERY else ceil_div(count * 25, 24)


@lru_cache(4096)  # depths share counts
def _long_extents(extent: int, units: tuple[int, ...], most: int) -> list[int]:
    """Tile extents that are not above `most`: in as few tiles as can be and in one more, and as long as can be."""
    fewest = ceil_div(extent, most)
    found = {x for x in _extents(extent, units, (fewest, fewest + 1)) if x <= most}
    if not found:
        found = {most // unit * unit for unit in units} - {0}
    return sorted(found)


def _extents(extent: int, units: Sequence[int], counts: Iterable[int]) -> list[int]:
    """Equal tile extents for each count, aligned to each of the units; `LARGE` ones to `FINEST` at least."""
    found = set()
    for count in counts:
        even = ceil_div(extent, max(count, 1))
        for unit in units:
            aligned = FINEST if even >= LARGE and FINEST % unit == 0 else unit
            found.add(min(extent, round_up(max(even, 1), aligned)))
    return sorted(e for e in found if e > 0)
