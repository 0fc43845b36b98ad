"""Plan with measured rates, but keep the plan of the default rates unless another one is clearly better.

Measured rates never cover everything, and the planner is not exact. So the plan with the default rates is the
incumbent. The plan with the measured rates is the challenger. It replaces the incumbent only if it is faster
in two predictions:

- At the measured rates, it is faster by more than `MARGIN`.
- If, besides, all rates that nobody has measured were a third of what is assumed, or three times as high, it
  is not slower. So a challenger relies on no rate that the incumbent does not need. It also avoids none that
  may be high.

No challenger is planned for a short product if the incumbent is nearly as fast as the multiplications alone,
or as moving each element once: planning then takes as long as it could save.
"""

from dataclasses import replace
from functools import lru_cache

from oocgemm.planning.cost.footprint import required_bytes
from oocgemm.planning.cost.gram import predict
from oocgemm.planning.cost.machine import MachineModel
from oocgemm.planning.cost.price import Prices
from oocgemm.planning.cost.rates import scaled
from oocgemm.planning.cost.simulate import simulate
from oocgemm.planning.plan import Faster, Plan, Scored, schedule_of
from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.search.planner import make_plan
from oocgemm.planning.setting import Budgets, Layouts, Setting
from oocgemm.planning.tiling import TileShape, ceil_div

# A challenger must be faster by this fraction. The times of products of pinned arrays on H100s were predicted
# with errors of up to 20%. With a fraction of 5%, calibrated rates changed the plans of two int8 products,
# which then took 1.25 and 1.06 times as long.
MARGIN = 0.2
# A challenger is planned if the incumbent takes at least this many seconds, or if a plan could be faster by
# MARGIN.
PLANNED_SECONDS = 2.0
# Rates that nobody has measured may be lower or higher than assumed by this factor.
DOUBT = 3.0
# Estimated seconds that simulating an operation takes. Two schedules are simulated if this takes at most
# MIN_EFFORT seconds, or the fraction EFFORT of the predicted time of the run.
SIMULATE_SECONDS, MIN_EFFORT, EFFORT = 15e-6, 0.02, 0.01


@lru_cache(64)
def guarded_plan(
    problem: GemmProblem,
    budgets: Budgets,
    machines: tuple[MachineModel, ...],
    assumed: frozenset[str] = frozenset(),
    layouts: Layouts | None = None,
    tile: TileShape | None = None,
    effort: float = 1.0,
) -> Plan:
    """Choose a plan for the last of several machine models that is not slower than the plans for the others.

    Args:
        problem, budgets, layouts, tile, effort: as for `make_plan`.
        machines: models of the same machine, from the default rates to the rates that are known best.
        assumed: names of the rates (`oocgemm.planning.cost.rates`) that the last model only assumes.

    Raises what `make_plan` raises.
    """
    best = make_plan(problem, budgets, machines[0], layouts, tile, effort)
    if len(machines) == 1:
        return best
    if (kept := _kept(best, machines[-1])) is not None:
        return kept
    others = [make_plan(problem, budgets, machine, layouts, tile, effort) for machine in machines[1:]]
    latest = others[-1]
    for challenger in others:
        differs = challenger.candidate != best.candidate
        if differs and _is_better(latest.setting, best, challenger, assumed, effort):
            best = challenger
    return best if best is latest else _with_rates(best, latest.machine, latest.faster)


def _kept(incumbent: Plan, machine: MachineModel) -> Plan | None:
    """Return the incumbent with other rates if no plan can save much of its time; None if one might."""
    if incumbent.setting.enqueues:
        # No measured rate changes the times of operations that one thread only enqueues.
        known = incumbent.machine
        machine = replace(machine, step_latency=known.step_latency, issue=known.issue)
    plan = _with_rates(incumbent, machine, None)
    seconds = plan.considered[0].prediction.total
    return plan if seconds < PLANNED_SECONDS and _fastest(plan.setting) > (1 - MARGIN) * seconds else None


def _fastest(setting: Setting) -> float:
    """Return the least seconds of any plan: those of its busiest lane, if each element moves once."""
    problem, machine, prices = setting.problem, setting.machine, Prices(setting)
    layouts = setting.layouts.by_operand
    m, n, k = problem.m, problem.n, max(1, problem.depth)
    blocks = {"A": (m, k)} if problem.gram else {"A": (m, k), "B": (k, n)}
    c = required_bytes(problem)["d2h"]  # of a Gram matrix, only a triangle

    def of_c(link: str) -> float:
        return c / prices.rate(link, "C", m, n)

    moved = [0.0 if prices.streams["C"] else of_c("write")]
    for decoded in (False, True):  # these are different lanes
        read = [x for x in blocks if not prices.streams[x] and (layouts[x].decode_bytes > 0) == decoded]
        moved.append(sum(prices.read(x, *blocks[x]) for x in read))
    if not machine.unified:
        old = of_c("h2d") if problem.reads_c else 0.0
        moved += [sum(prices.upload(x, *shape) for x, shape in blocks.items()) + old, of_c("d2h")]
        # Of a Gram matrix, only a triangle may be copied.
        staged = 0.0 if problem.gram else (1 + problem.reads_c) * prices.staged("C", m, n)
        moved.append(staged + sum(prices.staged(x, *shape) for x, shape in blocks.items()))
    return max(machine.multiply_seconds(problem.rate, problem.flops, m, n, k), *moved)


def _is_better(
    setting: Setting, incumbent: Plan, challenger: Plan, assumed: frozenset[str], part: float
) -> bool:
    """Tell whether the challenger is faster than the incumbent. `setting` has the measured rates."""
    plans = incumbent, challenger
    effort = SIMULATE_SECONDS * sum(map(_operations, plans))
    simulated = effort <= part * max(MIN_EFFORT, EFFORT * predict(setting, challenger.candidate).total)

    def seconds(setting: Setting, plan: Plan) -> float:
        if simulated:
            return simulate(schedule_of(setting, plan.candidate), setting)
        return predict(setting, plan.candidate).total

    old, new = (seconds(setting, plan) for plan in plans)
    if new >= (1 - MARGIN) * old:
        return False
    if not assumed:
        return True
    for factor in (1 / DOUBT, DOUBT):
        other = replace(setting, machine=scaled(setting.machine, dict.fromkeys(assumed, factor)))
        old, new = (seconds(other, plan) for plan in plans)
        if new > old:
            return False
    return True


def _with_rates(plan: Plan, machine: MachineModel, faster: Faster | None) -> Plan:
    """Return a plan with another machine model, and the predictions that follow from it."""
    setting = replace(plan.setting, machine=machine)
    considered = tuple(Scored(s.candidate, predict(setting, s.candidate)) for s in plan.considered)
    return replace(plan, machine=machine, considered=considered, faster=faster)


def _operations(plan: Plan) -> int:
    """Estimate the number of operations of a plan."""
    strips = ceil_div(plan.tile.m, max(1, plan.slots.strip))
    return plan.grid.count * (5 * plan.grid.steps + 4 * strips)
