"""The Gantt chart as an SVG picture for papers: one line per lane, on white.

An operation is a box, whose width is its duration. Boxes narrower than one SVG unit are merged into columns
of one unit, whose opacity shows how much of the column they cover. This bounds the size of the file.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape
from math import ceil, floor, log10

from oocgemm.reports.gantt import busy_cells
from oocgemm.timeline.exposed import exposed_intervals
from oocgemm.timeline.intervals import Interval
from oocgemm.timeline.series import lanes_of, rows
from oocgemm.timeline.spans import Span, Timeline

WIDTH, GUTTER, AXIS, ROW, GAP, WAITS = 900, 80, 26, 22, 7, 10
COLUMNS = WIDTH - GUTTER - 20
LEVELS = 10
# Colours of lanes and of causes of exposed time: the palette of Okabe and Ito, as on the HTML page.
COLOURS = {
    **{"read": "#0072b2", "decode": "#56b4e9", "h2d": "#009e73", "prepare": "#7a8b2e", "compute": "#59616c"},
    **{"d2h": "#cc79a7", "accumulator": "#cc79a7", "encode": "#b8860b", "write": "#d55e00"},
    **{"start-up": "#aeb4bb", "issue": "#d9a400", "tail": "#cdd1d6"},
}


def svg(timeline: Timeline, title: str = "") -> str:
    """Return the Gantt chart of all lanes as SVG.

    A row below the lane "compute" shows the causes of exposed time.
    """
    by_row: defaultdict[str, defaultdict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span, row in zip(timeline.spans, rows(timeline.spans), strict=True):
        by_row[span.lane][row].append(span)
    causes: defaultdict[str, list[Interval]] = defaultdict(list)
    for start, end, cause in exposed_intervals(timeline.spans, timeline.wall):
        causes[cause].append((start, end))
    parts: list[str] = []
    y: float = AXIS
    for lane in lanes_of(timeline.spans):
        depth = len(by_row[lane])
        parts.append(_text(GUTTER - 8, y + ROW / 2, lane, "end"))
        parts.append(f'<rect x="{GUTTER}" y="{y}" width="{COLUMNS}" height="{ROW}" fill="#f1f2f4"/>')
        for row, spans in by_row[lane].items():
            top, height = y + row * ROW / depth, ROW / depth - (depth > 1)
            parts += _row(spans, timeline.wall, top, height, COLOURS.get(lane, "#444"))
        y += ROW + GAP
        if lane == "compute":
            parts.append(_text(GUTTER - 8, y - 3 + WAITS / 2, "waits for", "end", "#666"))
            parts += _waits(causes, timeline.wall, y - 3)
            y += WAITS + GAP
    bottom = y
    parts += _axis(timeline.wall, bottom)
    parts += _legend(list(causes), bottom + 12)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 24}" width="{WIDTH}" '
        f'height="{bottom + 24}" font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="11">'
        f"<title>{escape(title or 'Gantt chart of a run')}</title>"
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


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


def _waits(causes: dict[str, list[Interval]], wall: int, y: float) -> list[str]:
    """Return the row of the causes of exposed time, as SVG paths.

    `causes` maps each cause to its intervals. In every column, one SVG unit wide, the causes are stacked. The
    height of a cause is its share of the column's time.
    """
    parts = []
    bottoms = [y + WAITS] * COLUMNS
    for cause, intervals in causes.items():
        boxes = []
        for column, share in enumerate(busy_cells(intervals, wall, COLUMNS)):
            if share * WAITS >= 0.05:
                bottoms[column] -= share * WAITS
                boxes.append(_box(column, bottoms[column], 1, share * WAITS))
        parts.append(f'<path d="{"".join(boxes)}" fill="{COLOURS.get(cause, "#444")}"/>')
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
