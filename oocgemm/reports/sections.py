"""The sections of the HTML page: figures, sentences, tables and small charts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from typing import Any

from oocgemm.planning.serialize import recorded_scalar
from oocgemm.planning.units import format_percent, format_rate, format_size, format_time
from oocgemm.reports.advice import Remedy, remedy, sentence
from oocgemm.reports.charts import c_grid, extents, lane_class, stacked_bar, table, throughput
from oocgemm.reports.devices import devices_section
from oocgemm.reports.fit import Fitted, fit
from oocgemm.reports.workers import counts
from oocgemm.timeline.activities import CAUSES
from oocgemm.timeline.diagnosis import Diagnosis, diagnose, unfinished
from oocgemm.timeline.metrics import Report, in_place, same_product
from oocgemm.timeline.series import lanes_of
from oocgemm.timeline.spans import Timeline

LINKS = {
    "read": "storage to host",
    "h2d": "host to device",
    "d2h": "device to host",
    "write": "host to storage",
}
OPERATORS = {"N": "", "T": "<sup>T</sup>", "C": "<sup>H</sup>"}


@dataclass(frozen=True)
class Run:
    """A run and what the page shows of it: the figures, the diagnosis, and the suggested change.

    `fitted` is None if the cost model cannot be fitted to the run.
    """

    name: str
    timeline: Timeline
    report: Report
    diagnosis: Diagnosis
    fitted: Fitted | None
    remedy: Remedy

    @classmethod
    def of(cls, name: str, timeline: Timeline, figures: Report) -> "Run":
        """Compute the diagnosis, the fitted model and the suggested change of a run from its figures."""
        diagnosis = diagnose(timeline, figures)
        fitted = fit(timeline, figures)
        return cls(name, timeline, figures, diagnosis, fitted, remedy(timeline, figures, diagnosis, fitted))

    @property
    def header(self) -> Mapping[str, Any]:
        return self.timeline.header


def body(runs: Sequence[Run]) -> str:
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


def _title(runs: Sequence[Run]) -> str:
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


def _where(run: Run) -> str:
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


def _each(runs: Sequence[Run], section: Callable[[Run], str], kind: str = "") -> str:
    if len(runs) == 1:
        inner = section(runs[0])
        return f'<section class="card {kind}">{inner}</section>' if kind else inner
    columns = "".join(
        f'<div class="run {f"card {kind}" if kind else ""}"><p class="name">{escape(run.name)}</p>'
        f"{section(run)}</div>"
        for run in runs
    )
    return f'<div class="columns">{columns}</div>'


def _verdict(run: Run) -> str:
    advice = escape(sentence(run.remedy, run.report.wall))
    cut = f'<p class="finding">{unfinished(run.report)}</p>' if run.report.unfinished else ""
    return (
        cut + '<p class="finding">'
        f"<strong>{escape(run.diagnosis.headline)}</strong>{escape(run.diagnosis.rest)}</p>"
        f"<p>{escape(run.diagnosis.evidence)}</p>"
        f'<p class="remedy">{advice}</p>'
    )


def _figures(runs: Sequence[Run]) -> str:
    until = "the log ends" if any(run.report.unfinished for run in runs) else "C is complete"
    rows = [("T", f"wall time until {until}"), ("Rate", "flops over T")]
    rows += [("Compute share", "of T spent multiplying")]
    copied = any(run.report.copy_overlap is not None for run in runs)  # nothing is, on the CPU
    if copied:
        rows += [("Copy overlap", "of copy time hidden behind compute")]
    rows += [("Storage overlap", "of storage time hidden behind compute")]
    calibrated = any(run.header.get("rates") for run in runs)
    efficiency = (
        "shortest time possible at the calibrated rates, over T" if calibrated else "needs oocgemm calibrate"
    )
    scaled = any(run.report.distribution for run in runs)
    if scaled:
        efficiency = (
            "flops over what all kernels could do in T"
            if calibrated
            else "needs oocgemm calibrate on every worker"
        )
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


def _scaling(run: Run) -> float | None:
    """Return the scaling efficiency of a run, also of one on one device."""
    if run.report.distribution:
        return run.report.distribution.scaling_efficiency
    kernel = (run.header.get("rates") or {}).get("kernel")
    return (
        run.report.flop_rate / kernel
        if kernel and run.report.flop_rate and not run.report.unfinished
        else None
    )


def _compared_runs(figures: Report, first: Report, alike: bool) -> str:
    """Return a text that compares a run with the first one on the page.

    It gives the ratio of T if both computed the same product (`alike`), otherwise that of the flop rates.
    """
    if alike and first.wall:
        return f"{figures.wall / first.wall:.2f} times the T"
    if figures.flop_rate and first.flop_rate:
        return f"a different product, {figures.flop_rate / first.flop_rate:.2f} times the rate"
    return "not comparable"


def _exposed(run: Run) -> str:
    """Return a table with the time of compute and the exposed time of each cause, longest first."""
    wall = run.report.wall
    parts = {cause: share * wall for cause, share in run.report.shares.items()}
    rows = [
        [
            f'<i class="key {lane_class(cause)}"></i>{escape(cause)}',
            format_time(seconds),
            format_percent(run.report.shares[cause]),
            CAUSES.get(cause, ""),
        ]
        for cause, seconds in parts.items()
    ]
    return stacked_bar(parts, wall) + table(["", "time", "of T", ""], rows, wide_last=True)


def _devices(run: Run) -> str:
    if run.report.distribution is None:
        return '<p class="note">This run used one device.</p>'
    return devices_section(run.report.distribution, run.timeline)


def _gantt(runs: Sequence[Run]) -> str:
    keys = (
        "<span class='hint'>A is solid, B and C are paler. Drag to pan, Ctrl + wheel to zoom, hover for "
        "details. Keys: arrows, +, -, 0.</span>"
    )
    tools = (
        '<div class="tools"><button type="button" data-zoom="in" aria-label="Zoom in">+</button>'
        '<button type="button" data-zoom="out" aria-label="Zoom out">−</button>'
        f'<button type="button" data-zoom="all">All</button><output id="range"></output>{keys}</div>'
    )

    def chart(run: Run) -> str:
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


def _traffic(run: Run) -> str:
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


def _predicted(run: Run) -> str:
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


def _setup(run: Run) -> str:
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
        on_host = (
            ""
            if slots["unified"]
            else f"; host C {slots['host_c']}, A {slots['host_a']}, B {slots['host_b']}"
        )
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
    row(
        "machine",
        ", ".join(str(header.get("machine", {}).get(k, "")) for k in ("processor", "platform")).strip(", "),
    )
    row("versions", ", ".join(f"{k} {v}" for k, v in header.get("versions", {}).items()))
    lines = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in rows)
    return f'<table class="setup"><tbody>{lines}</tbody></table>'
