"""The sections of the HTML page: figures, sentences, tables, and small charts that need no scripts."""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

from oocgemm.planning.plan import recorded_scalar
from oocgemm.planning.units import counted, format_percent, format_rate, format_size, format_time
from oocgemm.reports.advice import Fitted, Remedy, fit, remedy, sentence
from oocgemm.timeline.activities import CAUSES, COMPUTE, finish_times, lanes_of, rate_limits, rates
from oocgemm.timeline.metrics import (
    Diagnosis,
    Distribution,
    Report,
    UnitFigures,
    diagnose,
    in_place,
    same_product,
    unfinished,
)
from oocgemm.timeline.spans import Timeline
from oocgemm.values import dataclass

# Longer names of workers, such as addresses, are replaced by "worker" and a number in charts.
MAX_LABEL = 9
HEAD = ("worker", "device", "parts", "compute", "largest wait", "end", "clock offset", "lost")


def labels(units: Sequence[UnitFigures]) -> list[str]:
    """Return a short, distinct name per device, for charts: the name of its worker, its number, or both."""
    names = [*dict.fromkeys((unit.worker, unit.host) for unit in units)]
    workers = {name for name, _ in names}
    short = len(workers) == len(names) and max(map(len, workers)) <= MAX_LABEL
    several = len(units) > len(names)
    found = []
    for unit in units:
        number = names.index((unit.worker, unit.host))
        name = unit.worker if short else f"worker {number}"
        device = f"device {unit.device}" if not unit.worker else f"{name}/{unit.device}"
        found.append(device if several or not unit.worker else name)
    return found


def counts(found: Distribution) -> str:
    """Return a text with the numbers of devices, workers and hosts, without redundant numbers."""
    devices, workers = counted(len(found.units), "device"), counted(found.workers, "worker")
    if not found.units[0].worker:
        return devices
    where = f"{workers} on {counted(found.hosts, 'host')}"
    return where if len(found.units) == found.workers else f"{devices} of {where}"


def summary(found: Distribution, timeline: Timeline) -> list[tuple[str, str]]:
    """Return the figures of the whole run, each as (name, text)."""
    storage, lost = found.storage, found.lost
    ends = f"{format_time(found.first_end)} to {format_time(found.last_end)}"
    reads = format_size(storage["bytes"] or 0)
    if storage["least"]:
        ratio = (storage["bytes"] or 0) / storage["least"]
        reads += f", {ratio:.2f} times the lower bound"
    scaling = format_percent(found.scaling_efficiency)
    if found.scaling_efficiency is None and not timeline.unfinished:
        scaling += " (needs `oocgemm calibrate` on every worker)"
    rows = [("ran on", counts(found)), ("scaling efficiency", scaling)]
    rows += [("balance", format_percent(found.balance)), ("last operations end", ends)]
    rows += [("storage reads", reads)]
    if lost["attempts"] or lost["flops"]:
        work = f"{format_flops(lost['flops'])} in {format_time(lost['seconds'])}"
        attempts = int(lost["attempts"])
        rows.append(("lost", f"{work}; {attempts} process{'es' * (attempts != 1)} died or failed"))
    if unread := timeline.header.get("unread"):
        missing = f"{counted(len(unread), 'log')} could not be read, the last one: {unread[-1]}"
        rows.append(("missing", missing))
    return rows


def title(unit: UnitFigures) -> str:
    """Describe a device in one line, for tooltips."""
    number = f"device {unit.device}"
    return " on ".join(part for part in (unit.worker or number, unit.host) if part) + (
        f", {number}" if unit.worker else ""
    )


