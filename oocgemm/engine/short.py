"""Tell which runs are so short that one thread runs all of their operations."""

from oocgemm.planning import Plan

# A run of at most this many steps, on operands in memory that have at most this many bytes together with C,
# needs less time than its threads take to start. Its operations run one after the other in one thread. So do
# those of a run on pinned operands, of any size: they are only enqueued.
MAX_SHORT_STEPS, MAX_SHORT_BYTES, MAX_DIRECT_STEPS = 16, 128 << 20, 64


def is_short(plan: Plan) -> bool:
    """Return whether a plan's operations take so little time that one thread should run all of them."""
    layouts = plan.layouts
    if plan.steps > MAX_DIRECT_STEPS or not (layouts.operands_in_memory and layouts.c.in_memory):
        return False
    problem, sizes = plan.problem, plan.problem.itemsizes
    if all(map(plan.is_direct, "ABC")) and not problem.planes:
        return True
    if plan.steps > MAX_SHORT_STEPS:
        return False
    m, n, k = problem.m, problem.n, problem.depth
    return m * k * sizes["A"] + k * n * sizes["B"] + m * n * sizes["C"] <= MAX_SHORT_BYTES
