"""A plan: every decision about a product, and the memory, traffic and time that follow from it.

`recorded_plan` rebuilds a plan from the plain data that `Plan.to_dict` returned, as stored in a timeline's
header.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, fields, is_dataclass, replace
from functools import cached_property
from math import isclose, isfinite
from types import NoneType
from typing import Any, get_args, get_origin

from oocgemm.planning.cost.bound import min_bytes, required_bytes
from oocgemm.planning.cost.clock import (
    Prediction,
    estimate_shared_loads,
    predict,
    predict_shared,
    predict_triangle,
)
from oocgemm.planning.cost.coding import describe
from oocgemm.planning.cost.footprint import Candidate, Footprint, extents, footprint
from oocgemm.planning.cost.machine import MachineModel
from oocgemm.planning.layout import KINDS, Codings, Layout, Layouts
from oocgemm.planning.lowering import Lowered, lower
from oocgemm.planning.problem import DTYPES, GemmProblem, Op
from oocgemm.planning.schedule.dealing import SharedSchedule, arrangement, deal, deal_in_order, deal_rows
from oocgemm.planning.schedule.operation import Program, Slots
from oocgemm.planning.schedule.operations import Schedule
from oocgemm.planning.schedule.placement import Loads, estimate_loads
from oocgemm.planning.schedule.traversal import last, walk
from oocgemm.planning.setting import Budgets, Setting
from oocgemm.planning.sinks import DISJOINT, Step
from oocgemm.planning.tiling import Coverage, Shape, Tile, TileGrid, TileSet, TileShape, ceil_div
from oocgemm.planning.units import ceil_size, format_time
from oocgemm.values import dataclass


@dataclass(frozen=True)
class Scored:
    """A candidate (one way to run the product) with its predicted time."""

    candidate: Candidate
    prediction: Prediction


@dataclass(frozen=True)
class Faster:
    """Larger budgets that a plan recommends, and the seconds predicted for the product with them."""

    budgets: Budgets
    seconds: float


# `Plan.loads` simulates the caches to count the panels that are loaded. If that would take more placements of
# a panel in a slot than this, which take about 4 seconds, it estimates the panels instead.
MAX_COUNTED = 400_000


@dataclass(frozen=True)
class Plan:
    """How to run a product: the candidate that the planner chose, and the inputs that it was chosen for.

    `considered` are the best candidates of different tile shapes, for `explain`. `done` are the tiles that an
    earlier run completed. `faster` is set if larger budgets would make the product many times as fast.
    `devices` is the number of devices of the run.
    """

    problem: GemmProblem
    layouts: Layouts
    budgets: Budgets
    machine: MachineModel
    candidate: Candidate
    considered: tuple[Scored, ...] = ()
    done: frozenset[Tile] = frozenset()
    faster: Faster | None = None
    devices: int = 1

    @property
    def has_whole_rows(self) -> bool:
        """Whether workers compute whole rows of tiles: the cover is square, or tiles of a row are merged."""
        return self.problem.cover.square or self.problem.sink.merge != DISJOINT

    @cached_property
    def setting(self) -> Setting:
        return Setting(self.problem, self.machine, self.layouts, self.budgets, self.devices)

    @property
    def note(self) -> str:
        """A hint for the user that larger budgets would make the product far faster; empty if none would."""
        if self.faster is None:
            return ""
        unified = self.machine.unified
        given = self.budgets.by_option(unified=unified)
        options = " ".join(
            f"--{name.replace('_', '-')} {ceil_size(size)}"
            for name, size in self.faster.budgets.by_option(unified=unified).items()
            if size > given[name]
        )
        return (
            f"these budgets make the product slow, {format_time(self.prediction.total)} predicted; "
            f"with {options} it would take {format_time(self.faster.seconds)}"
        )

    @property
    def tile(self) -> TileShape:
        return self.candidate.tile

    @property
    def slots(self) -> Slots:
        return self.candidate.slots

    @cached_property
    def grid(self) -> TileGrid:
        return _grid(self.problem, self.candidate)

    @cached_property
    def tiles(self) -> TileSet:
        return TileSet.of(self.grid).remaining(self.done)

    @property
    def coverage(self) -> Coverage:
        return self.tiles.coverage

    @property
    def flops(self) -> int:
        """Floating-point operations of the tiles to compute. A complex one counts as several real ones."""
        return self.problem.step_flops(1, self.coverage.elements, self.problem.depth)

    @cached_property
    def steps(self) -> int:
        """Number of steps over all tiles to compute. Each step multiplies one panel of A by one of B."""
        return self.tiles.count * self.grid.steps

    @property
    def rounds(self) -> int:
        """Number of rounds. In a round, each device computes one tile; in the last round, perhaps none."""
        schedule = self.schedule() if self.problem.keeps_rows else None
        if isinstance(schedule, SharedSchedule):
            return schedule.rounds
        return ceil_div(self.tiles.count, self.devices)

    @property
    def share(self) -> float:
        """The largest part of the elements of C that any one device computes."""
        schedule = self.schedule()
        largest = schedule.largest if isinstance(schedule, SharedSchedule) else schedule.elements
        return largest / max(1, TileSet.of(self.grid).coverage.elements)

    def tile_bytes(self, tile: Tile) -> int:
        """Bytes of C that are written for a tile, or for its row of tiles if elements are selected."""
        if self.problem.sink.per_row:
            rows = self.grid.rows(tile[0])
            return (rows[1] - rows[0]) * self.problem.sink.per_row * self.problem.itemsizes["C"]
        return self.grid.written(tile) * self.problem.itemsizes["C"]

    @property
    def chunks(self) -> tuple[int, int]:
        """Shape of C's chunks or shards. No chunk has elements of two strips."""
        return self.setting.c_chunks(self.tile)

    @cached_property
    def footprint(self) -> Footprint:
        return footprint(self.setting, self.candidate)

    @cached_property
    def loads(self) -> Loads:
        """Bytes of the panels of A and B that the run loads. A panel counts each time that it is loaded.

        The bytes are counted exactly, unless that takes more than `MAX_COUNTED` placements of panels in
        slots. Then formulas estimate the bytes as if all panels were full. The sum for A and B differs by up
        to a fifth from the exact sum, and the bytes of one operand by a factor of up to 7.
        """
        schedule = self.schedule()
        counted = schedule.loads_within(MAX_COUNTED)
        if counted is not None:
            return counted
        if self.devices > 1:
            return estimate_shared_loads(self.setting, self.candidate, self.rounds)
        every = estimate_loads(self.problem, self.grid, self.slots, self.candidate.traversal)
        whole = TileSet.of(self.grid).extents
        a, b = (part / all_ for part, all_ in zip(self.tiles.extents, whole, strict=True))
        return Loads(a * every.a_up, b * every.b_up, a * every.a_read, b * every.b_read)

    @cached_property
    def traffic(self) -> dict[str, int]:
        """Bytes that cross each link during the run."""
        return self.schedule().traffic(self.loads, self.in_place)

    @cached_property
    def required(self) -> dict[str, int]:
        """Bytes over each link if every element crossed it once."""
        required, sizes = required_bytes(self.problem, self.coverage, self.in_place), self.problem.itemsizes
        c_read = required["write"] if self.problem.reads_c else 0
        if self.problem.cover.mirrored:
            required["write"] = self.schedule().elements_written * sizes["C"]
        if self.setting.turns_on_device:
            required["d2h"] = required["write"]
        if self.slots.unified:
            return required | {"h2d": 0, "d2h": 0}
        # The device copies from or to the arrays of operands without host slots: nothing is read or written.
        unread = {
            "A": self.coverage.rows * self.problem.depth * sizes["A"],
            "B": self.problem.depth * self.coverage.cols * sizes["B"],
            "C": c_read,
        }
        required["read"] -= sum(size for operand, size in unread.items() if self.slots.streams(operand))
        return required | ({"write": 0} if self.slots.streams("C") else {})

    @cached_property
    def least(self) -> dict[str, int]:
        """Lower bound on the bytes over each link for any schedule within the budgets.

        The bound for "h2d" follows from the device budget, and that for "read" from the sum of both budgets.
        """
        on_devices = self.devices * self.budgets.device
        once, memory = self.required, on_devices + self.budgets.host
        unread = self.in_place or any(map(self.slots.streams, self._operands))
        return {
            "read": once["read"] if unread else min_bytes(self.problem, memory, self.coverage),
            "h2d": 0 if self.slots.unified else min_bytes(self.problem, on_devices, self.coverage),
            "d2h": once["d2h"],
            "write": once["write"],
        }

    @cached_property
    def prediction(self) -> Prediction:
        """Predicted seconds of the run, by the virtual clock.

        A resumed run that computes a fraction of C takes the same fraction of the seconds of the whole run.
        """
        if self.devices > 1 and self.problem.cover.square:
            return predict_triangle(self.setting, self.candidate, self.share)
        if self.devices > 1:
            return predict_shared(self.setting, self.candidate, self.loads, self.rounds)
        whole = predict(self.setting, self.candidate)
        share = self.coverage.elements / max(1, TileSet.of(self.grid).coverage.elements)
        return whole if share == 1 else whole.part(share)

    @property
    def decoded(self) -> str:
        """Which operands the GPU decodes, and how they are compressed, as text; "" if none."""
        return describe(self.layouts, self.problem.operands)

    @cached_property
    def amplification(self) -> dict[str, float]:
        """Ratio of the bytes read to the bytes needed, of A and B."""
        problem, tile = self.problem, self.tile
        found = {"A": self.layouts.a.read_amplification((problem.m, problem.depth), (tile.m, tile.k))}
        if not problem.b.shares:
            found["B"] = self.layouts.b.read_amplification((problem.depth, problem.n), (tile.k, tile.n))
        return found

    def is_direct(self, operand: str) -> bool:
        """Tell whether the device copies the blocks of an operand directly from or to the caller's array."""
        return operand in self._direct

    @cached_property
    def all_direct(self) -> bool:
        return all(map(self.is_direct, "ABC"))

    @cached_property
    def _direct(self) -> frozenset[str]:
        panels = self._panels.items()
        return frozenset(x for x, (y, panel) in panels if self.slots.streams(x) and y.is_direct(panel))

    @property
    def in_place(self) -> set[str]:
        """Operands ("A", "B", "C") that the CPU multiplies where they are in the caller's memory."""
        return self.layouts.in_place

    @property
    def _operands(self) -> str:
        return f"{self.problem.operands}C"

    @cached_property
    def _panels(self) -> dict[str, tuple[Layout, Shape]]:
        """Per operand, its layout and the shape of the blocks that are copied: panels, or strips of C."""
        (m, n, k), layouts = extents(self.problem, self.tile), self.layouts
        return {"A": (layouts.a, (m, k)), "B": (layouts.b, (k, n)), "C": (layouts.c, (self.slots.strip, n))}

    @cached_property
    def lowered(self) -> Lowered:
        """The decisions about what the operations of the run do."""
        return lower(self.problem, self.slots)

    def schedule(self) -> Schedule:
        return schedule_of(self.setting, self.candidate, self.tiles)

    @cached_property
    def program(self) -> Program:
        """The operations of a short run in program order. Each has the indices of those that it waits for."""
        return Program(self.schedule())

    def explain(self) -> list[dict[str, Any]]:
        """List the best candidates of different tile shapes, the chosen one first, each with its drawback."""
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
        """Convert to plain data, for ``--json`` and the header of a timeline."""
        prediction = self.prediction
        problem = self.problem.record()
        problem |= {name: _number(problem[name]) for name in ("alpha", "beta")}
        problem["epilogue"] = [asdict(step) for step in self.problem.epilogue]
        return {
            "problem": problem,
            "flops": self.flops,
            "tile": asdict(self.tile),
            "tiles": list(self.grid.shape),
            "tiles_done_before": len(self.done),
            "chunks": list(self.chunks),
            "steps": self.steps,
            "slots": asdict(self.slots),
            "direct": "".join(filter(self.is_direct, self._operands)),
            "traversal": str(self.candidate.traversal),
            "candidate": asdict(self.candidate),
            "budget": asdict(self.budgets),
            "devices": self.devices,
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
            "layouts": self.layouts.to_dict(),
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
    return TileGrid.of(problem, candidate.tile, candidate.slots.strip)


def schedule_of(setting: Setting, candidate: Candidate, tiles: TileSet | None = None) -> Schedule:
    """Return the schedule of a candidate over some tiles of its grid, by default all of them."""
    problem, layouts = setting.problem, setting.layouts
    grid = _grid(problem, candidate)
    coded = {"A": layouts.a.decode_bytes, "B": layouts.b.decode_bytes, "C": layouts.c.writing.encodes}
    traversal, only = candidate.traversal, None if tiles is None or tiles.is_whole else tiles
    encoded = frozenset(operand for operand in coded if coded[operand])
    apart = setting.works_apart
    if problem.cover.square:
        every = problem.cover.order(grid.shape[0], traversal.band, grid.tile.m)
        order: Sequence[Tile] = every if only is None else [tile for tile in every if tile in only]
        end = every[-1] if every else None
    else:
        order = walk(traversal, *grid.shape, only)
        end = last(traversal, *grid.shape) if 0 not in grid.shape else None

    def dealt(devices: int, tiles: TileSet | None) -> list[Tile]:
        if problem.cover.square:
            return deal_in_order(devices, every, tiles, apart=apart)
        arranged = arrangement(devices, problem, grid, apart=apart)
        return deal(devices, grid.shape, traversal, arranged, tiles, apart=apart)

    def rows_dealt(devices: int, tiles: TileSet | None) -> list[list[Tile]]:
        if problem.cover.square:  # its order does not turn
            return deal_rows(devices, grid.shape, replace(traversal, turns=False), tiles or TileSet.of(grid))
        return deal_rows(devices, grid.shape, traversal, tiles)

    ends = frozenset[Tile]()
    if candidate.ends > 1 and problem.keeps_rows:
        ends = frozenset(own[-1] for own in rows_dealt(candidate.ends, None) if own)
    elif candidate.ends > 1:
        whole = dealt(candidate.ends, None)
        ends = frozenset(whole[(len(whole) - 1) // candidate.ends * candidate.ends :])
    given = candidate.slots, encoded, end
    more: dict[str, Any] = {"ends": ends, "alternates": traversal.alternates}
    if setting.devices == 1:
        return Schedule(problem, grid, order, *given, **more)
    if problem.keeps_rows:
        each = tuple(rows_dealt(setting.devices, only))
        tiles_of_all = [tile for own in each for tile in own]
        return SharedSchedule(problem, grid, tiles_of_all, *given, **more, devices=setting.devices, each=each)
    shared = dealt(setting.devices, only)
    return SharedSchedule(problem, grid, shared, *given, **more, devices=setting.devices)


def _falls_short(other: Prediction, best: Prediction) -> str:
    """Name the part of the predicted time in which a candidate loses most against the chosen one."""
    parts = {lane: other.lanes[lane] - best.lanes[lane] for lane in best.lanes}
    parts |= {
        "start-up": other.start_up - best.start_up,
        "bubbles": other.bubbles - best.bubbles,
        "tail": other.tail - best.tail,
    }
    worst = max(parts, key=lambda part: parts[part])
    why = f"{worst} +{format_time(parts[worst])}" if parts[worst] > 1e-6 else "no better"
    # The chosen candidate may have a longer predicted time than another one, within the error of the model.
    return f"within the model's error, {why}" if other.total < best.total else why


def _number(value: complex) -> float | str | list[float | str]:
    """Convert a scalar for JSON: complex numbers to [real, imaginary], Inf and NaN to text."""
    if isinstance(value, complex):
        return [_real(value.real), _real(value.imag)]
    return _real(value)


def _real(value: float) -> float | str:
    return value if isfinite(value) else str(value)


# Maximum relative difference between the recorded predicted time and the time that this version predicts. A
# larger difference means that another cost model made the plan.
TOLERANCE = 0.05


def recorded_plan(data: Mapping[str, Any], computed: Set[Tile] = frozenset()) -> Plan | None:
    """Rebuild the plan that `Plan.to_dict` wrote, without the candidates that the planner rejected.

    `computed` are the tiles that this run computed. An earlier run must have completed all others.

    Returns None if the data are incomplete or inconsistent, or if this version predicts a time that differs
    from the recorded one by more than `TOLERANCE`.
    """
    try:
        plan = Plan(
            recorded_problem(data["problem"]),
            recorded_layouts(data["layouts"]),
            _built(Budgets, data["budget"]),
            _built(MachineModel, data["model"]),
            recorded_candidate(data["candidate"]),
            devices=max(1, int(data["devices"])),
        )
        if before := data["tiles_done_before"]:
            if plan.grid.count - before != len(computed):
                return None
            done = set(TileSet.of(plan.grid)) - computed
            plan = replace(plan, done=frozenset(done))
        # Fields that are valid by themselves may still contradict one another.
        consistent = list(plan.grid.shape) == data["tiles"] and plan.steps == data["steps"]
        predicted = data["predicted_seconds"]["total"]
        return plan if consistent and isclose(plan.prediction.total, predicted, rel_tol=TOLERANCE) else None
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, IndexError):
        return None


def recorded_problem(data: Mapping[str, Any]) -> GemmProblem:
    """Rebuild a problem from `Plan.to_dict`. Raises `KeyError`, `TypeError` or `ValueError`."""
    made: dict[str, Any] = {name: recorded_scalar(data[name]) for name in ("alpha", "beta")}
    made |= {name: Op(data[name]) for name in ("trans_a", "trans_b")}
    made["epilogue"] = tuple(_built(Step, step) for step in data["epilogue"])
    for name in ("a_dtype", "b_dtype", "acc_dtype", "c_dtype"):
        DTYPES[data[name]]
    problem = GemmProblem.recorded(dict(data) | made)
    for part in (problem, problem.a, problem.b, problem.arithmetic, problem.sink):
        for field in fields(part):
            if field.type in (int, float, bool, str):
                _built(field.type, getattr(part, field.name))
    return problem


def recorded_candidate(data: Mapping[str, Any]) -> Candidate:
    """Rebuild a candidate from the output of `asdict`. Raises `KeyError` or `TypeError` for other data."""
    found: Candidate = _built(Candidate, data)
    return found


def recorded_layouts(data: Mapping[str, Any]) -> Layouts:
    """Rebuild layouts from `Layouts.to_dict`. Raises `KeyError` or `TypeError` for other data."""
    given = ({key: value for key, value in data[name].items() if key != "kind"} for name in "abc")
    layouts = (_built(KINDS[data[name]["kind"]], of) for name, of in zip("abc", given, strict=True))
    return Layouts(*layouts, codings=_built(Codings, data["codings"]))


def _built(kind: Any, data: Any) -> Any:
    """Build a value of a type from plain data: a dataclass, a mapping, a tuple, a number, a text or None.

    Raises `TypeError` if the data have another type, or if a number is not finite.
    """
    if is_dataclass(kind):
        types = {field.name: field.type for field in fields(kind)}
        return kind(**{name: _built(types.get(name), value) for name, value in data.items()})  # type: ignore[operator]
    arguments = get_args(kind)
    if get_origin(kind) is tuple and len(arguments) == len(data):
        return tuple(map(_built, arguments, data))
    if get_origin(kind) is Mapping:
        return {key: _built(arguments[1], value) for key, value in data.items()}
    if NoneType in arguments:
        return None if data is None else _built(arguments[0], data)
    if type(data) not in ((int, float) if kind is float else (kind,)):
        raise TypeError(f"{data!r} is not of type {kind}")
    if isinstance(data, float) and not isfinite(data):
        raise TypeError(f"{data!r} is not finite")
    return data


def recorded_scalar(value: Any) -> complex:
    """Parse alpha or beta: a number, a text such as "nan", or a list [real, imaginary] of these."""
    return complex(*map(float, value)) if isinstance(value, list) else float(value)
