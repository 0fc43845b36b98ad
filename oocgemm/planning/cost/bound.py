"""Lower bounds: on the time of candidates, to skip those that cannot be the fastest, and on bytes moved."""

from collections.abc import Collection, Iterable
from math import sqrt
from typing import NamedTuple

from oocgemm.planning.cost.footprint import Candidate, extents
from oocgemm.planning.cost.price import Prices
from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.schedule.placement import estimate_loads
from oocgemm.planning.schedule.traversal import last
from oocgemm.planning.tiling import Coverage, TileGrid, TileShape, length
from oocgemm.values import dataclass


def shape_bound(prices: Prices, tile: TileShape) -> float:
    """Return a lower bound on the seconds of all candidates with the tile shape `tile`.

    The bound assumes that both budgets are used only to cache panels, and that every tile uses all cached
    panels.
    """
    setting = prices.setting
    problem, machine, budgets = setting.problem, setting.machine, setting.budgets
    grid, (m, n, k) = TileGrid.of(problem, tile), extents(problem, tile)
    (down, across), depth = grid.shape, problem.depth
    if not m * n * k:
        return 0.0
    a = across * problem.m * depth * problem.itemsizes["A"]
    b = down * depth * problem.n * problem.itemsizes["B"]
    reuses = down * across - 1
    compute = prices.product(problem.flops, m, n, k)
    steps = down * across * grid.steps
    compute += steps * machine.step_latency
    store = max(prices.rate("read", "A", m, k), prices.rate("read", "B", k, n))
    link = max(prices.rate("h2d", "A", m, k), prices.rate("h2d", "B", k, n))
    up = (a + b - reuses * budgets.device) / link
    read = (a + b - reuses * (budgets.device + budgets.host)) / store
    if machine.shares_cores:
        return max(compute + max(0.0, read), steps * machine.issue)
    return max(compute, up, read, steps * machine.issue)


def bound(prices: Prices, candidate: Candidate) -> float:
    """Return a lower bound on the seconds of a candidate: the time of its busiest lane.

    The bound includes the time to load the first panels, and the time in which the last tile leaves the
    device.
    """
    setting, tile, slots = prices.setting, candidate.tile, candidate.slots
    problem, machine = setting.problem, setting.machine
    grid, (m, n, k) = TileGrid.of(problem, tile, slots.strip), extents(problem, tile)
    (down, across), grid_steps, depth = grid.shape, grid.steps, problem.depth
    tiles, strip, unified = grid.count, min(slots.strip, m), slots.unified
    if not tiles:
        return 0.0
    loading = _loading(prices, candidate, grid)
    # Tiles and strips of full size that together have as many elements as those that are computed.
    stairs = down if grid.is_staircase((0, 0)) else 0
    # BLAS may compute only a triangle of the squares on the diagonal.
    unneeded = m * strip / 2 if prices.halves else 0.0
    full = tiles - stairs + stairs * (grid.elements((0, 0)) - unneeded) / (m * n)
    whole = full * problem.m * problem.n / (down * m * across * n)
    strips = whole * m / strip
    # Strips are multiplied one after the other at the turn from one tile to the next, and in the last tile.
    step = min(prices.multiply(m, m, n, k), prices.multiply(strip, m, n, k) * m / strip)
    step += prices.prepare(m, n, k) if slots.planes else 0.0
    per_tile = max(1.0, depth / max(1, k)) * step
    streams_c = not unified and slots.host_c == 0
    write = 0.0 if streams_c else prices.write(strip, n)
    download = 0.0 if unified else prices.download(strip, n)
    turned = per_tile
    if slots.c == 1 and tiles > 1:
        # A strip of the next tile cannot start before the same strip of this tile has left the accumulator.
        turning = min(2 * slots.turn_steps, grid_steps) * step
        drains = 0.0 if problem.finishes else write if unified else download
        waiting = per_tile - turning + turning * strip / m + drains
        turned = max(per_tile, waiting - (waiting - per_tile) / tiles)
    finishing = strips * prices.finish(strip, n) if problem.finishes else 0.0
    compute = whole * turned + finishing
    old = prices.read("C", m, n) * whole if problem.reads_c else 0.0
    old_up = prices.upload("C", m, n) * whole if problem.reads_c and not unified else 0.0
    if machine.shares_cores:
        written = prices.write_cpu_share * strips * write
        return max(compute, loading.read + whole * per_tile + finishing + old + written)
    issue = machine.issue * (
        tiles * grid_steps + loading.copies + (1 if unified or streams_c else 2) * strips
    )
    # The last tile drains while its last steps run, strip by strip.
    square = problem.cover.square
    end = (down - 1, across - 1) if square else last(candidate.traversal, down, across)
    rows = length(grid.rows(end[0]))
    part, share = grid.elements(end) / (m * n), min(1.0, strip / rows)
    last_share = ((rows - 1) % strip + 1) / rows
    draining = max(download, write) * part * m / strip
    draining_steps = min(slots.last_steps, grid_steps)
    tail = max(last_share * draining, draining - draining_steps * step * part * (1 - share))
    # After the last Upload, at least one step follows.
    after = max(step * part + last_share * draining, draining + share * step * part)
    # The first strip leaves when the steps of its tile have run, perhaps strip by strip.
    leaving = loading.first + max(1.0, depth / max(1, k)) * step * strip / m
    # The old C is loaded over the same link as panels, and from the same storage.
    layouts = setting.layouts
    decoded = {layout.decode_bytes > 0 for layout in (layouts.a, layouts.b, layouts.c)}
    stored = loading.read + old if len(decoded) == 1 else 0.0
    return max(
        loading.first + compute + tail,
        max(loading.waited + loading.up, loading.read + loading.last_up, loading.alternating) + after,
        loading.up + old_up,
        stored,
        leaving + strips * download + last_share * part * m / strip * write,
        leaving + download + strips * write,
        issue,
    )


