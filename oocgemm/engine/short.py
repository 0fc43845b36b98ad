"""Tell which runs are so short that one thread starts all of their operations."""

from oocgemm.planning import Plan

# A run takes less time than its threads take to start if it has at most MAX_SHORT_STEPS steps, and if A, B
# and C are in memory and have at most MAX_SHORT_BYTES bytes together. So its operations run one after another
# in one thread.
MAX_SHORT_STEPS, MAX_SHORT_BYTES = 16, 128 << 20
# Without host slots, no operation keeps that thread busy: it only enqueues them on the GPU, or hands them to
# the threads of the ring. So there may be more steps, and more bytes. The progress of such a run is not
# shown, which takes about 0.2 s for MAX_STREAMED_BYTES of pageable arrays.
MAX_STREAMED_STEPS, MAX_STREAMED_BYTES = 64, 2 << 30
# The maximum number of steps whose blocks the GPU copies from and to pinned arrays. One thread enqueues an
# operation in 20 to 60 us, the threads of a long run need 200 us. Per operation, the run takes about 3 KB.
MAX_ENQUEUED_STEPS = 2048
# A run from pinned memory that takes less time than this, in seconds, is not handed to another thread, which
# takes 0.4 to 0.6 ms. An interrupt takes effect when it has ended.
MAX_BRIEF = 0.25


def is_short(plan: Plan) -> bool:
    """Return whether a plan's operations take so little time that one thread should start all of them."""
    layouts, problem, sizes = plan.layouts, plan.problem, plan.problem.itemsizes
    if not problem.planes and all(map(plan.is_direct, "ABC")):
        return plan.steps <= (MAX_ENQUEUED_STEPS if plan.devices == 1 else MAX_STREAMED_STEPS)
    if plan.steps > MAX_STREAMED_STEPS or not (layouts.operands_in_memory and layouts.c.in_memory):
        return False
    streamed = all(map(plan.slots.streams, "ABC")) and not problem.planes
    if plan.steps > MAX_SHORT_STEPS and not streamed:
        return False
    m, n, k = problem.m, problem.n, problem.depth
    size = m * k * sizes["A"] + k * n * sizes["B"] + m * n * sizes["C"]
    return size <= (MAX_STREAMED_BYTES if streamed else MAX_SHORT_BYTES)


def is_brief(plan: Plan) -> bool:
    """Return whether a run is so short that the thread of the caller should do all of it.

    Pageable arrays are copied by threads. To leave the run to one more thread costs nothing then: 512^3 took
    0.1 ms less.
    """
    return plan.setting.enqueues and is_short(plan) and plan.prediction.total < MAX_BRIEF
