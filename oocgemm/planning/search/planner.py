"""Choose how to run a product: enumerate candidates, and run the best of them on the virtual clock.

A lower bound orders the candidates. The clock runs them in this order, until no other one can be faster. Then
the planner changes one decision of the best candidate at a time, and keeps each change that saves time. It
does so once more from the best candidate of a shape that it has not reached: several changes may only save
time together.

If streams share what limits the run, such as the copies of pageable arrays on the host, many candidates are
predicted to take the same time. Those whose streams end sooner are faster in a run all the same. So half of
that time is added when candidates are compared whose predicted times are nearly the least.

Predictions have errors of more than one percent. Among candidates whose predictions are within one percent of
the best, the planner chooses the one that would be fastest if no operations overlapped. This candidate moves
fewer bytes in fewer operations. Of several such candidates, it chooses the one that begins to multiply first.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import inf

from oocgemm.planning.cost.clock import Prediction
from oocgemm.planning.cost.footprint import Candidate, required_bytes
from oocgemm.planning.cost.gram import predict
from oocgemm.planning.cost.machine import MachineModel
from oocgemm.planning.cost.price import Prices
from oocgemm.planning.layout import Layouts
from oocgemm.planning.plan import Faster, Plan, Scored
from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.schedule.dealing import arrangement
from oocgemm.planning.search.bounds import within
from oocgemm.planning.search.candidates import candidates, io_threads
from oocgemm.planning.search.gram import gram_candidates, smallest
from oocgemm.planning.search.moves import moves
from oocgemm.planning.search.refusals import budget_error, check_tile, too_small
from oocgemm.planning.setting import Budgets, Setting
from oocgemm.planning.tiling import Tile, TileGrid, TileShape
from oocgemm.planning.units import ceil_size, parse_size

# The virtual clock runs for at most this fraction of the predicted time of the run, and for at most this many
# seconds. It may always run for MIN_EFFORT seconds.
EFFORT, MIN_EFFORT, MAX_EFFORT = 0.008, 0.008, 0.8
# A search that is shortened (`effort` below 1) may always run for SHORT_EFFORT seconds.
SHORT_EFFORT = 0.012
# Estimated seconds that the clock takes per candidate, and per operation that it runs.
CANDIDATE_SECONDS, OPERATION_SECONDS = 115e-6, 1.2e-6
# Of the effort, the part that is spent on enumerated candidates. The rest is for changes of the best one.
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
# When streams end is only compared among candidates whose predicted time exceeds the least one by at most
# this fraction.
MAX_LONGER = 0.02
# Predicted times with at most this relative difference count as equal, since the cost model is no more exact.
CLOSE = 0.01
# Of these, candidates whose times differ by at most this fraction if no operations overlap count as alike:
# the one that begins to multiply first is chosen.
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

    The sizes in the options that bound the memory are doubled, one of them or all, and then quadrupled. The
    first budgets that suffice are returned. None are tried if the product takes less than `MIN_SLOW` seconds,
    or if no plan could be that much faster: it must still read the operands once and multiply them.
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

    `candidate` is how the interrupted run computed the product. If it does not fit the present budgets, the
    plan caches fewer panels and, if necessary, uses one I/O thread. The result is bit-identical all the same,
    and so it is with another number of devices.
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


@lru_cache(16)
def _enumerated(setting: Setting, tile: TileShape | None) -> tuple[Prices, Sequence[tuple[float, Candidate]]]:
    """Return the prices and all candidates with their lower bounds, for searches of any effort."""
    if tile is not None:
        check_tile(setting, tile)
    prices, gram = Prices(setting), setting.problem.cover.square
    enumerated = gram_candidates if gram else candidates
    for threads in (io_threads(setting), 1):  # one I/O thread needs the least temporary memory
        found = list(enumerated(prices, tile, threads))
        if found:
            return prices, found
    raise budget_error(setting, tile, smallest(setting, tile) if gram else None)


@lru_cache(64)
def _planned(setting: Setting, tile: TileShape | None, effort: float = 1.0) -> Plan:
    prices, found = _enumerated(setting, tile)
    fixed = setting.problem.cover.square or setting.problem.b.updated
    search = _Search(prices, effort)
    search.run_best(found)
    if effort and tile is None and not fixed and 0 not in (setting.problem.m, setting.problem.n):
        search.improve()
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
        self._spent, self._limit = 0.0, MIN_EFFORT
        self._least = inf  # predicted time
        self._first: Scored | None = None  # what the first descent chose

    def run_best(self, found: Sequence[tuple[float, Candidate]]) -> None:
        """Run candidates in ascending order of their lower bounds, until no other one can be faster.

        Candidates of the same tile shape come later, because other shapes are more likely to be faster.
        """
        best: Prediction | None = None
        alike = Counter[tuple[TileShape, int]]()
        order: list[tuple[float, int]] = []
        for number, (least, candidate) in enumerate(found):
            shape = candidate.tile, candidate.slots.c
            order.append((least * (1 + CLOSE * alike[shape]), number))
            alike[shape] += 1
        for _, number in sorted(order):
            least, candidate = found[number]
            if self._found and self._spent > ENUMERATED * self._limit:
                break
            if best and _is_hopeless(least, best):
                continue
            one = self._run(candidate)
            best = one if best is None or one.total < best.total else best
            usual = max(MIN_EFFORT, min(MAX_EFFORT, EFFORT * best.total))
            self._limit = min(usual, max(SHORT_EFFORT, self._effort * usual))

    def improve(self) -> None:
        """Change one decision of the best candidate at a time. Keep changes that save time. Repeat once."""
        reached: set[TileShape] = set()
        self._descend(reached)
        self._first = self.ranked()[0]
        self._descend(reached)

    def _descend(self, reached: set[TileShape]) -> None:
        """Improve the best candidate of a shape not in `reached` as far as possible, and add its shapes."""
        left = [Scored(*item) for item in self._found.items() if item[0].tile not in reached]
        now = min(left, key=self._rank, default=None)
        while now is not None:
            reached.add(now.candidate.tile)
            now = self._changed(now)

    def _changed(self, start: Scored) -> Scored | None:
        """Return a faster candidate that differs from `start` in one decision; None if none is found."""
        limit = (1 - MIN_GAIN) * self._compared(start.prediction)
        for least, candidate in moves(self._prices, start.candidate):
            if self._spent >= self._limit:
                return None
            if _is_hopeless(least, start.prediction, MIN_GAIN) or candidate in self._found:
                continue
            if self._compared(self._run(candidate)) < limit:
                return Scored(candidate, self._found[candidate])
        return None

    def ranked(self) -> list[Scored]:
        """Return the chosen candidate, then all others that have run, best first."""
        scored = sorted((Scored(*item) for item in self._found.items()), key=self._rank)
        limit = (1 + CLOSE) * self._compared(scored[0].prediction)
        close = [s for s in scored if self._compared(s.prediction) <= limit]
        serial = (1 + ALIKE) * min(s.prediction.serial for s in close)
        alike = [s for s in close if s.prediction.serial <= serial]
        chosen = min(alike, key=lambda s: (s.prediction.start_up, s.prediction.serial, self._rank(s)))
        first = self._first
        if first and self._compared(chosen.prediction) >= (1 - CLOSE) * self._compared(first.prediction):
            chosen = first
        return [chosen, *(s for s in scored if s is not chosen)]

    def _run(self, candidate: Candidate) -> Prediction:
        found = self._found[candidate] = predict(self._prices.setting, candidate, self._prices)
        self._spent += CANDIDATE_SECONDS + found.ran * OPERATION_SECONDS
        self._least = min(self._least, found.total)
        return found

    def _compared(self, prediction: Prediction) -> float:
        """Return the seconds by which candidates are compared.

        They are the predicted time, and a share of the time at which the last stream ends. The streams of a
        candidate whose predicted time is not near the least one count as if they ended with the run.
        """
        near = prediction.total <= (1 + MAX_LONGER) * self._least
        return prediction.total + STREAMS_SHARE * (prediction.streams if near else prediction.total)

    def _rank(self, s: Scored) -> tuple[float, int, int, int]:
        """Return a sort key, smallest for the best candidate: seconds, then numbers to break ties."""
        slots = s.candidate.slots
        return self._compared(s.prediction), slots.c, s.candidate.tile.k, slots.host_a + slots.host_b


def _is_hopeless(least: float, than: Prediction, gain: float = 0.0) -> bool:
    """Tell whether a candidate with a lower bound of `least` seconds cannot save the part `gain` of a time.

    If what streams share limits the plan that takes that time, a plan with the same limit may still have
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
