"""Timelines of simulated distributed runs: the parts of one virtual plan on several workers."""

import random
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from oocgemm.planning import Budgets, TileShape
from oocgemm.planning.partition import divide
from oocgemm.timeline import Recorder, Timeline
from oocgemm.timeline.log import WorkerLog, merge
from tests.support.virtual_runs import GIB, header_of, machine, run_of, virtual_plan, write_log

STARTED = 1_790_000_000.0
GAP = 20_000_000  # nanoseconds between two parts of a worker


def cluster(
    folder: Path, workers: int, grid: tuple[int, int], killed: Collection[int] = (), name: str = "gpu-{}"
) -> Timeline:
    """Simulate a product of 8 x 8 tiles in grid[0] x grid[1] parts, and merge the logs of all attempts.

    Each worker takes the next part when it has ended one. The processes of the parts with numbers in `killed`
    die after 60% of their time; their workers take no more parts, and other workers compute those again.
    """
    plan = virtual_plan(
        (16384, 16384, 4096), Budgets(GIB, 2 * GIB), machine(read=25e9), TileShape(2048, 2048, 1024)
    )
    chance = random.Random(1)
    every = {(i, j) for i in range(plan.grid.shape[0]) for j in range(plan.grid.shape[1])}
    free = {worker: chance.randrange(50_000_000, 70_000_000) for worker in range(workers)}
    last, logs = 0, []
    todo = [(part, 0) for part in divide(plan.grid, *grid)]
    while todo:
        part, attempt = todo.pop(0)
        worker = min(free, key=lambda one: free[one])
        run = run_of(replace(plan, done=frozenset(every.difference(part.tiles(plan.grid)))), jitter=0.3)
        header = dict(run.header) | {"started": STARTED + free[worker] / 1e9}
        dies = part.number in killed and not attempt
        wall = round(0.6 * run.wall) if dies else run.wall
        spans = tuple(span for span in run.spans if span.end <= wall)
        path = folder / f"part{part.number}-{attempt}.jsonl"
        write_log(path, Timeline(spans, wall, header, unfinished=dies))
        where = name.format(worker), f"node{worker // 4}", "NVIDIA H200"
        clock = 0, chance.randrange(20_000, 400_000)
        logs.append(WorkerLog(*where, *clock, str(path), part.number, attempt, dies))
        last = max(last, free[worker] + wall)
        free[worker] += wall + GAP
        if dies:
            del free[worker]
            todo.insert(0, (part, 1))
    log = Recorder(header_of(plan) | {"started": STARTED})
    log.finish(last + GAP, merge(log, logs))
    log.close()
    return log.timeline()
