"""Print with rich: plans, reports, checks, measurements, the machine, jobs, and what a command does now.

Texts from elsewhere are shown without control characters: see `oocgemm.system.text`.
"""

import io
import logging
import re
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from itertools import groupby
from threading import Event, Thread
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rich import markup
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Table

from oocgemm.cli.process import print_note
from oocgemm.jobs.support import OUT
from oocgemm.planning import Calibration, Plan
from oocgemm.planning.cost.machine import LINKS, calibrated_rates
from oocgemm.planning.partition import Partition
from oocgemm.planning.units import counted, format_percent, format_rate, format_size, format_time
from oocgemm.reports.advice import diagnosis_lines
from oocgemm.reports.charts import gantt, unit_gantt
from oocgemm.reports.sections import HEAD, heading, labels, summary
from oocgemm.reports.sections import row as row_of
from oocgemm.service.job_spec import parameters
from oocgemm.service.protocol import ID_LENGTH, SHORT, State
from oocgemm.system.text import LINES, plain
from oocgemm.timeline import Report, Timeline, in_place, same_product
from oocgemm.timeline.activities import COMPUTE, lanes_of
from oocgemm.timeline.metrics import Distribution

if TYPE_CHECKING:
    from oocgemm.jobs.verify import Verification
    from oocgemm.kernels.tuning import Tuning

SELDOM = 10.0  # seconds between progress lines if stderr is not a terminal


class PlainConsole(Console):
    """A console that prints no control characters except its own."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for part in super().render(renderable, options):
            yield part if part.control else Segment(plain(part.text, keep="\n"), part.style)


def escape(text: str) -> str:
    """Return a text on one line, without control characters, in which rich sees no markup."""
    return markup.escape(plain(text))


def print_traceback() -> None:
    """Print the traceback of the present exception on stderr."""
    print(plain(traceback.format_exc(), keep=LINES), end="", file=sys.stderr)


class _Stream(io.TextIOBase):
    def __init__(self, stream: io.TextIOBase) -> None:
        self._stream = stream

    def write(self, text: str, /) -> int:
        self._stream.write(plain(text, keep=LINES))
        return len(text)

    def flush(self) -> None:
        self._stream.flush()


class _Formatter(logging.Formatter):
    """Formats a message on one line. The lines of a traceback follow."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - a method of logging
        return plain(super().formatMessage(record))


def use_plain_log() -> None:
    """Print no control characters on stderr, because this process prints what others send."""
    handler = logging.StreamHandler(_Stream(sys.stderr))  # type: ignore[arg-type]
    handler.setFormatter(_Formatter())
    handler.setLevel(logging.WARNING)
    logging.getLogger("uvicorn").addHandler(handler)
    logging.getLogger("asyncio").addHandler(handler)


def table_of(*columns: str, left: Collection[int] = (0,)) -> Table:
    """Return a table. Columns with numbers in `left` are aligned left. Wide cells are folded, never cut."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number in left else "right", overflow="fold")
    return table


def print_table(out: Console, table: Table) -> None:
    """Print a table without breaking a word. If it is too wide, print a block of lines per row."""
    full = full_width(out, table)
    columns = [[column.header, *column.cells] for column in table.columns]
    widths = [max(len(line) for text in texts for line in str(text).split("\n")) for texts in columns]
    widest = max(range(len(widths)), key=widths.__getitem__)
    word = max(len(word) for text in columns[widest] for word in ["", *str(text).split()])
    if full - widths[widest] + word <= out.width:
        for number, column in enumerate(table.columns):
            column.no_wrap = full <= out.width or number != widest
        out.print(table)
        return
    names = [str(column.header).strip() for column in table.columns]
    for first, *others in zip(*(column.cells for column in table.columns), strict=True):
        out.print(f"[bold]{' '.join(filter(None, (names[0], str(first))))}[/]")
        for name, cell in zip(names[1:], others, strict=True):
            if cell:
                out.print(f"  {name} {cell}")


def full_width(out: Console, table: Table) -> int:
    """Return the width of a table, in columns, if no cell is folded."""
    return Measurement.get(out, out.options.update(max_width=1000), table).maximum


@contextmanager
def doing(enabled: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function that takes the present task's name. Show this name and the elapsed time on stderr.

    A terminal shows one line, which is removed at the end. Other outputs get a line every `SELDOM` seconds.
    """
    console = Console(stderr=True, highlight=False)
    if not enabled:
        yield lambda what: None
    elif console.is_terminal:
        columns = SpinnerColumn("line"), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=None)
            yield lambda what: bar.update(task, description=plain(what))
    else:
        with _lines(console) as say:
            yield say


