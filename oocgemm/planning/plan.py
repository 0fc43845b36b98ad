"""A plan: everything decided about a product, and what that comes to."""

from dataclasses import asdict, astuple, dataclass
from functools import cached_property
from math import isfinite
from typing import Any

from oocgemm.planning.cost.footprint import (
    Candidate,
    Footprint,
    Layouts,
    MachineModel,
    Part,
    extents,
    footprint,
    least_bytes,
    required_bytes,
    whole,
)
from oocgemm.planning.cost.predict import Prediction, amplification, closed_loads, predict
from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.schedule.operations import Operation, Schedule
from oocgemm.planning.schedule.placement import Loads
from oocgemm.planning.schedule.slots import Slots
from oocgemm.planning.schedule.traversal import last, walk
from oocgemm.planning.search.candidates import Budgets, c_chunks
from oocgemm.planning.tiling import Layout, Range, Tile, TileGrid, TileShape
from oocgemm.planning.units import ceil_size, format_time


@dataclass(frozen=True)
class Scored:
    """A candidate with what it is predicted to take."""

    candidate: Candidate
    prediction: Prediction


@dataclass(frozen=True)
class Faster:
    """Budgets not much larger than those of a plan, with which the product is predicted to take far less time."""

    budgets: Budgets
    seconds: float


# Placements of panels that counting loads may take: about 4 seconds. A plan of half as many steps is always counted.
MAX_COUNTED = 400_000
# At what share of the rate that memory is believed to have panels are copied into slots beside a GPU: for 33 GB/s 23 to 33 were seen.
BESIDE_A_GPU = 0.75


