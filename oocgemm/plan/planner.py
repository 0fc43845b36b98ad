"""Chooses tile, panel depth and slots: enumerate, score in closed form, simulate the best few, choose.

Traffic falls with the tile's extents, so the tile takes nearly all of the device memory and panels are only
as deep as the kernel and the copies want: ``c w h + 2 r (w + h) <= M``. Extents are enumerated as *counts* of
tiles down and across, which gives tiles of equal size; for each depth and count down, the fewest tiles across
that fit are tried, and a few more.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from math import isfinite, isqrt, lcm
from typing import Any

from oocgemm.errors import BudgetError, InputError
from oocgemm.plan.cost import (
    Candidate,
    Footprint,
    Layouts,
    MachineModel,
    Prediction,
    amplification,
    footprint,
    least_bytes,
    predict,
    required_bytes,
    scratch_bytes,
)
from oocgemm.plan.problem import GemmProblem
from oocgemm.plan.schedule import Schedule, Slots
from oocgemm.plan.simulate import simulate
from oocgemm.plan.tiling import TileGrid, TileShape, ceil_div, round_up
from oocgemm.plan.traversal import snake
from oocgemm.units import format_size, format_time

STRIP_BYTES = 32 << 20  # a drained strip: long enough for the link, short enough to start writing early
SIMULATED = 300  # operations: some 10 us each, for each of a few plans
CHUNK_BYTES = 8 << 20  # of a new C: cheap to allocate again and again, long enough for a disk
DEPTHS = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192)
BINS = 4
STRIPS = 24


@dataclass(frozen=True, slots=True)
class Budgets:
    """Hard upper bounds, in bytes, of what a run holds on the device and on the host."""

    device: int
    host: int


@dataclass(frozen=True)
class Scored:
    """A candidate with what it is predicted to take."""

    candidate: Candidate
    prediction: Prediction


@dataclass(frozen=True)
class Plan:
    """How a product will be run: everything decided, nothing done."""

    problem: GemmProblem
    layouts: Layouts
    budgets: Budgets
    machine: MachineModel
    candidate: Candidate
    considered: tuple[Scored, ...] = ()

    @property
    def tile(self) -> TileShape:
        return self.candidate.tile

    @property
    def slots(self) -> Slots:
        return self.candidate.slots

    @property
    def grid(self) -> TileGrid:
        return TileGrid.of(self.problem, self.tile)

    @property
    def steps(self) -> int:
        """Multiplications in all."""
        down, across = self.grid.shape
        return down * across * self.grid.steps

    @property
    def chunks(self) -> tuple[int, int]:
        """Chunks (or shards) of C; no two tiles and no two strips share one."""
        return c_chunks(self.problem, self.layouts, self.tile)

    @cached_property
    def footprint(self) -> Footprint:
        return footprint(self.problem, self.candidate, self.layouts, self.machine)

    @cached_property
    def traffic(self) -> dict[str, int]:
        """Exact bytes over each link."""
        return self.schedule().traffic()

    @cached_property
    def required(self) -> dict[str, int]:
        """Bytes over each link if every element crossed it once."""
        required = required_bytes(self.problem)
        return required | {"h2d": 0, "d2h": 0} if self.slots.unified else required

    @cached_property
    def least(self) -> dict[str, int]:
        """Fewest bytes over each link that these budgets allow any schedule; for storage, host and device
        memory count together."""
        once = self.required
        return {
            "read": least_bytes(self.problem, self.budgets.device + self.budgets.host),
            "h2d": 0 if self.slots.unified else least_bytes(self.problem, self.budgets.device),
            "d2h": once["d2h"],
            "write": once["write"],
        }

    @cached_property
    def prediction(self) -> Prediction:
        return predict(self.problem, self.candidate, self.layouts, self.machine, self.traffic)

    @cached_property
    def amplification(self) -> dict[str, float]:
        """Read amplification: bytes of the chunks touched over bytes wanted."""
        return amplification(self.problem, self.tile, self.layouts)

    def schedule(self) -> Schedule:
        return Schedule(self.problem, self.grid, snake(*self.grid.shape), self.slots)

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
            "flops": self.problem.flops,
            "tile": asdict(self.tile),
            "tiles": list(self.grid.shape),
            "chunks": list(self.chunks),
            "steps": self.steps,
            "slots": asdict(self.slots),
            "io_threads": self.candidate.io_threads,
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
    and `InputError` if `tile` cuts chunks of C in two.
    """
    layouts = layouts or Layouts()
    if tile is not None:
        _check_alignment(problem, layouts, tile)
        shapes = [tile]
    else:
        shapes = [*_shapes(problem, budgets, machine, layouts), _smallest(problem, layouts)]
    wanted = _io_threads(problem, budgets, machine, layouts)
    scored = _scored(problem, budgets, machine, layouts, shapes, wanted)
    if not scored:  # fewer threads leave more for slots
        scored = _scored(problem, budgets, machine, layouts, shapes, 1)
    if not scored:
        raise _budget_error(problem, budgets, machine, layouts, tile)
    # Of equals the simpler: fewer accumulators, shallower panels.
    scored.sort(key=lambda s: (s.prediction.total, s.candidate.slots.c, s.candidate.tile.r))
    best = _simulated_best(problem, machine, layouts, scored[:4])
    return Plan(problem, layouts, budgets, machine, best.candidate, tuple(_varied([best, *scored])))


