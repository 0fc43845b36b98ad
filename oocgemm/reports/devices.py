"""The section of the HTML page about the devices and workers of a run."""

from collections.abc import Sequence
from html import escape

from oocgemm.planning.units import format_percent
from oocgemm.reports.charts import lane_class, table
from oocgemm.reports.workers import HEAD, labels, row, summary
from oocgemm.timeline.metrics import Distribution, UnitFigures
from oocgemm.timeline.spans import Timeline

# Of more devices, only those are shown first that computed least.
MAX_ROWS, FEWEST = 16, 8


def devices_section(found: Distribution, timeline: Timeline) -> str:
    """Return the figures of a run on several devices or workers, and a table with a row for each device.

    Of many devices, those that computed least are shown, and all in a table that the reader can open.
    """
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
        rows.append([name, _bar(units[number]), *rest])
    return f'<div class="across">{table(head, rows)}</div>'


def _bar(unit: UnitFigures) -> str:
    """Return a bar of length T, divided into compute and the causes of exposed time."""
    pieces = "".join(
        f'<b class="{lane_class(cause)}" style="width:{100 * share:.3f}%" '
        f'title="{escape(cause)} {format_percent(share)} of T"></b>'
        for cause, share in unit.shares.items()
    )
    return f'<div class="stack thin">{pieces}</div>'