@dataclass(frozen=True)
class Plan:
    """How a product will be run: everything decided, nothing done, but for the tiles in `done` if it is resumed."""

    problem: GemmProblem
    layouts: Layouts
    budgets: Budgets
    machine: MachineModel
    candidate: Candidate
    considered: tuple[Scored, ...] = ()
    done: frozenset[Tile] = frozenset()
    faster: Faster | None = None

    @property
    def note(self) -> str:
        """What to say of a plan that somewhat larger budgets would make far faster; empty for any other."""
        if self.faster is None:
            return ""
        options = " ".join(
            f"--{tier}-memory {ceil_size(size)}"
            for tier, size, given in (
                ("device", self.faster.budgets.device, self.budgets.device),
                ("host", self.faster.budgets.host, self.budgets.host),
            )
            if size > given
        )
        return (
            f"these budgets make the product slow, {format_time(self.prediction.total)} predicted; with {options} it would "
            f"take {format_time(self.faster.seconds)}"
        )

    @property
    def tile(self) -> TileShape:
        return self.candidate.tile

    @property
    def slots(self) -> Slots:
        return self.candidate.slots

    @property
    def grid(self) -> TileGrid:
        return _grid(self.problem, self.candidate)

    @cached_property
    def part(self) -> Part:
        """What of C is computed: that is left, if the run is resumed."""
        if not self.done:
            return whole(self.problem)
        tiles = self.schedule().tiles
        rows = {i: _length(self.grid.rows(i)) for i, _ in tiles}
        cols = {j: _length(self.grid.cols(j)) for _, j in tiles}
        return Part(sum(rows.values()), sum(cols.values()), sum(rows[i] * cols[j] for i, j in tiles))

    @property
    def flops(self) -> int:
        """Real floating-point operations of that."""
        return self.problem.step_flops(1, self.part.elements, self.problem.depth)

    @property
    def steps(self) -> int:
        """Multiplications in all."""
        down, across = self.grid.shape
        return (down * across - len(self.done)) * self.grid.steps

    def tile_bytes(self, tile: Tile) -> int:
        """Bytes of a tile of C, as it is stored."""
        return (
            _length(self.grid.rows(tile[0])) * _length(self.grid.cols(tile[1])) * self.problem.itemsizes["C"]
        )

    @property
    def chunks(self) -> tuple[int, int]:
        """Chunks (or shards) of C; no two tiles and no two strips share one."""
        return c_chunks(self.problem, self.layouts, self.tile)

    @cached_property
    def footprint(self) -> Footprint:
        return footprint(self.problem, self.candidate, self.layouts, self.machine)

    @cached_property
    def loads(self) -> Loads:
        """Bytes of the panels loaded. They are counted, but in plans of so many tiles and steps that counting takes seconds
        they come from a closed form, which is within 1% there."""
        schedule = self.schedule()
        counted = schedule.loads_within(MAX_COUNTED)
        if counted is not None:
            return counted
        whole = closed_loads(self.problem, self.grid, self.slots, self.candidate.traversal)
        share = schedule.elements / (self.problem.m * self.problem.n)
        return Loads(*(share * loaded for loaded in astuple(whole)))

    @cached_property
    def traffic(self) -> dict[str, int]:
        """Bytes over each link, of panels as in `loads`."""
        return self.schedule().traffic(self.loads)

    @cached_property
    def required(self) -> dict[str, int]:
        """Bytes over each link if every element crossed it once."""
        required = required_bytes(self.problem, self.part)
        return required | {"h2d": 0, "d2h": 0} if self.slots.unified else required

    @cached_property
    def least(self) -> dict[str, int]:
        """Fewest bytes over each link that these budgets allow any schedule; for storage, host and device
        memory count together."""
        once = self.required
        return {
            "read": least_bytes(self.problem, self.budgets.device + self.budgets.host, self.part),
            "h2d": 0 if self.slots.unified else least_bytes(self.problem, self.budgets.device, self.part),
            "d2h": once["d2h"],
            "write": once["write"],
        }

    @cached_property
    def prediction(self) -> Prediction:
        return predict(self.problem, self.candidate, self.layouts, self.machine, self.loads)

    @cached_property
    def amplification(self) -> dict[str, float]:
        """Read amplification: bytes of the chunks touched over bytes wanted."""
        return amplification(self.problem, self.tile, self.layouts)

    @cached_property
    def operands_to_pin(self) -> set[str]:
        """The operands in memory that are to be locked, for a device to copy panels from where they lie: of which to lock and
        unlock them takes least beside what copying through slots holds up the multiplication."""
        problem, machine, k = self.problem, self.machine, self.problem.depth
        if not machine.pin:
            return set()
        sizes = {"A": problem.m * k * problem.itemsizes["A"], "B": k * problem.n * problem.itemsizes["B"]}
        copied = {"A": self.loads.a_read, "B": self.loads.b_read}
        lying = {
            operand
            for operand in sizes
            if self._panels[operand][0].allows_zero_copy(self._panels[operand][1])
        }
        held = {operand for operand in lying if self._panels[operand][0].pinned}

        def seconds(locked: set[str]) -> float:
            copying = sum(copied[x] for x in copied.keys() - locked - held) / (BESIDE_A_GPU * machine.memory)
            late = max(0.0, copying - self.prediction.lanes["compute"])
            return late + 2 * sum(sizes[x] for x in locked) / machine.pin

        return min((x for x in (set[str](), {"A"}, {"B"}, {"A", "B"}) if x <= lying - held), key=seconds)

    def is_zero_copy(self, operation: Operation) -> bool:
        """Whether what an operation brings is worth copying from where it lies in memory that is locked, or to there."""
        layout, panel = self._panels[operation.operand]
        rows, cols = operation.block
        block = _length(rows), _length(cols)
        if not layout.pinned:
            return operation.operand in self.operands_to_pin and layout.allows_zero_copy(block)
        if operation.operand == "C" and self.problem.checked:  # strips are looked at in their slots
            return False
        return layout.is_direct(panel, block)

    @cached_property
    def _panels(self) -> dict[str, tuple[Layout, Range]]:
        """Of each operand its layout, and the shape of its panels or strips."""
        (w, h, r), layouts = extents(self.problem, self.tile), self.layouts
        return {"A": (layouts.a, (w, r)), "B": (layouts.b, (r, h)), "C": (layouts.c, (self.slots.strip, h))}

    def schedule(self) -> Schedule:
        return schedule_of(self.problem, self.layouts, self.candidate, self.done)

    def explain(self) -> list[dict[str, Any]]:
        """The best few candidates of different tile shapes, the chosen one first, with what each falls short in."""
        chosen = next((s for s in self.considered if s.candidate == self.candidate), None)
        rows = [chosen] if chosen else []
        rows += [s for s in self.considered if s is not chosen]
        return [
            {
                "tile": str(s.candidate.tile),
                "c_slots": s.candidate.slots.c,
                "total": s.prediction.total,
                "lanes": dict(s.prediction.lanes),
                "bubbles": s.prediction.bubbles,
                "why": "chosen" if s is chosen else _falls_short(s.prediction, rows[0].prediction),
            }
            for s in rows
        ]

    def to_dict(self) -> dict[str, object]:
        """Plain data, for ``--json`` and the header of a timeline."""
        prediction = self.prediction
        problem = asdict(self.problem)
        problem |= {name: _number(problem[name]) for name in ("alpha", "beta")}
        return {
            "problem": problem,
            "flops": self.flops,
            "tile": asdict(self.tile),
            "tiles": list(self.grid.shape),
            "tiles_done_before": len(self.done),
            "chunks": list(self.chunks),
            "steps": self.steps,
            "slots": asdict(self.slots),
            "traversal": str(self.candidate.traversal),
            "candidate": asdict(self.candidate),
            "budget": asdict(self.budgets),
            "footprint": {
                "device": dict(self.footprint.device) | {"total": self.footprint.device_total},
                "host": dict(self.footprint.host) | {"total": self.footprint.host_total},
            },
            "traffic": self.traffic,
            "required": self.required,
            "least": self.least,
            "read_amplification": self.amplification,
            "machine": self.machine.name,
            "model": asdict(self.machine),
            "layouts": asdict(self.layouts),
            "calibrated": self.machine.calibrated,
            "predicted_seconds": dict(prediction.lanes)
            | {
                "start_up": prediction.start_up,
                "bubbles": prediction.bubbles,
                "tail": prediction.tail,
                "total": prediction.total,
            },
            "bottleneck": prediction.bottleneck,
            "faster": None if self.faster is None else asdict(self.faster),
        }


