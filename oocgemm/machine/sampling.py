"""Samples of rates: what is typical of them, taken again until a fit explains them."""

from collections.abc import Callable, Iterable, Mapping
from math import inf
from statistics import median
from time import perf_counter
from typing import TypeVar

from oocgemm.errors import BackendError

_ROUNDS = 5  # of samples, until a fit explains them

Fit = TypeVar("Fit")


def explained(
    measure: Callable[[int], float], places: Iterable[int], fit: Callable[[Mapping[int, float]], Fit]
) -> tuple[Fit, dict[int, float]]:
    """Measure rates at some places until a fit explains them.

    Args:
        measure: takes one sample, of a size or a depth.
        places: where to measure.
        fit: fits the median rate of each place. It raises `ValueError` for rates that it cannot explain.

    Returns:
        The fit, and the medians.

    Raises:
        BackendError: after `_ROUNDS` samples of each place the fit still refuses.
    """
    taken = {place: [measure(place)] for place in places}
    for again in range(_ROUNDS):
        if again:
            for place, rates in taken.items():
                rates.append(measure(place))
        medians = {place: median(rates) for place, rates in taken.items()}
        try:
            if inf in medians.values():
                raise ValueError("the clock saw no time pass")
            return fit(medians), medians
        except ValueError as error:
            reason = error
    raise BackendError(
        f"{reason}; nothing is kept of this calibration: end other programs on this machine and run oocgemm calibrate again"
    ) from reason


def per_second(amount: float, seconds: float) -> float:
    """Return a rate: infinite, which `explained` refuses, where no time has passed."""
    return amount / seconds if seconds > 0 else inf


def typical(act: Callable[[], float], limit: float) -> float:
    """Return the median of what `act` returns, called for `limit` seconds. The first call warms up, and counts only if it
    took that long by itself."""
    started = perf_counter()
    samples = [act()]
    if perf_counter() - started > limit:
        return samples[0]
    samples.clear()
    while not samples or perf_counter() - started < limit:
        samples.append(act())
    return median(samples)
