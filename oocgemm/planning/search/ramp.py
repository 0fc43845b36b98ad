"""Choose thin first steps for the first tile.

Panels of thin steps have a small extent along k, so that they arrive sooner and multiplications start sooner.
But the first step of depth tile.k, which follows, may wait longer for its panels.
"""

from itertools import islice
from math import lcm, prod

from oocgemm.planning.cost.footprint import extents
from oocgemm.planning.cost.price import panel_rate
from oocgemm.planning.schedule.traversal import step_order
from oocgemm.planning.setting import Setting
from oocgemm.planning.tiling import TileGrid, TileShape

# The depth of the first step is halved at most MAX_HALVINGS times, and never below MIN_THIN_DEPTH. Each thin
# step takes one more launch of a kernel.
MAX_HALVINGS = 2
MIN_THIN_DEPTH = 256


def best_ramp(setting: Setting, tile: TileShape) -> int:
    """Choose how often to halve the depth of the first step (`TileGrid.ramp`); 0 if thin steps save no time.

    The choice minimizes the time for which multiplications wait in the first steps. Thin steps gain nothing
    if panels take about as long to load as to multiply: the wait only moves to a later step.
    """
    layouts = setting.layouts
    unit = lcm(layouts.a.read_chunk[1], layouts.b.read_chunk[0])
    halvings = _max_halvings(setting.problem.depth, tile.k, unit)
    if halvings == 0:
        return 0
    # Among ramps whose waits differ by less than a microsecond, prefer the one with the thinnest steps. If
    # panels arrive sooner than modelled, thinner first steps start sooner.
    return min(range(halvings, -1, -1), key=lambda ramp: round(_waited(setting, tile, ramp), 6))


def _max_halvings(depth: int, k: int, unit: int) -> int:
    """Return how many times the depth k of the first step may be halved; 0 if there is only one step.

    `unit` is a common multiple of the chunks' extents along k. The thinnest step has a multiple of it as
    depth, so that whole chunks are read. `MIN_THIN_DEPTH` and `MAX_HALVINGS` are also respected.
    """
    halvings = 0
    while (
        halvings < MAX_HALVINGS
        and depth > k
        and (k >> halvings) % (2 * unit) == 0
        and k >> (halvings + 1) >= MIN_THIN_DEPTH
    ):
        halvings += 1
    return halvings


def _waited(setting: Setting, tile: TileShape, ramp: int) -> float:
    """Return the seconds for which multiplications wait for panels in the first steps of the first tile.

    `ramp` is the number of times that the depth of the first step is halved. Waits are counted in the thin
    steps and in the step after them. Later waits hardly depend on `ramp`.
    """
    problem, machine, layouts = setting.problem, setting.machine, setting.layouts
    (m, n, k), depth, grid = extents(problem, tile), problem.depth, TileGrid.of(problem, tile, ramp)
    read = uploaded = multiplied = waited = 0.0
    for step in islice(step_order((0, 0), grid.steps, ramp), ramp + 2):
        start, stop = grid.depth(step)
        thin_k = stop - start
        for layout, whole, panel, thin, size in (
            (layouts.a, (problem.m, depth), (m, k), (m, thin_k), problem.itemsizes["A"]),
            (layouts.b, (depth, problem.n), (k, n), (thin_k, n), problem.itemsizes["B"]),
        ):
            faults = 0.0 if setting.streams(layout) else machine.arena_seconds_per_byte
            read += prod(thin) * size * (1 / panel_rate(setting, layout, whole, panel) + faults)
            uploaded = max(read, uploaded) + prod(thin) * size / machine.upload_rate(layout, panel, thin)
        waited = max(waited, uploaded - multiplied)
        flops = problem.flops * m * n * thin_k / (problem.m * problem.n * depth)
        multiplied += machine.multiply_seconds(problem.rate, flops, m, n, thin_k) + machine.step_latency
    return waited
