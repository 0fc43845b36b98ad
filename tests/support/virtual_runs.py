"""Timelines of simulated runs: a plan's schedule with the modelled time of each operation."""

import os
import random
from dataclasses import replace
from typing import Any

from oocgemm.engine.executor import span_of
from oocgemm.planning import (
    Budgets,
    Chunked,
    Layouts,
    MachineModel,
    Plan,
    TileShape,
    Writing,
    default_model,
    make_plan,
)
from oocgemm.planning.schedule.operation import HazardTracker
from oocgemm.timeline import Recorder, Timeline
from tests.support.products import product_of
from tests.support.simulate import duration

GIB = 1 << 30
CHUNKS = Layouts(Chunked((512, 512)), Chunked((512, 512)), Chunked(writing=Writing((512, 512))))


def machine(**rates: float) -> MachineModel:
    """Return the model of a calibrated GPU with fast storage and the given rates."""
    rates = {"write": 20e9} | rates
    model = replace(default_model("cuda", 16), calibrated=True, storage_calibrated=True, name="a virtual GPU")
    return replace(model, **rates)  # type: ignore[arg-type]


def virtual_plan(
    size: tuple[int, int, int],
    budgets: Budgets,
    model: MachineModel,
    tile: TileShape | None = None,
    layouts: Layouts = CHUNKS,
) -> Plan:
    m, n, k = size
    names = "float64", "float64", "float64", "float64"
    return make_plan(product_of(m, n, k, *names), budgets, model, layouts, tile)


def run_of(plan: Plan, believed: MachineModel | None = None, jitter: float = 0.0) -> Timeline:
    """Simulate a plan on its machine and return the timeline.

    The header records the machine model `believed`, if given, as if the plan had been made for that one.
    """
    real, start_up = plan.machine, 5_000_000
    tracker: HazardTracker[list[int]] = HazardTracker()
    free: dict[str, int] = {}
    spans = []
    chance = random.Random(0)
    for number, operation in enumerate(plan.schedule()):
        done = [0, number]
        waits = tracker.admit(operation, done)
        start = max([start_up, free.get(operation.stream, 0), *(wait[0] for wait in waits)])
        seconds = duration(operation, plan.setting) * (1 + jitter * chance.random())
        done[0] = free[operation.stream] = start + max(1, round(seconds * 1e9))
        spans.append(span_of(number, operation, start, done[0], tuple(wait[1] for wait in waits)))
    header = header_of(replace(plan, machine=believed or real))
    return Timeline(tuple(spans), max(span.end for span in spans), header)


def write_log(path: str | os.PathLike[str], timeline: Timeline) -> None:
    """Write the log of a run, without the last line if the run is unfinished."""
    log = Recorder(timeline.header, path)
    for span in sorted(timeline.spans, key=lambda span: span.end):
        log.add(span)
    if not timeline.unfinished:
        log.finish(timeline.wall, {})
    log.close()


def header_of(plan: Plan) -> dict[str, Any]:
    """Return the header that the API writes into a log before the spans."""
    model = plan.machine
    kernel = model.kernels[plan.problem.a_dtype].peak
    return {
        "started": 1_790_000_000.0,
        "plan": plan.to_dict(),
        "backend": {"name": "cuda", "kernel": "auto", "device": "virtual GPU", "memory": "140 GiB"},
        "operands": {x: {"store": "zarr v3", "path": f"file:///data/{x}.zarr"} for x in "ABC"},
        "held": {"device": plan.footprint.device_total, "host": plan.footprint.host_total},
        "rates": {
            "kernel": kernel,
            "h2d": model.h2d,
            "d2h": model.d2h,
            "read": model.read,
            "write": model.write,
        },
        "machine": {"processor": "none", "platform": "paper", "memory": 128 * GIB},
        "versions": {"oocgemm": "0"},
    }
