#!/usr/bin/env python
"""The predicted time of the best plan of a product, if its kernel and all links run at their ceilings.

A block cannot be multiplied before it has arrived, nor downloaded before it is complete. So even a perfect
run takes longer than its slowest resource: at its start and at its end, only some resources are busy.

The best plan is that of several searches: the planner's with the rates of the ceilings and with its own
rates, and a descent from both and from the tiles of the loop that an expert would write. The descent tries
all candidates that differ in one decision, and some that the planner does not try, such as tiles of uneven
widths.

usage: grid_schedule.py FILE: search again for the products in a results file, with more time.
"""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from grid_cases import COLD, IN_MEMORY, PAGEABLE, Case, budget_bytes, loop_tile
from plan_settings import grid_setting

from oocgemm.planning import KernelRate, MachineModel, Setting, TileShape, make_plan
from oocgemm.planning.cost.clock import predict
from oocgemm.planning.cost.footprint import Candidate, footprint
from oocgemm.planning.cost.price import Prices
from oocgemm.planning.schedule.traversal import Traversal
from oocgemm.planning.tiling import ceil_div, round_up

LATENCY = 1e-6  # seconds of each operation, so that it is not worth while to use ever smaller blocks
UNIT = 128  # extents of tiles and strips above MIN_ROUNDED are multiples of this number
MIN_ROUNDED = 1024
MAX_DRAIN = 32
MIN_GAIN = 5e-4  # a step of the descent gains at least this part
SECONDS = 6.0  # of the descent per product, if a results file is searched again


def scheduled(case: Case, rates: dict[str, Any], compute: float | None, seconds: float = 0.0) -> float | None:
    """Return the seconds of the best plan on the virtual clock; None if the time in core is not known.

    `rates` and `compute` are as for `grid_cases.bounds`. Each operation takes `LATENCY`, too. The descent
    takes at most `seconds`.
    """
    if compute is None:
        return None
    of_grid = grid_setting(case, "cuda")
    ceilings = Setting(
        of_grid.problem, model(case, rates, compute, of_grid), of_grid.layouts, of_grid.budgets
    ).enqueued
    prices = Prices(ceilings)
    starts = dict.fromkeys(
        make_plan(s.problem, s.budgets, s.machine, s.layouts).candidate for s in (ceilings, of_grid)
    )
    m, n, k = loop_tile(case, budget_bytes(case, of_grid.budgets.device), 1)
    starts |= {replace(x, tile=TileShape(m, n, k)): None for x in list(starts)[:1]}
    fitting = [x for x in starts if _fits(ceilings, x)]
    until = time.perf_counter() + seconds
    found = [_descended(prices, x, until) for x in fitting]
    # Links that copy both ways at once are slower than the clock assumes.
    return max(min(found), _bound(case, rates, compute))


def _bound(case: Case, rates: dict[str, Any], compute: float) -> float:
    from grid_cases import bounds

    return max(bounds(case, rates, compute).values())


def _descended(prices: Prices, start: Candidate, until: float) -> float:
    """Change one decision at a time, the one that saves most. Return the seconds of the last candidate."""
    setting, best, seen = prices.setting, start, {start}
    seconds = predict(setting, start, prices).total
    while time.perf_counter() < until:
        tried = [x for x in dict.fromkeys(_neighbours(setting, best)) if x not in seen and _fits(setting, x)]
        seen.update(tried)
        found = min(((predict(setting, x, prices).total, i, x) for i, x in enumerate(tried)), default=None)
        if found is None or found[0] > (1 - MIN_GAIN) * seconds:
            break
        seconds, _, best = found
    return seconds


