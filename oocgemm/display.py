"""What the command line shows: plans and reports, drawn with rich."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from oocgemm.backends.tuning import Tuning
from oocgemm.bench import AGAINST, BY_NCU, against
from oocgemm.plan import Calibration, Plan
from oocgemm.system import LINKS, calibrated_rates
from oocgemm.timeline import Report, Timeline, diagnosis_lines, gantt, in_place
from oocgemm.units import format_rate, format_size, format_time
from oocgemm.verify import Verification

TRAFFIC = ("read", "h2d", "d2h", "write")
GANTT_WIDTH = 72


def _console(width: int = 110) -> Console:
    # Piped output is not cut to a terminal's width.
    return Console(width=None if sys.stdout.isatty() else width, highlight=False)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(columns[0])
    for column in columns[1:]:
        table.add_column(column, justify="right")
    return table


def print_plan(plan: Plan, explain: bool = False) -> None:
    """A plan: what it computes, tile and slots, memory, traffic, predicted times."""
    out = _console()
    problem, tile, slots = plan.problem, plan.tile, plan.slots
    down, across = plan.grid.shape
    out.print(
        f"[bold]C[/] {problem.m} x {problem.n}  =  {_scalar(problem.alpha)}op(A) {problem.m} x {problem.k}  @  "
        f"op(B) {problem.k} x {problem.n}"
        + (f"  +  {_scalar(problem.beta)}C" if problem.reads_c else "")
        + f"   {problem.a_dtype}"
        + ("" if problem.c_dtype == problem.a_dtype else f" into {problem.c_dtype}")
        + ("" if problem.compute == "native" else f" by {problem.compute}")
        + f", {problem.flops:.3g} flops"
    )
    out.print(
        f"[bold]tile[/] {tile.w} x {tile.h}, panels {tile.r} deep: {down} x {across} tiles, "
        f"{plan.grid.steps} steps each, {plan.steps} in all"
    )
    out.print(
        f"[bold]slots[/] device: C {slots.c}, A {slots.a}, B {slots.b}; "
        + (
            "none on the host, which is the device; "
            if slots.unified
            else f"host: A {slots.host_a}, B {slots.host_b}, "
        )
        + f"{'' if slots.unified else f'C {slots.host_c} '}strips of {slots.strip} rows; "
        f"{plan.candidate.io_threads} I/O threads"
    )
    out.print()
    memory = _table("memory", "holds", "budget", "of which")
    for tier, held, total, budget in (
        ("device", plan.footprint.device, plan.footprint.device_total, plan.budgets.device),
        ("host", plan.footprint.host, plan.footprint.host_total, plan.budgets.host),
    ):
        parts = ", ".join(f"{name} {format_size(size)}" for name, size in held.items() if size)
        memory.add_row(tier, format_size(total), format_size(budget), parts)
    out.print(memory)
    out.print()
    traffic = _table("link", "bytes", "each once", "least possible", "ratio", "predicted")
    lanes = plan.prediction.lanes
    for link in TRAFFIC:
        if plan.traffic[link]:
            least = plan.least[link]
            ratio = f"{plan.traffic[link] / least:.2f}" if least else "-"
            sizes = (format_size(x[link]) for x in (plan.traffic, plan.required, plan.least))
            traffic.add_row(link, *sizes, ratio, format_time(lanes[link]) if lanes[link] else "")
    for lane in (lane for lane in lanes if lane not in TRAFFIC and lanes[lane]):
        traffic.add_row(lane, "", "", "", "", format_time(lanes[lane]))
    out.print(traffic)
    for operand, factor in plan.amplification.items():
        if factor > 1.005:
            out.print(f"reading {operand} decodes {factor:.2f} times its bytes: its chunks straddle panels")
    prediction = plan.prediction
    out.print()
    out.print(
        f"[bold]predicted[/] {format_time(prediction.total)}, bound by [bold]{prediction.bottleneck}[/] "
        f"(start-up {format_time(prediction.start_up)}, bubbles {format_time(prediction.bubbles)}, "
        f"tail {format_time(prediction.tail)})"
    )
    out.print(_machine_model(plan.machine.name, plan.machine.calibrated), soft_wrap=True)
    if plan.note:
        out.print(f"Note: {plan.note}", soft_wrap=True)
    if explain:
        _print_considered(out, plan)


def _machine_model(name: str, calibrated: bool) -> str:
    remedy = "" if calibrated else ": times are rough, run `oocgemm calibrate` for this machine"
    return f"machine model: {escape(name)}{remedy}"


def _print_considered(out: Console, plan: Plan) -> None:
    out.print()
    rows = plan.explain()
    lanes = [lane for lane in plan.prediction.lanes if any(row["lanes"][lane] for row in rows)]
    table = _table("considered", "C slots", "predicted", *lanes, "bubbles", "why not")
    for row in rows:
        times = (format_time(row["lanes"][lane]) for lane in lanes)
        table.add_row(
            *(row["tile"], str(row["c_slots"]), format_time(row["total"]), *times),
            *(format_time(row["bubbles"]), row["why"]),
        )
    out.print(table)


def print_report(report: Report, timeline: Timeline, *, advise: bool = False) -> None:
    """What bounded a run, its figures and its Gantt picture; with `advise` what to change, which takes plans to be made."""
    out = _console()
    for text in diagnosis_lines(report, timeline, advise=advise):
        out.print(escape(text))
    out.print()
    rate = f", {format_rate(report.flop_rate, 'FLOP')}" if report.flop_rate else ""
    out.print(f"[bold]T[/] {format_time(report.wall)}{rate}")
    out.print(
        f"[bold]compute share[/] {_percent(report.compute_share)}   "
        f"[bold]copy overlap[/] {_percent(report.copy_overlap)}   "
        f"[bold]storage overlap[/] {_percent(report.storage_overlap)}   "
        f"[bold]efficiency[/] {_percent(report.efficiency)}"
        + (" (needs `oocgemm calibrate`)" if _uncalibrated(report, timeline) else "")
    )
    causes = sorted(report.exposed.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{cause} {format_time(seconds)}" for cause, seconds in causes)
    total = sum(report.exposed.values())
    out.print(f"[bold]exposed[/] {format_time(total)}: {parts or 'nothing'}")
    if report.checks:
        _print_checks(out, report.checks)
    plan = timeline.header.get("plan", {})
    if "machine" in plan:
        out.print(_machine_model(plan["machine"], plan.get("calibrated", False)), soft_wrap=True)
    if kernels := timeline.header.get("backend", {}).get("multiplied by"):
        out.print(f"multiplied by {escape(', '.join(kernels))}", soft_wrap=True)
    if lying := in_place(timeline):
        out.print(lying)
    if retried := timeline.header.get("retried"):
        out.print(
            f"tried again {len(retried)} times what had failed, at last {escape(retried[-1])}",
            soft_wrap=True,
        )
    out.print()
    table = _table("lane", "busy", "operations", "bytes", "rate", "required", "least possible")
    for lane, _ in gantt(timeline, 1):
        figures = report.lanes[lane]
        moved = figures["bytes"]
        rate = format_rate(moved / figures["busy"]) if moved and figures["busy"] else ""
        if lane == "compute" and figures["busy"]:
            rate = format_rate(report.flops / figures["busy"], "FLOP")
        # Of chunks that are decoded on their way, that lane tells what the link has moved.
        through = {"decode": "read", "encode": "write"}.get(lane, lane)
        link = report.traffic.get(lane if through in report.lanes else through, {})
        bounds = (format_size(link[x]) if link.get(x) is not None else "" for x in ("required", "least"))  # type: ignore[arg-type]
        size = format_size(moved) if moved else ""
        table.add_row(
            lane, format_time(figures["busy"]), str(round(figures["operations"])), size, rate, *bounds
        )
    out.print(table)
    out.print()
    for lane, picture in gantt(timeline, GANTT_WIDTH):
        out.print(f"{lane:>8} │{picture}│", soft_wrap=True)
    ticks = f"0{format_time(report.wall):>{GANTT_WIDTH - 1}}"
    out.print(f"{'':>8}  {ticks}", soft_wrap=True)


def _uncalibrated(report: Report, timeline: Timeline) -> bool:
    """Whether a calibration would give the run an efficiency: none has the rates of what is rounded."""
    compute = timeline.header.get("plan", {}).get("problem", {}).get("compute", "native")
    return report.efficiency is None and not report.unfinished and compute not in ("tf32", "bf16")


def print_verification(found: Verification) -> None:
    """What `verify` has found, and what that is worth."""
    out = _console()
    out.print(
        f"[bold]C is {'right' if found.right else 'wrong'}[/]: {found.vectors} random vectors on {found.groups} "
        f"groups of columns, the worst sum off by {found.excess:.2g} of its tolerance",
        soft_wrap=True,
    )
    if found.right:
        out.print(
            f"A row that is wrong within a group is missed with a probability of at most {100 * found.missed:.2g}%, unless "
            f"by less than rounding; a single element off by more than {2 * found.tolerance:.2g} is never missed",
            soft_wrap=True,
        )
    out.print(
        f"{format_size(found.bytes)} in {format_time(found.seconds)}, {format_rate(found.bytes / found.seconds)}"
    )


def _print_checks(out: Console, checks: dict[str, Any]) -> None:
    redone = checks["recomputed"]
    which = ", ".join(f"({i}, {j})" for i, j in redone[:5]) + (", ..." if len(redone) > 5 else "")
    out.print(
        f"[bold]checked[/] {checks['tiles']} tiles in {checks['blocks']} blocks"
        + (f", {checks['undecided']} of them for Inf and NaN only" if checks["undecided"] else "")
        + f"; recomputed {len(redone)}{f': tiles {which}' if redone else ''}; "
        + f"took {_percent(checks['core_share'])} of the cores' time"
        + (
            f" and {format_time(checks['device_seconds'])} of the device's"
            if checks["device_seconds"]
            else ""
        ),
        soft_wrap=True,
    )


def print_comparison(names: Sequence[str], reports: Sequence[Report], timelines: Sequence[Timeline]) -> None:
    """Two runs side by side."""
    out = _console()
    for name, report, timeline in zip(names, reports, timelines, strict=True):
        out.print(
            f"[bold]{escape(name)}[/]  {escape(' '.join(diagnosis_lines(report, timeline)))}", soft_wrap=True
        )
    out.print()
    table = _table("", *map(escape, names), "change")
    first, second = reports
    table.add_row("T", format_time(first.wall), format_time(second.wall), _change(first.wall, second.wall))
    for name in ("compute_share", "copy_overlap", "storage_overlap", "efficiency"):
        shares = [getattr(report, name) for report in reports]
        table.add_row(name.replace("_", " "), *map(_percent, shares), "")
    for cause in dict.fromkeys(cause for report in reports for cause in report.exposed):
        seconds = [report.exposed.get(cause, 0.0) for report in reports]
        table.add_row(f"exposed, {cause}", *map(format_time, seconds), _change(*seconds))
    for link in TRAFFIC:
        moved = [report.traffic[link]["bytes"] or 0 for report in reports]
        if any(moved):
            table.add_row(f"bytes, {link}", *map(format_size, moved), _change(*moved))
    out.print(table)


def _change(old: float, new: float) -> str:
    return f"{100 * (new / old - 1):+.1f}%" if old else ""


def print_calibration(found: Calibration, path: str) -> None:
    """What was measured of a machine, and where it is kept."""
    out = _console()
    out.print(f"[bold]{escape(found.device)}[/] ({found.backend}), {found.samples['seconds']:.0f} s\n")
    measured: dict[str, dict[str, float]] = found.samples["kernels"]
    depths = sorted({int(depth) for rates in measured.values() for depth in rates})
    scale, unit = (
        (1e12, "TFLOP/s") if max(fit.peak for fit in found.kernels.values()) >= 1e12 else (1e9, "GFLOP/s")
    )
    kernels = _table(f"{unit}, panels deep", *map(str, depths), "fitted peak", "halved at")
    for dtype, rates in measured.items():
        fit = found.kernels[dtype]
        shown = (f"{rates[str(d)] / scale:.3g}" if str(d) in rates else "" for d in depths)
        kernels.add_row(dtype, *shown, f"{fit.peak / scale:.3g}", f"{fit.half_depth:.3g}")
    out.print(kernels)
    out.print()
    moved: dict[str, float] = {}
    for link, by_size in found.samples["copies"].items():
        if isinstance(by_size, dict):
            moved |= {f"{link}, {format_size(int(size))}": rate for size, rate in by_size.items()}
        else:
            moved[link] = by_size
    for name, rate in calibrated_rates(found).items():
        moved[LINKS[name] + (", fitted" if name in found.samples["copies"] else "")] = rate
    links = _table("link", "GB/s")
    for name, rate in moved.items():
        links.add_row(name, f"{rate / 1e9:.3g}")
    out.print(links)
    out.print(f"first use of memory {found.rates['arena_seconds_per_byte'] * 2**30:.3g} s a GiB")
    out.print(f"issuing an operation {format_time(found.rates['issue'])}")
    others = found.samples["cores used by others"]
    if others >= 0.2:
        out.print(
            f"other programs kept {others:.1f} cores busy: rates are low, calibrate again when they are done"
        )
    out.print(f"\nstorage: {escape(found.samples['path'])}", soft_wrap=True)
    out.print(f"kept in {escape(path)}", soft_wrap=True)


def print_info(found: dict[str, Any]) -> None:
    """What there is to work with, and what is missing."""
    out = _console()
    here, engines = found["machine"], {name: found[f"{name} backend"] for name in ("host", "cuda")}
    for name, text in {
        "versions": ", ".join(f"{package} {version}" for package, version in found["versions"].items()),
        "machine": f"{here['processor']}, {here['cores']} cores, {format_size(here['memory'])} of memory, "
        f"{format_size(here['available'])} available; {here['platform']}",
        **{name: _engine(engine) for name, engine in engines.items()},
    }.items():
        out.print(f"[bold]{name:<9}[/] {escape(text)}", soft_wrap=True)
    there = {name: engine for name, engine in engines.items() if "missing" not in engine}
    out.print()
    table = _table("rates", *there)
    for group, unit in (("kernels", "FLOP"), ("links", "B")):
        for rate in dict.fromkeys(rate for engine in there.values() for rate in engine[group]):
            cells = (_rate(engine, rate, engine[group].get(rate), unit) for engine in there.values())
            table.add_row(LINKS.get(rate, rate), *cells)
    out.print(table)
    for name, engine in there.items():
        out.print(f"{name}: {escape(engine['rates'])}", soft_wrap=True)
    if any(engine["assumed"] for engine in there.values()):
        out.print("~ assumed, not measured here")
    if found["missing"]:
        out.print()
        table = _table("missing", "for", "command")
        for column in table.columns:
            column.justify, column.no_wrap = "left", True
        for one in found["missing"]:
            table.add_row(one["what"], one["for"], escape(one["command"]))
        out.print(table)


def _engine(engine: dict[str, Any]) -> str:
    """A backend in a line: what it runs on, and with what."""
    if "missing" in engine:
        return str(engine["missing"])
    if "blas" in engine:
        return f"{engine['device']}, BLAS {engine['blas']}"
    cuda, driver = (f"{int(engine[x]) // 1000}.{int(engine[x]) % 1000 // 10}" for x in ("cuda", "driver"))
    memory = f"{engine['memory']} of memory, {format_size(engine['free'])} free"
    return f"{engine['device']}, {memory}; cupy {engine['cupy']}, CUDA {cuda}, driver for CUDA {driver}"


def _rate(engine: dict[str, Any], name: str, rate: float | None, unit: str) -> str:
    if rate is None:
        return ""
    return ("~ " if name in engine["assumed"] else "") + format_rate(rate, unit)


@contextmanager
def doing(enabled: bool) -> Iterator[Callable[[str], None]]:
    """A line on stderr that says what is being done."""
    if not enabled:
        yield lambda what: None
        return
    with Console(stderr=True).status("") as status:
        yield lambda what: status.update(escape(what))


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def _scalar(value: complex) -> str:
    return "" if value == 1 else f"{value:g} "


def print_bench(result: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Rungs beside cuBLAS: a table for each dtype, of the fastest variant of each rung."""
    out = _console(132)
    out.print(f"[bold]{escape(result['device'])}[/], clock at most {result['max clock'] or '-'} MHz")
    columns = "GFLOP/s", "of peak", "of cuBLAS", "flop/byte", "loads", "stores", "conflicts", "occupancy"
    variants: dict[str, set[tuple[int, ...]]] = {}
    for row in result["rows"]:
        variants.setdefault(row["kernel"], set()).add(tuple(row["params"].values()))
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        table = _table(f"\n{dtype}", "kernel", *columns)
        for column in table.columns[:2]:
            column.no_wrap, column.justify = True, "left"
        last = None
        for row in (row for row in rows if row["dtype"] == dtype):
            shape = _product_of(row)
            variant = (
                " " + ",".join(map(str, row["params"].values())) if len(variants[row["kernel"]]) > 1 else ""
            )
            numbers = (
                row.get(x)
                for x in ("intensity", "load sectors", "store sectors", "bank conflicts", "occupancy")
            )
            table.add_row(
                "" if shape == last else shape,
                row["kernel"] + variant,
                f"{row['flops'] / 1e9:.4g}",
                *("" if share is None else f"{share:.3f}" for share in (row["of peak"], row["of cublas"])),
                *("" if number is None else f"{number:.3g}" for number in numbers),
            )
            last = shape
        out.print(table)
    out.print(
        "\nflop/byte, loads and stores (sectors of 32 bytes) and bank conflicts are counted on paper, before caches; "
        "small products measure the launch"
    )
    if "not counted" in result:
        out.print(f"\nnothing is counted on the device: {escape(result['not counted'])}", soft_wrap=True)
    counted = _table("\ncounted", "product", "kernel", *AGAINST)
    for column in counted.columns[:3]:
        column.no_wrap, column.justify = True, "left"
    for row in (row for row in rows if "ncu" in row):
        counted.add_row(row["dtype"], _product_of(row), row["kernel"], *against(row))
    if counted.row_count:
        out.print(counted)
        out.print(f"\n{BY_NCU}")


def _product_of(row: dict[str, Any]) -> str:
    return "x".join(map(str, row["shape"])) + (" beta 1" if row["beta"] else "")


def print_tuning(tuning: Tuning, path: str) -> None:
    """Rates of the rungs by dtype and class of shapes, the fastest first."""
    out = _console()
    table = _table("dtype", "class", "kernel", "TFLOP/s", "parameters")
    for dtype, classes in tuning.rungs.items():
        for name, found in classes.items():
            for rung, best in sorted(found.items(), key=lambda item: -item[1].rate):
                params = " ".join(f"{key}={value}" for key, value in best.params.items())
                table.add_row(dtype, name, rung, f"{best.rate / 1e12:.4g}", params)
    out.print(table)
    out.print(f"\nkept in {path}")