@contextmanager
def _lines(console: Console) -> Iterator[Callable[[str], None]]:
    started, ended, task = perf_counter(), Event(), "starting"

    def say(what: str) -> None:
        nonlocal task
        task = plain(what)

    def repeat() -> None:  # a thread, so that lines appear even if `say` is not called for minutes
        while not ended.wait(SELDOM):
            console.print(f"{format_time(perf_counter() - started)}  {task}", soft_wrap=True, markup=False)

    thread = Thread(target=repeat, name="oocgemm-progress", daemon=True)
    try:
        with suppress(RuntimeError):  # no thread can be started: print no lines, but continue the work
            thread.start()
        yield say
    finally:
        ended.set()
        if thread.ident is not None:
            thread.join()


# Maximum number of devices that are printed. If there are more, those that computed least are printed.
MAX_UNITS = 16
TRAFFIC = ("read", "h2d", "d2h", "write")
# The counts of a kernel that the last columns of its table show.
COUNTED = ("intensity", "load_sectors", "store_sectors", "bank_conflicts", "occupancy")
# Characters for a lane's name, and for the shortest bar in the Gantt chart.
LANE_WIDTH, MIN_GANTT = 8, 10


def print_calibration(found: Calibration, path: str) -> None:
    """Print the measured rates of a machine, and where they are stored."""
    out = console()
    out.print(f"[bold]{escape(found.device)}[/] ({found.backend}), {found.samples['seconds']:.0f} s\n")
    measured: dict[str, dict[str, float]] = found.samples["kernels"]
    depths = sorted({int(depth) for rates in measured.values() for depth in rates})
    fast = max(fit.peak for fit in found.kernels.values()) >= 1e12
    scale, unit = (1e12, "TFLOP/s") if fast else (1e9, "GFLOP/s")
    kernels = table_of(f"{unit}, panels deep", *map(str, depths), "fitted peak", "halved at")
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
    links = table_of("link", "GB/s")
    for name, rate in moved.items():
        links.add_row(name, f"{rate / 1e9:.3g}")
    out.print(links)
    out.print(f"prefaulting memory {found.rates['arena_seconds_per_byte'] * 2**30:.3g} s per GiB")
    out.print(f"submitting an operation {format_time(found.rates['issue'])}")
    others = found.samples["cores_used_by_others"]
    if others >= 0.2:
        out.print(
            f"other programs used {others:.1f} cores, so the rates are too low: calibrate again when they "
            "have ended"
        )
    out.print(f"\nstorage: {escape(found.samples['path'])}", soft_wrap=True)
    out.print(f"stored in {escape(path)}", soft_wrap=True)