def row(unit: UnitFigures, label: str) -> list[str]:
    """Return the table cells of a device, in the columns of `HEAD`. `label` is its name in charts."""
    waits = {cause: share for cause, share in unit.shares.items() if cause != COMPUTE}
    longest = max(waits, key=lambda cause: waits[cause], default="")
    sign = "-" if unit.clock_offset < 0 else "+"
    offset = f"{sign}{format_time(abs(unit.clock_offset))} ± {format_time(unit.clock_error)}"
    where = f" on {unit.host}" if unit.host else ""
    name = unit.worker if label.startswith(unit.worker) else f"{label}: {unit.worker}"
    return [
        f"{name}{where}" if unit.worker else "-",
        f"{unit.device}: {unit.described}" if unit.described else str(unit.device),
        f"{unit.parts} ({unit.lost_parts} died)" if unit.lost_parts else str(unit.parts),
        format_percent(unit.shares.get(COMPUTE, 0.0)),
        f"{longest} {format_percent(waits[longest])}" if longest else "-",
        format_time(unit.end),
        offset if unit.worker else "-",
        format_flops(unit.lost_flops) if unit.lost_flops else "-",
    ]


def format_flops(flops: float) -> str:
    """Format a number of floating-point operations.

    >>> format_flops(4.5e12)
    '4.5 TFLOP'
    """
    return format_rate(flops, "FLOP").removesuffix("/s")


BINS = 240
# Six colours of the colour map cividis, from the start of a run to its end. The map is readable with any
# colour vision.
CIVIDIS = ((0, 34, 78), (53, 69, 108), (102, 105, 112), (148, 142, 119), (200, 184, 102), (254, 232, 56))
MAX_TILES = 10_000
# Maximum number of devices in a table. If there are more, the first table has the FEWEST that computed least.
MAX_ROWS, FEWEST = 16, 8
LINKS = {
    "read": "storage to host",
    "h2d": "host to device",
    "d2h": "device to host",
    "write": "host to storage",
}
OPERATORS = {"N": "", "T": "<sup>T</sup>", "C": "<sup>H</sup>"}


def lane_class(cause: str) -> str:
    """Return the CSS class that colours a lane or a cause of exposed time."""
    return "lane-d2h" if cause == "accumulator" else f"lane-{escape(cause)}"


def stacked_bar(shares: Mapping[str, float], wall: float | None = None) -> str:
    """Return a bar divided into named shares. Its length is T, `wall` seconds. Without `wall`, it is thin."""
    pieces = "".join(
        f'<b class="{lane_class(name)}" style="width:{100 * share:.3f}%" title="{escape(name)} '
        f'{"" if wall is None else f"{format_time(share * wall)}, "}{format_percent(share)} of T"></b>'
        for name, share in shares.items()
    )
    return f'<div class="stack{" thin" if wall is None else ""}">{pieces}</div>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, wide_last: bool = False) -> str:
    """Return an HTML table. Cells are HTML. The first column has texts, with `wide_last` also the last."""

    def cell(tag: str, index: int, text: str) -> str:
        left = index == 0 or (wide_last and index == len(head) - 1)
        return f"<{tag}{'' if left else ' class=n'}>{text}</{tag}>"

    lines = ["".join(cell("td", i, text) for i, text in enumerate(row)) for row in rows]
    top = "".join(cell("th", i, text) for i, text in enumerate(head))
    kind = ' class="wide"' if wide_last else ""
    rest = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table{kind}><thead><tr>{top}</tr></thead><tbody>{rest}</tbody></table>"


def throughput(timeline: Timeline, report: Report) -> str:
    """Return a chart of each lane's rate during the run. A dashed line shows the highest possible rate."""
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
    """Return a picture of C, coloured by when tiles were finished, or a note if it cannot be drawn."""
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


def devices_section(found: Distribution, timeline: Timeline) -> str:
    """Return the figures of a run on several devices, one row per device. A reader can expand long lists."""
    facts = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>"
        for name, text in summary(found, timeline)
    )
    text = f'<dl class="facts">{facts}</dl>'
    every = range(len(found.units))
    if len(every) <= MAX_ROWS:
        return text + _table(found.units, every)
    least = sorted(sorted(every, key=lambda number: found.units[number].compute)[:FEWEST])
    return (
        f'{text}<p class="note">The {FEWEST} devices that computed least:</p>{_table(found.units, least)}'
        f"<details><summary>All {len(every)} devices</summary>{_table(found.units, every)}</details>"
    )


