#!/usr/bin/env python
"""Compare the bytes that plans move with the lower bound, and with the best plan that a search finds.

The script needs no hardware. The planner minimises time. Here it plans for machines on which one link is slow
and everything else takes almost no time, so that it minimises the traffic on that link. The search
(`traffic_oracle.py`) uses panels as deep as those of the plan.
"""

import json
import statistics
import time
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from math import prod, sqrt
from pathlib import Path
from typing import Any

import click
from traffic_oracle import Case, min_panels

from oocgemm.planning import (
    DTYPES,
    Budgets,
    GemmProblem,
    KernelRate,
    MachineModel,
    Op,
    Plan,
    default_model,
    make_plan,
)
from oocgemm.planning.cost.bound import min_bytes
from oocgemm.planning.schedule.placement import estimate_loads

MIB, GIB = 1 << 20, 1 << 30
SLOW, FREE = 1e9, 1e18
SHAPES = {
    "square": [(1 << 10,) * 3, (1 << 12,) * 3, (1 << 14,) * 3, (24576,) * 3, (1 << 16,) * 3, (1 << 18,) * 3],
    "wide": [(1 << 11, 1 << 17, 1 << 13), (1 << 13, 1 << 20, 1 << 13)],
    "tall": [(1 << 17, 1 << 11, 1 << 13), (1 << 20, 1 << 13, 1 << 13)],
    "thin k": [(1 << 15, 1 << 15, 1 << 10), (1 << 17, 1 << 17, 1 << 10)],
    "thick k": [(1 << 12, 1 << 12, 1 << 20), (1 << 15, 1 << 15, 1 << 19)],
    "primes": [(1009, 1013, 1019), (10007, 10009, 10037), (99991, 50021, 30011), (10007, 200003, 5003)],
}
BUDGETS = [(128 * MIB, 128 * MIB), (256 * MIB, 2 * GIB), (GIB, GIB), (3 * GIB, 8 * GIB), (8 * GIB, 64 * GIB)]
# How the bytes of a plan are counted. Up to MAX_WALKED steps, the operations of the schedule are summed. Up
# to MAX_COUNTED steps, the loads of panels are counted. For larger plans the planner's formula is used.
MAX_WALKED, MAX_COUNTED = 3000, 1 << 20
# A plan is good if it moves at most TARGET times the bytes of the search's plan, and at most NEAR times the
# lower bound.
TARGET, NEAR = 1.02, 1.10


def machine(kind: str, p: GemmProblem) -> MachineModel:
    """Return a machine on which the link `kind` has 1 GB/s and everything else takes almost no time."""
    base = default_model("host" if kind == "unified" else "cuda", 16)
    links = dict.fromkeys(("h2d", "d2h", "read", "read_scattered", "decode", "memory", "write"), FREE)
    if kind == "h2d":
        links["h2d"] = SLOW
    else:
        links |= {"read": SLOW, "read_scattered": SLOW}
    free = dict.fromkeys(("copy_latency", "write_latency", "issue", "arena_seconds_per_byte"), 0.0)
    # A million steps take 1% of the time of moving A and B once. If steps took no time, plans of needlessly
    # many steps would be as good.
    free["step_latency"] = 1e-8 * (p.m + p.n) * p.k * p.itemsizes["A"] / SLOW
    # Kernels take almost no time, but still prefer their usual depths.
    kernels = {name: KernelRate(1e22, rate.half_depth) for name, rate in base.kernels.items()}
    return replace(base, name=f"slow {kind}", kernels=kernels, **links, **free)


def problem(m: int, n: int, k: int, dtype: str, beta: float) -> GemmProblem:
    d = DTYPES[dtype]
    return GemmProblem.of(m, n, k, d.name, d.name, d.accumulator, d.results[0], 1.0, beta, Op.N, Op.N)


