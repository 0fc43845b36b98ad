"""Chooses how to run a product: enumerate, score in closed form, walk the schedules of the best few, choose."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from math import isfinite, lcm
from typing import Any

from oocgemm.errors import BudgetError, InputError
from oocgemm.plan.candidates import Budgets, c_chunks, candidates, io_threads, smallest
from oocgemm.plan.cost import (
    Candidate,
    Footprint,
    Layouts,
    MachineModel,
    Part,
    footprint,
    least_bytes,
    required_bytes,
    whole,
)
from oocgemm.plan.placing import Loads
from oocgemm.plan.predict import Prediction, amplification, predict
from oocgemm.plan.problem import GemmProblem
from oocgemm.plan.schedule import Schedule
from oocgemm.plan.simulate import simulate
from oocgemm.plan.slots import Slots
from oocgemm.plan.tiling import Span, Tile, TileGrid, TileShape, ceil_div, ramp_of
from oocgemm.plan.traversal import walk
from oocgemm.units import format_size, format_time

# Planning may take this share of the time a run is predicted to take, and no more seconds than that.
EFFORT, LONGEST = 0.004, 0.5
# Seconds to count the loads of a step, to run an operation on the virtual clock.
COUNTED, SIMULATED = 20e-6, 15e-6
FINALISTS = 4


@dataclass(frozen=True)
class Scored:
    """A candidate with what it is predicted to take."""

    candidate: Candidate
    prediction: Prediction


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
        """Exact bytes of the panels loaded."""
        return self.schedule().loads()

    @cached_property
    def traffic(self) -> dict[str, int]:
        """Exact bytes over each link."""
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

    def schedule(self) -> Schedule:
        return _schedule(self.problem, self.layouts, self.candidate, self.done)

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
        }


def make_plan(
    problem: GemmProblem,
    budgets: Budgets,
    machine: MachineModel,
    layouts: Layouts | None = None,
    tile: TileShape | None = None,
) -> Plan:
    """The plan predicted to be fastest within the budgets; with `tile`, the best for that tile shape.

    `layouts` are in the orientation of op(X). Raises `BudgetError` if nothing fits, with the least that would,
    and `InputError` if `tile` cuts chunks of C in two. Asked the same again, it answers from memory: planning takes
    some milliseconds, and so may the product.
    """
    return _planned(problem, budgets, machine, layouts or Layouts(), tile)


def continued(
    problem: GemmProblem,
    budgets: Budgets,
    machine: MachineModel,
    layouts: Layouts,
    candidate: Candidate,
    done: frozenset[Tile],
) -> Plan:
    """The plan of a run that goes on as `candidate` with the tiles that are not done. Where the budgets are less than they
    were it keeps fewer panels; what the bits hang on stays. Raises `BudgetError` if that does not fit either."""
    slots = candidate.slots
    together = max(2, min(slots.drain, slots.a, slots.b))  # panels of the steps that go strip by strip
    fewer = replace(
        slots,
        a=min(slots.a, together),
        b=min(slots.b, together),
        host_a=min(slots.host_a, 2),
        host_b=min(slots.host_b, 2),
        host_c=min(slots.host_c, 2),
    )
    least = replace(candidate, slots=fewer, io_threads=1)
    for tried in (candidate, replace(candidate, slots=fewer), least):
        plan = Plan(problem, layouts, budgets, machine, tried, done=done)
        held = plan.footprint
        if (held.device_total <= budgets.device and held.host_total <= budgets.host) or plan.steps == 0:
            return plan
    name, least_bytes, budget = "device", held.device_total, budgets.device
    if held.device_total <= budgets.device:
        name, least_bytes, budget = "host", held.host_total, budgets.host
    raise BudgetError(
        f"{name} memory {format_size(budget)} cannot hold the plan that the run was begun with ({format_size(least_bytes)}: "
        f"{least_bytes} bytes): raise --{name}-memory",
        least=least_bytes,
    )


@lru_cache(64)
def _planned(
    problem: GemmProblem, budgets: Budgets, machine: MachineModel, layouts: Layouts, tile: TileShape | None
) -> Plan:
    if tile is not None:
        _check_alignment(problem, layouts, tile)
    wanted = io_threads(problem, budgets, machine, layouts)
    found: list[Candidate] = []
    for threads in (wanted, 1):  # fewer threads leave more for slots
        found = found or list(candidates(problem, budgets, machine, layouts, tile, threads))
    if not found:
        raise _budget_error(problem, budgets, machine, layouts, tile)
    scored = [Scored(candidate, predict(problem, candidate, layouts, machine)) for candidate in found]
    scored.sort(key=_rank)
    scored[:FINALISTS] = [_ramped(problem, machine, layouts, s) for s in scored[:FINALISTS]]
    best = _walked(problem, machine, layouts, scored)
    return Plan(problem, layouts, budgets, machine, best.candidate, tuple(_varied([best, *scored])))


def _ramped(problem: GemmProblem, machine: MachineModel, layouts: Layouts, s: Scored) -> Scored:
    """With thin first steps, lest the kernel wait long for the first panels, where it runs beside the copies and takes
    longest. A copying lane that takes longer begins at once anyway, and would carry the thin panels once more when the
    whole ones are used again."""
    if machine.shares_cores or s.prediction.bottleneck != "compute":
        return s
    unit = lcm(layouts.a.read_chunk[1], layouts.b.read_chunk[0])
    ramp = ramp_of(problem.depth, s.candidate.tile.r, unit)
    return replace(s, candidate=replace(s.candidate, ramp=ramp))


def _rank(s: Scored) -> tuple[float, int, int, int]:
    """Of equals the simpler: fewer accumulators, shallower panels, less pinned memory."""
    slots = s.candidate.slots
    return s.prediction.total, slots.c, s.candidate.tile.r, slots.host_a + slots.host_b


def _walked(
    problem: GemmProblem, machine: MachineModel, layouts: Layouts, scored: Sequence[Scored]
) -> Scored:
    """The best of the few best, their schedules being counted and, where lanes run side by side, run on a virtual
    clock. Costs at most a small share of what the run is predicted to take."""
    effort = min(LONGEST, EFFORT * scored[0].prediction.total)
    exact: list[Scored] = []
    for s in scored[:FINALISTS]:
        grid = TileGrid.of(problem, s.candidate.tile)
        cost = COUNTED * grid.shape[0] * grid.shape[1] * grid.steps
        effort -= cost
        # Before the tiles are even listed, which can be millions; and one alone would have nothing to be held against.
        if effort < 0 or (not exact and effort < cost):
            break
        schedule = _schedule(problem, layouts, s.candidate)
        prediction = predict(problem, s.candidate, layouts, machine, schedule.loads())
        exact.append(Scored(s.candidate, prediction))
    exact.sort(key=_rank)
    if machine.shares_cores or len(exact) < 2:
        return exact[0] if exact else scored[0]
    timed: list[tuple[float, int]] = []
    for number, s in enumerate(exact):
        schedule = _schedule(problem, layouts, s.candidate)
        strips = ceil_div(s.candidate.tile.w, s.candidate.slots.strip)
        effort -= SIMULATED * len(schedule.tiles) * (5 * schedule.grid.steps + 4 * strips)
        if effort < 0:
            break
        timed.append((simulate(schedule, problem, machine, layouts), number))
    return exact[min(timed)[1]] if timed else exact[0]


def _grid(problem: GemmProblem, candidate: Candidate) -> TileGrid:
    return TileGrid.of(problem, candidate.tile, candidate.ramp)


def _schedule(
    problem: GemmProblem, layouts: Layouts, candidate: Candidate, done: frozenset[Tile] = frozenset()
) -> Schedule:
    grid = _grid(problem, candidate)
    coded = {"A": layouts.a.decode_bytes, "B": layouts.b.decode_bytes, "C": layouts.c.encodes}
    tiles = walk(candidate.traversal, *grid.shape)
    return Schedule(
        problem,
        grid,
        [tile for tile in tiles if tile not in done] if done else tiles,
        candidate.slots,
        frozenset(operand for operand in coded if coded[operand]),
        tiles[-1] if tiles else None,
    )


def _varied(scored: Sequence[Scored], most: int = 6) -> Iterator[Scored]:
    """The best few that differ in tile shape, for explanations."""
    shapes: set[TileShape] = set()
    for s in scored:
        if s.candidate.tile not in shapes:
            shapes.add(s.candidate.tile)
            yield s
        if len(shapes) == most:
            return


def _check_alignment(problem: GemmProblem, layouts: Layouts, tile: TileShape) -> None:
    if min(tile.w, tile.h, tile.r) < 1:
        raise InputError(f"tile {tile} has an extent below 1")
    chunk = layouts.c.write_chunk
    for name, extent, nominal, unit in (
        ("w", problem.m, tile.w, chunk[0]),
        ("h", problem.n, tile.h, chunk[1]),
    ):
        if nominal < extent and nominal % unit:
            raise InputError(
                f"tile {tile}: {name} = {nominal} would cut chunks of C ({chunk[0]} x {chunk[1]}) in two, and two "
                f"tiles must not write one chunk: make {name} a multiple of {unit}"
            )


def _budget_error(
    problem: GemmProblem,
    budgets: Budgets,
    machine: MachineModel,
    layouts: Layouts,
    tile: TileShape | None,
) -> BudgetError:
    """Says which budget is too small, and the least that would do."""
    shape = tile or smallest(problem, layouts)
    strip = min(c_chunks(problem, layouts, shape)[0], shape.w)
    host = 0 if machine.unified else 1
    slots = Slots(
        host_a=host,
        host_b=host,
        host_c=host,
        finish=2 if problem.finishes else 0,
        strip=strip,
        unified=machine.unified,
    )
    held = footprint(problem, Candidate(shape, slots), layouts, machine)
    what = f"the plan of tile {tile}" if tile else "the smallest plan"
    if held.device_total > budgets.device:
        name, budget, least = "device", budgets.device, held.device_total
        remedy = "pass a smaller --tile" if tile else "give C smaller chunks, if it has large ones"
    else:
        name, budget, least = "host", budgets.host, held.host_total
        remedy = "pass a smaller --tile" if tile else "rechunk the operands into smaller chunks"
    detail = f"{least} bytes"
    if name == "host" and held.host["scratch"]:
        detail += f", {format_size(held.host['scratch'])} of it to decode or encode a chunk"
    return BudgetError(
        f"{name} memory {format_size(budget)} cannot hold {what} ({format_size(least)}: {detail}): "
        f"raise --{name}-memory or {remedy}",
        least=least,
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
    return f"{worst} +{format_time(parts[worst])}" if parts[worst] > 1e-6 else "no better"


def _length(span: Span) -> int:
    return span[1] - span[0]


def _number(value: complex) -> float | str | list[float | str]:
    """A scalar as JSON holds it: complex ones as [real, imaginary], NaN and infinities as text."""
    if isinstance(value, complex):
        return [_real(value.real), _real(value.imag)]
    return _real(value)


def _real(value: float) -> float | str:
    return value if isfinite(value) else str(value)
