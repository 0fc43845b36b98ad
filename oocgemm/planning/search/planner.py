"""Chooses how to run a product: enumerate, score in closed form, walk the schedules of the best few, choose.

The model is not exact to a percent. Among plans that it finds as near to one another as that, the one is chosen which
would take least if nothing overlapped: with fewer bytes and operations, and less left to be hidden, less can go wrong.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, islice
from math import inf

from oocgemm.errors import BudgetError, InputError
from oocgemm.planning.cost.footprint import (
    Candidate,
    Footprint,
    Layouts,
    MachineModel,
    footprint,
    required_bytes,
    slot_bytes,
)
from oocgemm.planning.cost.predict import multiply_seconds, predict
from oocgemm.planning.cost.simulate import simulate
from oocgemm.planning.integers import MAX_INT32_DEPTH
from oocgemm.planning.plan import Faster, Plan, Scored, schedule_of
from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.schedule.ramp import best_ramp
from oocgemm.planning.schedule.slots import Slots
from oocgemm.planning.schedule.traversal import last
from oocgemm.planning.search.candidates import MAX_DRAIN, Budgets, c_chunks, candidates, io_threads, smallest
from oocgemm.planning.search.shapes import with_less_last, with_more
from oocgemm.planning.tiling import Tile, TileGrid, TileShape, ceil_div
from oocgemm.planning.units import ceil_size, format_size, parse_size

# Planning may take this share of the time a run is predicted to take, and no more seconds than that.
EFFORT, LONGEST = 0.004, 0.5
# Seconds to count the loads of a step, to run an operation on the virtual clock.
COUNTED, SIMULATED = 20e-6, 15e-6
FINALISTS = 4
LIKE = 3  # shapes that others are derived from where C leaves late
PRUNE_FACTOR = 1.1  # times the best predicted time
# A plan is slow that takes longer than this, in seconds, if a few times as much memory makes it so many times as fast.
MIN_SLOW, MIN_FASTER = 5.0, 10
CLOSE = 0.01  # share of the best predicted time that the model cannot tell apart


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
    return _noted(problem, budgets, machine, layouts or Layouts(), tile)


@lru_cache(64)
def _noted(
    problem: GemmProblem, budgets: Budgets, machine: MachineModel, layouts: Layouts, tile: TileShape | None
) -> Plan:
    """The plan, with larger budgets that would make it far faster if there are such."""
    plan = _planned(problem, budgets, machine, layouts, tile)
    faster = None if tile else _faster(plan)
    return replace(plan, faster=faster) if faster else plan


def _faster(plan: Plan) -> Faster | None:
    """The least of some larger budgets with which a slow product takes a tenth of the time; None if none does, or it is not slow.

    Memory a few times as large makes a product that much faster only where tiles are tiny: chunks are then decoded many
    times over, or issuing operations takes most of the time. Such a plan takes many times as long as multiplying does.
    """
    problem, budgets, machine = plan.problem, plan.budgets, plan.machine
    seconds = plan.considered[0].prediction.total
    once = required_bytes(problem)["read"] / min(machine.read, machine.decode)
    least = multiply_seconds(problem, machine, problem.flops, problem.m, problem.n, max(1, problem.depth))
    if seconds < MIN_SLOW or seconds < MIN_FASTER * (least + once):
        return None
    for times in (2, 4):
        device, host = (parse_size(ceil_size(times * size)) for size in (budgets.device, budgets.host))
        for tried in (Budgets(device, budgets.host), Budgets(budgets.device, host), Budgets(device, host)):
            found = _planned(problem, tried, machine, plan.layouts, None).considered[0].prediction.total
            if MIN_FASTER * found <= seconds:
                return Faster(tried, found)
    return None


def resumed_plan(
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
    together = max(2, slots.last_steps)  # panels of the steps that go strip by strip
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
    raise _too_small(budgets, held, "the plan that the run was begun with")


@lru_cache(64)
def _planned(
    problem: GemmProblem, budgets: Budgets, machine: MachineModel, layouts: Layouts, tile: TileShape | None
) -> Plan:
    if tile is not None:
        _check_alignment(problem, layouts, tile)
    threads, scored = io_threads(problem, budgets, machine, layouts), list[Scored]()
    if not _add(scored, problem, budgets, machine, layouts, {tile: 0}, threads):
        threads = 1  # leaves more for slots
        if not _add(scored, problem, budgets, machine, layouts, {tile: 0}, threads):
            raise _budget_error(problem, budgets, machine, layouts, tile)
    scored.sort(key=_rank)
    if tile is None and scored[0].prediction.tail > CLOSE * scored[0].prediction.total:
        scored = _with_less_at_end(problem, budgets, machine, layouts, scored, threads)
    limit = (1 + CLOSE) * scored[0].prediction.total
    close = sum(s.prediction.total <= limit for s in scored)
    # The fastest is looked at whatever it takes.
    scored[1:close] = sorted(scored[1:close], key=lambda s: s.prediction.serial)
    scored[:FINALISTS] = [
        _ramped(problem, machine, layouts, _draining_longer(problem, budgets, machine, layouts, s))
        for s in scored[:FINALISTS]
    ]
    best = _walked(problem, machine, layouts, scored)
    return Plan(problem, layouts, budgets, machine, best.candidate, tuple(_varied([best, *scored])))


def _with_less_at_end(
    problem: GemmProblem,
    budgets: Budgets,
    machine: MachineModel,
    layouts: Layouts,
    scored: Sequence[Scored],
    threads: int,
) -> list[Scored]:
    """The same, best first, and what leaves less of C for the end like the best and like those that would be best if none were
    left for it: of each number of tiles down and across one, the best few."""
    found = list(scored)
    for others in (with_more, with_less_last):
        best: dict[tuple[int, int], Scored] = {}
        for s in sorted(found, key=lambda s: s.prediction.total - s.prediction.tail):
            best.setdefault(TileGrid.of(problem, s.candidate.tile).shape, s)
        like = [min(found, key=_rank), *islice(best.values(), LIKE)]
        known = {s.candidate.tile for s in found}
        left: dict[TileShape | None, int] = {}
        for s in like:
            for shape in others(problem, layouts, s.candidate.tile):
                if shape not in known:
                    left[shape] = max(left.get(shape, 0), _last(problem, s.candidate))
        _add(found, problem, budgets, machine, layouts, left, threads)
    return sorted(found, key=_rank)


def _add(
    scored: list[Scored],
    problem: GemmProblem,
    budgets: Budgets,
    machine: MachineModel,
    layouts: Layouts,
    tiles: Mapping[TileShape | None, int],
    threads: int,
) -> bool:
    """Score the candidates of tile shapes, or of all if one is None, in closed form, but not those that must be worse than one that is
    there. Where a shape comes with a number of elements, only walks that have fewer of C in the last tile, with turns or without.
    Whether any is new."""
    best = min((s.prediction.total for s in scored), default=inf)
    known = {s.candidate for s in scored}
    before = len(known)

    def limit() -> float:
        return PRUNE_FACTOR * best

    for tile, left in tiles.items():
        found = candidates(problem, budgets, machine, layouts, tile, threads, limit)
        for candidate in _ending_with_less(problem, found, left) if left else found:
            if candidate not in known:
                known.add(candidate)
                scored.append(Scored(candidate, predict(problem, candidate, layouts, machine)))
                best = min(best, scored[-1].prediction.total)
    return len(known) > before


def _ending_with_less(problem: GemmProblem, found: Iterable[Candidate], left: int) -> Iterator[Candidate]:
    """Those that leave fewer elements of C for the end, without turns where that leaves fewer still."""
    for turning in found:
        straight = replace(turning, traversal=replace(turning.traversal, turns=False))
        candidate = min(turning, straight, key=lambda candidate: _last(problem, candidate))
        if _last(problem, candidate) < left:
            yield candidate


def _last(problem: GemmProblem, candidate: Candidate) -> int:
    """Elements of C in the last tile."""
    grid = TileGrid.of(problem, candidate.tile)
    return grid.elements(last(candidate.traversal, *grid.shape))


def _draining_longer(
    problem: GemmProblem, budgets: Budgets, machine: MachineModel, layouts: Layouts, s: Scored
) -> Scored:
    """With as many steps of the last tile strip by strip as is best where C leaves late: their panels take the place of kept ones.
    Where panels come late, or C all the time, that hides nothing."""
    candidate, slots, p = s.candidate, s.candidate.slots, s.prediction
    if machine.shares_cores or problem.planes or p.bottleneck != "compute" or p.tail <= CLOSE * p.total:
        return s
    size, best = slot_bytes(problem, candidate.tile, slots.strip), s
    a_size, b_size = size["device", "A"], size["device", "B"]
    held = slots.a * a_size + slots.b * b_size
    most = min(held // max(1, a_size + b_size), MAX_DRAIN, TileGrid.of(problem, candidate.tile).steps)
    for drain in range(slots.last_steps + 1, most + 1):
        a = max(drain, min(slots.a, (held - drain * b_size) // a_size))
        b = max(drain, min(slots.b, (held - a * a_size) // b_size))
        longer = replace(candidate, slots=replace(slots, a=a, b=b, drain=drain, turn=slots.turn_steps))
        fits = footprint(problem, longer, layouts, machine)
        if fits.device_total <= budgets.device and fits.host_total <= budgets.host:
            best = min(best, Scored(longer, predict(problem, longer, layouts, machine)), key=_rank)
    return best


def _ramped(problem: GemmProblem, machine: MachineModel, layouts: Layouts, s: Scored) -> Scored:
    """With thin first steps, lest the kernel wait long for the first panels, where it runs beside the copies and takes
    longest. A copying lane that takes longer begins at once anyway, and would carry the thin panels once more when the
    whole ones are used again."""
    if machine.shares_cores or s.prediction.bottleneck != "compute":
        return s
    ramp = best_ramp(problem, machine, layouts, s.candidate.tile)
    return replace(s, candidate=replace(s.candidate, ramp=ramp))


def _rank(s: Scored) -> tuple[float, int, int, int]:
    """Of equals the simpler: fewer accumulators, shallower panels, less pinned memory."""
    slots = s.candidate.slots
    return s.prediction.total, slots.c, s.candidate.tile.k, slots.host_a + slots.host_b


def _least_work(timed: Sequence[tuple[float, Scored]]) -> Scored:
    """Of those that take about as long as the fastest, the one that would take least if nothing overlapped."""
    limit = (1 + CLOSE) * min(seconds for seconds, _ in timed)
    return min((s for seconds, s in timed if seconds <= limit), key=lambda s: (s.prediction.serial, _rank(s)))


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
        schedule = schedule_of(problem, layouts, s.candidate)
        exact.append(Scored(s.candidate, predict(problem, s.candidate, layouts, machine, schedule.loads())))
    exact.sort(key=_rank)
    costs = accumulate(_simulating(problem, s.candidate) for s in exact)
    clocked = [s for s, cost in zip(exact, costs, strict=True) if cost <= effort]
    if machine.shares_cores or len(clocked) < 2:
        return _least_work([(s.prediction.total, s) for s in exact or scored])
    least = min(max(s.prediction.lanes.values()) for s in clocked)
    timed: list[tuple[float, Scored]] = []
    for s in sorted(clocked, key=lambda s: s.prediction.serial):
        timed.append((simulate(schedule_of(problem, layouts, s.candidate), problem, machine, layouts), s))
        if timed[-1][0] <= (1 + CLOSE) * least:
            break  # no other is faster by more than can be told, and all have more to do
    return _least_work(timed)


def _simulating(problem: GemmProblem, candidate: Candidate) -> float:
    """About how many seconds it takes to run a candidate's schedule on a virtual clock."""
    grid, strips = TileGrid.of(problem, candidate.tile), ceil_div(candidate.tile.m, candidate.slots.strip)
    return SIMULATED * grid.shape[0] * grid.shape[1] * (5 * grid.steps + 4 * strips)


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
    if min(tile.m, tile.n, tile.k) < 1:
        raise InputError(f"tile {tile} has an extent below 1")
    if problem.exact and min(tile.k, problem.depth) > MAX_INT32_DEPTH:
        raise InputError(
            f"tile {tile}: int32 holds sums of {MAX_INT32_DEPTH} products of int8 numbers, and panels would be {tile.k} deep: make "
            f"r at most {MAX_INT32_DEPTH}"
        )
    chunk = layouts.c.write_chunk
    for name, extent, nominal, unit in (
        ("w", problem.m, tile.m, chunk[0]),
        ("h", problem.n, tile.n, chunk[1]),
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
    """The error that says which budgets are too small for the smallest plan."""
    shape = tile or smallest(problem, layouts)
    strip = min(c_chunks(problem, layouts, shape)[0], shape.m)
    host = 0 if machine.unified else 1
    slots = Slots(
        host_a=host,
        host_b=host,
        host_c=host,
        finish=2 if problem.finishes else 0,
        strip=strip,
        planes=2 if problem.planes else 0,
        unified=machine.unified,
    )
    held = footprint(problem, Candidate(shape, slots), layouts, machine)
    if tile:
        return _too_small(budgets, held, f"the plan of tile {tile}", "a smaller tile")
    remedies = []
    if held.host_total > budgets.host:
        remedies += [f"rechunk {x}" for x, on in (("A", layouts.a), ("B", layouts.b)) if on.decode_bytes]
    if max(layouts.c.write_chunk) > 16 or (held.host_total > budgets.host and layouts.c.encodes):
        remedies.append("give C smaller chunks")
    return _too_small(budgets, held, "the smallest plan", " or ".join(remedies))


def _too_small(budgets: Budgets, held: Footprint, what: str, otherwise: str = "") -> BudgetError:
    """The error that says which budgets are too small for what is `held`, and names sizes that will do."""
    short = [
        (tier, budget, total)
        for tier, budget, total in (
            ("device", budgets.device, held.device_total),
            ("host", budgets.host, held.host_total),
        )
        if total > budget
    ]
    given = " and ".join(f"{tier} memory {format_size(budget)}" for tier, budget, _ in short)
    needed = " and ".join(f"{total} bytes" for _, _, total in short)
    if any(tier == "host" for tier, _, _ in short) and held.host["scratch"]:
        needed += f", {format_size(held.host['scratch'])} of it to decode or encode chunks"
    arguments = ", ".join(f"{tier}_memory='{ceil_size(total)}'" for tier, _, total in short)
    options = " ".join(f"--{tier}-memory {ceil_size(total)}" for tier, _, total in short)
    return BudgetError(
        f"{given} cannot hold {what} ({needed}): pass {arguments} ({options}){otherwise and f', or {otherwise}'}",
        least=short[0][2],
        needed=(held.device_total, held.host_total),
    )
