"""Draw the roofline of a machine: how many flop/s each link allows, against flops per byte.

The method is that of Williams, Waterman and Patterson, *Roofline: an insightful visual performance model*
(2009). The horizontal axis has two scales: flops per byte over the link below, and the size of a square
float64 tile that computes so many flops per byte above. A tile of m x m elements computes 2 m^2 k flops from
2 m k elements of A and B, which are m flops per element.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from math import ceil, floor, log10, sqrt

from oocgemm.planning import Calibration
from oocgemm.planning.cost.calibration import LINKS, calibrated_rates
from oocgemm.planning.units import format_rate, format_size

WIDTH, HEIGHT = 1040, 550
LEFT, RIGHT, TOP, BOTTOM = 295, 810, 112, 490
# Minimum vertical distance between two labels, in pixels.
LINE = 17
# Bytes per element of float64, the dtype of the tiles on the upper axis.
ITEMSIZE = 8

# Colours of the lines of the links, in the order of the argument `links`.
COLOURS = ("#d55e00", "#56a8dc", "#b8860b", "#cc79a7", "#009e73")
# The links that A and B can cross on their way to the device. Only these are drawn.
SOURCES = {"read_cold", "read", "decode", "memory", "h2d"}
STYLE = """
svg { background: #fff; font: 12px Helvetica, Arial, "DejaVu Sans", sans-serif; }
text { fill: #16191d; } .soft { fill: #5b636d; } .title { font-size: 16px; font-weight: bold; }
.grid { stroke: #e3e6ea; } .frame { stroke: #8a9097; fill: none; }
.roof { stroke: #59616c; stroke-width: 1.5; fill: none; }
.link { stroke-width: 2; fill: none; } .lead { stroke-width: 1; fill: none; }
.mark { stroke: #16191d; stroke-dasharray: 4 3; }
.over { stroke: #fff; stroke-width: 4; paint-order: stroke; }
@media (prefers-color-scheme: dark) {
svg { background: #181c22; } text { fill: #e8ebef; } .soft { fill: #9aa4b0; }
.grid { stroke: #2a3038; } .frame { stroke: #6a737d; }
.roof { stroke: #a9b2bd; } .mark { stroke: #e8ebef; } .over { stroke: #181c22; }
}"""


def roofline_of(found: Calibration, budget: int) -> str:
    """Return the roofline of a calibrated machine, as SVG.

    `budget` is a device budget in bytes. A vertical line marks a square float64 tile of this size.
    """
    links = {LINKS[name]: rate for name, rate in calibrated_rates(found).items() if name in SOURCES}
    roofs = {dtype: rate.peak for dtype, rate in found.kernels.items()}
    return roofline(f"{found.device}, calibrated on {found.date}", links, roofs, budget)


def roofline(title: str, links: Mapping[str, float], roofs: Mapping[str, float], budget: int) -> str:
    """Return an SVG of attainable flop/s against flops per byte.

    Args:
        title: heading of the picture.
        links: bytes per second of each link, by its label. Rates must be positive.
        roofs: flop/s of each kernel, by its label. Rates must be positive.
        budget: size in bytes of the square float64 tile that a vertical line marks.
    """
    fastest, slowest, mark = max(links.values()), min(links.values()), sqrt(budget / ITEMSIZE) / ITEMSIZE
    # The horizontal axis includes `mark`, the flops per byte of a tile with `budget` bytes, and every point
    # at which the line of a link meets the line of a kernel.
    first = 10.0 ** (floor(log10(min(min(roofs.values()) / fastest, mark))) - 1)
    last = 10.0 ** ceil(log10(max(2 * max(roofs.values()) / slowest, 1.5 * mark)))
    low, high = first * slowest / 1.5, 2 * max(roofs.values())

    def x(intensity: float) -> float:
        return LEFT + (RIGHT - LEFT) * log10(intensity / first) / log10(last / first)

    def y(rate: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * log10(rate / low) / log10(high / low)

    parts = [
        _text(24, 34, title, "title"),
        _text(
            24,
            54,
            "Attainable flop rate over each link, by the flops computed per byte that crosses it",
            "soft",
        ),
    ]
    for power in range(ceil(log10(low)), floor(log10(high)) + 1):
        parts.append(_line(98, y(10.0**power), RIGHT, y(10.0**power), "grid"))
        parts.append(_text(91, y(10.0**power) + 4, format_rate(10.0**power, "FLOP"), "soft", "end"))
    for power in range(round(log10(first)), round(log10(last)) + 1):
        parts.append(_line(x(10.0**power), TOP, x(10.0**power), BOTTOM, "grid"))
        number = f"{10**power:,}".replace(",", "\u202f") if power >= 0 else f"{10.0**power:g}"
        parts.append(_text(x(10.0**power), BOTTOM + 18, number, "soft", "middle"))
    for size in (1 << bits for bits in range(5, 70, 5)):
        if first <= (intensity := sqrt(size / ITEMSIZE) / ITEMSIZE) <= last:
            parts.append(_line(x(intensity), TOP - 5, x(intensity), TOP, "frame"))
            parts.append(_text(x(intensity), TOP - 10, format_size(size), "soft", "middle"))
    middle = (LEFT + RIGHT) / 2
    parts.append(_text(middle, BOTTOM + 38, "flop per byte over the link", "soft", "middle"))
    upper_axis = "device memory of the square float64 tile with this intensity"
    parts.append(_text(middle, TOP - 28, upper_axis, "soft", "middle"))
    parts.append(f'<path d="M{LEFT} {TOP}H{RIGHT}V{BOTTOM}H{LEFT}z" class="frame"/>')
    for name, rate, at in _labelled(roofs, y):
        parts.append(
            f'<path d="M{x(rate / fastest):.1f} {y(rate):.1f}H{RIGHT}L{RIGHT + 14} {at:.1f}h4" class="roof"/>'
        )
        parts.append(_text(RIGHT + 23, at + 4, f"{name} {format_rate(rate, 'FLOP')}"))
    colours = dict(zip(links, COLOURS, strict=False))
    for name, rate, at in _labelled(links, lambda r: y(r * first)):
        colour = colours[name]
        start, top = y(rate * first), max(roofs.values())
        parts.append(
            f'<path d="M{LEFT} {start:.1f}L{x(top / rate):.1f} {y(top):.1f}" class="link" stroke="{colour}"/>'
        )
        parts.append(
            f'<path d="M{LEFT} {start:.1f}L{LEFT - 16} {at:.1f}h-4" class="lead" stroke="{colour}"/>'
        )
        parts.append(_text(LEFT - 25, at + 4, f"{name} {format_rate(rate)}", "over", "end"))
    parts.append(_line(x(mark), TOP, x(mark), BOTTOM, "mark"))
    right = x(mark) < middle
    label = f"tile of the default budget, {format_size(budget)}"
    parts.append(
        _text(x(mark) + (6 if right else -6), BOTTOM - 10, label, "over", "start" if right else "end")
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>{''.join(parts)}</svg>\n"
    )


def _labelled(rates: Mapping[str, float], y: Callable[[float], float]) -> Iterator[tuple[str, float, float]]:
    """Yield (name, rate, y of the label) for each rate, the fastest first.

    `y` maps a rate to its vertical position in pixels. Labels that would overlap are moved apart.
    """
    ordered = sorted(rates.items(), key=lambda item: -item[1])
    heights = spread([y(rate) for _, rate in ordered], LINE, TOP, BOTTOM)
    yield from ((name, rate, at) for (name, rate), at in zip(ordered, heights, strict=True))


def spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move ascending positions so that neighbours are at least `gap` apart.

    The results are at most `high` and, if there is room for all of them, at least `low`.

    >>> spread([10.0, 11.0, 50.0], 6.0, 0.0, 54.0)
    [10.0, 16.0, 50.0]
    >>> spread([52.0, 53.0], 6.0, 0.0, 54.0)
    [48.0, 54.0]
    """
    found: list[float] = []
    for place in places:
        found.append(max(place, found[-1] + gap if found else low))
    for index in reversed(range(len(found))):
        found[index] = min(found[index], found[index + 1] - gap if index + 1 < len(found) else high)
    return found


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{style}"/>'


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{style}">{escape(text)}</text>'