def _table(units: Sequence[UnitFigures], numbers: Sequence[int]) -> str:
    names = labels(units)
    head = [HEAD[0], "share of T", *HEAD[1:]]
    rows = []
    for number in numbers:
        name, *rest = map(escape, row(units[number], names[number]))
        rows.append([name, stacked_bar(units[number].shares), *rest])
    return f'<div class="across">{table(head, rows)}</div>'


@dataclass(frozen=True)
class ReportedRun:
    """A run, and data that the page shows. `fitted` is None if the cost model cannot be fitted."""

    name: str
    timeline: Timeline
    report: Report
    diagnosis: Diagnosis
    fitted: Fitted | None
    remedy: Remedy

    @classmethod
    def of(cls, name: str, timeline: Timeline, figures: Report) -> "ReportedRun":
        diagnosis = diagnose(timeline, figures)
        fitted = fit(timeline, figures)
        return cls(name, timeline, figures, diagnosis, fitted, remedy(timeline, figures, diagnosis, fitted))

    @property
    def header(self) -> Mapping[str, Any]:
        return self.timeline.header


def body(runs: Sequence[ReportedRun]) -> str:
    """Return all sections of the page as HTML. If there are several runs, they are shown side by side."""
    plain = [_title(runs), _each(runs, _verdict, "verdict"), _figures(runs)]
    wide = [("Where the time went", _each(runs, _exposed))]
    if any(run.report.distribution for run in runs):
        wide.append(("Workers and devices", _each(runs, _devices)))
    wide += [
        ("Timeline", _gantt(runs)),
        ("Throughput", _each(runs, lambda run: throughput(run.timeline, run.report))),
    ]
    narrow = [("Traffic against the lower bound", _each(runs, _traffic))]
    if not all(run.report.distribution for run in runs):
        narrow.append(("Predicted and measured", _each(runs, _predicted)))
    narrow += [
        ("Tiles of C by finishing time", _each(runs, lambda run: c_grid(run.timeline))),
        ("Setup", _each(runs, _setup)),
    ]
    half = " half" if len(runs) == 1 else ""
    cards = [f'<section class="card"><h2>{name}</h2>{content}</section>' for name, content in wide]
    for number, (name, content) in enumerate(narrow):
        kind = half if (number ^ 1) < len(narrow) else ""  # an odd card takes the whole width
        cards.append(f'<section class="card{kind}"><h2>{name}</h2>{content}</section>')
    return f'<main class="runs-{len(runs)}">{"".join([*plain, *cards])}</main>'


def heading(header: Mapping[str, Any]) -> str:
    """Return the product as a line of text, for example "4096 x 4096 x 4096 float32 into float64"."""
    problem = header.get("plan", {}).get("problem")
    if not problem:
        return "Matrix product"
    into = f" into {problem['c_dtype']}" if problem["c_dtype"] != problem["a_dtype"] else ""
    stored = problem.get("stored_a") or problem.get("stored_b")
    changed = f" from {stored}" if stored else ""
    return f"{problem['m']} x {problem['n']} x {problem['k']} {problem['a_dtype']}{changed}{into}"


def _title(runs: Sequence[ReportedRun]) -> str:
    header = runs[0].header
    plan = header.get("plan", {})
    problem = plan.get("problem")
    name = "Matrix product"
    if problem and len({heading(run.header) for run in runs}) == 1:
        alpha, beta = (recorded_scalar(problem[name]) for name in ("alpha", "beta"))
        name = (
            f"C = {_factor(alpha)}A{OPERATORS[problem['trans_a']]} B{OPERATORS[problem['trans_b']]}"
            + (f" + {_factor(beta)}C" if beta else "")
            + f' <span class="shape">{extents(problem["m"], problem["n"], problem["k"])} '
            f"{escape(problem['a_dtype'])}</span>"
        )
    where = " vs ".join(map(_where, runs))
    return (
        '<header class="top"><div><p class="brow">oocgemm report</p>'
        f'<h1>{name}</h1><p class="meta">{where}</p></div>'
        '<button id="theme" type="button" aria-label="Switch between light and dark">Dark</button></header>'
    )


