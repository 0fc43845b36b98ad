"""Enumerate the candidates for a product: tile shapes with numbers of slots (buffers)."""

from collections.abc import Iterator
from math import inf, prod

from oocgemm.planning.cost.bound import shape_bound
from oocgemm.planning.cost.footprint import Candidate, extents, scratch_bytes, workspace_per_element
from oocgemm.planning.cost.price import Prices
from oocgemm.planning.search.chained import chained_shapes, smallest_shape
from oocgemm.planning.search.shapes import shapes, strip_shapes
from oocgemm.planning.search.slot_counts import slot_counts
from oocgemm.planning.setting import Setting
from oocgemm.planning.tiling import TileShape, ceil_div, round_up

# Minimum size of a large chunk, in bytes. For large chunks, more threads are used (`io_threads`). For smaller
# ones, more threads do not help: most of the time is taken by opening and closing files.
LARGE_CHUNK = 8 << 20
# With less device memory for slots than this, in bytes, all depths (tile.k) and the smallest tile are tried.
SCARCE_MEMORY = 1 << 20
# If A, B and C are multiplied in place, one product takes about CALL_SECONDS seconds, and has at least
# MIN_CALL_ROWS rows of C. With fewer rows, BLAS would copy B into its own buffers too often.
CALL_SECONDS, MIN_CALL_ROWS = 0.5, 1024
# A tile shape is skipped if a lower bound on its time exceeds the least bound of a candidate by this factor.
PRUNE_FACTOR = 1.3


def candidates(prices: Prices, tile: TileShape | None, io_threads: int) -> Iterator[tuple[float, Candidate]]:
    """Yield candidates that fit the budgets, each with a lower bound on its seconds.

    If `tile` is given, all of them have that tile shape. Otherwise, chained products have the first tile
    shape that fits. Of other products, tile shapes whose lower bound exceeds `PRUNE_FACTOR` times the least
    bound of a candidate are left out.
    """
    setting = prices.setting
    problem, machine = setting.problem, setting.machine
    if tile is None and needs_no_memory(setting):
        tile = in_place_tile(setting)
    if problem.b.updated:
        for shape in [tile] if tile else chained_shapes(setting):
            if found := list(slot_counts(prices, shape, 1, io_threads)):
                yield from found
                return
        return
    best = inf
    # If memory is scarce, all depths (tile.k) are tried: panels of the best ones may leave no room for a
    # tile.
    scarce = setting.budgets.device - machine.device_reserve < SCARCE_MEMORY
    for every_depth in (False, True):
        others = [(tile, 2)] if tile else list(shapes(setting, every_depth=every_depth))
        strips = [] if tile else list(strip_shapes(setting))
        strips, direct = (
            [found for found in some if is_enqueued(setting, found[0])] for some in (strips, others)
        )
        tried = [*strips, *(direct or others)]  # the strips may not fit
        bounds = {shape: shape_bound(prices, shape) for shape, _ in tried}
        tried.sort(key=lambda found: bounds[found[0]])
        # A shape that fits with two accumulators is also tried with one, which leaves more memory for panels.
        accumulators = ((shape, c) for shape, count in tried for c in range(1, count + 1))
        for shape, c in dict.fromkeys(accumulators):
            if bounds[shape] > PRUNE_FACTOR * best:
                break
            if c == 1 or shape.m < problem.m or shape.n < problem.n:
                for least, candidate in slot_counts(prices, shape, c, io_threads):
                    best = min(best, least)
                    yield least, candidate
        if tile or not (best == inf or scarce):
            return
    yield from slot_counts(prices, min_tile(setting), 1, io_threads)


def is_enqueued(setting: Setting, tile: TileShape) -> bool:
    """Return False if threads would copy narrow panels although all arrays are pinned (`enqueues`)."""
    m, n, k = extents(setting.problem, tile)
    layouts = setting.layouts
    blocks = (layouts.a, (m, k)), (layouts.b, (k, n)), (layouts.c, (m, n))
    return not setting.enqueues or all(layout.is_direct(block) for layout, block in blocks)


def needs_no_memory(setting: Setting) -> bool:
    """Return whether A, B and C are multiplied in place, without any workspace."""
    problem = setting.problem
    workspace = problem.planes or workspace_per_element(problem, setting.machine)
    return len(setting.layouts.in_place) == 3 and not workspace


def in_place_tile(setting: Setting) -> TileShape:
    """Return the tile shape of a product that needs no memory: some rows of C, and all of n and k.

    As few products as possible are the fastest. C is only divided so that a run shows its progress and can
    be cancelled.
    """
    problem = setting.problem
    m, n, k = max(1, problem.m), max(1, problem.n), max(1, problem.depth)
    seconds = setting.machine.multiply_seconds(problem.rate, problem.flops, m, n, k)
    tiles = max(1, min(int(seconds / CALL_SECONDS), m // MIN_CALL_ROWS))
    return TileShape(ceil_div(m, tiles), n, k)


def min_tile(setting: Setting) -> TileShape:
    """Return the smallest tile shape that the planner uses: 16 x 16 x 16, rounded up to whole chunks of C."""
    problem, unit = setting.problem, setting.layouts.c.writing.chunk
    if problem.b.updated:
        return smallest_shape(problem)
    return TileShape(
        max(1, min(problem.m, round_up(16, unit[0]))),
        max(1, min(problem.n, round_up(16, unit[1]))),
        max(1, min(problem.depth, 16)),
    )


def io_threads(setting: Setting) -> int:
    """Choose the number of reader threads, which is also the number of writer threads.

    - The number is `MachineModel.io_threads` for plain copies.
    - It is 1.5 times as large, but at most one per core, if a GPU multiplies and the CPU does more than plain
      reads: A or B has large chunks (`LARGE_CHUNK`), both are in host memory, or reads compute digests.
    - It is at least `MachineModel.codec_threads` if chunks are decoded or encoded.
    - It is reduced until the temporary memory of all threads takes at most half of the host budget.
    """
    problem, machine, layouts = setting.problem, setting.machine, setting.layouts
    read = (layouts.a, layouts.b, layouts.c) if problem.reads_c else (layouts.a, layouts.b)
    codecs = layouts.c.writing.encodes or any(layout.decode_bytes for layout in read)
    threads = machine.io_threads
    large = any(
        prod(layout.read_chunk) * problem.itemsizes[operand] >= LARGE_CHUNK
        for operand, layout in (("A", layouts.a), ("B", layouts.b))
    )
    more = large or problem.checked == "device" or not setting.host_caches_panels
    if more and not machine.shares_cores:
        threads = max(threads, min(machine.cores, threads * 3 // 2))
    if codecs:
        threads = max(threads, machine.codec_threads)
    while threads > 1 and scratch_bytes(setting, threads) > setting.budgets.host // 2:
        threads -= 1
    return threads