@dataclass(frozen=True)
class Row:
    """One plan for a machine with one slow link, and the bytes that it moves over that link."""

    shape: str
    m: int
    n: int
    k: int
    beta: float
    device: int
    host: int
    machine: str
    link: str
    tile: str
    traversal: str
    slots: dict[str, Any]
    steps: int
    bytes: int
    counted: bool  # whether the loads were counted; if not, `bytes` is from the planner's formula
    closed: int  # bytes by the planner's formula
    least: int
    oracle: int
    oracle_tiling: dict[str, int]
    misses_least: str  # why the plan moves more than NEAR times the lower bound, empty if it does not
    # Bytes that the operations of the schedule move over the link, None for long schedules.
    walked: int | None
    planning_seconds: float
    seconds: float  # time of the whole measurement, including the search

    @property
    def over_oracle(self) -> float:
        return self.bytes / self.oracle

    @property
    def over_least(self) -> float:
        return self.bytes / self.least

    @property
    def ratios(self) -> dict[str, float]:
        return {
            "over_oracle": self.over_oracle,
            "over_least": self.over_least,
            "oracle_over_least": self.oracle / self.least,
        }


def c_bytes(p: GemmProblem) -> int:
    """Return the bytes of the old C that are loaded."""
    return p.m * p.n * p.itemsizes["C"] if p.reads_c else 0


def net(plan: Plan, kind: str) -> tuple[int, int | None]:
    """Return the bytes of device and host memory that panels and tiles can use, without reserves.

    The bytes of host memory are None if host memory cannot reduce the traffic on the link.
    """
    host = plan.budgets.host - plan.machine.host_reserve if kind == "read" else None
    return plan.budgets.device - plan.machine.device_reserve, host


def oracle(plan: Plan, kind: str, moved: int) -> tuple[int, dict[str, int]]:
    """Return the fewest bytes that any tiling moves over the slow link, and that tiling.

    Panels are as deep as in the plan. The number of steps is limited to that of the plan, or to so many that
    they take 1% of the time of moving the plan's panels, if that is more. A plan that moves fewer bytes in
    more steps takes longer, so it is not better.
    """
    p = plan.problem
    max_steps = max(plan.steps, (moved - c_bytes(p)) / SLOW / plan.machine.step_latency / 100)
    depth = min(plan.tile.k, p.depth)
    fewest, how = min_panels(Case(p.m, p.n, p.depth, p.itemsizes["A"], depth, *net(plan, kind), max_steps))
    return int(fewest) + c_bytes(p), how


def misses_least(plan: Plan, kind: str, moved: int, found: int, least: int) -> str:
    """Return why a plan moves more than NEAR times the lower bound: the first constraint that explains it."""
    if moved <= NEAR * least:
        return ""
    if found <= NEAR * least:
        return "the plan"
    p, (device, host) = plan.problem, net(plan, kind)
    if found <= NEAR * min_bytes(p, device + (host or 0)):
        return "memory set aside"
    panels = found - c_bytes(p)
    # The bytes of panels are this over the square root of the memory.
    each = 2 * p.m * p.n * p.depth * p.itemsizes["A"] ** 1.5
    if panels <= NEAR * each / sqrt(device + (host or 0)):
        return "the bound's - 2 M - m n"
    if host is not None and panels <= NEAR * each / sqrt(device):
        return "no accumulators in host memory"
    return "whole tiles, two panels of each operand"


def measure(case: tuple[str, tuple[int, int, int], tuple[int, int], str]) -> list[Row]:
    """Measure the plans for one product and one pair of budgets, with beta 0 and 1."""
    shape, extents, memories, kind = case
    budgets, link = Budgets(*memories), "h2d" if kind == "h2d" else "read"
    on = machine(kind, problem(*extents, "float64", 0))
    rows = []
    for beta in (0.0, 1.0):
        p = problem(*extents, "float64", beta)
        started = time.perf_counter()
        plan = make_plan(p, budgets, on)
        planning = time.perf_counter() - started
        loads = estimate_loads(p, plan.grid, plan.slots, plan.candidate.traversal)
        closed = plan.schedule().traffic(loads)[link]
        counted = plan.steps <= MAX_COUNTED
        moved = plan.schedule().traffic()[link] if counted else closed
        found, how = oracle(plan, kind, moved)
        least = plan.least[link]
        walked = None
        if plan.steps <= MAX_WALKED:
            walked = sum(op.bytes for op in plan.schedule() if op.lane.value == link)
        rows.append(
            Row(
                *(shape, *extents, beta, *memories, kind, link),
                *(str(plan.tile), str(plan.candidate.traversal), asdict(plan.slots), plan.steps),
                *(moved, counted, closed, least, found, how),
                *(misses_least(plan, kind, moved, found, least), walked, planning),
                seconds=time.perf_counter() - started,
            )
        )
    return rows