def _grid(problem: GemmProblem, candidate: Candidate) -> TileGrid:
    return TileGrid.of(problem, candidate.tile, candidate.ramp)


def schedule_of(
    problem: GemmProblem, layouts: Layouts, candidate: Candidate, done: frozenset[Tile] = frozenset()
) -> Schedule:
    grid = _grid(problem, candidate)
    coded = {"A": layouts.a.decode_bytes, "B": layouts.b.decode_bytes, "C": layouts.c.encodes}
    return Schedule(
        problem,
        grid,
        walk(candidate.traversal, *grid.shape, done),
        candidate.slots,
        frozenset(operand for operand in coded if coded[operand]),
        last(candidate.traversal, *grid.shape) if 0 not in grid.shape else None,
    )


def _falls_short(other: Prediction, best: Prediction) -> str:
    """Where a candidate loses most time against the chosen one."""
    parts = {lane: other.lanes[lane] - best.lanes[lane] for lane in best.lanes}
    parts |= {
        "start-up": other.start_up - best.start_up,
        "bubbles": other.bubbles - best.bubbles,
        "tail": other.tail - best.tail,
    }
    worst = max(parts, key=lambda part: parts[part])
    why = f"{worst} +{format_time(parts[worst])}" if parts[worst] > 1e-6 else "no better"
    # The planner's choice is not always the fastest predicted.
    return f"as good as equal, {why}" if other.total < best.total else why


def _length(span: Range) -> int:
    return span[1] - span[0]


def _number(value: complex) -> float | str | list[float | str]:
    """A scalar as JSON holds it: complex ones as [real, imaginary], NaN and infinities as text."""
    if isinstance(value, complex):
        return [_real(value.real), _real(value.imag)]
    return _real(value)


def _real(value: float) -> float | str:
    return value if isfinite(value) else str(value)
