"""The Gantt chart as a picture for papers: SVG, black on white, a line a lane."""

from collections.abc import Sequence
from html import escape
from math import floor, log10

from oocgemm.timeline.figures import exposed_intervals, union
from oocgemm.timeline.series import lanes_of, rows
from oocgemm.timeline.spans import Span, Timeline

WIDTH, GUTTER, AXIS, ROW, GAP = 900, 80, 26, 22, 7
# After Okabe and Ito, as on the page; the multiplications in grey.
COLOURS = {
    **{"read": "#0072b2", "decode": "#56b4e9", "h2d": "#009e73", "prepare": "#7a8b2e", "compute": "#59616c"},
    **{"d2h": "#cc79a7", "accumulator": "#cc79a7", "encode": "#b8860b", "write": "#d55e00"},
    **{"start-up": "#aeb4bb", "issue": "#d9a400", "tail": "#cdd1d6"},
}
# What is nearer than this many units is drawn as one: a picture of any run has a bounded size.
NEAR = 0.25


def svg(timeline: Timeline, title: str = "") -> str:
    """The Gantt chart of all lanes, and below the compute lane what it waits for."""
    lanes = lanes_of(timeline.spans)
    scale = (WIDTH - GUTTER - 12) / max(1, timeline.wall)
    row = rows(timeline.spans)
    parts: list[str] = []
    y = AXIS
    for lane in lanes:
        depth = 1 + max(r for r, span in zip(row, timeline.spans, strict=True) if span.lane == lane)
        height = ROW / depth
        parts.append(_text(GUTTER - 8, y + ROW / 2, lane, "end"))
        parts.append(
            f'<rect x="{GUTTER}" y="{y}" width="{WIDTH - GUTTER - 12}" height="{ROW}" fill="#f1f2f4"/>'
        )
        for r in range(depth):
            # B is lighter than A, of the multiplications every other step.
            shades: tuple[list[Span], list[Span]] = [], []
            for at, span in zip(row, timeline.spans, strict=True):
                if span.lane == lane and at == r:
                    shades[span.step % 2 if span.kind == "multiply" else span.operand == "B"].append(span)
            for spans, opacity in zip(shades, (1, 0.62), strict=True):
                parts.append(
                    _bars(
                        spans,
                        scale,
                        y + r * height,
                        height - (1 if depth > 1 else 0),
                        COLOURS.get(lane, "#444"),
                        opacity,
                    )
                )
        y += ROW + GAP
        if lane == "compute":
            parts.append(_text(GUTTER - 8, y + 1, "waits for", "end", "#666"))
            waits = exposed_intervals(timeline.spans, timeline.wall)
            for cause in dict.fromkeys(cause for _, _, cause in waits):
                path = _path([(a, b) for a, b, c in waits if c == cause], scale, y - 3, 8)
                parts.append(f'<path d="{path}" fill="{COLOURS.get(cause, "#444")}"/>')
            y += 8 + GAP
    causes = dict.fromkeys(cause for _, _, cause in exposed_intervals(timeline.spans, timeline.wall))
    height_all = y + 24
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height_all}" width="{WIDTH}" height="{height_all}" '
        'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="11">'
        f'<title>{escape(title or "Gantt chart of a run")}</title><rect width="100%" height="100%" fill="#fff"/>'
        f"{_axis(timeline.wall, scale, y)}{''.join(parts)}{_legend(list(causes), y + 12)}</svg>\n"
    )


def _bars(spans: Sequence[Span], scale: float, y: float, height: float, colour: str, opacity: float) -> str:
    if not spans:
        return ""
    path = _path([(s.start, s.end) for s in spans], scale, y, height)
    return f'<path d="{path}" fill="{colour}" fill-opacity="{opacity}"/>'


def _path(intervals: Sequence[tuple[int, int]], scale: float, y: float, height: float) -> str:
    """Rectangles over the intervals, those that nearly touch in one."""
    near = round(NEAR / scale)
    joined = union((start, end + near) for start, end in intervals)
    return "".join(
        f"M{GUTTER + start * scale:.2f} {y:.2f}h{max(0.1, (end - near - start) * scale):.2f}v{height:.2f}"
        f"h-{max(0.1, (end - near - start) * scale):.2f}z"
        for start, end in joined
    )


def _axis(wall: int, scale: float, bottom: float) -> str:
    if wall <= 0:
        return ""
    step = 10.0 ** floor(log10(wall / 4))
    step *= next(f for f in (1, 2, 5) if wall / (f * step) <= 10 or f == 5)
    unit, name = next(((u, n) for u, n in ((1e9, "s"), (1e6, "ms")) if step >= u / 10), (1e3, "µs"))
    digits = max(0, -floor(log10(step / unit) + 1e-9))
    parts = []
    for number in range(int(wall / step) + 1):
        x = GUTTER + number * step * scale
        parts.append(f'<path d="M{x:.2f} {AXIS - 6}V{bottom}" stroke="#d5d8dc"/>')
        parts.append(_text(x, 10, f"{number * step / unit:.{digits}f} {name}", "middle", "#666"))
    return "".join(parts)


def _legend(causes: Sequence[str], y: float) -> str:
    x, parts = GUTTER, []
    for cause in causes:
        parts.append(f'<rect x="{x}" y="{y - 4}" width="9" height="9" fill="{COLOURS.get(cause, "#444")}"/>')
        parts.append(_text(x + 13, y + 1, cause, "start", "#666"))
        x += 28 + 6 * len(cause)
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#16191d") -> str:
    return f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
