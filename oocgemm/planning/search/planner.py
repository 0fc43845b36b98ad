"""Choose how to run a product: enumerate candidates, predict their times, simulate the best few, choose.

Predictions have errors of more than one percent. Among candidates whose predictions are within one percent of
the best, the planner chooses the one that would be fastest if no operations overlapped. This candidate moves
fewer bytes in fewer operations.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, islice
from math import inf

from oocgemm.planning.cost.footprint import Candidate, footprint, required_bytes, slot_bytes
from oocgemm.planning.cost.machine import MachineModel
from oocgemm.planning.cost.predict import min_seconds, predict
from oocgemm.planning.cost.simulate import simulate
from oocgemm.planning.plan import Faster, Plan, Scored, schedule_of
from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.schedule.traversal import last
from oocgemm.planning.search.candidates import candidates, io_threads
from oocgemm.planning.search.ramp import best_ramp
from oocgemm.planning.search.refusals import budget_error, check_tile, too_small
from oocgemm.planning.search.shapes import with_more_tiles, with_smaller_last
from oocgemm.planning.search.slot_counts import MAX_DRAIN, slot_counts
from oocgemm.planning.setting import Budgets, Layouts, Setting
from oocgemm.planning.tiling import Tile, TileGrid, TileShape, ceil_div
from oocgemm.planning.units import ceil_size, parse_size

# The planner counts loads and simulates schedules for at most this fraction of the predicted time of the run,
# and for at most this many seconds.
EFFORT, MAX_EFFORT = 0.004, 0.5
# Estimated seconds that the planner takes per step to count the loads of a candidate, and per operation to
# simulate it.
COUNT_SECONDS, SIMULATE_SECONDS = 20e-6, 15e-6
# Number of best candidates that are compared by counted loads and by simulated schedules.
FINALISTS = 4
# Maximum number of further candidates, besides the best one, from which `_with_shorter_tail` derives shapes.
SEEDS = 3
# Estimated seconds that the planner takes to predict the candidates of one tile shape, and the minimum number
# of shapes that `_with_shorter_tail` tries. It tries more as long as they take no longer than EFFORT permits.
SHAPE_SECONDS, MIN_DERIVED = 0.4e-3, 12
# A tile shape is skipped if a lower bound on its time exceeds the best predicted time by this factor.
PRUNE_FACTOR = 1.1
# Larger budgets are recommended only if the product takes at least MIN_SLOW seconds, and would be at least
# MIN_FASTER times as fast.
MIN_SLOW, MIN_FASTER = 5.0, 10
# Predicted times with at most this relative difference count as equal, since the cost model is no more exact.
CLOSE = 0.01
MAX_EXPLAINED = 6  # maximum number of candidates that a plan keeps for `Plan.explain`


def make_plan(
    problem: GemmProblem,
    budgets: Budgets,
    machine: MachineModel,
    layouts: Layouts | None = None,
    tile: TileShape | None = None,
) -> Plan:
    """Choose the plan that is predicted to be fastest within the budgets. If given, `tile` is its tile shape.

    `layouts` are those of op(A), op(B) and C. Raises `BudgetError` if no plan fits; the message names
    sufficient budgets. Raises `InputError` if the product cannot use tiles of shape `tile`, for instance
    because their borders would divide chunks of C.

    Plans are cached, because planning may take as long as a small product: milliseconds.
    """
    return _plan_with_advice(Setting(problem, machine, layouts or Layouts(), budgets), tile)


@lru_cache(64)
def _plan_with_advice(setting: Setting, tile: TileShape | None) -> Plan:
    """Choose a plan, and find larger budgets that would make it far faster."""
    plan = _planned(setting, tile)
    faster = None if tile else _faster(plan)
    return replace(plan, faster=faster) if faster else plan


def _faster(plan: Plan) -> Faster | None:
    """Find larger budgets that make a slow product at least `MIN_FASTER` times as fast, or return None.

    The device budget, the host budget and both are doubled, then quadrupled. The first budgets that suffice
    are returned. None are tried if the product takes less than `MIN_SLOW` seconds, or if no plan could be
    that much faster: it must still read the operands once and multiply them.
    """
    setting = plan.setting
    problem, budgets, machine = setting.problem, setting.budgets, setting.machine
    seconds = plan.considered[0].prediction.total
    once = required_bytes(problem)["read"] / min(machine.read, machine.decode)
    depth = max(1, problem.depth)
    compute = machine.multiply_seconds(problem.rate, problem.flops, problem.m, problem.n, depth)
    if seconds < MIN_SLOW or seconds < MIN_FASTER * (compute + once):
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
    """Return a plan that completes an interrupted run: it computes the tiles that are not in `done`.

    `candidate` is how the interrupted run computed the product. If it does not fit the present budgets, the
    plan caches fewer panels and, if necessary, uses one I/O thread. The result is bit-identical all the same.
    Raises `BudgetError` if the plan does not fit even then.
    """
    slots = candidate.slots
    # The last steps of a tile run strip by strip, so that the panels of all these steps are needed together.
    together = max(2, slots.last_steps)
    fewer = replace(
        slots,
        a=min(slots.a, together),
        b=min(slots.b, together),
        host_a=min(slots.host_a, 2),
        host_b=min(slots.host_b, 2),
        host_c=min(slots.host_c, 2),
    )
    smallest = replace(candidate, slots=fewer, io_threads=1)
    for tried in (candidate, replace(candidate, slots=fewer), smallest):
        plan = Plan(problem, layouts, budgets, machine, tried, done=done)
        used = plan.footprint
        if (used.device_total <= budgets.device and used.host_total <= budgets.host) or plan.steps == 0:
            return plan
    raise too_small(budgets, used, "the plan that the run was begun with")


@lru_cache(64)
def _planned(setting: Setting, tile: TileShape | None) -> Plan:
    if tile is not None:
        check_tile(setting, tile)
    threads = io_threads(setting)
    scored = _scored(setting, tile, threads)
    if not scored:
        threads = 1  # one I/O thread needs the least temporary memory
        scored = _scored(setting, tile, threads)
    if not scored:
        raise budget_error(setting, tile)
    scored.sort(key=_rank)
    if tile is None and scored[0].prediction.tail > CLOSE * scored[0].prediction.total:
        scored = _with_shorter_tail(setting, scored, threads)
    limit = (1 + CLOSE) * scored[0].prediction.total
    close = sum(s.prediction.total <= limit for s in scored)
    # Candidate 0 is predicted to be fastest. It stays at index 0, so that it is one of the finalists.
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
    """Add candidates with a smaller last tile, and return all candidates, best first.

    No multiplication overlaps the download and the write of the last tile (the tail), so that a smaller last
    tile may save time. The new tile shapes are derived from those of the best candidate, and of up to `SEEDS`
    others that would be best without their tails. Short runs try only the first few.
    """
    found, known = list(scored), {s.candidate for s in scored}
    most = max(MIN_DERIVED, int(EFFORT * scored[0].prediction.total / SHAPE_SECONDS))
    for derive in (with_more_tiles, with_smaller_last):
        best: dict[tuple[int, int], Scored] = {}
        for s in sorted(found, key=lambda s: s.prediction.total - s.prediction.tail):
            best.setdefault(TileGrid.of(setting.problem, s.candidate.tile).shape, s)
        seeds = [min(found, key=_rank), *islice(best.values(), SEEDS)]
        shapes = {s.candidate.tile for s in found}
        last_elements: dict[tuple[TileShape, int], int] = {}  # by shape and number of accumulators
        for s in seeds:
            elements = _last_elements(setting.problem, s.candidate)
            for shape in derive(setting, s.candidate.tile):
                if shape not in shapes:
                    key = shape, s.candidate.slots.c
                    last_elements[key] = max(last_elements.get(key, 0), elements)
        limit = PRUNE_FACTOR * seeds[0].prediction.total
        for (shape, accumulators), elements in islice(last_elements.items(), most):
            if min_seconds(setting, shape) <= limit:
                derived = slot_counts(setting, shape, accumulators, threads)
                for candidate in _ending_smaller(setting.problem, derived, elements):
                    if candidate not in known:
                        known.add(candidate)
                        found.append(Scored(candidate, predict(setting, candidate)))
    return sorted(found, key=_rank)


def _scored(setting: Setting, tile: TileShape | None, threads: int) -> list[Scored]:
    """Predict the times of all candidates, or of those of one tile shape.

    A shape is skipped if the lower bound on its time exceeds `PRUNE_FACTOR` times the best predicted time.
    """
    best, found = inf, list[Scored]()

    def limit() -> float:
        return PRUNE_FACTOR * best

    for candidate in candidates(setting, tile, threads, limit):
        found.append(Scored(candidate, predict(setting, candidate)))
        best = min(best, found[-1].prediction.total)
    return found


def _ending_smaller(problem: GemmProblem, found: Iterable[Candidate], elements: int) -> Iterator[Candidate]:
    """Yield the candidates whose last tile has fewer than `elements` elements of C.

    Each candidate is yielded with or without `Traversal.turns`, whichever has the smaller last tile.
    """
    for turning in found:
        straight = replace(turning, traversal=replace(turning.traversal, turns=False))
        candidate = min(turning, straight, key=lambda candidate: _last_elements(problem, candidate))
        if _last_elements(problem, candidate) < elements:
            yield candidate


def _last_elements(problem: GemmProblem, candidate: Candidate) -> int:
    """Count the elements of C in the tile that a candidate computes last."""
    grid = TileGrid.of(problem, candidate.tile)
    return grid.elements(last(candidate.traversal, *grid.shape))


def _with_longer_drain(setting: Setting, s: Scored) -> Scored:
    """Choose how many steps of the last tile run strip by strip (`Slots.drain`).

    With more such steps, the first strip is written earlier, but fewer device slots are left to cache panels.
    More steps only help if multiplications are the bottleneck and the last tile takes long to write.
    Otherwise the candidate is returned unchanged.
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
    """Add thin first steps (`TileGrid.ramp`) if multiplications are the bottleneck and overlap copies.

    Otherwise return the candidate unchanged: an earlier start of the multiplications gains nothing if copies
    are the bottleneck.
    """
    if setting.machine.shares_cores or s.prediction.bottleneck != "compute":
        return s
    return replace(s, candidate=replace(s.candidate, ramp=best_ramp(setting, s.candidate.tile)))


