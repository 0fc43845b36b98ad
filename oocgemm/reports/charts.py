"""Tables and small charts of the HTML page, drawn without scripts: a stacked bar, rates, the tiles of C."""

from collections.abc import Mapping, Sequence
from html import escape

from oocgemm.planning.units import format_percent, format_rate, format_time
from oocgemm.timeline.metrics import Report
from oocgemm.timeline.series import finish_times, lanes_of, rate_limits, rates
from oocgemm.timeline.spans import Timeline

BINS = 240
# Six colours of the colour map cividis, from the start of a run to its end. The map is readable with any
# colour vision.
CIVIDIS = ((0, 34, 78), (53, 69, 108), (102, 105, 112), (148, 142, 119), (200, 184, 102), (254, 232, 56))
MAX_TILES = 10_000


def lane_class(cause: str) -> str:
    """Return the CSS class that colours a lane or a cause of exposed time."""
    return "lane-d2h" if cause == "accumulator" else f"lane-{escape(cause)}"


def stacked_bar(parts: Mapping[str, float], whole: float) -> str:
    """Return a bar of length `whole`, divided into named `parts`. All lengths are in seconds."""
    pieces = "".join(
        f'<b class="{lane_class(name)}" style="width:{100 * part / whole:.3f}%" '
        f'title="{escape(name)} {format_time(part)}, {format_percent(part / whole)} of T"></b>'
        for name, part in parts.items()
        if whole
    )
    return f'<div class="stack">{pieces}</div>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, wide_last: bool = False) -> str:
    """Return an HTML table. The cells in `head` and `rows` are HTML too.

    The first column has text, which is aligned to the left. All other columns have numbers, which are aligned
    to the right. If `wide_last` is set, the last column has text too.
    """

    def cell(tag: str, index: int, text: str) -> str:
        left = index == 0 or (wide_last and index == len(head) - 1)
        return f"<{tag}{'' if left else ' class=n'}>{text}</{tag}>"

    lines = ["".join(cell("td", i, text) for i, text in enumerate(row)) for row in rows]
    top = "".join(cell("th", i, text) for i, text in enumerate(head))
    kind = ' class="wide"' if wide_last else ""
    rest = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table{kind}><thead><tr>{top}</tr></thead><tbody>{rest}</tbody></table>"


def throughput(timeline: Timeline, report: Report) -> str:
    """Return one chart per lane, which shows the lane's rate during the run.

    A dashed line shows the highest rate that the lane can reach.
    """
    known = rate_limits(timeline)
    charts = []
    for lane in lanes_of(timeline.spans):
        spans = [span for span in timeline.spans if span.lane == lane]
        found = rates(spans, timeline.wall, BINS)
        if not any(found):
            continue
        unit = "FLOP" if lane == "compute" else "B"
        limit, measured = known.get(lane, (0.0, False))
        # The dashed line is left out if its rate, `limit`, is so high that the curve would be hard to read.
        # An assumed limit may be wrong, so it is left out earlier than a measured one.
        shown = bool(limit) and limit < (10 if measured else 3) * max(found)
        top = 1.05 * max(*found, limit if shown else 0.0)
        steps = "".join(f"V{100 - 100 * rate / top:.2f}h1" for rate in found)
        height = f"{100 - 100 * limit / top:.2f}"
        line = f'<line x1="0" x2="{BINS}" y1="{height}" y2="{height}"/>' if shown else ""
        moved = report.flops if lane == "compute" else report.lanes[lane]["bytes"]
        busy = report.lanes[lane]["busy"]
        source = "calibrated" if measured else "assumed"
        known_limit = f"limit {format_rate(limit, unit)} ({source})" if limit else "limit unknown"
        peak = format_rate(max(found), unit)
        charts.append(
            f'<figure class="rate"><figcaption><b><i class="key {lane_class(lane)}"></i>{escape(lane)}</b>'
            f"<span>{format_rate(moved / busy if busy else 0.0, unit)} while busy, {known_limit}</span>"
            "</figcaption>"
            f'<svg class="{lane_class(lane)}" viewBox="0 0 {BINS} 100" preserveAspectRatio="none" role="img" '
            f'aria-label="Rate of {escape(lane)} over time, at most {peak}">'
            f'<path d="M0 100{steps}V100Z"/>{line}</svg>'
            f'<div class="axis"><span>0</span><span>peak {peak}</span>'
            f"<span>{format_time(timeline.wall / 1e9)}</span></div></figure>"
        )
    note = (
        f'<p class="note">Each column is the mean rate over 1/{BINS} of T, idle time included. '
        "Broken line: the rate limit, calibrated on this machine or assumed by the plan. "
        "It is left out if it is far above the rates.</p>"
    )
    return f'<div class="rates">{"".join(charts)}</div>{note}'


