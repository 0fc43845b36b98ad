"""Lower bounds on the time of candidates, to skip those that cannot be the fastest."""

from oocgemm.planning.cost.footprint import Candidate, extents
from oocgemm.planning.cost.loads import estimate_loads
from oocgemm.planning.cost.price import Prices
from oocgemm.planning.schedule.traversal import last
from oocgemm.planning.tiling import TileGrid, TileShape, length


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
    compute = machine.multiply_seconds(problem.rate, problem.flops, m, n, k)
    compute += down * across * grid.steps * max(machine.step_latency, machine.issue)
    store = max(prices.rate("read", "A", m, k), prices.rate("read", "B", k, n))
    link = max(prices.rate("h2d", "A", m, k), prices.rate("h2d", "B", k, n))
    up = (a + b - reuses * budgets.device) / link
    read = (a + b - reuses * (budgets.device + budgets.host)) / store
    return compute + max(0.0, read) if machine.shares_cores else max(compute, up, read)


def bound(prices: Prices, candidate: Candidate) -> float:
    """Return a lower bound on the seconds of a candidate: the time of its busiest lane.

    The bound includes the time to load the first panels, and the time in which the last tile leaves the
    device.
    """
    setting, tile, slots = prices.setting, candidate.tile, candidate.slots
    problem, machine = setting.problem, setting.machine
    grid, (m, n, k) = TileGrid.of(problem, tile), extents(problem, tile)
    (down, across), grid_steps, depth = grid.shape, grid.steps, problem.depth
    tiles, strip, unified = down * across, min(slots.strip, m), slots.unified
    if not tiles:
        return 0.0
    loads = estimate_loads(problem, grid, slots, candidate.traversal)
    read = up = first = copies = reading = uploading = 0.0
    for operand, rows, cols, loaded, uploaded, count, on_host in (
        ("A", m, k, loads.a_read, loads.a_up, slots.a, slots.host_a),
        ("B", k, n, loads.b_read, loads.b_up, slots.b, slots.host_b),
    ):
        if size := prices.bytes(operand, rows, cols):
            streams = not unified and on_host == 0
            reading = 0.0 if streams else prices.read(operand, rows, cols)
            uploading = 0.0 if unified else prices.upload(operand, rows, cols)
            read += loaded / size * reading
            read += min(count if unified else on_host, loaded / size) * prices.faults(operand, rows, cols)
            up += uploaded / size * uploading
            copies += 0.0 if streams else loaded / size
            copies += 0.0 if unified else uploaded / size
            first += (reading + uploading) / (1 << candidate.ramp)
    # With a single host slot, Reads and Uploads of an operand alternate.
    in_turn = not unified and 1 in (slots.host_a, slots.host_b)
    # Tiles and strips of full size that together have as many elements as C.
    whole = problem.m * problem.n / (m * n)
    strips = whole * m / strip
    step = prices.multiply(m, m, n, k) + (prices.prepare(m, n, k) if slots.planes else 0.0)
    per_tile = max(1.0, depth / max(1, k)) * step
    streams_c = not unified and slots.host_c == 0
    write = 0.0 if streams_c else prices.write(strip, n)
    download = 0.0 if unified else prices.download(strip, n)
    if slots.c == 1 and tiles > 1:
        # A strip of the next tile cannot start before the same strip of this tile has left the accumulator.
        turning = min(2 * slots.turn_steps, grid_steps) * step
        waiting = per_tile - turning + turning * strip / m + (write if unified else download)
        per_tile = max(per_tile, waiting - (waiting - per_tile) / tiles)
    compute = whole * per_tile
    old = prices.read("C", m, n) * whole if problem.reads_c else 0.0
    if machine.shares_cores:
        return read + compute + old + prices.write_cpu_share * strips * write
    issue = machine.issue * (tiles * grid_steps + copies + (1 if unified or streams_c else 2) * strips)
    # The last tile drains while its last steps run, strip by strip.
    end = last(candidate.traversal, down, across)
    part, share = grid.elements(end) / (m * n), min(1.0, strip / length(grid.rows(end[0])))
    draining = max(download, write) * part * m / strip
    tail = max(share * draining, draining - min(slots.last_steps, grid_steps) * step * part * (1 - share))
    # After the last Upload, at least one step follows.
    after = max(step * part + share * draining, draining + share * step * part)
    return max(
        first + compute + tail,
        reading / (1 << candidate.ramp) + up + after,
        read + (up if in_turn else uploading) + after,
        first + step / grid_steps + strips * download + share * draining,
        first + step / grid_steps + strips * (download / grid_steps + write),
        issue,
    )