def _rank(s: Scored) -> tuple[float, int, int, int]:
    """Return a sort key, smallest for the best candidate: predicted time, then numbers to break ties."""
    slots = s.candidate.slots
    return s.prediction.total, slots.c, s.candidate.tile.k, slots.host_a + slots.host_b


def _min_work(timed: Sequence[tuple[float, Scored]]) -> Scored:
    """Choose the candidate with the least work among those whose time is within `CLOSE` of the best.

    The work is `Prediction.serial`: the time that the run would take if no operations overlapped.
    `timed` has (seconds, candidate) pairs.
    """
    limit = (1 + CLOSE) * min(seconds for seconds, _ in timed)
    return min((s for seconds, s in timed if seconds <= limit), key=lambda s: (s.prediction.serial, _rank(s)))


def _best_of(setting: Setting, scored: Sequence[Scored]) -> Scored:
    """Choose the best of the first `FINALISTS` candidates.

    The bytes that each candidate loads are counted instead of estimated. If copies and multiplications
    overlap, the schedules are also simulated. All this takes at most the fraction `EFFORT` of the predicted
    time of the run: candidates for which no time is left are ignored. If there is no time to compare two
    candidates, the choice is made among all of `scored`, by their estimates.
    """
    problem, machine = setting.problem, setting.machine
    effort = min(MAX_EFFORT, EFFORT * scored[0].prediction.total)
    exact: list[Scored] = []
    for s in scored[:FINALISTS]:
        grid = TileGrid.of(problem, s.candidate.tile)
        cost = COUNT_SECONDS * grid.shape[0] * grid.shape[1] * grid.steps
        effort -= cost
        # Counting the loads of millions of tiles takes long. The first candidate is counted only if there is
        # time for a second one, to compare it with.
        if effort < 0 or (not exact and effort < cost):
            break
        schedule = schedule_of(setting, s.candidate)
        exact.append(Scored(s.candidate, predict(setting, s.candidate, schedule.loads())))
    exact.sort(key=_rank)
    costs = accumulate(_simulation_seconds(problem, s.candidate) for s in exact)
    simulated = [s for s, cost in zip(exact, costs, strict=True) if cost <= effort]
    if machine.shares_cores or len(simulated) < 2:
        return _min_work([(s.prediction.total, s) for s in exact or scored])
    bound = min(max(s.prediction.lanes.values()) for s in simulated)
    timed: list[tuple[float, Scored]] = []
    for s in sorted(simulated, key=lambda s: s.prediction.serial):
        timed.append((simulate(schedule_of(setting, s.candidate), setting), s))
        if timed[-1][0] <= (1 + CLOSE) * bound:
            break  # no candidate is faster than `bound`, and the remaining ones have more work
    return _min_work(timed)


def _simulation_seconds(problem: GemmProblem, candidate: Candidate) -> float:
    """Estimate the seconds that simulating a candidate's schedule takes."""
    grid, strips = TileGrid.of(problem, candidate.tile), ceil_div(candidate.tile.m, candidate.slots.strip)
    return SIMULATE_SECONDS * grid.shape[0] * grid.shape[1] * (5 * grid.steps + 4 * strips)


def _varied(scored: Sequence[Scored]) -> Iterator[Scored]:
    """Yield the first candidate of each tile shape, up to `MAX_EXPLAINED` shapes."""
    shapes: set[TileShape] = set()
    for s in scored:
        if s.candidate.tile not in shapes:
            shapes.add(s.candidate.tile)
            yield s
        if len(shapes) == MAX_EXPLAINED:
            return