def _where(run: ReportedRun) -> str:
    header, spread = run.header, run.report.distribution
    backend, plan = header.get("backend", {}), header.get("plan", {})
    parts = [str(backend.get("device", "")), counts(spread) if spread else ""]
    if budget := plan.get("budget"):
        parts.append(f"device {format_size(budget['device'])}, host {format_size(budget['host'])}")
    if started := header.get("started"):
        parts.append(f"{datetime.fromtimestamp(started, UTC):%Y-%m-%d %H:%M} UTC")
    return escape("\u00a0· ".join(part for part in parts if part))


def _factor(scalar: complex) -> str:
    number = complex(scalar)
    return "" if number == 1 else f"({number:g}) " if number.imag else f"{number.real:g} "


def _each(runs: Sequence[ReportedRun], section: Callable[[ReportedRun], str], kind: str = "") -> str:
    if len(runs) == 1:
        inner = section(runs[0])
        return f'<section class="card {kind}">{inner}</section>' if kind else inner
    columns = "".join(
        f'<div class="run {f"card {kind}" if kind else ""}"><p class="name">{escape(run.name)}</p>'
        f"{section(run)}</div>"
        for run in runs
    )
    return f'<div class="columns">{columns}</div>'


def _verdict(run: ReportedRun) -> str:
    advice = escape(sentence(run.remedy, run.report.wall))
    cut = f'<p class="finding">{unfinished(run.report)}</p>' if run.report.unfinished else ""
    return (
        cut + '<p class="finding">'
        f"<strong>{escape(run.diagnosis.headline)}</strong>{escape(run.diagnosis.rest)}</p>"
        f"<p>{escape(run.diagnosis.evidence)}</p>"
        f'<p class="remedy">{advice}</p>'
    )


def _figures(runs: Sequence[ReportedRun]) -> str:
    until = "the log ends" if any(run.report.unfinished for run in runs) else "C is complete"
    rows = [("T", f"wall time until {until}"), ("Rate", "flops over T")]
    rows += [("Compute share", "of T spent multiplying")]
    copied = any(run.report.copy_overlap is not None for run in runs)  # no copies on the CPU
    if copied:
        rows += [("Copy overlap", "of copy time hidden behind compute")]
    rows += [("Storage overlap", "of storage time hidden behind compute")]
    scaled = any(run.report.distribution for run in runs)
    if any(run.header.get("rates") for run in runs):
        shortest = "shortest time possible at the calibrated rates, over T"
        efficiency = "flops over what all kernels could do in T" if scaled else shortest
    else:
        efficiency = "needs oocgemm calibrate" + (" on every worker" if scaled else "")
    rows += [("Scaling efficiency" if scaled else "Efficiency", efficiency)]
    values = [
        [
            format_time(r.wall),
            format_rate(r.flop_rate, "FLOP") if r.flop_rate else "-",
            *map(format_percent, (r.compute_share, *([r.copy_overlap] * copied), r.storage_overlap)),
            format_percent(_scaling(run) if scaled else r.efficiency),
        ]
        for run in runs
        for r in [run.report]
    ]
    tiles = "".join(
        f"<div><dt>{name}</dt>{''.join(f'<dd>{value[i]}</dd>' for value in values)}"
        f"<dd class='what'>{what}</dd></div>"
        for i, (name, what) in enumerate(rows)
    )
    note = ""
    if len(runs) > 1:
        first, *others = runs
        alike = same_product([run.timeline for run in runs])
        said = ", ".join(
            f"{escape(run.name)}, {_compared_runs(run.report, first.report, alike)}" for run in others
        )
        note = f'<p class="note legend">First line: {escape(first.name)}. Second line, in blue: {said}.</p>'
    return f'<div><dl class="figures">{tiles}</dl>{note}</div>'


