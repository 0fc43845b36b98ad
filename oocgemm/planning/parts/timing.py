"""Predict the seconds in which several workers compute all parts of a plan."""

from collections import Counter
from collections.abc import Sequence

from oocgemm.planning.parts.part import Part
from oocgemm.planning.parts.price import PartPrices, PartSize
from oocgemm.planning.plan import Plan
from oocgemm.planning.tiling import ceil_div

# Parts whose ends differ by less than this fraction of their time end together.
TOGETHER = 1e-9


def longest_first(parts: Sequence[Part], prices: PartPrices) -> list[Part]:
    """Order parts by their numbers of multiplications, the longest part first."""
    return sorted(parts, key=lambda part: (-prices.size(part).volume, part.number))


def rounds_seconds(parts: Sequence[Part], prices: PartPrices, workers: int) -> float:
    """Estimate the seconds until all parts are computed, as if each took as long as the first, longest one."""
    return ceil_div(len(parts), workers) * prices.seconds(prices.size(parts[0]), workers) if parts else 0.0


def parts_seconds(parts: Sequence[Part], prices: PartPrices, workers: int) -> float:
    """Predict the seconds until all parts are computed, the longest of which come first.

    A worker that has completed a part begins the next one of `parts`. While w workers are busy, each part
    advances as if w equal workers shared the storage (`PartPrices.prediction`). For fewer busy workers than
    `workers`, only the first part is predicted. The others are sped up by the same factor.
    """
    waiting = [prices.size(part) for part in reversed(parts)]
    if not waiting:
        return 0.0
    longest = waiting[-1]
    # The parts that workers are busy with: what remains of each, as a fraction, and how many are alike.
    running: Counter[tuple[PartSize, float]] = Counter()
    seconds, idle = 0.0, workers
    while waiting or running:
        for _ in range(min(idle, len(waiting))):
            running[waiting.pop(), 1.0] += 1
            idle -= 1
        factor = prices.seconds(longest, workers - idle) / prices.seconds(longest, workers)
        whole = {size: factor * prices.seconds(size, workers) for size, _ in running}
        step = min(left * whole[size] for size, left in running)
        seconds += step
        rest: Counter[tuple[PartSize, float]] = Counter()
        for (size, left), count in running.items():
            after = left - step / whole[size]
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
