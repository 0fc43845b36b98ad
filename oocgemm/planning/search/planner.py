"""Choose how to run a product: enumerate candidates, and run the best of them on the virtual clock.

The clock runs candidates with the most promising tile shapes first (`shapes`), but none whose lower bound
shows that it cannot be the fastest. Then the planner changes one decision of the best candidate at a time,
and keeps each change that saves time.

If streams share the resource that limits the run, such as the host's copies of pageable arrays, many
candidates are predicted to take the same time. In a run, those whose streams end sooner are still faster. So
half of the time at which the last stream ends is added to a predicted time that is nearly the least.

Predictions have errors of more than one percent. Among candidates whose predictions are within one percent of
the best, the planner chooses the one that would be fastest if no operations overlapped. This candidate moves
fewer bytes in fewer operations. If there are several such candidates, the planner chooses the one that begins
to multiply first.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import itemgetter

from oocgemm.planning.cost.bound import bound, required_bytes, shape_bound
from oocgemm.planning.cost.clock import Prediction, predict
from oocgemm.planning.cost.footprint import Candidate
from oocgemm.planning.cost.machine import MachineModel
from oocgemm.planning.cost.price import Prices
from oocgemm.planning.layout import Layouts
from oocgemm.planning.plan import Faster, Plan, Scored
from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.schedule.dealing import arrangement
from oocgemm.planning.search.refusals import budget_error, check_tile, too_small, within
from oocgemm.planning.search.shapes import Shapes, chained_shapes, in_place_tile, min_tile, needs_no_memory
from oocgemm.planning.search.slot_counts import io_threads, slot_counts
from oocgemm.planning.search.squares import Squares, smallest
from oocgemm.planning.setting import Budgets, Setting
from oocgemm.planning.tiling import Tile, TileGrid, TileShape
from oocgemm.planning.units import ceil_size, parse_size

# The virtual clock runs for at most this fraction of the predicted time of the run, and for at most this many
# seconds. It may always run for MIN_EFFORT seconds.
EFFORT, MIN_EFFORT, MAX_EFFORT = 0.015, 0.006, 0.12
# A search that is shortened (`effort` below 1) may always run for SHORT_EFFORT seconds.
SHORT_EFFORT = 0.012
# Estimated seconds that the clock takes per candidate, and per operation that it runs.
CANDIDATE_SECONDS, OPERATION_SECONDS = 115e-6, 1.2e-6
# The same per tile shape for which numbers of slots are chosen.
SHAPE_SECONDS = 200e-6
# A tile shape is not tried if its estimated time exceeds the best predicted time by the factor PRUNE. A shape
# that differs in one decision is not tried if its estimated time exceeds that of the other one by NEAR.
PRUNE, NEAR = 1.5, 1.1
# A candidate is not tried if its lower bound exceeds the least bound for its tile shape by this factor. In 11
# of 2200 such pairs of candidates, the one with the higher bound was faster.
NEAR_BOUND = 1.02
# For a square cover, the clock runs at most MAX_SQUARES candidates with tiles of all sizes, and as many with
# tiles of the best REFINED_SIDES sizes.
MAX_SQUARES, REFINED_SIDES = 12, 2
# If all arrays are pinned, strips of C are also tried that are this many times as large: fewer strips take
# less time to enqueue.
LARGER_STRIP = 4
# The part of the effort that is spent on enumerated candidates. The rest is for changes of the best one.
ENUMERATED = 0.5
# A change of the best candidate is kept if it saves at least this fraction of the time.
MIN_GAIN = 0.002
# Larger budgets are recommended only if the product takes at least MIN_SLOW seconds, and would be at least
# MIN_FASTER times as fast.
MIN_SLOW, MIN_FASTER = 5.0, 10
# This part of the time at which the last stream ends is added to the predicted time. Measured on an H200 with
# pageable arrays: two plans for 16384^3 in float16 were predicted to take 37 ms. One took 35 ms, the other
# 40 ms. Two plans for 8192^3 in float64 with 512 MiB were predicted to take 46 ms, and took 44 and 48 ms. In
# both pairs, the streams of the faster plan end 3 to 4 ms sooner.
STREAMS_SHARE = 0.5
# The times at which streams end are only compared among candidates whose predicted time exceeds the least one
# by at most this fraction.
MAX_LONGER = 0.02
# Predicted times with at most this relative difference count as equal, since the cost model is no more exact.
CLOSE = 0.01
# Among candidates with equal predicted times, those whose times without any overlap differ by at most this
# fraction count as alike. The one that begins to multiply first is chosen.
ALIKE = 0.003
# Host slots per tile row (or column) in which several devices work at the same time, in a resumed run.
PANELS_PER_LINE = 3
MAX_EXPLAINED = 6  # maximum number of candidates that a plan keeps for `Plan.explain`


def make_plan(
    problem: GemmProblem,
    budgets: Budgets,
    machine: MachineModel,
    layouts: Layouts | None = None,
    tile: TileShape | None = None,
    effort: float = 1.0,
) -> Plan:
    """Choose the plan that is predicted to be fastest within the budgets. If given, `tile` is its tile shape.

    `layouts` are those of op(A), op(B) and C. The search takes the part `effort` of its usual time. With an
    effort of 0, it takes little time, and does not change the best of the enumerated candidates. Raises
    `BudgetError` if no plan fits; the message names sufficient budgets. Raises `InputError` if the product
    cannot use tiles of shape `tile`, for instance because their borders would divide chunks of C.

    Plans are cached, because planning may take as long as a small product: milliseconds.
    """
    setting = Setting(problem, machine, layouts or Layouts(), budgets).enqueued
    return _plan_with_advice(setting, tile, effort)


@lru_cache(64)
def _plan_with_advice(setting: Setting, tile: TileShape | None, effort: float) -> Plan:
    """Choose a plan, and find larger budgets that would make it far faster, unless the effort is small."""
    plan = _planned(setting, tile, effort)
    faster = None if tile or effort < 1 else _faster(plan)
    return replace(plan, faster=faster) if faster else plan


def _faster(plan: Plan) -> Faster | None:
    """Find larger budgets that make a slow product at least `MIN_FASTER` times as fast, or return None.

    The sizes in the options that bound the memory are doubled, first one size and then all, and later
    quadrupled. The first budgets that suffice are returned. None are tried if the product takes less than
    `MIN_SLOW` seconds, or if no plan could be that much faster: it must still read the operands once and
    multiply them.
    """
    setting = plan.setting
    problem, budgets, machine = setting.problem, setting.budgets, setting.machine
    seconds = plan.considered[0].prediction.total
    once = required_bytes(problem)["read"] / min(machine.read, machine.decode)
    depth = max(1, problem.depth)
    compute = machine.multiply_seconds(problem.rate, problem.flops, problem.m, problem.n, depth)
    if seconds < MIN_SLOW or seconds < MIN_FASTER * (compute + once):
        return None
    given = budgets.by_option(unified=machine.unified)
    for times in (2, 4):
        larger = {name: parse_size(ceil_size(times * size)) for name, size in given.items()}
        for some in (*((name,) for name in given), tuple(given)):
            sizes = given | {name: larger[name] for name in some}
            found = within(sizes, lambda tried: _planned(replace(setting, budgets=tried), None, 0.0))
            if MIN_FASTER * (predicted := found.considered[0].prediction.total) <= seconds:
                return Faster(found.budgets, predicted)
    return None


def resumed_plan(
    problem: GemmProblem,
    budgets: Budgets,
    machine: MachineModel,
    layouts: Layouts,
    candidate: Candidate,
    done: frozenset[Tile],
    devices: int = 1,
) -> Plan:
    """Return a plan that completes an interrupted run: it computes the tiles that are not in `done`.

    `candidate` is the way in which the interrupted run computed the product. If it does not fit the present
    budgets, the plan caches fewer panels and, if necessary, uses one I/O thread. The result has the same bits
    in all cases, also with another number of devices.

    Raises `BudgetError` if the plan does not fit even then.
    """
    slots = candidate.slots
    if not slots.unified and not problem.checked:
        # A Gram matrix has no slots for B, which is the same array as A.
        a, b = slots.streams("A"), slots.streams(problem.operands[-1])
        layouts = layouts.cached_as(a and not layouts.a.in_memory, b and not layouts.b.in_memory)
    # The last steps of a tile run strip by strip, so that the panels of all these steps are needed together.
    together = max(2, slots.last_steps)
    fewer = replace(
        slots,
        # A Gram matrix has slots for panels in both roles.
        a=min(slots.a, together if slots.b else 2 * together),
        b=min(slots.b, together),
        host_a=min(slots.host_a, 2),
        host_b=min(slots.host_b, 2),
        host_c=min(slots.host_c, 2),
    )
    smallest = replace(candidate, slots=fewer, io_threads=1)
    begun_with = [candidate]
    if devices > 1:
        # With fewer slots, the reads of one device would wait for the uploads to another one.
        apart = Setting(problem, machine, layouts, budgets, devices).works_apart
        arranged = arrangement(devices, problem, TileGrid.of(problem, candidate.tile), apart=apart)
        host_a, host_b = (
            max(count, PANELS_PER_LINE * lines) if count else 0
            for count, lines in zip((slots.host_a, slots.host_b), arranged, strict=True)
        )
        begun_with.insert(0, replace(candidate, slots=replace(slots, host_a=host_a, host_b=host_b)))
    for tried in (*begun_with, replace(candidate, slots=fewer), smallest):
        plan = Plan(problem, layouts, budgets, machine, tried, done=done, devices=devices)
        used = plan.footprint
        if (used.device_total <= budgets.device and used.host_total <= budgets.host) or plan.steps == 0:
            return plan
    raise too_small(plan.setting, used, "the plan that the run was begun with")


@lru_cache(64)
def _planned(setting: Setting, tile: TileShape | None, effort: float = 1.0) -> Plan:
    if tile is not None:
        check_tile(setting, tile)
    search = _Search(Prices(setting), effort)
    if not any(search.run(tile, threads) for threads in (io_threads(setting), 1)):
        raise budget_error(setting, tile, smallest(setting, tile) if setting.problem.cover.square else None)
    scored = search.ranked()
    return Plan(
        setting.problem,
        setting.layouts,
        setting.budgets,
        setting.machine,
        scored[0].candidate,
        tuple(_varied(scored)),
    )


class _Search:
    """The candidates that the virtual clock has run, and the effort that is left for others."""

    def __init__(self, prices: Prices, effort: float) -> None:
        self._prices, self._effort = prices, effort
        self._found: dict[Candidate, Prediction] = {}
        self._best: Prediction | None = None
        self._tried: set[tuple[TileShape, int, int]] = set()
        self._spent, self._limit = 0.0, MIN_EFFORT

    def run(self, tile: TileShape | None, threads: int) -> bool:
        """Search with a number of I/O threads, and a tile shape if given. Return whether a plan fits."""
        prices, setting = self._prices, self._prices.setting
        problem = setting.problem
        if problem.cover.square:
            self._run_squares(tile, threads)
        elif problem.b.one_tile:
            for shape in [tile] if tile else chained_shapes(setting):
                if self._try(shape, 1, threads):
                    break
        elif tile is not None or needs_no_memory(setting):
            shape = tile or in_place_tile(setting)
            for c in (1, 2) if shape.m < problem.m or shape.n < problem.n else (1,):
                self._try(shape, c, threads)
        elif 0 not in (problem.m, problem.n):
            shapes = Shapes(prices)
            for every_depth in (False, True)[shapes.is_scarce :]:
                for seconds, shape, c in shapes.ranked(every_depth=every_depth):
                    if self._best and (
                        self._spent > ENUMERATED * self._limit or seconds > PRUNE * self._best.total
                    ):
                        break
                    self._try(shape, c, threads)
                if self._found:
                    break
            if self._effort and self._found:
                self._improve(shapes)
        if not self._found and not tile:
            self._try(min_tile(setting), 1, threads)
        return bool(self._found)

    def _run_squares(self, tile: TileShape | None, threads: int) -> None:
        """Run the candidates of a square cover that may be faster than those before them."""
        if not self._prices.setting.problem.m:
            self._clock([(0.0, smallest(self._prices.setting, tile))])
            return
        squares = Squares(self._prices, threads)
        if tile is not None:
            self._clock(squares.of(tile)[:MAX_SQUARES])
        else:
            self._clock(squares.of_all_sides()[:MAX_SQUARES])
            ranked = sorted(self._found, key=lambda one: self._found[one].total)
            sides = list(dict.fromkeys(one.tile.m for one in ranked))[:REFINED_SIDES]
            if sides:
                self._clock(squares.with_sides(sides)[:MAX_SQUARES])

    def _try(self, shape: TileShape, c: int, threads: int) -> Scored | None:
        """Run the candidates with a tile shape that may be faster, and return the best of them."""
        if (shape, c, threads) in self._tried:
            return None
        self._tried.add((shape, c, threads))
        if self._best and shape_bound(self._prices, shape) > self._best.total:
            return None
        self._spent += SHAPE_SECONDS
        found = sorted(slot_counts(self._prices, shape, c, threads), key=itemgetter(0))
        return self._clock(x for x in found if x[0] <= NEAR_BOUND * found[0][0])

    def _clock(self, found: Iterable[tuple[float, Candidate]]) -> Scored | None:
        best = None
        for least, candidate in found:
            if best is not None and self._spent >= self._limit:
                break
            if (self._best and _is_hopeless(least, self._best)) or candidate in self._found:
                continue
            prediction = self._found[candidate] = predict(self._prices.setting, candidate, self._prices)
            self._spent += CANDIDATE_SECONDS + prediction.ran * OPERATION_SECONDS
            if self._best is None or prediction.total < self._best.total:
                self._best = prediction
                usual = max(MIN_EFFORT, min(MAX_EFFORT, EFFORT * prediction.total))
                self._limit = min(usual, max(SHORT_EFFORT, self._effort * usual))
            scored = Scored(candidate, prediction)
            if best is None or self._rank(scored) < self._rank(best):
                best = scored
        return best

    def _improve(self, shapes: Shapes) -> None:
        """Change one decision of the best candidate at a time. Keep changes that save time."""
        found = [Scored(*item) for item in self._found.items()]
        now: Scored | None = min(found, key=self._rank)
        while now is not None:
            now = self._changed(now, shapes)

    def _changed(self, start: Scored, shapes: Shapes) -> Scored | None:
        """Return a faster candidate that differs from `start` in one decision; None if none is found."""
        setting, candidate = self._prices.setting, start.candidate
        limit = (1 - MIN_GAIN) * self._compared(start.prediction)
        strip = min(candidate.tile.m, LARGER_STRIP * candidate.slots.strip)
        # Without slots for finished strips, strips of any size take no memory.
        if setting.enqueues and not setting.problem.finishes and strip > candidate.slots.strip:
            fewer = replace(candidate, slots=replace(candidate.slots, strip=strip))
            found = self._clock([(bound(self._prices, fewer), fewer)])
            if found and self._compared(found.prediction) < limit:
                return found
        usual = shapes.estimate(candidate.tile, candidate.slots.c)
        for seconds, shape, c in shapes.near(candidate.tile, candidate.slots.c):
            if self._spent >= self._limit:
                return None
            if seconds > NEAR * usual:
                continue
            found = self._try(shape, c, candidate.io_threads)
            if found and self._compared(found.prediction) < limit:
                return found
        return None

    def ranked(self) -> list[Scored]:
        """Return the chosen candidate, then all others that have run, best first."""
        scored = sorted((Scored(*item) for item in self._found.items()), key=self._rank)
        limit = (1 + CLOSE) * self._compared(scored[0].prediction)
        close = [s for s in scored if self._compared(s.prediction) <= limit]
        serial = (1 + ALIKE) * min(s.prediction.serial for s in close)
        alike = [s for s in close if s.prediction.serial <= serial]
        chosen = min(alike, key=lambda s: (s.prediction.start_up, s.prediction.serial, self._rank(s)))
        return [chosen, *(s for s in scored if s is not chosen)]

    def _compared(self, prediction: Prediction) -> float:
        """Return the seconds by which candidates are compared.

        They are the predicted time, and a share of the time at which the last stream ends. The streams of a
        candidate whose predicted time is not near the least one count as if they ended with the run.
        """
        near = self._best and prediction.total <= (1 + MAX_LONGER) * self._best.total
        return prediction.total + STREAMS_SHARE * (prediction.streams if near else prediction.total)

    def _rank(self, s: Scored) -> tuple[float, int, int, int]:
        """Return a sort key, smallest for the best candidate: seconds, then numbers to break ties."""
        slots = s.candidate.slots
        return self._compared(s.prediction), slots.c, s.candidate.tile.k, slots.host_a + slots.host_b


def _is_hopeless(least: float, than: Prediction, gain: float = 0.0) -> bool:
    """Tell whether a candidate with a lower bound of `least` seconds cannot save the part `gain` of `than`.

    If a resource that streams share limits the plan of `than`, a plan with the same limit may still have
    streams that end sooner.
    """
    return least > than.total if than.streams < than.total else least >= (1 - gain) * than.total


def _varied(scored: Sequence[Scored]) -> Iterator[Scored]:
    """Yield the first candidate of each tile shape, up to `MAX_EXPLAINED` shapes."""
    shapes: set[TileShape] = set()
    for s in scored:
        if s.candidate.tile not in shapes:
            shapes.add(s.candidate.tile)
            yield s
        if len(shapes) == MAX_EXPLAINED:
            return
