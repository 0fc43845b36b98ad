"""Choose the depths to try: the extents tile.k along k of the panels of A and B that a step multiplies."""

from math import inf, isqrt, lcm

from oocgemm.planning import integers
from oocgemm.planning.cost.footprint import workspace_per_element
from oocgemm.planning.cost.price import Prices
from oocgemm.planning.emulation import MAX_DEPTH
from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.setting import Setting
from oocgemm.planning.tiling import ceil_div

# Depths (tile.k) to try for all dtypes, and further ones for int8.
DEPTHS = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192)
BYTE_DEPTHS = (16384, 32768)
# Tile shapes are enumerated for this many depths (tile.k), the best ones. More would make planning slower.
BEST_DEPTHS = 4


def best_depths(setting: Setting, memory: int, *, every_depth: bool) -> list[int]:
    """List the best depths (tile.k) in ascending order, or all depths to try if `every_depth`.

    `memory` is the bytes of device memory for tiles and panels.
    """
    return sorted(_depths(setting, memory)[: None if every_depth else BEST_DEPTHS])


def link_rate(setting: Setting, tile: tuple[int, int, int]) -> float:
    """Return the bytes per second of the slowest link that panels cross, for tiles of shape (m, n, k)."""
    prices, (m, n, k) = Prices(setting), tile
    links = ("read",) if setting.machine.unified else ("read", "h2d")
    return min(prices.rate(link, *panel) for link in links for panel in (("A", m, k), ("B", k, n)))


def _depths(setting: Setting, memory: int) -> list[int]:
    """List the depths (tile.k) to try, best first.

    They are `DEPTHS`, small multiples of the chunks' extents along k, and the maximum depth. Multiples and
    divisors of these extents come first, since they read whole chunks. Depths whose panels do not fit into
    `memory` bytes come last. Otherwise the order is that of the estimated time of the product, with a square
    tile that fills `memory` bytes.
    """
    problem, machine, layouts = setting.problem, setting.machine, setting.layouts
    depth = max(1, problem.depth)
    chunk_a, chunk_b = layouts.a.read_chunk[1], layouts.b.read_chunk[0]
    units = {chunk_a, chunk_b, lcm(chunk_a, chunk_b)}
    multiples = {unit * times for unit in units for times in (1, 2, 3, 4, 6, 8)}
    deepest = max_depth(problem)
    usual = (*DEPTHS, *BYTE_DEPTHS) if problem.exact else DEPTHS
    depths = sorted(k for k in {*usual, deepest, *multiples} if k <= deepest and (k >= 16 or k == depth))

    def seconds(k: int) -> float:
        itemsize, acc = problem.itemsizes["A"], problem.itemsizes["acc"]
        # A square tile of `side` rows and four panels fill the memory: side^2 + 4 * panels * side = memory,
        # in elements of the accumulator. Here, `panels` is the size of a panel and its workspace per row of
        # the tile.
        panels = k * (2 * itemsize + workspace_per_element(problem, machine)) // (2 * acc)
        side = isqrt(4 * panels**2 + max(1, memory // acc)) - 2 * panels
        if side < 1:
            return inf
        m, n = (
            max(1, min(extent, side // chunk * chunk or side))
            for extent, chunk in ((problem.m, layouts.a.read_chunk[0]), (problem.n, layouts.b.read_chunk[1]))
        )
        compute = machine.multiply_seconds(problem.rate, problem.flops, m, n, k)
        moved = problem.m * problem.n * depth * itemsize * (1 / m + 1 / n)
        copied = moved / link_rate(setting, (m, n, k))
        steps = ceil_div(problem.m, m) * ceil_div(problem.n, n) * ceil_div(depth, k)
        overlapped = max(compute, copied) + 0.1 * (compute + copied)
        return overlapped + steps * machine.step_latency

    def whole_chunks(k: int) -> bool:
        chunks = ((layouts.a, chunk_a), (layouts.b, chunk_b))
        return k == depth or all(x.partial_reads or k % chunk == 0 or chunk % k == 0 for x, chunk in chunks)

    return sorted(depths, key=lambda k: (seconds(k) == inf, not whole_chunks(k), seconds(k)))


def max_depth(problem: GemmProblem) -> int:
    """Return the maximum depth of a step: all of k, or the depth above which int32 sums could overflow."""
    depth = max(1, problem.depth)
    if problem.exact:
        return min(depth, integers.MAX_INT32_DEPTH // 16 * 16)
    return min(depth, MAX_DEPTH) if problem.planes else depth
