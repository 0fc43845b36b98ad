"""Print the figures of a run on several devices or workers with rich."""

from rich.console import Console
from rich.table import Table

from oocgemm.cli.plain import escape
from oocgemm.cli.tables import print_table
from oocgemm.planning.units import format_time
from oocgemm.reports.distribution import HEAD, labels, row, summary
from oocgemm.reports.gantt import unit_gantt
from oocgemm.timeline import Report, Timeline
from oocgemm.timeline.metrics import Distribution

# Maximum number of devices that are printed. Of more, those are printed that computed least.
MAX_UNITS = 16
MIN_WIDTH = 10  # characters for T in a picture


def print_distribution(out: Console, report: Report, timeline: Timeline) -> None:
    """Print the figures of the whole run, and a row for each device.

    Print nothing for a run on one device.
    """
    found = report.distribution
    if found is None:
        return
    for name, text in summary(found, timeline):
        out.print(f"[bold]{name}[/] {escape(text)}")
    out.print()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate(HEAD):
        table.add_column(name, overflow="fold", justify="left" if number < 2 else "right")
    shown, names = _shown(found), labels(found.units)
    for number in shown:
        table.add_row(*map(escape, row(found.units[number], names[number])))
    print_table(out, table)
    if left := len(found.units) - len(shown):
        out.print(f"{left} more devices, which computed longer: --json and --html show all", soft_wrap=True)


def print_unit_gantt(out: Console, found: Distribution, timeline: Timeline) -> None:
    """Print a line for each device that shows when it computed."""
    shown, names = _shown(found), labels(found.units)
    margin = max(len(names[number]) for number in shown)
    width = max(MIN_WIDTH, out.width - margin - 3)
    for number, picture in zip(shown, unit_gantt(timeline, shown, width), strict=True):
        out.print(f"{names[number]:>{margin}} │{picture}│", soft_wrap=True, markup=False)
    out.print(f"{'':>{margin}}  0{format_time(timeline.wall / 1e9):>{width - 1}}", soft_wrap=True)


def _shown(found: Distribution) -> list[int]:
    """Return the positions of the devices to print, in ascending order."""
    by_compute = sorted(range(len(found.units)), key=lambda number: found.units[number].compute)
    return sorted(by_compute[:MAX_UNITS])
