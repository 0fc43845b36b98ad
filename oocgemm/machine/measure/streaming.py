"""Measure how fast a run loads a matrix: run products that read it panel by panel, and use their spans.

The executor runs these products, with as many threads as in any other run. So all I/O threads read at once,
several panels are in flight, and on a GPU the uploads of earlier panels take place at the same time.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from time import perf_counter_ns

import numpy as np

from oocgemm import stores
from oocgemm.backends import Backend
from oocgemm.engine.executor import Run
from oocgemm.engine.staging import Staging
from oocgemm.machine.measure.sampling import per_second
from oocgemm.planning import (
    Budgets,
    Candidate,
    GemmProblem,
    Kind,
    Layout,
    Layouts,
    MachineModel,
    Plan,
    Setting,
    Slots,
    TileShape,
)
from oocgemm.planning.search.candidates import io_threads
from oocgemm.stores import Matrix
from oocgemm.system.memory import available_memory
from oocgemm.timeline import Span
from oocgemm.timeline.intervals import length, union

# Columns of B: few, so that the multiplications take no time in comparison.
COLUMNS = 8
# Slots for panels on a GPU, and in its host's memory if A is not in memory itself.
DEVICE_SLOTS, HOST_SLOTS = 4, 3


@contextmanager
def streaming(
    engine: Backend, machine: MachineModel, a: Matrix, depth: int
) -> Iterator[Callable[[], list[Span]]]:
    """Prepare products that load a float64 matrix A; yield a function that runs one and returns its spans.

    If the device is the host, the panels are only read: a run's reads and multiplications share the cores, so
    that the model adds their times.

    Args:
        engine, machine: the backend and its model.
        a: the matrix that is loaded. A GPU does not copy directly from it, even if it is pinned.
        depth: number of columns of a panel. A panel has all rows.
    """
    plan = _plan(machine, a, depth)
    rows, cols = a.shape
    operands = {"A": a, "B": _ones((cols, COLUMNS)), "C": _ones((rows, COLUMNS))}
    with ExitStack() as cleanup:
        session = engine.open(plan, "auto")
        cleanup.callback(session.close)
        staging = Staging(plan, operands, session.pin, session.host_arena)
        cleanup.callback(staging.close)

        def run() -> list[Span]:
            spans: list[Span] = []
            Run(plan, session, staging, perf_counter_ns(), spans.append).execute()
            return spans

        def read() -> list[Span]:
            spans = []
            for number, operation in enumerate(plan.schedule()):
                if (operation.kind, operation.operand) == (Kind.READ, "A"):
                    started = perf_counter_ns()
                    staging.transfer(operation, [session.view(operation, operation.writes[0])])
                    spans.append(Span.of(number, operation, started, perf_counter_ns(), ()))
            return spans

        yield read if machine.unified else run


def loading_seconds(spans: list[Span]) -> float:
    """Return the seconds in which at least one panel of A was read or, if none was, uploaded."""
    for kind in (Kind.READ, Kind.UPLOAD):
        moved = [(s.start, s.end) for s in spans if (s.kind, s.operand) == (kind, "A") and s.bytes]
        if moved:
            return length(union(moved)) / 1e9
    return 0.0


def rate_of(a: Matrix, seconds: float) -> float:
    """Return the bytes per second at which A was loaded."""
    return per_second(a.shape[0] * a.shape[1] * a.dtype.itemsize, seconds)


def _plan(machine: MachineModel, a: Matrix, depth: int) -> Plan:
    (rows, cols), room = a.shape, available_memory()
    problem = GemmProblem(rows, COLUMNS, cols, "float64", "float64", "float64", "float64")
    in_memory = Layout(in_memory=True)
    layouts = Layouts(replace(a.layout, zero_copy_width=0, in_place=False), in_memory, in_memory)
    budgets = Budgets(room, room)
    setting = Setting(problem, machine, layouts, budgets)
    if machine.unified:
        slots = Slots(1, 1, 1, 0, 0, 0, strip=rows, unified=True)
    else:
        host = 0 if setting.streams(layouts.a) else HOST_SLOTS
        slots = Slots(DEVICE_SLOTS, 2, 1, host, 0, 0, strip=rows)
    threads = io_threads(setting)
    tile = TileShape(rows, COLUMNS, depth)
    return Plan(problem, layouts, budgets, machine, Candidate(tile, slots, io_threads=threads))


def _ones(shape: tuple[int, int]) -> Matrix:
    return stores.open_matrix("an operand", np.ones(shape))