class _Loading(NamedTuple):
    """Lower bounds on the seconds for which panels are loaded.

    `first` is the time until the first panels are on the device, `read` that of all Reads, `up` that of all
    Uploads, and `alternating` that of the Reads and Uploads of an operand with one host slot. The first
    Upload starts after `waited`, and the last one takes `last_up`. `copies` is the number of Reads and
    Uploads.
    """

    first: float
    waited: float
    read: float
    up: float
    last_up: float
    alternating: float
    copies: float


def _loading(prices: Prices, candidate: Candidate, grid: TileGrid) -> _Loading:
    problem, slots = prices.setting.problem, candidate.slots
    m, n, k = extents(problem, candidate.tile)
    loads = estimate_loads(problem, grid, slots, candidate.traversal)
    read = up = copies = alternating = first_read = first_up = waited = last_up = 0.0
    for operand, rows, cols, loaded, uploaded, count, on_host in (
        ("A", m, k, loads.a_read, loads.a_up, slots.a, slots.host_a),
        ("B", k, n, loads.b_read, loads.b_up, slots.b, slots.host_b),
    )[: len(problem.operands)]:
        if size := prices.bytes(operand, rows, cols):
            streams = not slots.unified and on_host == 0
            reading = 0.0 if streams else prices.read(operand, rows, cols)
            last_up = 0.0 if slots.unified else prices.upload(operand, rows, cols)
            read += loaded / size * reading
            faulting = min(count if slots.unified else on_host, loaded / size)
            read += faulting * prices.faults(operand, rows, cols)
            up += uploaded / size * last_up
            if on_host == 1:
                alternating = max(alternating, loaded / size * (reading + last_up))
            copies += (0.0 if streams else loaded / size) + (0.0 if slots.unified else uploaded / size)
            # Panel B is read while panel A is uploaded.
            waited = waited or reading
            first_read += reading
            first_up = max(first_read, first_up) + last_up
    return _Loading(first_up, waited, read, up, last_up, alternating, copies)


def whole(problem: GemmProblem) -> Coverage:
    """Return the coverage of all of C, or of the triangle of a Gram matrix."""
    return Coverage(problem.m, 0 if problem.b.shares else problem.n, problem.elements)