def _scored(
    problem: GemmProblem,
    budgets: Budgets,
    machine: MachineModel,
    layouts: Layouts,
    shapes: Iterable[TileShape],
    io_threads: int,
) -> list[Scored]:
    """Every shape with the best slots that fit, with one accumulator and with two."""
    scored = []
    for tile in shapes:
        several = tile.w < problem.m or tile.h < problem.n
        for c in (1, 2) if several else (1,):
            for slots in _slot_choices(problem, layouts, machine, tile, c):
                candidate = Candidate(tile, slots, io_threads)
                if _fits(footprint(problem, candidate, layouts, machine), budgets):
                    scored.append(Scored(candidate, predict(problem, candidate, layouts, machine)))
                    break
    return scored


def _smallest(problem: GemmProblem, layouts: Layouts) -> TileShape:
    """The smallest tile that is ever used."""
    must = layouts.c.write_chunk
    return TileShape(
        max(1, min(problem.m, round_up(16, must[0]))),
        max(1, min(problem.n, round_up(16, must[1]))),
        max(1, min(problem.depth, 16)),
    )


def c_chunks(problem: GemmProblem, layouts: Layouts, tile: TileShape) -> tuple[int, int]:
    """Chunks of C: as they are, or for a new C about `CHUNK_BYTES` each and never more than twice that, near
    square, dividing the tile wherever tiles meet."""
    if not layouts.c.free_chunks:
        return layouts.c.write_chunk
    elements = CHUNK_BYTES // problem.itemsizes["C"]
    rows = _dividing(isqrt(elements), tile.w, problem.m)
    return rows, _dividing(max(1, elements // rows), tile.h, problem.n)


@lru_cache(4096)
def _dividing(target: int, nominal: int, extent: int) -> int:
    """The chunk extent near `target` and at most sqrt(2) times it that divides `nominal`; any such where one
    tile spans `extent`."""
    if nominal >= extent:
        return max(1, ceil_div(extent, max(1, ceil_div(extent, target))))
    divisors = [d for q in range(1, isqrt(nominal) + 1) if nominal % q == 0 for d in (q, nominal // q)]
    return max(d for d in divisors if d * d <= 2 * target * target)


def _io_threads(problem: GemmProblem, budgets: Budgets, machine: MachineModel, layouts: Layouts) -> int:
    """As many as the machine wants, but scratch for decoding takes at most half of the host budget."""
    threads = machine.io_threads
    while threads > 1 and scratch_bytes(layouts, problem.reads_c, threads) > budgets.host // 2:
        threads -= 1
    return threads


def _fits(held: Footprint, budgets: Budgets) -> bool:
    return held.device_total <= budgets.device and held.host_total <= budgets.host


def _alignments(problem: GemmProblem, layouts: Layouts) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What tile extents along m and along n may be multiples of: the chunks of C, which they must be (or for a new
    C a number that gives it good ones), and what suits reading A or B as well."""
    units = []
    for extent, must, wish in (
        (problem.m, layouts.c.write_chunk[0], layouts.a.read_chunk[0]),
        (problem.n, layouts.c.write_chunk[1], layouts.b.read_chunk[1]),
    ):
        unit = 128 if layouts.c.free_chunks and extent > 1024 else must
        units.append(tuple(dict.fromkeys((unit, lcm(unit, wish)))))
    return units[0], units[1]


def _shapes(
    problem: GemmProblem, budgets: Budgets, machine: MachineModel, layouts: Layouts
) -> Iterator[TileShape]:
    """Tile shapes worth scoring. For each depth, and one accumulator or two, shapes are binned by area; of each
    of the largest bins the one that moves least is kept: larger moves less, smaller starts and ends sooner."""
    units_m, units_n = _alignments(problem, layouts)
    extents_m = _extents(problem.m, units_m, _counts(problem.m))
    for r in _depths(problem, layouts):
        for c in (1, 2):
            bins: dict[int, tuple[float, int, int]] = {}
            for w in extents_m:
                most = _widest(problem, budgets, machine, w, r, c)
                fewest = ceil_div(problem.n, most) if most > 0 else 0
                for h in _extents(problem.n, units_n, range(fewest, fewest + 2) if fewest else ()):
                    if h > most:
                        continue
                    moved = ceil_div(problem.n, h) / problem.n + ceil_div(problem.m, w) / problem.m
                    best = bins.get((w * h).bit_length())
                    if best is None or (moved, h) < best[:2]:
                        bins[(w * h).bit_length()] = moved, h, w
            for area in sorted(bins, reverse=True)[:BINS]:
                _, h, w = bins[area]
                yield TileShape(w, h, r)


def _depths(problem: GemmProblem, layouts: Layouts) -> list[int]:
    """Panel depths worth trying: round numbers, multiples of the chunks along k, and all of k."""
    k = max(1, problem.depth)
    chunk_a, chunk_b = layouts.a.read_chunk[1], layouts.b.read_chunk[0]
    units = {chunk_a, chunk_b, lcm(chunk_a, chunk_b)}
    depths = {*DEPTHS, k, *(unit * times for unit in units for times in (1, 2, 3, 4, 6, 8))}
    return sorted(d for d in depths if d <= k and (d >= 16 or d == k))


def _counts(extent: int) -> Iterator[int]:
    """How many tiles to cut an extent into: every count up to 32, then ever sparser."""
    count = 1
    while count <= extent:
        yield count
        count = count + 1 if count < 32 else ceil_div(count * 9, 8)


def _extents(extent: int, units: Sequence[int], counts: Iterable[int]) -> list[int]:
    """Equal tile extents for each count, aligned to each of the units."""
    found = set()
    for count in counts:
        even = ceil_div(extent, max(count, 1))
        for unit in units:
            found.add(min(extent, round_up(max(even, 1), unit)))
    return sorted(e for e in found if e > 0)


def _widest(problem: GemmProblem, budgets: Budgets, machine: MachineModel, w: int, r: int, c: int) -> int:
    """The widest tile that device memory allows beside c accumulators of w rows and panels of depth r."""
    sizes = problem.itemsizes
    r = min(r, problem.depth)
    free = budgets.device - machine.device_reserve - 2 * w * r * sizes["A"]
    return max(0, min(problem.n, free // (c * w * sizes["acc"] + 2 * r * sizes["B"])))


def _slot_choices(
    problem: GemmProblem, layouts: Layouts, machine: MachineModel, tile: TileShape, c: int
) -> Iterator[Slots]:
    """Slots for a tile shape, the best first: a third host slot rides out jitter where cores are not short, one
    alone would have reading and uploading take turns."""
    unit = c_chunks(problem, layouts, tile)[0]
    row_bytes = max(1, min(tile.h, problem.n) * problem.itemsizes["C"])
    # Few strips a tile, since each is several operations; fewer rows where memory is short.
    wanted = max(STRIP_BYTES // row_bytes, ceil_div(tile.w, STRIPS), 1)
    sizes = (wanted, STRIP_BYTES // row_bytes, STRIP_BYTES // 32 // row_bytes, 1)
    strips = sorted({min(round_up(max(1, rows), unit), tile.w) for rows in sizes}, reverse=True)
    finish = 2 if problem.finishes else 0
    for host in (0,) if machine.unified else (2, 1) if machine.shares_cores else (3, 2, 1):
        for rows in strips:
            yield Slots(
                c=c,
                host_a=host,
                host_b=host,
                host_c=host,
                finish=finish,
                strip=rows,
            )


def _simulated_best(
    problem: GemmProblem, machine: MachineModel, layouts: Layouts, scored: Sequence[Scored]
) -> Scored:
    """The best of a few by walking their schedules, where these are short enough to walk."""

    def seconds(s: Scored) -> float:
        grid = TileGrid.of(problem, s.candidate.tile)
        schedule = Schedule(problem, grid, snake(*grid.shape), s.candidate.slots)
        tile = s.candidate.tile
        read_rate = min(
            machine.store_rate(layouts.a, (tile.w, tile.r)), machine.store_rate(layouts.b, (tile.r, tile.h))
        )
        return simulate(schedule, problem, machine, read_rate)

    def operations(s: Scored) -> int:
        grid = TileGrid.of(problem, s.candidate.tile)
        strips = ceil_div(s.candidate.tile.w, s.candidate.slots.strip)
        return grid.shape[0] * grid.shape[1] * (5 * grid.steps + 4 * strips)

    if machine.shares_cores or any(operations(s) > SIMULATED for s in scored):
        return scored[0]
    return min(scored, key=seconds)


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
    smallest = tile or _smallest(problem, layouts)
    strip = min(c_chunks(problem, layouts, smallest)[0], smallest.w)
    host = 0 if machine.unified else 1
    slots = Slots(host_a=host, host_b=host, host_c=host, finish=2 if problem.finishes else 0, strip=strip)
    held = footprint(problem, Candidate(smallest, slots), layouts, machine)
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


def _number(value: complex) -> float | str | list[float | str]:
    """A scalar as JSON holds it: complex ones as [real, imaginary], NaN and infinities as text."""
    if isinstance(value, complex):
        return [_real(value.real), _real(value.imag)]
    return _real(value)


def _real(value: float) -> float | str:
    return value if isfinite(value) else str(value)