def c_grid(timeline: Timeline) -> str:
    """Return a picture of C in which the colour of each tile shows when the tile was finished.

    If there are more than `MAX_TILES` tiles, return their number instead.
    """
    plan = timeline.header.get("plan", {})
    done = finish_times(timeline.spans)
    if not done or "problem" not in plan or not timeline.wall:
        return '<p class="note">No tile of C was finished.</p>'
    if len(done) > MAX_TILES:
        return f'<p class="note">{extents(len(done))} tiles are too many to draw.</p>'
    problem, tile = plan["problem"], plan["tile"]
    m, n = problem["m"], problem["n"]
    down = -(-m // tile["m"])
    tiles = down * (down + 1) // 2 if problem.get("gram") else down * -(-n // tile["n"])
    cells = []
    for (i, j), end in sorted(done.items()):
        y, x = i * tile["m"], j * tile["n"]
        height, width = min(tile["m"], m - y), min(tile["n"], n - x)
        cells.append(
            f'<rect x="{100 * x / n:.3f}" y="{100 * y / m:.3f}" width="{100 * width / n:.3f}" '
            f'height="{100 * height / m:.3f}" fill="{_colour(end / timeline.wall)}" '
            f'data-tile="{i},{j}" data-end="{end}"/>'
        )
    count = extents(tiles) if len(done) == tiles else f"{extents(len(done))} of {extents(tiles)}"
    end_of_log = " before the log ends" if timeline.unfinished else ""
    stops = ",".join(_colour(step / 5) for step in range(6))
    ratio = min(2.5, max(0.4, n / m))
    return (
        '<div class="grid"><svg viewBox="0 0 100 100" preserveAspectRatio="none" '
        f'style="aspect-ratio:{ratio:.3f};width:{340 * ratio:.0f}px" role="img" '
        f'aria-label="{len(done)} tiles of C by finishing time">{"".join(cells)}</svg>'
        f'<div class="scale"><span>0</span><i style="background:linear-gradient(90deg,{stops})"></i>'
        f"<span>{format_time(timeline.wall / 1e9)}</span></div></div>"
        f'<p class="note">{extents(m, n)} elements in {count} tiles. '
        "The colour is the time of a tile's last write"
        f"{end_of_log}. Click a tile to see it in the timeline.</p>"
    )


def extents(*sizes: int) -> str:
    """Format the extents of a matrix, or a count, with thin spaces between thousands.

    >>> extents(32768, 512)
    '32\u202f768 × 512'
    """
    return " × ".join(f"{size:,}" for size in sizes).replace(",", "\u202f")


def _colour(share: float) -> str:
    """Return the colour of a time in the run: 0 is the start of the run and 1 its end.

    >>> _colour(0.0), _colour(1.0)
    ('#00224e', '#fee838')
    """
    position = min(1.0, max(0.0, share)) * (len(CIVIDIS) - 1)
    index = min(int(position), len(CIVIDIS) - 2)
    part = position - index
    mixed = (round(a + (b - a) * part) for a, b in zip(CIVIDIS[index], CIVIDIS[index + 1], strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)
