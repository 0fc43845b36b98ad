"""Choose the panel depths (tile.k) worth trying."""

from math import inf, isqrt, lcm

from oocgemm.planning import integers
from oocgemm.planning.cost.footprint import workspace_per_element
from oocgemm.planning.emulation import MAX_DEPTH
from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.setting import Setting
from oocgemm.planning.tiling import ceil_div, round_up

DEPTHS = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192)
BYTE_DEPTHS = (16384, 32768)  # further ones, for int8
BEST_DEPTHS = 4
# Bound on the ratio of the time to load deep panels to the time to issue a step.
MAX_LOAD_RATIO = 4


def best_depths(setting: Setting, memory: int, *, every_depth: bool) -> list[int]:
    """List the best depths in ascending order, or all of them, with the deep ones that small m and n need.

    `memory` is in bytes on the device.
    """
    usual = _usual_depths(setting, memory)[: None if every_depth else BEST_DEPTHS]
    return sorted({*usual, *_deep_depths(setting)})


def link_rate(setting: Setting, tile: tuple[int, int, int]) -> float:
    """Bytes per second of the slowest link that panels of a tile of m x n x k cross."""
    machine, layouts = setting.machine, setting.layouts
    m, n, k = tile
    stores = min(machine.store_rate(layouts.a, (m, k)), machine.store_rate(layouts.b, (k, n)))
    return stores if machine.unified else min(stores, machine.h2d)


def _usual_depths(setting: Setting, memory: int) -> list[int]:
    """List round depths, multiples of the chunks along k, and all of k, in order of estimated time.

    The estimate is for a square tile that fills the memory. Depths that read whole chunks come first.
    """
    problem, machine, layouts = setting.problem, setting.machine, setting.layouts
    depth = max(1, problem.depth)
    chunk_a, chunk_b = layouts.a.read_chunk[1], layouts.b.read_chunk[0]
    units = {chunk_a, chunk_b, lcm(chunk_a, chunk_b)}
    multiples = {unit * times for unit in units for times in (1, 2, 3, 4, 6, 8)}
    deepest = min([_max_depth(problem), *_deep_depths(setting)[-1:]])
    usual = (*DEPTHS, *BYTE_DEPTHS) if problem.exact else DEPTHS
    depths = sorted(k for k in {*usual, deepest, *multiples} if k <= deepest and (k >= 16 or k == depth))

    def seconds(k: int) -> float:
        itemsize, acc = problem.itemsizes["A"], problem.itemsizes["acc"]
        panels = k * (2 * itemsize + workspace_per_element(problem, machine)) // (2 * acc)
        side = isqrt(4 * panels**2 + max(1, memory // acc)) - 2 * panels  # side^2 + 4 panels side = memory
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
        amplification = max(
            layouts.a.read_amplification((problem.m, depth), (m, k)),
            layouts.b.read_amplification((depth, problem.n), (k, n)),
        )
        overlapped = max(compute, copied * amplification) + 0.1 * (compute + copied * amplification)
        return overlapped + steps * machine.step_latency

    def whole_chunks(k: int) -> bool:
        chunks = ((layouts.a, chunk_a), (layouts.b, chunk_b))
        return k == depth or all(x.partial_reads or k % chunk == 0 or chunk % k == 0 for x, chunk in chunks)

    return sorted(depths, key=lambda k: (seconds(k) == inf, not whole_chunks(k), seconds(k)))


def _deep_depths(setting: Setting) -> list[int]:
    """List further depths, for m and n so small that issuing a step takes longer than loading its panels.

    Deeper panels than `MAX_LOAD_RATIO` allows would only fault in more memory and overlap less.
    """
    problem, machine, layouts = setting.problem, setting.machine, setting.layouts
    per_k = problem.m * problem.itemsizes["A"] + problem.n * problem.itemsizes["B"]  # bytes
    # A step is a multiplication, and reads and uploads of two panels.
    issuing = machine.issue * (3 if machine.unified else 5)
    unit = lcm(layouts.a.read_chunk[1], layouts.b.read_chunk[0])
    k, limit = round_up(DEPTHS[-1], unit if unit < DEPTHS[-1] else 1), _max_depth(problem)

    def loading(k: int) -> float:
        return k * per_k / link_rate(setting, (problem.m, problem.n, k))

    depths: list[int] = []
    while k < limit and loading(k) < (MAX_LOAD_RATIO if depths else 1) * issuing:
        k = min(2 * k, limit)
        depths.append(k)
    return depths


def _max_depth(problem: GemmProblem) -> int:
    """Return the deepest panels that a kernel can sum in one step."""
    depth = max(1, problem.depth)
    if problem.exact:
        return min(depth, integers.MAX_INT32_DEPTH // 16 * 16)
    return min(depth, MAX_DEPTH) if problem.planes else depth
