"""Choose thin first steps: multiplications start sooner, but may wait longer for the first whole step."""

from itertools import islice
from math import lcm, prod

from oocgemm.planning.cost.footprint import extents
from oocgemm.planning.cost.price import panel_rate
from oocgemm.planning.schedule.traversal import step_order
from oocgemm.planning.setting import Setting
from oocgemm.planning.tiling import TileGrid, TileShape

# Bounds on thin first steps: the depth is halved at most twice, and stays large enough for a kernel launch to
# pay.
MAX_HALVINGS = 2
MIN_THIN_DEPTH = 256


def best_ramp(setting: Setting, tile: TileShape) -> int:
    """Choose how often to halve the first step (`TileGrid.ramp`), so that multiplications wait least.

    A ramp gains nothing if panels take about as long to load as to multiply: the first whole step then waits
    as long as without. It loses time if rows of panels are copied without staging, since short rows are
    slower.
    """
    layouts = setting.layouts
    unit = lcm(layouts.a.read_chunk[1], layouts.b.read_chunk[0])
    halvings = _max_halvings(setting.problem.depth, tile.k, unit)
    if halvings == 0:
        return 0
    # Among ramps that are equal to the microsecond, prefer the thinnest: panels may arrive sooner than
    # modelled.
    return min(range(halvings, -1, -1), key=lambda ramp: round(_waited(setting, tile, ramp), 6))


def _max_halvings(depth: int, k: int, unit: int) -> int:
    """Count how often k can be halved to multiples of `unit` that are at least `MIN_THIN_DEPTH`."""
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
    """Seconds of waits before the second whole step. Later waits do not depend on the ramp."""
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
            faults = 0.0 if layout.is_direct(panel) else machine.arena_seconds_per_byte
            read += prod(thin) * size * (1 / panel_rate(setting, layout, whole, panel) + faults)
            uploaded = max(read, uploaded) + prod(thin) * size / machine.upload_rate(layout, panel, thin)
        waited = max(waited, uploaded - multiplied)
        flops = problem.flops * m * n * thin_k / (problem.m * problem.n * depth)
        multiplied += machine.multiply_seconds(problem.rate, flops, m, n, thin_k) + machine.step_latency
    return waited