def print_bench(result: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Print the fastest variant of each kernel, compared with cuBLAS: the `rows` of `result` to print."""
    out = console()
    out.print(f"[bold]{escape(result['device'])}[/], clock at most {result['max_clock'] or '-'} MHz")
    columns = "GFLOP/s", "of peak", "of cuBLAS", "flop/byte", "loads", "stores", "conflicts", "occupancy"
    variants: dict[str, set[tuple[int, ...]]] = {}
    for row in result["rows"]:
        variants.setdefault(row["kernel"], set()).add(tuple(row["params"].values()))
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        table = table_of(f"\n{dtype}", "kernel", *columns, left=range(2))
        last = None
        for row in (row for row in rows if row["dtype"] == dtype):
            shape, kernel = _product_of(row), row["kernel"]
            if len(variants[kernel]) > 1:
                kernel += " " + ",".join(map(str, row["params"].values()))
            shares, numbers = (row["of_peak"], row["of_cublas"]), (row.get(name) for name in COUNTED)
            cells = ["" if shape == last else shape, kernel, f"{row['flops'] / 1e9:.4g}"]
            cells += ["" if share is None else f"{share:.3f}" for share in shares]
            table.add_row(*cells, *("" if number is None else f"{number:.3g}" for number in numbers))
            last = shape
        _print_unfolded(out, table)
    out.print(
        "\nflop/byte, loads and stores (sectors of 32 bytes) and bank conflicts are computed as if without "
        "caches; the time of small products is that of a launch"
    )
    if "not_counted" in result:
        out.print(f"\nno counters of the device: {escape(result['not_counted'])}", soft_wrap=True)
    from oocgemm.machine.kernel_bench import AGAINST, BY_NCU, against

    counted = table_of("\ncounted", "product", "kernel", *AGAINST, left=range(3))
    for row in (row for row in rows if "ncu" in row):
        counted.add_row(row["dtype"], _product_of(row), row["kernel"], *against(row))
    if counted.row_count:
        _print_unfolded(out, counted)
        out.print(f"\n{BY_NCU}")


def _print_unfolded(out: Console, table: Table) -> None:
    """Print a table in its full width, without folding cells. A narrow terminal wraps its lines."""
    PlainConsole(highlight=False, width=max(out.width, full_width(out, table))).print(table)


def _product_of(row: dict[str, Any]) -> str:
    return "x".join(map(str, row["shape"])) + (" beta 1" if row["beta"] else "")


def print_tuning(tuning: "Tuning", path: str) -> None:
    """Print the rates of kernels per dtype and class of shapes, the fastest first."""
    out = console()
    table = table_of("dtype", "class", "kernel", "TFLOP/s", "parameters")
    for dtype, classes in tuning.rungs.items():
        for name, found in classes.items():
            for rung, best in sorted(found.items(), key=lambda item: -item[1].rate):
                params = " ".join(f"{key}={value}" for key, value in best.params.items())
                table.add_row(dtype, name, rung, f"{best.rate / 1e12:.4g}", params)
    print_table(out, table)
    out.print(f"\nstored in {path}")


def print_scaling(partitions: Sequence[Partition]) -> None:
    """Print a row per number of workers. Consecutive numbers share a row if the same parts are chosen."""
    out = console()
    columns = "workers", "used", "parts", "predicted", "speed-up", "bottleneck", "why no more"
    table = table_of(*columns, left=(0, 6))
    for _, alike in groupby(partitions, key=lambda p: (p.workers, p.grid, p.plan.tile)):
        first, *others = alike
        final = others[-1] if others else first
        counts = f"{first.available}-{final.available}" if others else str(first.available)
        cells = [counts, str(final.workers), "x".join(map(str, final.grid)), format_time(final.seconds)]
        table.add_row(*cells, f"{final.speed_up:.2f}", final.bottleneck, final.why)
    out.print()
    print_table(out, table)
    out.print(partitions[-1].reason)


def _print_distribution(out: Console, report: Report, timeline: Timeline) -> None:
    """Print the figures of a run on several devices, and a row for each device."""
    found = report.distribution
    if found is None:
        return
    for name, text in summary(found, timeline):
        out.print(f"[bold]{name}[/] {escape(text)}")
    out.print()
    table = table_of(*HEAD, left=range(2))
    shown, names = _shown(found), labels(found.units)
    for number in shown:
        table.add_row(*map(escape, row_of(found.units[number], names[number])))
    print_table(out, table)
    if left := len(found.units) - len(shown):
        out.print(f"{left} more devices, which computed longer: --json and --html show all", soft_wrap=True)


def _print_gantt(out: Console, found: Distribution | None, timeline: Timeline) -> None:
    """Print a line per lane, or per device of a run on several devices, that shows when it was busy."""
    shown = [] if found is None else _shown(found)
    names = [] if found is None else [labels(found.units)[number] for number in shown]
    margin = max(map(len, names), default=LANE_WIDTH)
    width = max(MIN_GANTT, out.width - margin - 3)
    lines = gantt(timeline, width)
    if found is not None:
        lines = list(zip(names, unit_gantt(timeline, shown, width), strict=True))
    for name, picture in lines:
        out.print(f"{name:>{margin}} │{picture}│", soft_wrap=True, markup=False)
    out.print(f"{'':>{margin}}  0{format_time(timeline.wall / 1e9):>{width - 1}}", soft_wrap=True)


def _shown(found: Distribution) -> list[int]:
    by_compute = sorted(range(len(found.units)), key=lambda number: found.units[number].compute)
    return sorted(by_compute[:MAX_UNITS])


def console() -> Console:
    """Return a console on stdout, as wide as the terminal or $COLUMNS, else 80 columns."""
    return PlainConsole(highlight=False)


def print_plan(plan: Plan, explain: bool = False) -> None:
    """Print a plan: the product, tile and buffers, memory, traffic, predicted times."""
    out = console()
    problem, tile, slots = plan.problem, plan.tile, plan.slots
    down, across = plan.grid.shape
    out.print(
        f"[bold]C[/] {problem.m} x {problem.n}  =  {_scalar(problem.alpha)}{'  @  '.join(problem.factors)}"
        + (f"  +  {_scalar(problem.beta)}C" if problem.updates_c else "")
        + f"   {problem.described_dtype}"
        + ("" if problem.c_dtype == problem.a_dtype else f" into {problem.c_dtype}")
        + ("" if problem.compute == "native" else f" by {problem.compute}")
        + "".join(f", {step.kind.replace('_', ' ')}" for step in problem.epilogue)
        + f", {problem.flops:.3g} flops"
    )
    out.print(
        f"[bold]tile[/] {tile.m} x {tile.n}, panels {tile.k} deep: {down} x {across} tiles, "
        f"{counted(plan.grid.steps, 'step')} each, {plan.steps} in all"
    )
    on_host = f"host: A {slots.host_a}, B {slots.host_b}, C {slots.host_c} "
    if slots.unified:
        on_host = "none on the host, since the device uses the same memory; "
    out.print(
        f"[bold]slots[/] device: C {slots.c}, A {slots.a}, B {slots.b}; {on_host}"
        f"strips of {slots.strip} rows; "
        f"{plan.candidate.io_threads} I/O threads"
    )
    out.print()
    memory = table_of("memory", "used", "budget", "of which", left=(0, 3))
    on_device = "device" if plan.devices == 1 else f"each of {plan.devices} devices"
    for tier, used, total, budget in (
        (on_device, plan.footprint.device, plan.footprint.device_total, plan.budgets.device),
        ("host", plan.footprint.host, plan.footprint.host_total, plan.budgets.host),
    ):
        parts = ", ".join(f"{name} {format_size(size)}" for name, size in used.items() if size)
        memory.add_row(tier, format_size(total), format_size(budget), parts)
    print_table(out, memory)
    out.print()
    traffic = table_of("link", "bytes", "required", "lower bound", "ratio", "predicted")
    lanes = plan.prediction.lanes
    for link in TRAFFIC:
        if plan.traffic[link]:
            least = plan.least[link]
            ratio = f"{plan.traffic[link] / least:.2f}" if least else "-"
            sizes = (format_size(x[link]) for x in (plan.traffic, plan.required, plan.least))
            traffic.add_row(link, *sizes, ratio, format_time(lanes[link]) if lanes[link] else "")
    for lane in (lane for lane in lanes if lane not in TRAFFIC and lanes[lane]):
        traffic.add_row(lane, "", "", "", "", format_time(lanes[lane]))
    print_table(out, traffic)
    if plan.decoded:
        out.print(f"decoded by the GPU: {plan.decoded}")
    if coding := plan.layouts.codings.c:
        out.print(f"compressed by the GPU: C ({coding.codec})")
    for operand, factor in plan.amplification.items():
        if factor > 1.005:
            more = f"decodes {factor:.2f} times its bytes"
            out.print(f"reading {operand} {more}: its chunks cross panel borders")
    prediction = plan.prediction
    out.print()
    out.print(
        f"[bold]predicted[/] {format_time(prediction.total)}, longest lane [bold]{prediction.bottleneck}[/] "
        f"(start-up {format_time(prediction.start_up)}, bubbles {format_time(prediction.bubbles)}, "
        f"tail {format_time(prediction.tail)})"
    )
    _print_model(out, plan.machine.name, plan.machine.calibrated)
    if plan.note:
        out.print(f"Note: {plan.note}", soft_wrap=True)
    if explain:
        _print_considered(out, plan)


def _print_model(out: Console, name: str, calibrated: bool) -> None:
    out.print(f"machine model: {escape(name)}", soft_wrap=True)
    if not calibrated:
        out.print("times are rough estimates: run `oocgemm calibrate` on this machine")


def _print_considered(out: Console, plan: Plan) -> None:
    """Print each considered plan with the times of its lanes, or only the longest on a narrow terminal."""
    out.print()
    rows = plan.explain()
    lanes = [lane for lane in plan.prediction.lanes if any(row["lanes"][lane] for row in rows)]
    table = _considered(rows, lanes, lambda row: [format_time(row["lanes"][lane]) for lane in lanes])
    if full_width(out, table) > out.width:

        def longest(row: dict[str, Any]) -> list[str]:
            lane, seconds = max(row["lanes"].items(), key=lambda part: part[1])
            return [f"{lane} {format_time(seconds)}"]

        table = _considered(rows, ["longest lane"], longest)
    print_table(out, table)


def _considered(
    rows: Sequence[dict[str, Any]], columns: Sequence[str], cells: Callable[[dict[str, Any]], list[str]]
) -> Table:
    last = len(columns) + 4
    table = table_of("considered", "C slots", "predicted", *columns, "bubbles", "why not", left=(0, last))
    for column in table.columns[:-1]:
        column.no_wrap = True
    for row in rows:
        table.add_row(
            *(row["tile"], str(row["c_slots"]), format_time(row["total"]), *cells(row)),
            *(format_time(row["bubbles"]), row["why"]),
        )
    return table


def print_report(report: Report, timeline: Timeline, *, advise: bool = False) -> None:
    """Print what limited the speed of a run, with `advise` also what to change, figures and Gantt chart."""
    out = console()
    for text in diagnosis_lines(report, timeline, advise=advise):
        out.print(escape(text))
    out.print()
    rate = f", {format_rate(report.flop_rate, 'FLOP')}" if report.flop_rate else ""
    out.print(f"[bold]T[/] {format_time(report.wall)}{rate}")
    # A run without copies, as on the CPU, has no overlap of copies.
    copies = f"[bold]copy overlap[/] {format_percent(report.copy_overlap)}   "
    out.print(
        f"[bold]compute share[/] {format_percent(report.compute_share)}   "
        f"{copies if report.copy_overlap is not None else ''}"
        f"[bold]storage overlap[/] {format_percent(report.storage_overlap)}   "
        + (f"[bold]efficiency[/] {format_percent(report.efficiency)}" if not report.distribution else "")
        + (" (needs `oocgemm calibrate`)" if _uncalibrated(report, timeline) else "")
    )
    stalls = {cause: share for cause, share in report.shares.items() if cause != COMPUTE}
    parts = ", ".join(
        f"{cause} {format_percent(share)} ({format_time(report.exposed[cause])})"
        for cause, share in stalls.items()
    )
    total = format_percent(sum(stalls.values())), format_time(sum(report.exposed.values()))
    out.print(f"[bold]exposed[/] {total[0]} ({total[1]}): {parts}" if stalls else "[bold]exposed[/] nothing")
    if report.checks:
        _print_checks(out, report.checks)
    plan = timeline.header.get("plan", {})
    if "machine" in plan:
        _print_model(out, plan["machine"], plan.get("calibrated", False))
    if kernels := timeline.header.get("backend", {}).get("multiplied by"):
        out.print(f"multiplied by {escape(', '.join(kernels))}", soft_wrap=True)
    if zero_copy := in_place(timeline):
        out.print(zero_copy)
    if retried := timeline.header.get("retried"):
        last = escape(retried[-1])
        out.print(f"retried {len(retried)} failed reads, the last one: {last}", soft_wrap=True)
    _print_distribution(out, report, timeline)
    out.print()
    busy = "mean busy" if report.devices > 1 else "busy"
    table = table_of("lane", busy, "operations", "bytes", "rate", "required", "lower bound")
    for lane in lanes_of(timeline.spans):
        figures = report.lanes[lane]
        moved = figures["bytes"]
        rate = format_rate(moved / figures["busy"]) if moved and figures["busy"] else ""
        if lane == "compute" and figures["busy"]:
            rate = format_rate(report.flops / figures["busy"], "FLOP")
        # If no operation ran on read, the row of decode shows the bounds of reads; likewise encode for
        # writes.
        through = {"decode": "read", "encode": "write"}.get(lane, lane)
        link = report.traffic.get(lane if through in report.lanes else through, {})
        bounds = (format_size(link[x]) if link.get(x) is not None else "" for x in ("required", "least"))  # type: ignore[arg-type]
        size = format_size(moved) if moved else ""
        count = str(round(figures["operations"]))
        table.add_row(lane, format_time(figures["busy"]), count, size, rate, *bounds)
    print_table(out, table)
    out.print()
    _print_gantt(out, report.distribution, timeline)


def _uncalibrated(report: Report, timeline: Timeline) -> bool:
    """Return whether the efficiency is missing, and a calibration would give it; not for tf32 and bf16."""
    compute = timeline.header.get("plan", {}).get("problem", {}).get("compute", "native")
    if report.distribution or report.unfinished or compute in ("tf32", "bf16"):
        return False
    return report.efficiency is None


def print_verification(found: "Verification") -> None:
    """Print the result of `verify`, with the probabilities of a false alarm and of a missed error."""
    out, checked = console(), "C" if found.uplo == "full" else f"The {found.uplo} triangle of C"
    out.print(
        f"[bold]{checked} is {'correct' if found else 'wrong'}[/]: its largest error, in sums of rows, is "
        f"{found.excess:.2g} times what rounding may cause"
    )
    if found:
        out.print(
            f"An element that is off by more than {2 * found.tolerance:.2g} is never missed if it is the "
            f"only wrong one in its row. Several wrong elements in a row are missed with a "
            f"probability of at most {100 * found.miss_probability:.2g}%"
        )
    model = {
        "probabilistic": "rounding errors are independent and of mean 0 (Higham and Mary, 2019)",
        "worst-case": "all rounding errors have their largest size and the worst sign",
    }
    out.print(
        f"It is assumed that {model[found.bound]}. Then a correct C fails with a probability of at most "
        f"{found.false_alarm:.0e}"
    )
    out.print(
        f"{format_size(found.bytes)} in {format_time(found.seconds)}, "
        f"{format_rate(found.bytes / found.seconds)}"
    )


def _print_checks(out: Console, checks: dict[str, Any]) -> None:
    redone = checks["recomputed"]
    text = f"{counted(checks['tiles'], 'tile')} in {counted(checks['blocks'], 'block')}"
    if checks["undecided"]:
        text += f", {checks['undecided']} of them for nonfinite values only"
    text += f"; recomputed {len(redone)}"
    if redone:
        which = ", ".join(f"({i}, {j})" for i, j in redone[:5])
        text += f": tiles {which}" + (", ..." if len(redone) > 5 else "")
    text += f"; took {format_percent(checks['core_share'])} of the cores' time"
    if checks["device_seconds"]:
        text += f" and {format_time(checks['device_seconds'])} of the device's"
    if checks.get("sampled"):
        again, seconds = counted(checks["sampled"], "element"), format_time(checks["sampled_seconds"])
        text += f"; computed {again} again in {seconds}"
    out.print(f"[bold]checked[/] {text}", soft_wrap=True)


def print_comparison(names: Sequence[str], reports: Sequence[Report], timelines: Sequence[Timeline]) -> None:
    """Print two runs side by side. Changes of times and bytes are shown only for runs of the same product."""
    out = console()
    for name, report, timeline in zip(names, reports, timelines, strict=True):
        out.print(f"[bold]{escape(name)}[/]  {escape(' '.join(diagnosis_lines(report, timeline)))}")
    alike = same_product(timelines)
    if not alike:
        products = " and ".join(heading(timeline.header) for timeline in timelines)
        out.print(f"different products, {escape(products)}: compare rates and shares, not times and bytes")
    out.print()
    # Long names are printed above the table.
    heads = names if max(map(len, names)) <= out.width // 4 else ("first", "second")
    table = table_of("", *map(escape, heads), "change")
    first, second = reports

    def row(name: str, form: Callable[[float], str], old: float, new: float, *, compared: bool) -> None:
        change = f"{100 * (new / old - 1):+.1f}%" if compared and old else ""
        table.add_row(name, form(old), form(new), change)

    row("T", format_time, first.wall, second.wall, compared=alike)
    if first.flop_rate and second.flop_rate:
        row("rate", partial(format_rate, unit="FLOP"), first.flop_rate, second.flop_rate, compared=True)
    for name in ("compute_share", "copy_overlap", "storage_overlap", "efficiency"):
        shares = [getattr(report, name) for report in reports]
        if name == "copy_overlap" and shares == [None, None]:
            continue
        table.add_row(name.replace("_", " "), *map(format_percent, shares), "")
    for cause in dict.fromkeys(cause for report in reports for cause in report.exposed):
        parts = [(report.exposed if alike else report.shares).get(cause, 0.0) for report in reports]
        row(f"exposed, {cause}", format_time if alike else format_percent, *parts, compared=alike)
    for link in TRAFFIC:
        moved = [report.traffic[link]["bytes"] or 0 for report in reports]
        if any(moved):
            row(f"bytes, {link}", format_size, *moved, compared=alike)
    print_table(out, table)


def print_info(found: dict[str, Any]) -> None:
    """Print versions, machine, backends with their rates, and what is missing."""
    out = console()
    here, engines = found["machine"], {name: found[f"{name}_backend"] for name in ("host", "cuda")}
    for name, text in {
        "versions": ", ".join(f"{package} {version}" for package, version in found["versions"].items()),
        "machine": f"{here['processor']}, {here['cores']} cores, {format_size(here['memory'])} of memory, "
        f"{format_size(here['available'])} available; {here['platform']}; "
        f"{'with' if here['compiled'] else 'without'} compiled host code",
        **{name: _engine(engine) for name, engine in engines.items()},
    }.items():
        out.print(f"[bold]{name:<9}[/] {escape(text)}", soft_wrap=name in engines)
    there = {name: engine for name, engine in engines.items() if "missing" not in engine}
    out.print()
    for name, engine in there.items():
        table = table_of(f"rates of {name}", "assumed", "probed", "measured", "in use")
        for group, unit in (("kernels", "FLOP"), ("links", "B")):
            for rate, value in engine[group].items():
                sources = (engine["sources"][rate].get(x) for x in ("assumed", "probed", "measured"))
                cells = ("" if x is None else format_rate(x, unit) for x in (*sources, value))
                table.add_row(LINKS.get(rate, rate.replace("_", " ")), *cells)
        print_table(out, table)
        out.print(f"{escape(engine['rates'])}\n", soft_wrap=True)
    if found["missing"]:
        table = table_of("missing", "for", "command", left=range(3))
        for column in table.columns:
            column.no_wrap = column.header != "for"
        for one in found["missing"]:
            table.add_row(one["what"], one["for"], escape(one["command"]))
        print_table(out, table)


def _engine(engine: dict[str, Any]) -> str:
    """Return one line for a backend: device, memory and libraries."""
    if "missing" in engine:
        return str(engine["missing"])
    if "blas" in engine:
        return f"{engine['device']}, BLAS {engine['blas']}"
    cuda, driver = (f"{int(engine[x]) // 1000}.{int(engine[x]) % 1000 // 10}" for x in ("cuda", "driver"))
    memory = f"{engine['memory']} of memory, {format_size(engine['free'])} free"
    return f"{engine['device']}, {memory}; cupy {engine['cupy']}, CUDA {cuda}, driver for CUDA {driver}"


def _scalar(value: complex) -> str:
    return "" if value == 1 else f"{value:g} "


Info = Mapping[str, Any]
# What a job in one of these states waits for.
_UNTIL = {State.HELD: "released", State.PAUSED: "resumed"}


def print_jobs(jobs: Sequence[Info]) -> None:
    """Print a table of jobs. Ids are shortened to their last characters, as far as these are distinct."""
    out = console()
    if not jobs:
        out.print("no jobs")
        return
    length = short_length([job["id"] for job in jobs])
    columns = "id", "name", "owner", "state", "reason", "priority", "progress", "start"
    table = table_of(*columns, left=range(5))
    now = time.time()
    for job in jobs:
        found = job["progress"]
        done = f"{100 * found['done'] // found['total']}%" if found and found["total"] else ""
        progress = ", ".join(filter(None, (done, left_of(job, now))))
        cells = [job["id"][-length:], title_of(job), job["owner"], job["state"]]
        cells += [reason_of(job), str(job["priority"]), progress, start_of(job, now)]
        table.add_row(*map(escape, cells))
    print_table(out, table)


def short_length(ids: Sequence[str]) -> int:
    """Return how many of the last characters of ids tell them apart, at least `SHORT`.

    >>> short_length(["X0000001", "Y0000001", "X0000002"])
    8
    """
    return next(
        (size for size in range(SHORT, ID_LENGTH) if len({each[-size:] for each in ids}) == len({*ids})),
        ID_LENGTH,
    )


def title_of(job: Info) -> str:
    """Return the name of a job; its product if it has none, as the page of the service does.

    >>> title_of({"name": "", "a": "data:dir/A.zarr", "b": "data:B.npy", "c": "out:C.zarr"})
    'C.zarr = A.zarr × B.npy'
    >>> title_of({"name": "", "verb": "gram", "x": "data:X.zarr", "out": "out:K.zarr"})
    'K.zarr = gram(X.zarr)'
    """
    verb, operands = job.get("verb", "gemm"), _operands(job)
    *given, out = (re.split("[:/]", each)[-1] for each in operands.values())
    what = " × ".join(given) if verb == "gemm" else f"{verb}({', '.join(given)})"
    return str(job["name"]) or f"{out} = {what}"


def _operands(job: Info) -> dict[str, str]:
    """Return the operands of a job and the place of its result, by name. The place is the last one."""
    names = sorted(found := parameters(job.get("verb", "gemm")), key=lambda name: found[name] == OUT)
    given = {name: job[name] for name in names if job.get(name) is not None}
    return {name: each if isinstance(each, str) else _made(each) for name, each in given.items()}


def _made(made: Any) -> str:
    """Return a short text for a number, or for a made value: what makes it."""
    return next(iter(made)) if isinstance(made, dict) else str(made)


def reason_of(job: Info) -> str:
    """Return why a job waits; "" if it does not wait, or if the reason is unknown."""
    return f"until {_UNTIL[job['state']]}" if job["state"] in _UNTIL else job["reason"] or ""


def start_of(job: Info, now: float) -> str:
    """Return when a waiting job will start, relative to `now`; "" if that is unknown."""
    if job.get("state") in _UNTIL:
        return f"when {_UNTIL[job['state']]}"
    start = job["predicted_start"]
    if start is None:
        return ""
    return f"in {format_time(start - now)}" if start > now + 1 else "now"


def left_of(job: Info, now: float) -> str:
    """Return how long a running job will still take, by its finished tiles; "" if it does not run."""
    if job["state"] != State.RUNNING or not job["started"] or not job["progress"]:
        return ""
    (done, total), passed = (job["progress"][each] for each in ("done", "total")), now - job["started"]
    seconds = passed / done * (total - done) if done > 1 else job["predicted_s"] - passed
    if done < 2 and seconds < 0:  # it takes longer than predicted
        return ""
    return "ends soon" if seconds < 1 else f"{format_time(seconds)} left"


def print_job(job: Info) -> None:
    """Print one job: its product, state, plan, memory and times."""
    out, now = console(), time.time()
    state = job["state"] + (f" ({reason})" if (reason := reason_of(job)) else "")
    plan, progress = job["plan"], job["progress"]
    verb, (*given, place) = job.get("verb", "gemm"), _operands(job).values()
    options = ", ".join(
        f"{name} {format_size(value) if name.endswith('memory') and isinstance(value, int) else value}"
        for name, value in job["options"].items()
    )
    rows = [
        *(("job", job["id"]), ("name", title_of(job)), ("owner", job["owner"]), ("state", state)),
        ("error", job["error"]),
        *(("warning", each) for each in job.get("warnings", ())),
        ("product", f"{given[0]} @ {given[1]} -> {place}" if verb == "gemm" else ""),
        (verb, f"{', '.join(given)} -> {place}" if verb != "gemm" else ""),
        ("extents", f"{plan['m']} x {plan['n']} x {plan['k']} {plan['a_dtype']}" if "m" in plan else ""),
        ("options", options),
        ("progress", f"{progress['done']} of {progress['total']} tiles" if progress else ""),
        ("left", left_of(job, now).removesuffix(" left")),
        ("priority", str(job["priority"])),
        ("memory", _needs(job)),
        ("predicted", format_time(job["predicted_s"])),
        ("starts", start_of(job, now)),
        ("device", "" if job["device"] is None else str(job["device"])),
        ("attempts", f"{job['attempt']}, of which {job['failures']} failed (at most {job['max_attempts']})"),
        ("needs", ", ".join(job["needs"])),
        *((name, _local(job[name])) for name in ("created", "started", "ended", "deadline")),
        ("exit code", "" if job["exit_code"] is None else str(job["exit_code"])),
        ("possible", ", ".join(job["actions"])),
    ]
    for name, value in rows:
        if value:
            out.print(f"[bold]{name:<10}[/] {escape(value)}", soft_wrap=True)


def print_planned(planned: Info) -> None:
    """Print what would happen if a job were submitted."""
    plan, out = planned["plan"], console()
    if "tile" in plan:
        tiles = " x ".join(map(str, plan["tiles"]))
        out.print(f"[bold]{'tile':<10}[/] {'x'.join(map(str, plan['tile']))}, {tiles} tiles")
    out.print(f"[bold]{'memory':<10}[/] {_needs(planned)}")
    out.print(f"[bold]{'predicted':<10}[/] {format_time(planned['predicted_s'])}")
    if start := start_of(planned, time.time()):
        out.print(f"[bold]{'starts':<10}[/] {start}")
    if plan.get("c_exists"):
        print_note(
            "C is unfinished: the job goes on with it. If A, B or options have changed since, it fails. To "
            "compute all of C anew, pass --overwrite"
        )


def _needs(job: Info) -> str:
    parts = (("device", "device_bytes"), ("host", "host_bytes"), ("disk", "disk_bytes"))
    return ", ".join(f"{name} {format_size(job[key])}" for name, key in parts if job.get(key))


def _local(at: float | None) -> str:
    return "" if at is None else datetime.fromtimestamp(at).isoformat(" ", "seconds")