def _scaling(run: ReportedRun) -> float | None:
    """Return the scaling efficiency of a run on one or several devices; None if it is unknown."""
    if run.report.distribution:
        return run.report.distribution.scaling_efficiency
    kernel, rate = (run.header.get("rates") or {}).get("kernel"), run.report.flop_rate
    return rate / kernel if kernel and rate and not run.report.unfinished else None


def _compared_runs(figures: Report, first: Report, alike: bool) -> str:
    """Compare a run with the page's first run: by T if both computed the same product, else by rate."""
    if alike and first.wall:
        return f"{figures.wall / first.wall:.2f} times the T"
    if figures.flop_rate and first.flop_rate:
        return f"a different product, {figures.flop_rate / first.flop_rate:.2f} times the rate"
    return "not comparable"


def _exposed(run: ReportedRun) -> str:
    """Return a table with the time of compute and the exposed time of each cause, longest first."""
    wall, shares = run.report.wall, run.report.shares
    rows = []
    for cause, share in shares.items():
        key = f'<i class="key {lane_class(cause)}"></i>{escape(cause)}'
        rows.append([key, format_time(share * wall), format_percent(share), CAUSES.get(cause, "")])
    return stacked_bar(shares, wall) + table(["", "time", "of T", ""], rows, wide_last=True)


def _devices(run: ReportedRun) -> str:
    if run.report.distribution is None:
        return '<p class="note">This run used one device.</p>'
    return devices_section(run.report.distribution, run.timeline)


def _gantt(runs: Sequence[ReportedRun]) -> str:
    keys = (
        "<span class='hint'>A is solid, B and C are paler. Drag to pan, Ctrl + wheel to zoom, hover for "
        "details. Keys: arrows, +, -, 0.</span>"
    )
    tools = (
        '<div class="tools"><button type="button" data-zoom="in" aria-label="Zoom in">+</button>'
        '<button type="button" data-zoom="out" aria-label="Zoom out">−</button>'
        f'<button type="button" data-zoom="all">All</button><output id="range"></output>{keys}</div>'
    )

    def chart(run: ReportedRun) -> str:
        name = f'<p class="name">{escape(run.name)}</p>' if len(runs) > 1 else ""
        spans = run.timeline.spans
        label = f"Gantt chart of {len(spans)} operations on {len(lanes_of(spans))} lanes"
        more = ""
        if run.report.distribution:
            label += f" of {len(run.report.distribution.units)} devices"
            keys = "".join(
                f'<span><i class="key {lane_class(cause)}"></i>{escape(cause)}</span>'
                for cause in run.report.shares
            )
            more = (
                f'<p class="keys">{keys}</p><p class="note">One row per device: what it computed or waited '
                "for. Click a name on the left to show its lanes.</p>"
            )
        return (
            f'{name}<div class="gantt"><canvas class="lanes" tabindex="0" role="img" aria-label="{label}">'
            f'</canvas><canvas class="overview" aria-hidden="true"></canvas></div>{more}'
        )

    return tools + "".join(map(chart, runs))


def _traffic(run: ReportedRun) -> str:
    rows = []
    for link, figures in run.report.traffic.items():
        moved, required, bound = (figures[name] or 0 for name in ("bytes", "required", "least"))
        if not (moved or required):
            continue
        whole = max(moved, required, bound, 1)
        bar = (
            f'<div class="bar"><b class="lane-{link}" style="width:{100 * moved / whole:.2f}%"></b>'
            + (f'<u style="left:{min(100 * bound / whole, 99.6):.2f}%"></u>' if bound else "")
            + "</div>"
        )
        ratio = f"{moved / bound:.2f}" if bound else "-"
        sizes = (format_size(x) if x else "-" for x in (moved, required, bound))
        rows.append([f"{link}<small>{LINKS[link]}</small>", *sizes, ratio, bar])
    return (
        table(["link", "moved", "required", "lower bound", "ratio", ""], rows, wide_last=True)
        + '<p class="note">Required: the bytes if each element crossed the link once. Lower bound, marked '
        "across the bar: no schedule within these budgets can move fewer bytes. "
        "Ratio: moved over lower bound.</p>"
    )


