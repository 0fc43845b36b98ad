"""Measure rates repeatedly, until a model of the rates fits their medians."""

from collections.abc import Callable, Iterable, Mapping
from math import inf
from statistics import median
from time import perf_counter
from typing import TypeVar

import numpy as np

from oocgemm.backends.base import Array
from oocgemm.errors import BackendError

# Maximum samples per size that `explained` measures before it raises BackendError.
_ROUNDS = 5

Fit = TypeVar("Fit")


def explained(
    measure: Callable[[int], float], places: Iterable[int], fit: Callable[[Mapping[int, float]], Fit]
) -> tuple[Fit, dict[int, float]]:
    """Measure rates at several sizes, and fit a model to them.

    If the fit fails, one more sample is measured at each size, and the fit is repeated with the medians.

    Args:
        measure: measures at a size and returns the rate.
        places: the sizes at which rates are measured.
        fit: fits a model to the median rate at each size. It raises `ValueError` if the model does not
            explain the rates, for example because other programs disturbed the measurement.

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
    """Return `amount / seconds`, or infinity if `seconds` is 0.

    A caller that gets infinity repeats its measurement.
    """
    return amount / seconds if seconds > 0 else inf


def typical(act: Callable[[], float], limit: float) -> float:
    """Call `act` repeatedly for `limit` seconds, and return the median of its results.

    The first call warms caches up. Its result is ignored, unless this call takes longer than `limit`.
    """
    started = perf_counter()
    samples = [act()]
    if perf_counter() - started > limit:
        return samples[0]
    samples.clear()
    while not samples or perf_counter() - started < limit:
        samples.append(act())
    return median(samples)


def numbers(shape: tuple[int, int]) -> Array:
    """Return normal random numbers, rounded to 1/64 so that they compress about as well as measured data."""
    count = shape[0] * shape[1]
    some = np.round(np.random.default_rng(0).standard_normal(min(count, 1 << 20)) * 64) / 64
    return np.resize(some, count).reshape(shape)