def summary(rows: list[Row]) -> dict[str, Any]:
    """Return for each machine the largest and the median ratio, and why plans miss the targets."""
    by_kind = defaultdict(list)
    for row in rows:
        by_kind[row.machine].append(row)
    out: dict[str, Any] = {}
    for kind, some in by_kind.items():
        over_oracle, over_least = [x.over_oracle for x in some], [x.over_least for x in some]
        out[kind] = {
            "plans": len(some),
            "over_oracle": {"max": max(over_oracle), "median": statistics.median(over_oracle)},
            "above_target": sum(ratio > TARGET for ratio in over_oracle),
            "over_least": {"max": max(over_least), "median": statistics.median(over_least)},
            "above_near": sum(ratio > NEAR for ratio in over_least),
            "of_these_the_oracle": sum(row.oracle > NEAR * row.least for row in some),
            "because_of": Counter(row.misses_least for row in some if row.misses_least),
            "planning_seconds_max": max(row.planning_seconds for row in some),
        }
    walked = [row for row in rows if row.walked is not None]
    closed = [row.closed / row.bytes for row in rows if row.counted]
    out["announced"] = {
        "walked": len(walked),
        "moved_otherwise": sum(row.walked != row.bytes for row in walked),
        "counted": len(closed),
        "closed_over_counted": {"min": min(closed), "max": max(closed)},
    }
    return out


def worst(rows: list[Row], count: int = 3) -> list[dict[str, Any]]:
    """Return the plans of each machine that move the most bytes relative to the search."""
    found = []
    for kind in dict.fromkeys(row.machine for row in rows):
        some = [row for row in rows if row.machine == kind]
        found += sorted(some, key=lambda row: -row.over_oracle)[:count]
    return [asdict(row) | row.ratios for row in found]


HEADS = (
    f"{'shape':8}{'m':>8}{'n':>8}{'k':>8} beta {'device':>7}{'host':>7} {'machine':8}"
    f"{'GB':>9}{'/oracle':>9}{'/least':>8}  seconds; tile, walk / oracle's"
)


def print_rows(rows: list[Row]) -> None:
    for x in rows:
        gib = [f"{size / GIB:.3g}G" for size in (x.device, x.host)]
        mark = " <--" if x.over_oracle > TARGET else ""
        print(
            f"{x.shape:8}{x.m:8}{x.n:8}{x.k:8}{x.beta:5} {gib[0]:>7}{gib[1]:>7} {x.machine:8}"
            f"{x.bytes / 1e9:9.4g}{x.over_oracle:9.4f}{x.over_least:8.3f} {x.seconds:8.1f}; "
            f"{x.tile}, {x.traversal} / "
            f"{x.oracle_tiling} {x.misses_least}{mark}",
            flush=True,
        )


@click.command()
@click.option("--output", type=click.Path(path_type=Path), default="scripts/bench/results/bench_traffic.json")
@click.option("--machines", default="h2d,read,unified", show_default=True)
@click.option("--only", default="", help="Only these shapes, by name.")
@click.option("--processes", default=2, show_default=True)
def main(output: Path, machines: str, only: str, processes: int) -> None:
    """Plan products over a grid of shapes and budgets, small products first.

    Prints a row for each plan. Writes a summary and the worst plans to a JSON file.
    """
    started = time.perf_counter()
    print(HEADS)
    cases = [
        (shape, extents, memories, kind)
        for shape, sizes in SHAPES.items()
        if not only or shape in only.split(",")
        for extents in sizes
        for memories in BUDGETS
        for kind in machines.split(",")
        # Budgets below the memory that is reserved for the host's BLAS are left out.
        if kind != "unified" or memories[0] >= 256 * MIB
    ]
    cases.sort(key=lambda case: prod(case[1]))
    rows: list[Row] = []
    grid = {"shapes": only or "all", "machines": machines, "cases": len(cases)}
    with ProcessPoolExecutor(processes) as pool:
        for done, found in enumerate(pool.map(measure, cases), 1):
            print_rows(found)
            rows += found
            # The file is written after every case, because the last and largest cases take the longest.
            result = grid | {
                "cases_done": done,
                "summary": summary(rows),
                "worst": worst(rows),
                "seconds": time.perf_counter() - started,
            }
            output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["summary"], indent=2))


if __name__ == "__main__":
    main()