def _predicted(run: ReportedRun) -> str:
    # The plan predicts the times of a complete run. An unfinished run cannot be compared with them.
    plan = {} if run.report.unfinished or run.report.distribution else run.header.get("plan", {})
    predicted: dict[str, float] = plan.get("predicted_seconds", {})
    rows = []
    for lane in lanes_of(run.timeline.spans):
        measured = run.report.lanes.get(lane, {}).get("busy", 0.0)
        rows.append([escape(lane), *_compared(predicted.get(lane), measured)])
    rows.append(["<b>T</b>", *_compared(predicted.get("total"), run.report.wall)])
    model = escape(str(run.header.get("plan", {}).get("machine", "unknown")))
    note = f"Busy time of each lane, and T. Machine model: {model}."
    if not run.header.get("plan", {}).get("calibrated"):
        note += " Its rates are assumed; run <code>oocgemm calibrate</code> to measure them."
    if run.fitted:
        refitted = format_time(run.fitted.seconds(run.fitted.plan))
        note += f" With the measured rates of this run the model predicts T = {refitted}."
    return table(["", "predicted", "measured", "ratio"], rows) + f'<p class="note">{note}</p>'


def _compared(predicted: float | None, measured: float) -> list[str]:
    if not predicted:
        return ["-", format_time(measured), "-"]
    return [format_time(predicted), format_time(measured), f"{measured / predicted:.2f}"]


def _setup(run: ReportedRun) -> str:
    plan, header = run.header.get("plan", {}), run.header
    rows: list[list[str]] = []

    def row(name: str, value: object) -> None:
        if value:
            rows.append([name, escape(str(value))])

    if tile := plan.get("tile"):
        down, across = plan["tiles"]
        row("tile", f"{extents(tile['m'], tile['n'])}, panels {extents(tile['k'])} deep")
        steps = extents(plan["steps"])
        row("grid", f"{extents(down, across)} tiles, {steps} steps, {plan.get('traversal', '')}")
    if slots := plan.get("slots"):
        on_host = f"; host C {slots['host_c']}, A {slots['host_a']}, B {slots['host_b']}"
        on_host = "" if slots["unified"] else on_host
        prepared = f", prepared {slots['planes']}" if slots.get("planes") else ""
        row("slots", f"device C {slots['c']}, A {slots['a']}, B {slots['b']}{prepared}{on_host}")
    for tier, used in plan.get("footprint", {}).items():
        row(f"{tier} memory", f"{format_size(used['total'])} of {format_size(plan['budget'][tier])}")
    for name, operand in header.get("operands", {}).items():
        codecs = ", ".join(operand.get("codecs") or ())
        chunks = extents(*(operand.get("chunks") or ()))
        shown = [operand.get("store"), f"chunks {chunks}" if chunks else "", codecs, operand.get("path")]
        shown.append(operand.get("transform"))
        if plan.get("layouts", {}).get("codings", {}).get(name.lower()):
            shown.append("compressed by the GPU" if name == "C" else "decoded by the GPU")
        row(name, ", ".join(str(part) for part in shown if part))
    backend = dict(header.get("backend", {}))
    kernels = ", ".join(backend.pop("multiplied by", ()))
    row("backend", ", ".join(f"{k} {v}" if k != "name" else str(v) for k, v in backend.items()))
    row("multiplied by", kernels)
    row("zero-copy", in_place(run.timeline))
    machine = (str(header.get("machine", {}).get(k, "")) for k in ("processor", "platform"))
    row("machine", ", ".join(machine).strip(", "))
    row("versions", ", ".join(f"{k} {v}" for k, v in header.get("versions", {}).items()))
    lines = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in rows)
    return f'<table class="setup"><tbody>{lines}</tbody></table>'
