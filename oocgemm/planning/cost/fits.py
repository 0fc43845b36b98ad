"""Lines through measured rates, and which rates are refused: those beyond their link, and those that no line explains."""

from collections.abc import Callable, Mapping, Sequence

from oocgemm.planning.units import format_rate, format_size

# Bytes per second that no link between host and device exceeds: NVLink-C2C carries 450e9 in one direction.
MAX_LINK = 500e9
# How far a measured rate may be from the fit to it, as a share of the lesser.
MAX_RESIDUAL = 0.5


def fit_line(points: Sequence[tuple[float, float]], least: float = 0.0) -> tuple[float, float]:
    """Return (intercept, slope) of the line through points of positive y with the least squared relative errors, the
    intercept not below `least` and the slope not below 0.

    >>> [round(x, 9) for x in fit_line([(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)])]
    [1.0, 2.0]
    >>> fit_line([(1.0, 3.0), (2.0, 3.0), (3.0, 3.0)])
    (3.0, 0.0)
    """
    # Both coordinates over y: the line is to come out at 1 everywhere.
    ones = [1 / y for _, y in points]
    xs = [x / y for x, y in points]
    s11, s1x, sxx = (
        sum(a * b for a, b in zip(p, q, strict=True)) for p, q in ((ones, ones), (ones, xs), (xs, xs))
    )
    determinant = s11 * sxx - s1x * s1x
    if determinant > 1e-12 * s11 * sxx:
        slope = (s11 * sum(xs) - s1x * sum(ones)) / determinant
        intercept = (sum(ones) - slope * s1x) / s11
        if slope >= 0 and intercept >= least:
            return intercept, slope
        if slope >= 0:
            return least, max(0.0, (sum(xs) - least * s1x) / sxx)
    return max(least, sum(ones) / s11), 0.0


def fit_link(link: str, rates: Mapping[int, float], limit: float | None = None) -> tuple[float, float]:
    """Fit (latency, bytes per second) to the rates that copies of so many bytes were measured at.

    Raises `ValueError` where a rate is more than `limit` (by default `MAX_LINK`), or further than `MAX_RESIDUAL` from the fit.

    >>> [float(f"{x:.3g}") for x in fit_link("d2h", {1_000_000: 25e9, 9_000_000: 45e9})]
    [2e-05, 50000000000.0]
    """
    for size, rate in rates.items():
        check_link(f"{link} of {format_size(size)}", rate, limit)
    latency, per_byte = fit_line([(size, size / rate) for size, rate in rates.items()])
    check_fit(link, "B", rates, lambda size: size / (latency + per_byte * size), format_size)
    # Where all copies took the same time, they were too short to give a slope.
    fitted = 1 / per_byte if per_byte else max(rates.values())
    check_link(f"the rate fitted to {link}", fitted, limit)
    return latency, fitted


def check_link(name: str, rate: float, limit: float | None = None) -> None:
    """Raise `ValueError` for a rate that no link has, or this one cannot have."""
    if not 0 < rate <= (limit or MAX_LINK):
        what = "the link of this device" if limit else "any link"
        raise ValueError(
            f"{name} came to {format_rate(rate)}, {what} carries at most {format_rate(limit or MAX_LINK)}"
        )


def check_fit(
    name: str,
    unit: str,
    rates: Mapping[int, float],
    fit: Callable[[int], float],
    at: Callable[[int], str] = str,
) -> None:
    """Raise `ValueError` where a measured rate is further than `MAX_RESIDUAL` from the fitted one."""

    def residual(place: int) -> float:
        return max(fit(place) / rates[place], rates[place] / fit(place)) - 1

    worst = max(rates, key=residual)
    if residual(worst) > MAX_RESIDUAL:
        found = ", ".join(f"{at(place)}: {format_rate(rate, unit)}" for place, rate in rates.items())
        raise ValueError(
            f"no fit explains what was measured of {name} ({found}): the best expects {format_rate(fit(worst), unit)} at "
            f"{at(worst)}, which is {residual(worst):.0%} off and may be {MAX_RESIDUAL:.0%}"
        )
