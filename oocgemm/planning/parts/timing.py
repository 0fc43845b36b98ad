"""Predict the seconds in which several workers compute all parts of a plan."""

from collections import Counter
from collections.abc import Sequence

from oocgemm.planning.parts.part import Part
from oocgemm.planning.parts.price import PartPrices, PartSize
from oocgemm.planning.plan import Plan

# Parts whose ends differ by less than this fraction of their time end together.
TOGETHER = 1e-9


def longest_first(parts: Sequence[Part], prices: PartPrices) -> list[Part]:
    """Order parts by their predicted time, the longest first."""
    return sorted(parts, key=lambda part: (-prices.seconds(prices.size(part), 1), part.number))


def parts_seconds(parts: Sequence[Part], prices: PartPrices, workers: int) -> float:
    """Predict the seconds until all parts are computed.

    A worker that has completed a part begins the next one of `parts`. While w workers are busy, each part
    advances as if w equal workers shared the storage (`PartPrices.prediction`).
    """
    waiting = [prices.size(part) for part in reversed(parts)]
    # The parts that workers are busy with: what remains of each, as a fraction, and how many are alike.
    running: Counter[tuple[PartSize, float]] = Counter()
    seconds, idle = 0.0, workers
    while waiting or running:
        for _ in range(min(idle, len(waiting))):
            running[waiting.pop(), 1.0] += 1
            idle -= 1
        whole = {size: prices.seconds(size, workers - idle) for size, _ in running}
        step = min(left * whole[size] for size, left in running)
        seconds += step
        rest: Counter[tuple[PartSize, float]] = Counter()
        for (size, left), count in running.items():
            after = left - step / whole[size] if whole[size] else 0.0
            if after <= TOGETHER:
                idle += count
            else:
                rest[size, after] += count
        running = rest
    return seconds


def sum_seconds(plan: Plan, prices: PartPrices, k_slices: int, workers: int) -> float:
    """Predict the seconds to add the partial products of slices of k, and to write C.

    All workers add equal shares of C, each of them chunk by chunk: it reads the chunk of every slice (and
    the old C, if beta is not 0), then it writes the chunk of C.
    """
    if k_slices == 1:
        return 0.0
    problem, machine = plan.problem, prices.storage.shared(plan.machine, workers)
    elements, sizes = problem.m * problem.n / workers, problem.itemsizes
    read = elements * (k_slices * sizes["acc"] + (sizes["C"] if problem.reads_c else 0))
    return read / machine.read + elements * sizes["C"] / machine.write
