"""Choose how to run a product: enumerate candidates, score them, simulate the best few, choose.

The cost model is not accurate to a percent. Among plans that it predicts within one percent of each other,
the planner chooses the one that would take least if nothing overlapped: it moves fewer bytes in fewer
operations, and depends less on overlap.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, islice
from math import inf

from oocgemm.planning.cost.footprint import Candidate, footprint, required_bytes, slot_bytes
from oocgemm.planning.cost.machine import MachineModel
from oocgemm.planning.cost.predict import predict
from oocgemm.planning.cost.simulate import simulate
from oocgemm.planning.plan import Faster, Plan, Scored, schedule_of
from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.schedule.traversal import last
from oocgemm.planning.search.candidates import candidates, io_threads
from oocgemm.planning.search.ramp import best_ramp
from oocgemm.planning.search.refusals import budget_error, check_tile, too_small
from oocgemm.planning.search.shapes import with_more_tiles, with_smaller_last
from oocgemm.planning.search.slot_counts import MAX_DRAIN
from oocgemm.planning.setting import Budgets, Layouts, Setting
from oocgemm.planning.tiling import Tile, TileGrid, TileShape, ceil_div
from oocgemm.planning.units import ceil_size, parse_size

# Planning may take this share of the predicted time of the run, and at most this many seconds.
EFFORT, MAX_EFFORT = 0.004, 0.5
# Seconds per step to count its loads, and per operation to simulate it.
COUNT_SECONDS, SIMULATE_SECONDS = 20e-6, 15e-6
FINALISTS = 4
SEEDS = 3  # tile shapes from which others are derived where the drain takes long
PRUNE_FACTOR = 1.1  # shapes that take at least as many times the best predicted time are not scored
# A plan is slow if it takes at least this many seconds, and a few times as much memory makes it this many
# times as fast.
MIN_SLOW, MIN_FASTER = 5.0, 10
CLOSE = 0.01  # relative difference of predicted times that is within the model's error
MAX_EXPLAINED = 6


def make_plan(
    problem: GemmProblem,
    budgets: Budgets,
    machine: MachineModel,
    layouts: Layouts | None = None,
    tile: TileShape | None = None,
) -> Plan:
    """Choose the plan that is predicted to be fastest within the budgets; with `tile`, for that tile shape.

    `layouts` are in the orientation of op(X). Raises `BudgetError` if nothing fits, with the smallest budgets
    that do, and `InputError` if tiles of that shape would divide chunks of C. Plans are cached: planning
    takes milliseconds, and so may the product.
    """
    return _plan_with_advice(Setting(problem, machine, layouts or Layouts(), budgets), tile)


@lru_cache(64)
def _plan_with_advice(setting: Setting, tile: TileShape | None) -> Plan:
    """Choose a plan, and find larger budgets that would make it far faster."""
    plan = _planned(setting, tile)
    faster = None if tile else _faster(plan)
    return replace(plan, faster=faster) if faster else plan


def _faster(plan: Plan) -> Faster | None:
    """Find the smallest of some larger budgets that make a slow product ten times as fast, or None.

    A few times as much memory gains that much only if tiles are tiny. Then chunks are decoded many times
    over, or issuing operations takes most of the time. Such a plan takes many times as long as the
    multiplication alone.
    """
    setting = plan.setting
    problem, budgets, machine = setting.problem, setting.budgets, setting.machine
    seconds = plan.considered[0].prediction.total
    once = required_bytes(problem)["read"] / min(machine.read, machine.decode)
    depth = max(1, problem.depth)
    least = machine.multiply_seconds(problem.rate, problem.flops, problem.m, problem.n, depth)
    if seconds < MIN_SLOW or seconds < MIN_FASTER * (least + once):
        return None
    for times in (2, 4):
        device, host = (parse_size(ceil_size(times * size)) for size in (budgets.device, budgets.host))
        for tried in (Budgets(device, budgets.host), Budgets(budgets.device, host), Budgets(device, host)):
            found = _planned(replace(setting, budgets=tried), None).considered[0].prediction.total
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
    """Return the plan of a run that resumes `candidate` with the tiles that are not done.

    If the budgets are smaller than before, it caches fewer panels. Everything that affects rounding stays.
    Raises `BudgetError` if the smallest such plan does not fit.
    """
    slots = candidate.slots
    together = max(2, slots.last_steps)  # panels of the steps that run strip by strip
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
        used = plan.footprint
        if (used.device_total <= budgets.device and used.host_total <= budgets.host) or plan.steps == 0:
            return plan
    raise too_small(budgets, used, "the plan that the run was begun with")


@lru_cache(64)
def _planned(setting: Setting, tile: TileShape | None) -> Plan:
    if tile is not None:
        check_tile(setting, tile)
    threads, scored = io_threads(setting), list[Scored]()
    if not _add(scored, setting, {tile: 0}, threads):
        threads = 1  # leaves more memory for slots
        if not _add(scored, setting, {tile: 0}, threads):
            raise budget_error(setting, tile)
    scored.sort(key=_rank)
    if tile is None and scored[0].prediction.tail > CLOSE * scored[0].prediction.total:
        scored = _with_shorter_tail(setting, scored, threads)
    limit = (1 + CLOSE) * scored[0].prediction.total
    close = sum(s.prediction.total <= limit for s in scored)
    # The fastest stays first, so that it is always among the finalists.
    scored[1:close] = sorted(scored[1:close], key=lambda s: s.prediction.serial)
    scored[:FINALISTS] = [_ramped(setting, _with_longer_drain(setting, s)) for s in scored[:FINALISTS]]
    best = _best_of(setting, scored)
    return Plan(
        setting.problem,
        setting.layouts,
        setting.budgets,
        setting.machine,
        best.candidate,
        tuple(_varied([best, *scored])),
    )


def _with_shorter_tail(setting: Setting, scored: Sequence[Scored], threads: int) -> list[Scored]:
    """Add candidates of which less of C drains at the end, and return all, best first.

    They are derived from the best candidate and from those that would be best without their tails, one for
    each number of tiles down and across.
    """
    found = list(scored)
    for derive in (with_more_tiles, with_smaller_last):
        best: dict[tuple[int, int], Scored] = {}
        for s in sorted(found, key=lambda s: s.prediction.total - s.prediction.tail):
            best.setdefault(TileGrid.of(setting.problem, s.candidate.tile).shape, s)
        seeds = [min(found, key=_rank), *islice(best.values(), SEEDS)]
        known = {s.candidate.tile for s in found}
        last_elements: dict[TileShape | None, int] = {}
        for s in seeds:
            for shape in derive(setting, s.candidate.tile):
                if shape not in known:
                    elements = _last_elements(setting.problem, s.candidate)
                    last_elements[shape] = max(last_elements.get(shape, 0), elements)
        _add(found, setting, last_elements, threads)
    return sorted(found, key=_rank)


def _add(scored: list[Scored], setting: Setting, tiles: Mapping[TileShape | None, int], threads: int) -> bool:
    """Score the candidates of tile shapes, or of all shapes for None. Tell whether any is new.

    Shapes that must be worse than the best candidate are skipped. If a shape comes with a number of elements,
    only traversals whose last tile has fewer are added, with turns or without.
    """
    best = min((s.prediction.total for s in scored), default=inf)
    known = {s.candidate for s in scored}
    before = len(known)

    def limit() -> float:
        return PRUNE_FACTOR * best

    for tile, elements in tiles.items():
        found = candidates(setting, tile, threads, limit)
        for candidate in _ending_smaller(setting.problem, found, elements) if elements else found:
            if candidate not in known:
                known.add(candidate)
                scored.append(Scored(candidate, predict(setting, candidate)))
                best = min(best, scored[-1].prediction.total)
    return len(known) > before


def _ending_smaller(problem: GemmProblem, found: Iterable[Candidate], elements: int) -> Iterator[Candidate]:
    """Yield candidates whose last tile has fewer elements, without turns if it then has fewer still."""
    for turning in found:
        straight = replace(turning, traversal=replace(turning.traversal, turns=False))
        candidate = min(turning, straight, key=lambda candidate: _last_elements(problem, candidate))
        if _last_elements(problem, candidate) < elements:
            yield candidate


def _last_elements(problem: GemmProblem, candidate: Candidate) -> int:
    """Count the elements of C in the last tile."""
    grid = TileGrid.of(problem, candidate.tile)
    return grid.elements(last(candidate.traversal, *grid.shape))


def _with_longer_drain(setting: Setting, s: Scored) -> Scored:
    """Run as many steps of the last tile strip by strip as is best; their panels replace cached ones.

    That hides nothing unless multiplications are the bottleneck and the tail is long.
    """
    problem, machine, budgets = setting.problem, setting.machine, setting.budgets
    candidate, slots, p = s.candidate, s.candidate.slots, s.prediction
    if machine.shares_cores or problem.planes or p.bottleneck != "compute" or p.tail <= CLOSE * p.total:
        return s
    size, best = slot_bytes(problem, candidate.tile, slots.strip), s
    a_size, b_size = size["device", "A"], size["device", "B"]
    panels = slots.a * a_size + slots.b * b_size
    longest = min(panels // max(1, a_size + b_size), MAX_DRAIN, TileGrid.of(problem, candidate.tile).steps)
    for drain in range(slots.last_steps + 1, longest + 1):
        a = max(drain, min(slots.a, (panels - drain * b_size) // a_size))
        b = max(drain, min(slots.b, (panels - a * a_size) // b_size))
        longer = replace(candidate, slots=replace(slots, a=a, b=b, drain=drain, turn=slots.turn_steps))
        used = footprint(setting, longer)
        if used.device_total <= budgets.device and used.host_total <= budgets.host:
            best = min(best, Scored(longer, predict(setting, longer)), key=_rank)
    return best


def _ramped(setting: Setting, s: Scored) -> Scored:
    """Add thin first steps if multiplications are the bottleneck and overlap with copies.

    If a copying lane is the bottleneck, it starts at once in any case. It would copy the thin panels a second
    time, as parts of the whole panels that other tiles use.
    """
    if setting.machine.shares_cores or s.prediction.bottleneck != "compute":
        return s
    return replace(s, candidate=replace(s.candidate, ramp=best_ramp(setting, s.candidate.tile)))


def _rank(s: Scored) -> tuple[float, int, int, int]:
    """Order by predicted time; then prefer fewer accumulators, thinner panels and less pinned memory."""
    slots = s.candidate.slots
    return s.prediction.total, slots.c, s.candidate.tile.k, slots.host_a + slots.host_b


def _least_work(timed: Sequence[tuple[float, Scored]]) -> Scored:
    """Of the candidates about as fast as the fastest, choose the one that takes least without overlap."""
    limit = (1 + CLOSE) * min(seconds for seconds, _ in timed)
    return min((s for seconds, s in timed if seconds <= limit), key=lambda s: (s.prediction.serial, _rank(s)))


def _best_of(setting: Setting, scored: Sequence[Scored]) -> Scored:
    """Choose the best of the finalists.

    Their loads are counted and, if lanes overlap, their schedules simulated. That
    takes at most a small share of the predicted time of the run.
    """
    problem, machine = setting.problem, setting.machine
    effort = min(MAX_EFFORT, EFFORT * scored[0].prediction.total)
    exact: list[Scored] = []
    for s in scored[:FINALISTS]:
        grid = TileGrid.of(problem, s.candidate.tile)
        cost = COUNT_SECONDS * grid.shape[0] * grid.shape[1] * grid.steps
        effort -= cost
        # Stop before tiles are listed, which may be millions. A single counted candidate could not be
        # compared.
        if effort < 0 or (not exact and effort < cost):
            break
        schedule = schedule_of(setting, s.candidate)
        exact.append(Scored(s.candidate, predict(setting, s.candidate, schedule.loads())))
    exact.sort(key=_rank)
    costs = accumulate(_simulation_seconds(problem, s.candidate) for s in exact)
    simulated = [s for s, cost in zip(exact, costs, strict=True) if cost <= effort]
    if machine.shares_cores or len(simulated) < 2:
        return _least_work([(s.prediction.total, s) for s in exact or scored])
    least = min(max(s.prediction.lanes.values()) for s in simulated)
    timed: list[tuple[float, Scored]] = []
    for s in sorted(simulated, key=lambda s: s.prediction.serial):
        timed.append((simulate(schedule_of(setting, s.candidate), setting), s))
        if timed[-1][0] <= (1 + CLOSE) * least:
            break  # the others have more to do, and none is faster by more than the model's error
    return _least_work(timed)


def _simulation_seconds(problem: GemmProblem, candidate: Candidate) -> float:
    """Estimate the seconds that simulating a candidate's schedule takes."""
    grid, strips = TileGrid.of(problem, candidate.tile), ceil_div(candidate.tile.m, candidate.slots.strip)
    return SIMULATE_SECONDS * grid.shape[0] * grid.shape[1] * (5 * grid.steps + 4 * strips)


def _varied(scored: Sequence[Scored]) -> Iterator[Scored]:
    """Yield the best candidates of different tile shapes, for explanations."""
    shapes: set[TileShape] = set()
    for s in scored:
        if s.candidate.tile not in shapes:
            shapes.add(s.candidate.tile)
            yield s
        if len(shapes) == MAX_EXPLAINED:
            return
