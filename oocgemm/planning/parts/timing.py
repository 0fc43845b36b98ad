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
    """Estimate the seconds until all parts are computed, as if all took as long as the first one."""
    if not parts:
        return 0.0
    return ceil_div(len(parts), workers) * prices.time(prices.size(parts[0]), workers).seconds


def parts_seconds(parts: Sequence[Part], prices: PartPrices, workers: int) -> float:
    """Predict the seconds until all parts are computed, the longest of which come first.

    A worker that has completed a part begins the next one of `parts`. While w workers read and multiply, each
    of their parts advances as if w equal workers shared the storage (`PartPrices.time`). While w workers
    only write the last tiles of their parts, those share the storage among them. If writing limits the run,
    all busy workers share it. For fewer workers than `workers`, only the first part is predicted. The others
    are sped up by the same factor.
    """
    waiting = [prices.size(part) for part in reversed(parts)]
    if not waiting:
        return 0.0
    longest = waiting[-1]
    writes = prices.time(longest, workers).lane in ("write", "encode")
    # What workers do: the part, whether it is in its tail, the fraction of that stage which remains to be
    # done; and the number of workers that do the same.
    running: Counter[tuple[PartSize, bool, float]] = Counter()
    seconds, idle = 0.0, workers
    while waiting or running:
        for _ in range(min(idle, len(waiting))):
            running[waiting.pop(), False, 1.0] += 1
            idle -= 1
        counts = [sum(n for (_, tail, _), n in running.items() if tail is stage) for stage in (False, True)]
        if writes:
            counts = [workers - idle] * 2
        factors = [_speed(prices, longest, count, workers)[tail] for tail, count in enumerate(counts)]
        lasts = {key: factors[key[1]] * _stages(prices, key[0], workers)[key[1]] for key in running}
        step = min(left * lasts[key] for key in running for left in key[2:])
        seconds += step
        rest: Counter[tuple[PartSize, bool, float]] = Counter()
        for key, count in running.items():
            size, tail, left = key
            after = left - step / lasts[key] if lasts[key] else 0.0
            if after > TOGETHER:
                rest[size, tail, after] += count
            elif tail:
                idle += count
            else:
                rest[size, True, 1.0] += count
        running = rest
    return seconds


def _stages(prices: PartPrices, size: PartSize, workers: int) -> tuple[float, float]:
    found = prices.time(size, workers)
    return found.main, found.tail


def _speed(prices: PartPrices, size: PartSize, count: int, workers: int) -> tuple[float, float]:
    """Divide the times of the two stages of a part with `count` busy workers by those with `workers`."""
    few, all_ = _stages(prices, size, max(1, count)), _stages(prices, size, workers)
    return few[0] / all_[0] if all_[0] else 1.0, few[1] / all_[1] if all_[1] else 1.0


def sum_seconds(plan: Plan, prices: PartPrices, k_slices: int) -> float:
    """Predict the seconds to add the partial products of slices of k, and to write C.

    One process adds them chunk by chunk: it reads the chunk of every slice (and the old C, if beta is not 0),
    then it writes the chunk of C.
    """
    if k_slices == 1:
        return 0.0
    problem, machine = plan.problem, prices.storage.shared(plan.machine, 1)
    elements, sizes = problem.m * problem.n, problem.itemsizes
    read = elements * (k_slices * sizes["acc"] + (sizes["C"] if problem.reads_c else 0))
    return read / machine.read + elements * sizes["C"] / machine.write