def min_bytes(problem: GemmProblem, memory: int, part: Coverage | None = None) -> int:
    """Return a lower bound on the bytes that any schedule loads into a memory of `memory` bytes.

    If the memory has room for M elements, and each operand is read at least once, any schedule loads at least
    this many elements:

    - beta = 0:  max(m k + k n, 2 m n k / sqrt(M) - 2 M - m n)
    - otherwise: max(m k + k n + m n, 2 m n k / sqrt(M) - 2 M)

    The source is Smith, Lowery, Langou and van de Geijn, *A tight I/O lower bound for matrix multiplication*
    (2019). With mixed dtypes, M counts elements of the narrowest one. If only a `part` of C is computed, m
    and n are its numbers of rows and columns, and m n is its number of elements.

    For a Gram matrix, whose triangle takes P multiplications, the second term is sqrt(2) P / sqrt(M) - 2 M.
    Source: Beaumont, Eyraud-Dubois, Langou and Verite, *I/O-optimal algorithms for symmetric linear algebra
    kernels* (2022).
    """
    part = part or whole(problem)
    sizes = problem.itemsizes
    narrowest = min(sizes.values())
    elements = max(1, memory // narrowest)
    once = required_bytes(problem, part)["h2d"]
    products = min(part.elements, problem.elements) * problem.depth
    # Without halves, products of both elements (i, j) and (j, i) are counted.
    factor = 2 if not problem.b.shares else sqrt(2) if problem.cover.halves else sqrt(1 / 2)
    streaming = factor * products / sqrt(elements) - 2 * elements
    if not problem.reads_c:
        streaming -= part.elements
    return max(once, int(streaming * narrowest))


def required_bytes(
    problem: GemmProblem, part: Coverage | None = None, in_place: Collection[str] = ()
) -> dict[str, int]:
    """Return the bytes over each link if every element that is needed for a part of C crosses it once.

    The operands in `in_place` cross no link: they are multiplied where they are.
    """
    part = part or whole(problem)
    sizes = problem.itemsizes | dict.fromkeys(in_place, 0)
    # If the number of elements that the sink keeps is only known after the run, it counts as 0.
    c_bytes = 0 if problem.sink.bounded else problem.sink.count(part.rows, part.elements) * sizes["C"]
    up = (
        part.rows * problem.depth * sizes["A"]
        + problem.depth * part.cols * sizes["B"]
        + (c_bytes if problem.reads_c else 0)
    )
    return {"read": up, "h2d": up, "d2h": c_bytes, "write": c_bytes}


@dataclass(frozen=True, slots=True)
class WorkerShare:
    """The share of a worker in a product: its memory in bytes, elements of C, and multiplications."""

    memory: int
    elements: int
    products: int


def min_bytes_of_workers(problem: GemmProblem, shares: Iterable[WorkerShare], required: int = 0) -> int:
    """Return a lower bound on the bytes that workers read from storage together, with these shares.

    Each worker reads into a memory of its own. A worker that computes `products` multiplications for
    `elements` elements of C, with room for M elements, reads at least

    - a + b elements of A and B with ``a * b >= products**2 / elements`` (Loomis and Whitney, 1949), where a
      is at most m k and b at most k n;
    - ``2 products / sqrt(M) - 2 M`` elements, less `elements` if beta = 0, as for one memory (`min_bytes`).

    For equal parts of a grid with p_k slices of k, the first bound is ``2 k sqrt(m n P / p_k)`` elements in
    all. `required` are the bytes if each element was read once. They are the bound for one large memory.
    """
    least = sum(max(_panel_bytes(problem, s), _streaming_bytes(problem, s)) for s in shares)
    return max(required, int(least))


def _panel_bytes(problem: GemmProblem, share: WorkerShare) -> float:
    """Return the least bytes of A and B that contain the operands of a worker's multiplications."""
    if not share.elements or not share.products:
        return 0.0
    sizes = problem.itemsizes
    pairs = share.products**2 / share.elements
    most = problem.m * problem.depth
    # a sizes[A] + b sizes[B] with a b = pairs is least at a = sqrt(pairs sizes[B] / sizes[A]).
    a = sqrt(pairs * sizes["B"] / sizes["A"])
    a = min(most, max(a, pairs / (problem.depth * problem.n)))
    return a * sizes["A"] + pairs / a * sizes["B"]


def _streaming_bytes(problem: GemmProblem, share: WorkerShare) -> float:
    """Return the least bytes that a worker reads because its memory is small; negative if it is large."""
    narrowest = min(problem.itemsizes.values())
    memory = max(1, share.memory // narrowest)
    elements = 2 * share.products / sqrt(memory) - 2 * memory
    return (elements - (0 if problem.reads_c else share.elements)) * narrowest