def _neighbours(setting: Setting, candidate: Candidate) -> Iterator[Candidate]:
    problem, tile, slots = setting.problem, candidate.tile, candidate.slots
    chunk_m, chunk_n = setting.layouts.c.writing.chunk

    def shaped(**extents: int) -> Candidate:
        shape = replace(tile, **extents)
        return replace(candidate, tile=shape, slots=replace(slots, strip=min(slots.strip, shape.m)))

    for name, extent, whole, unit in (
        ("m", tile.m, problem.m, chunk_m),
        ("n", tile.n, problem.n, chunk_n),
        ("k", tile.k, problem.depth, 1),
    ):
        count = ceil_div(whole, extent)
        counts = (count - 1, count + 1, 2 * count, 3 * count, count // 2)
        extents = {ceil_div(whole, x) for x in counts if x > 0}
        for each in extents | {extent * 5 // 4, extent * 9 // 8, extent * 7 // 8}:  # uneven tiles, too
            rounded = round_up(max(1, each), unit if each < MIN_ROUNDED else max(unit, UNIT))
            yield shaped(**{name: min(whole, rounded)})
    for rows in {2 * slots.strip, slots.strip // 2, slots.strip * 3 // 2, tile.m}:
        few = round_up(max(1, rows), setting.c_chunks(tile)[0] if rows < MIN_ROUNDED else UNIT)
        yield replace(candidate, slots=replace(slots, strip=min(tile.m, few)))
    for drain in {slots.drain + 1, slots.drain - 1, 2 * slots.drain, 1}:
        if 1 <= drain <= MAX_DRAIN:
            more = {x: max(getattr(slots, x), drain + 1) for x in "ab"}
            yield replace(candidate, slots=replace(slots, drain=drain, **more))
    for more_a, more_b in ((1, 0), (0, 1), (-1, 0), (0, -1), (8, 0), (0, 8), (16, 16)):
        if slots.a + more_a >= 2 and slots.b + more_b >= 2:
            yield replace(candidate, slots=replace(slots, a=slots.a + more_a, b=slots.b + more_b))
    yield replace(candidate, slots=replace(slots, c=3 - slots.c))
    for axis in (0, 1):
        yield replace(candidate, traversal=Traversal(axis))


def _fits(setting: Setting, candidate: Candidate) -> bool:
    used = footprint(setting, candidate)
    return used.device_total <= setting.budgets.device and used.host_total <= setting.budgets.host


def model(case: Case, rates: dict[str, Any], compute: float, setting: Setting) -> MachineModel:
    """Return a machine whose links and kernel run at the measured ceilings."""
    default, name = setting.machine, setting.problem.rate
    kernel = default.kernels[name]
    whole = default.multiply_seconds(name, setting.problem.flops, case.m, case.n, case.k)
    read = rates["disk_read"] if case.source in COLD else rates.get("page_h2d", rates["h2d"])
    pageable = case.source == PAGEABLE
    return replace(
        default,
        kernels={**default.kernels, name: KernelRate(kernel.peak * whole / compute, kernel.half_depth)},
        h2d=rates["staged_h2d" if pageable else "h2d"],
        d2h=rates["staged_d2h" if pageable else "d2h"],
        memory=rates["staged_h2d_both"] + rates["staged_d2h_both"],
        read=read,
        read_scattered=read,
        write=rates["d2h"] if case.source in IN_MEMORY else rates["disk_write"],
        copy_latency=LATENCY,
        step_latency=LATENCY,
        write_latency=LATENCY,
        segment=LATENCY,
        issue=LATENCY,
    )


def main() -> None:
    path = Path(sys.argv[1])
    results = json.loads(path.read_text())
    for key, found in results.items():
        for name, one in found.get("cases", {}).items():
            if "compute_seconds" in one and "staged_small" in found.get("links", {}):
                rates = found["links"] | {x: one[x] for x in ("disk_read",) if x in one}
                before = one.get("scheduled")
                one["scheduled"] = scheduled(Case(**one["case"]), rates, one["compute_seconds"], SECONDS)
                print(f"{key}: {name}: {before} -> {one['scheduled']}", flush=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
