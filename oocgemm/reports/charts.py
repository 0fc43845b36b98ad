"""Gantt charts of a run, as lines of characters or as an SVG picture, and the roofline of a machine.

*Gantt charts.* In characters, there is one line per lane. A character stands for a part of the run, and its
height shows the share of this part in which the lane was busy.

In the picture, a run on several devices has one line per device, which shows what the device computed or
waited for. Its lanes follow if there are at most `MAX_LANES` lanes of all devices. An operation is a box,
whose width is its duration. Boxes narrower than one SVG unit are merged into columns of one unit, whose
opacity shows how much of the column they cover. This bounds the size of the file.

*Roofline.* It shows how many flop/s each link allows, against flops per byte. The method is that of Williams,
Waterman and Patterson, *Roofline: an insightful visual performance model* (2009). The horizontal axis has two
scales: below, flops per byte over the link; above, the size of a square float64 tile that computes so many
flops per byte. A tile of m x m elements computes 2 m^2 k flops from 2 m k elements of A and B, which are m
flops per element.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from math import ceil, floor, log10, sqrt

from oocgemm.planning import Calibration
from oocgemm.planning.cost.machine import LINKS, calibrated_rates
from oocgemm.planning.units import format_rate, format_size
from oocgemm.reports.sections import labels
from oocgemm.timeline.activities import (
    COMPUTE,
    Wait,
    activities,
    is_distributed,
    lanes_of,
    rows,
    spans_by_unit,
    stalls,
)
from oocgemm.timeline.metrics import Distribution, report
from oocgemm.timeline.spans import LANES, Interval, Span, Timeline, union

SHADES = " ▁▂▃▄▅▆▇█"
WIDTH, GUTTER, AXIS, ROW, GAP, WAITS = 900, 80, 26, 22, 7, 10
COLUMNS = WIDTH - GUTTER - 20
DEVICE, MAX_LANES = 12, 20
LEVELS = 10
# Colours of lanes and of causes of exposed time: the palette of Okabe and Ito, as on the HTML page.
COLOURS = {
    **{"read": "#0072b2", "decode": "#56b4e9", "h2d": "#009e73", "prepare": "#7a8b2e", "compute": "#59616c"},
    **{"d2h": "#cc79a7", "accumulator": "#cc79a7", "encode": "#b8860b", "write": "#d55e00"},
    **{"start-up": "#aeb4bb", "issue": "#d9a400", "tail": "#cdd1d6"},
    **{"samples": "#b7d6cc", "part-wait": "#e3d9f2", "reduce": "#8656c9"},
    "select": "#e69f00",
}


def busy_cells(intervals: list[Interval], wall: int, cells: int) -> list[float]:
    """Divide the run into `cells` equal parts and return the share of each part that the intervals cover.

    `wall` is the length of the run, in the unit of the intervals.

    >>> busy_cells([(0, 25), (50, 100)], 100, 4)
    [1.0, 0.0, 1.0, 1.0]
    """
    shares = [0.0] * cells
    if wall <= 0:
        return shares
    width = wall / cells
    for start, end in union(intervals):
        for cell in range(int(start / width), min(cells, int(end / width) + 1)):
            shares[cell] += max(0.0, min(end, (cell + 1) * width) - max(start, cell * width)) / width
    return [min(1.0, share) for share in shares]


def gantt(timeline: Timeline, width: int = 80) -> list[tuple[str, str]]:
    """Return (lane, line of `width` characters) for each lane that was used, in data flow order."""
    lanes: defaultdict[str, list[Interval]] = defaultdict(list)
    for span in timeline.spans:
        lanes[span.lane].append((span.start, span.end))
    return [
        (lane, "".join(_shade(share) for share in busy_cells(lanes[lane], timeline.wall, width)))
        for lane in LANES
        if lanes[lane]
    ]


def unit_gantt(timeline: Timeline, numbers: Sequence[int], width: int = 80) -> list[str]:
    """Return a line per device, for those with positions in `numbers`: it shows when the device computed."""
    did = [*activities(timeline).values()]
    computed = [[(start, end) for start, end, cause in did[number] if cause == COMPUTE] for number in numbers]
    return ["".join(map(_shade, busy_cells(one, timeline.wall, width))) for one in computed]


def _shade(share: float) -> str:
    # Round down to eighths, so that full height means always busy; 0.02 allows for rounding errors. Any
    # activity gets at least one eighth, to be visible.
    level = 0 if share <= 0 else max(1, min(8, int(share * 8 + 0.02)))
    return SHADES[level]


def svg(timeline: Timeline, title: str = "") -> str:
    """Return the Gantt chart of all lanes as SVG, with causes of exposed time below "compute"."""
    found = report(timeline).distribution if is_distributed(timeline) else None
    if found is None:
        causes = _by_cause(stalls(timeline))
        parts, bottom = _lanes(timeline.spans, timeline.wall, AXIS, causes)
        shown = list(causes)
    else:
        parts, bottom, shown = _devices(timeline, found)
    parts += _axis(timeline.wall, bottom)
    parts += _legend(shown, bottom + 12)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 24}" width="{WIDTH}" '
        f'height="{bottom + 24}" font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="11">'
        f"<title>{escape(title or 'Gantt chart of a run')}</title>"
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _devices(timeline: Timeline, found: Distribution) -> tuple[list[str], float, list[str]]:
    """Return the rows of all devices, the vertical position below, and the causes that the rows show."""
    did, by_unit = activities(timeline), spans_by_unit(timeline)
    open_lanes = len(did) * len(lanes_of(timeline.spans)) <= MAX_LANES
    parts: list[str] = []
    y: float = AXIS
    shown: dict[str, None] = {}
    for (unit, activity), name in zip(did.items(), labels(found.units), strict=True):
        causes = _by_cause(activity)
        shown |= dict.fromkeys(causes)
        parts.append(_text(GUTTER - 8, y + DEVICE / 2, name, "end"))
        parts += _waits(causes, timeline.wall, y, DEVICE)
        y += DEVICE + 2
        if open_lanes:
            rows_of_lanes, y = _lanes(by_unit.get(unit, []), timeline.wall, y + 2, None)
            parts += rows_of_lanes
            y += GAP
    return parts, y + (0 if open_lanes else GAP), list(shown)


def _lanes(
    spans: Sequence[Span], wall: int, y: float, causes: dict[str, list[Interval]] | None
) -> tuple[list[str], float]:
    """Return the rows of lanes, from `y` downwards, and the position below. `causes` follow "compute"."""
    by_row: defaultdict[str, defaultdict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span, row in zip(spans, rows(spans), strict=True):
        by_row[span.lane][row].append(span)
    parts: list[str] = []
    for lane in lanes_of(spans):
        depth = len(by_row[lane])
        parts.append(_text(GUTTER - 8, y + ROW / 2, lane, "end", "#16191d" if causes is not None else "#666"))
        parts.append(f'<rect x="{GUTTER}" y="{y}" width="{COLUMNS}" height="{ROW}" fill="#f1f2f4"/>')
        for row, ran in by_row[lane].items():
            top, height = y + row * ROW / depth, ROW / depth - (depth > 1)
            parts += _row(ran, wall, top, height, COLOURS.get(lane, "#444"))
        y += ROW + GAP
        if lane == "compute" and causes is not None:
            parts.append(_text(GUTTER - 8, y - 3 + WAITS / 2, "waits for", "end", "#666"))
            parts += _waits(causes, wall, y - 3, WAITS)
            y += WAITS + GAP
    return parts, y


def _by_cause(intervals: Iterable[Wait]) -> dict[str, list[Interval]]:
    causes: defaultdict[str, list[Interval]] = defaultdict(list)
    for start, end, cause in intervals:
        causes[cause].append((start, end))
    return causes


def _row(spans: Sequence[Span], wall: int, y: float, height: float, colour: str) -> list[str]:
    """Return the boxes of the operations on one row of a lane, as SVG paths.

    The boxes of B are lighter than those of A. Every other Multiply is lighter, to tell consecutive steps
    apart.
    """
    scale = COLUMNS / max(1, wall)
    drawn: defaultdict[float, list[str]] = defaultdict(list)
    narrow: list[Interval] = []
    for span in spans:
        width = (span.end - span.start) * scale
        if width < 1:
            narrow.append((span.start, span.end))
            continue
        lighter = span.step % 2 == 1 if span.kind == "multiply" else span.operand == "B"
        drawn[0.66 if lighter else 1.0].append(_box(span.start * scale, y, width, height))
    for column, share in enumerate(busy_cells(narrow, wall, COLUMNS) if narrow else ()):
        if share:
            drawn[ceil(share * LEVELS) / LEVELS].append(_box(column, y, 1, height))
    return [f'<path d="{"".join(boxes)}" fill="{colour}" fill-opacity="{o}"/>' for o, boxes in drawn.items()]


def _waits(causes: dict[str, list[Interval]], wall: int, y: float, height: float) -> list[str]:
    """Return a row of causes of exposed time, as SVG paths. Equal neighbours are one box.

    In every column, one SVG unit wide, the causes are stacked: the height of each is its share of the time.
    """
    parts = []
    bottoms = [y + height] * COLUMNS
    for cause, intervals in causes.items():
        boxes: list[tuple[float, float, list[int]]] = []
        for column, share in enumerate(busy_cells(intervals, wall, COLUMNS)):
            if share * height < 0.05:
                continue
            bottoms[column] -= share * height
            box = bottoms[column], share * height
            if boxes and boxes[-1][:2] == box and boxes[-1][2][-1] == column - 1:
                boxes[-1][2].append(column)
            else:
                boxes.append((*box, [column]))
        path = "".join(_box(columns[0], top, len(columns), high) for top, high, columns in boxes)
        parts.append(f'<path d="{path}" fill="{COLOURS.get(cause, "#444")}"/>')
    return parts


def _box(x: float, y: float, width: float, height: float) -> str:
    return f"M{GUTTER + x:.5g} {y:.4g}h{width:.4g}v{height:.3g}h-{width:.4g}z"


def _axis(wall: int, bottom: float) -> list[str]:
    if wall <= 0:
        return []
    power = 10.0 ** floor(log10(wall / 4))
    step = power * next(f for f in (1, 2, 5) if wall / (f * power) <= 10 or f == 5)
    unit, name = next(((u, n) for u, n in ((1e9, "s"), (1e6, "ms")) if step >= u / 10), (1e3, "µs"))
    digits = max(0, -floor(log10(step / unit) + 1e-9))
    parts = []
    for number in range(int(wall / step) + 1):
        x = GUTTER + number * step * COLUMNS / wall
        parts.append(f'<path d="M{x:.2f} {AXIS - 6}v4M{x:.2f} {bottom - 3}v4" stroke="#8a9097"/>')
        parts.append(_text(x, 10, f"{number * step / unit:.{digits}f} {name}", "middle", "#666"))
    return parts


def _legend(causes: Iterable[str], y: float) -> list[str]:
    x, parts = GUTTER, []
    for cause in causes:
        parts.append(f'<rect x="{x}" y="{y - 4}" width="9" height="9" fill="{COLOURS.get(cause, "#444")}"/>')
        parts.append(_text(x + 13, y + 1, cause, "start", "#666"))
        x += 32 + 6 * len(cause)
    return parts


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#16191d") -> str:
    return f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


SHEET, HEIGHT = 1040, 550
LEFT, RIGHT, TOP, BOTTOM = 295, 810, 112, 490
SUBTITLE = "Attainable flop rate over each link, by the flops computed per byte that crosses it"
# Minimum vertical distance between two labels, in pixels.
LINE = 17
# Bytes per element of float64, the dtype of the tiles on the upper axis.
ITEMSIZE = 8

# Colours of the lines of the links, in the order of the argument `links`.
LINK_COLOURS = ("#d55e00", "#56a8dc", "#b8860b", "#cc79a7", "#009e73")
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
    """Return the roofline of a calibrated machine, as SVG. A line marks a float64 tile of `budget` bytes."""
    links = {LINKS[name]: rate for name, rate in calibrated_rates(found).items() if name in SOURCES}
    roofs = {dtype: rate.peak for dtype, rate in found.kernels.items()}
    return roofline(f"{found.device}, calibrated on {found.date}", links, roofs, budget)


def roofline(title: str, links: Mapping[str, float], roofs: Mapping[str, float], budget: int) -> str:
    """Return an SVG of attainable flop/s against flops per byte.

    `links` are bytes per second, `roofs` flop/s, by their labels. A vertical line marks the square float64
    tile of `budget` bytes.
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
        _label(24, 34, title, "title"),
        _label(24, 54, SUBTITLE, "soft"),
    ]
    for power in range(ceil(log10(low)), floor(log10(high)) + 1):
        parts.append(_line(98, y(10.0**power), RIGHT, y(10.0**power), "grid"))
        parts.append(_label(91, y(10.0**power) + 4, format_rate(10.0**power, "FLOP"), "soft", "end"))
    for power in range(round(log10(first)), round(log10(last)) + 1):
        parts.append(_line(x(10.0**power), TOP, x(10.0**power), BOTTOM, "grid"))
        number = f"{10**power:,}".replace(",", "\u202f") if power >= 0 else f"{10.0**power:g}"
        parts.append(_label(x(10.0**power), BOTTOM + 18, number, "soft", "middle"))
    for size in (1 << bits for bits in range(5, 70, 5)):
        if first <= (intensity := sqrt(size / ITEMSIZE) / ITEMSIZE) <= last:
            parts.append(_line(x(intensity), TOP - 5, x(intensity), TOP, "frame"))
            parts.append(_label(x(intensity), TOP - 10, format_size(size), "soft", "middle"))
    middle = (LEFT + RIGHT) / 2
    parts.append(_label(middle, BOTTOM + 38, "flop per byte over the link", "soft", "middle"))
    upper_axis = "device memory of the square float64 tile with this intensity"
    parts.append(_label(middle, TOP - 28, upper_axis, "soft", "middle"))
    parts.append(f'<path d="M{LEFT} {TOP}H{RIGHT}V{BOTTOM}H{LEFT}z" class="frame"/>')
    for name, rate, at in _labelled(roofs, y):
        parts.append(
            f'<path d="M{x(rate / fastest):.1f} {y(rate):.1f}H{RIGHT}L{RIGHT + 14} {at:.1f}h4" class="roof"/>'
        )
        parts.append(_label(RIGHT + 23, at + 4, f"{name} {format_rate(rate, 'FLOP')}"))
    colours = dict(zip(links, LINK_COLOURS, strict=False))
    for name, rate, at in _labelled(links, lambda r: y(r * first)):
        colour = colours[name]
        start, top = y(rate * first), max(roofs.values())
        parts.append(
            f'<path d="M{LEFT} {start:.1f}L{x(top / rate):.1f} {y(top):.1f}" class="link" stroke="{colour}"/>'
        )
        parts.append(
            f'<path d="M{LEFT} {start:.1f}L{LEFT - 16} {at:.1f}h-4" class="lead" stroke="{colour}"/>'
        )
        parts.append(_label(LEFT - 25, at + 4, f"{name} {format_rate(rate)}", "over", "end"))
    parts.append(_line(x(mark), TOP, x(mark), BOTTOM, "mark"))
    beside, anchor = (6, "start") if x(mark) < middle else (-6, "end")
    label = f"tile of the default budget, {format_size(budget)}"
    parts.append(_label(x(mark) + beside, BOTTOM - 10, label, "over", anchor))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SHEET} {HEIGHT}" width="{SHEET}" '
        f'height="{HEIGHT}">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>{''.join(parts)}</svg>\n"
    )


def _labelled(rates: Mapping[str, float], y: Callable[[float], float]) -> Iterator[tuple[str, float, float]]:
    """Yield (name, rate, y of the label), the fastest first. Labels that would overlap are moved apart."""
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


def _label(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{style}">{escape(text)}</text>'
