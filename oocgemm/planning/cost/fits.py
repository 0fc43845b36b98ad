"""Fit lines to measured rates. Reject rates that no link can reach, or that differ much from the line."""

from collections.abc import Callable, Mapping, Sequence

from oocgemm.planning.units import format_rate, format_size

# Maximum plausible rate of a link between host and device, in bytes per second. The fastest link known,
# NVLink-C2C, has 450e9 in one direction. A higher rate is a measurement error.
MAX_LINK = 500e9
# Maximum difference between a measured rate and the fitted rate, relative to the smaller of the two. With a
# larger difference, the fit is rejected.
MAX_RESIDUAL = 0.5


def fit_line(points: Sequence[tuple[float, float]], min_intercept: float = 0.0) -> tuple[float, float]:
    """Fit a line to points of positive y by least squares of the relative errors; return (intercept, slope).

    The intercept is at least `min_intercept`, and the slope is at least 0.

    >>> [round(x, 9) for x in fit_line([(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)])]
    [1.0, 2.0]
    >>> fit_line([(1.0, 3.0), (2.0, 3.0), (3.0, 3.0)])
    (3.0, 0.0)
    """
    # Dividing the equation of each point by its y turns relative errors into absolute ones.
    ones = [1 / y for _, y in points]
    xs = [x / y for x, y in points]
    s11, s1x, sxx = (
        sum(a * b for a, b in zip(p, q, strict=True)) for p, q in ((ones, ones), (ones, xs), (xs, xs))
    )
    determinant = s11 * sxx - s1x * s1x
    if determinant > 1e-12 * s11 * sxx:
        slope = (s11 * sum(xs) - s1x * sum(ones)) / determinant
        intercept = (sum(ones) - slope * s1x) / s11
        if slope >= 0 and intercept >= min_intercept:
            return intercept, slope
        if slope >= 0:
            return min_intercept, max(0.0, (sum(xs) - min_intercept * s1x) / sxx)
    return max(min_intercept, sum(ones) / s11), 0.0


def fit_link(link: str, rates: Mapping[int, float], limit: float | None = None) -> tuple[float, float]:
    """Fit a latency in seconds and a rate in bytes per second to copies; return (latency, rate).

    `rates` maps the bytes of a copy to its measured bytes per second.

    Raises `ValueError` if a rate exceeds `limit` (default `MAX_LINK`) or differs from the fit by more than
    `MAX_RESIDUAL`.

    >>> [float(f"{x:.3g}") for x in fit_link("d2h", {1_000_000: 25e9, 9_000_000: 45e9})]
    [2e-05, 50000000000.0]
    """
    for size, rate in rates.items():
        check_link(f"{link} of {format_size(size)}", rate, limit)
    latency, per_byte = fit_line([(size, size / rate) for size, rate in rates.items()])
    check_fit(link, "B", rates, lambda size: size / (latency + per_byte * size), format_size)
    # If all copies took the same time, they were too short for a fit. Return the largest measured rate.
    fitted = 1 / per_byte if per_byte else max(rates.values())
    check_link(f"the rate fitted to {link}", fitted, limit)
    return latency, fitted


def check_link(name: str, rate: float, limit: float | None = None) -> None:
    """Raise `ValueError` if a rate exceeds `limit` (default `MAX_LINK`) or is not positive."""
    if not 0 < rate <= (limit or MAX_LINK):
        link = "the link of this device" if limit else "any link"
        raise ValueError(
            f"{name} came to {format_rate(rate)}, which is impossible: {link} carries at most "
            f"{format_rate(limit or MAX_LINK)}"
        )


def check_fit(
    name: str,
    unit: str,
    rates: Mapping[int, float],
    fit: Callable[[int], float],
    at: Callable[[int], str] = str,
) -> None:
    """Raise `ValueError` if a measured rate differs from the fitted one by more than `MAX_RESIDUAL`.

    `rates` maps sizes to measured rates, and `fit` returns the fitted rate for a size. `at` formats a size
    for the message.
    """

    def residual(place: int) -> float:
        return max(fit(place) / rates[place], rates[place] / fit(place)) - 1

    worst = max(rates, key=residual)
    if residual(worst) > MAX_RESIDUAL:
        found = ", ".join(f"{at(place)}: {format_rate(rate, unit)}" for place, rate in rates.items())
        raise ValueError(
            f"no fit explains what was measured of {name} ({found}): the best fit expects "
            f"{format_rate(fit(worst), unit)} at {at(worst)}, which is {residual(worst):.0%} off; at "
            f"most {MAX_RESIDUAL:.0%} is accepted"
        )
