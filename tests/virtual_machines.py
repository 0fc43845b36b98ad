"""Machines whose true rates differ from the assumed ones, and runs on them in virtual time."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from grid_cases import CHUNKS, IN_MEMORY, ITEM_BYTES, PINNED, Case  # type: ignore

from oocgemm.planning import (
    DTYPES,
    Budgets,
    Candidate,
    GemmProblem,
    Layout,
    Layouts,
    MachineModel,
    Plan,
    Setting,
)
from oocgemm.planning.cost.learned import Learned
from oocgemm.planning.cost.rates import scaled
from oocgemm.planning.cost.simulate import simulate, timed
from oocgemm.planning.plan import schedule_of
from oocgemm.planning.schedule.hazards import HazardTracker
from oocgemm.planning.search.guarded import guarded_plan
from oocgemm.planning.units import parse_size
from oocgemm.timeline import Span
from oocgemm.timeline.observed import observed_rates

GIB = 1 << 30
# Rates that differ between machines, besides those of kernels.
RATES = ("h2d", "d2h", "read", "decode", "memory", "write", "prepare")
PLACES = {"A": "8:1", "B": "8:1", "C": "8:1"}
MAX_SPANS = 4096


def true_machine(assumed: MachineModel, seed: int) -> MachineModel:
    """Return a machine whose rates are 0.3 to 3 times the assumed ones."""
    pick = random.Random(seed)
    factors = {name: 3 ** pick.uniform(-1.096, 1.0) for name in (*RATES, *assumed.kernels)}
    return scaled(assumed, factors)


def problem_of(case: Case) -> GemmProblem:
    kind = DTYPES[case.dtype]
    accumulator = "int32" if case.dtype == "int8" else kind.accumulator
    names = case.dtype, case.dtype, accumulator, case.c_dtype
    return GemmProblem(case.m, case.n, case.k, *names, compute=case.compute)


def setting_of(case: Case, machine: MachineModel) -> Setting:
    item = ITEM_BYTES[case.dtype]
    if case.source in IN_MEMORY:
        x = Layout(in_memory=True, itemsize=item, zero_copy_width=(32 << 10) // item)
        x = replace(x, pinned=case.source == PINNED)
        layouts = Layouts(x, x, replace(x, itemsize=case.c_item_bytes))
    elif case.source in CHUNKS:
        side = CHUNKS[case.source]
        a, b = ((min(side, r), min(side, c)) for r, c in ((case.m, case.k), (case.k, case.n)))
        layouts = Layouts(
            Layout(a, a, itemsize=item), Layout(b, b, itemsize=item), Layout(free_chunks=True, itemsize=item)
        )
    else:
        layouts = Layouts(
            Layout(line=case.k, itemsize=item),
            Layout(line=case.n, itemsize=item),
            Layout(line=case.n, itemsize=item),
        )
    device = "100GiB" if not machine.unified else "8GiB"
    host = "60GiB" if not machine.unified else "3GiB"
    budgets = Budgets(parse_size(case.device or device), parse_size(case.host or host))
    return Setting(problem_of(case), machine, layouts, budgets)


@dataclass
class VirtualMachine:
    """A machine that runs products in virtual time, and learns from each run."""

    assumed: MachineModel
    true: MachineModel
    learned: Learned = field(default_factory=lambda: Learned("m", "b", "d", {}))

    def plan(self, setting: Setting) -> Plan:
        places = dict.fromkeys(("read", "decode", "write"), ("8:1",))
        model, _ = self.learned.apply(self.assumed, places)
        known = self.learned.known(places)
        assumed = frozenset({*RATES, setting.problem.rate} - known)
        return guarded_plan(setting.problem, setting.budgets, (self.assumed, model), assumed, setting.layouts)

    def seconds(self, plan: Plan) -> float:
        setting = self._truly(plan.setting)
        return simulate(schedule_of(setting, plan.candidate), setting)

    def _truly(self, setting: Setting) -> Setting:
        """Return a setting with the true rates, as the planner has it with the assumed ones."""
        return replace(setting, machine=self.true).enqueued

    def learn(self, plan: Plan) -> None:
        spans = list(virtual_spans(plan.candidate, self._truly(plan.setting)))
        found = observed_rates(plan, spans, PLACES)
        observed = {key: (one.rate, one.busy) for key, one in found.items()}
        self.learned = self.learned.with_run(observed, plan.machine, self.assumed, None)


def virtual_spans(candidate: Candidate, setting: Setting) -> Iterator[Span]:
    """Yield the first spans of a run in which each operation takes its modelled time."""
    tracker: HazardTracker[list[int]] = HazardTracker()
    free: dict[str, int] = {}
    for number, (operation, seconds) in enumerate(timed(schedule_of(setting, candidate), setting)):
        if number == MAX_SPANS:
            return
        done = [0, number]
        waits = tracker.admit(operation, done)
        stream = "compute" if operation.lane == "prepare" else operation.stream
        start = max([free.get(stream, 0), *(wait[0] for wait in waits)])
        done[0] = free[stream] = start + max(1, round(seconds * 1e9))
        yield Span.of(number, operation, start, done[0], (wait[1] for wait in waits))
