"""Sampling of rates: medians, repeated until a fit explains them."""

from collections.abc import Callable, Iterable, Mapping
from math import inf
from statistics import median
from time import perf_counter
from typing import TypeVar

from oocgemm.errors import BackendError

_ROUNDS = 5  # rounds of samples before the fit is given up

Fit = TypeVar("Fit")


def explained(
    measure: Callable[[int], float], places: Iterable[int], fit: Callable[[Mapping[int, float]], Fit]
) -> tuple[Fit, dict[int, float]]:
    """Measure rates at several sizes, or depths, until a fit explains them.

    Args:
        measure: takes one sample at a size and returns its rate.
        places: the sizes.
        fit: fits the median rate of each size. It raises `ValueError` for rates that it cannot explain.

    Returns:
        The fit, and the median rate of each size.

    Raises:
        BackendError: the fit still fails after `_ROUNDS` samples of each size.
    """
    taken = {place: [measure(place)] for place in places}
    for again in range(_ROUNDS):
        if again:
            for place, rates in taken.items():
                rates.append(measure(place))
        medians = {place: median(rates) for place, rates in taken.items()}
        try:
            if inf in medians.values():
                raise ValueError("an operation took no measurable time")
            return fit(medians), medians
        except ValueError as error:
            reason = error
    raise BackendError(
        f"{reason}; this calibration was not saved: end other programs on this machine and run "
        "oocgemm calibrate again"
    ) from reason


def per_second(amount: float, seconds: float) -> float:
    """Return a rate. It is infinite if `seconds` is 0; `explained` rejects that."""
    return amount / seconds if seconds > 0 else inf


def typical(act: Callable[[], float], limit: float) -> float:
    """Call `act` for `limit` seconds and return the median of its results.

    The first call warms up. Its result counts only if that call alone took longer than `limit`.
    """
    started = perf_counter()
    samples = [act()]
    if perf_counter() - started > limit:
        return samples[0]
    samples.clear()
    while not samples or perf_counter() - started < limit:
        samples.append(act())
    return median(samples)
