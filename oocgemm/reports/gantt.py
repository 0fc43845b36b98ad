"""Gantt charts of a run: as lines of characters, and as an SVG picture for papers.

In characters, there is one line per lane, and the height of a character shows the share of its part of the
run in which the lane was busy.

In the picture, a run on several devices has one line per device, which shows what the device computed or
waited for. Its lanes follow if there are at most `MAX_LANES` lanes of all devices. An operation is a box,
whose width is its duration. Boxes narrower than one SVG unit are merged into columns of one unit, whose
opacity shows how much of the column they cover. This bounds the size of the file.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape
from math import ceil, floor, log10

from oocgemm.reports.distribution import labels
from oocgemm.timeline.activities import COMPUTE, Wait, activities, is_distributed, spans_by_unit, stalls
from oocgemm.timeline.metrics import Distribution, report
from oocgemm.timeline.series import lanes_of, rows
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
    """Return (lane, line) for each lane that was used, in the order of data flow.

    A line has `width` characters.
    """
    lanes: defaultdict[str, list[Interval]] = defaultdict(list)
    for span in timeline.spans:
        lanes[span.lane].append((span.start, span.end))
    return [
        (lane, "".join(_shade(share) for share in busy_cells(lanes[lane], timeline.wall, width)))
        for lane in LANES
        if lanes[lane]
    ]


def unit_gantt(timeline: Timeline, numbers: Sequence[int], width: int = 80) -> list[str]:
    """Return a line for each device with one of these numbers, which shows when the device computed.

    The numbers are positions in the list of all devices. A line has `width` characters.
    """
    did = [*activities(timeline).values()]
    computed = [[(start, end) for start, end, cause in did[number] if cause == COMPUTE] for number in numbers]
    return ["".join(map(_shade, busy_cells(one, timeline.wall, width))) for one in computed]


def _shade(share: float) -> str:
    # Round down to eighths, so that full height means always busy; 0.02 allows for rounding errors. Any
    # activity gets at least one eighth, to be visible.
    level = 0 if share <= 0 else max(1, min(8, int(share * 8 + 0.02)))
    return SHADES[level]


def svg(timeline: Timeline, title: str = "") -> str:
    """Return the Gantt chart of all lanes as SVG.

    A row below the lane "compute" shows the causes of exposed time.
    """
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
    """Return the rows of all devices, the position below them, and the causes that they show."""
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
    """Return the rows of the lanes, from `y` downwards, and the position below them.

    `causes` are drawn below the lane "compute", if given.
    """
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

    Operations on B are lighter than those on A. Every other Multiply is lighter, so that consecutive steps
    can be told apart.
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
    """Return a row of causes of exposed time, as SVG paths.

    `causes` maps each cause to its intervals. In every column, one SVG unit wide, the causes are stacked. The
    height of a cause is its share of the column's time. Equal neighbours are one box.
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
