"""The figures of a run on several devices or workers in words: a summary, and a row for each device."""

from collections.abc import Sequence

from oocgemm.planning.units import format_percent, format_rate, format_size, format_time
from oocgemm.timeline.activities import COMPUTE
from oocgemm.timeline.metrics import Distribution, UnitFigures
from oocgemm.timeline.spans import Timeline

# Longer names of workers, such as addresses, are replaced by "worker" and a number in charts.
MAX_LABEL = 9
HEAD = ("worker", "device", "parts", "compute", "largest wait", "end", "clock offset", "lost")


def labels(units: Sequence[UnitFigures]) -> list[str]:
    """Return a short, distinct name for each device, for the rows of charts.

    It is the name of the worker, followed by the number of the device if a worker has several.
    """
    names = [*dict.fromkeys((unit.worker, unit.host) for unit in units)]
    short = len({name for name, _ in names}) == len(names) and all(
        len(name) <= MAX_LABEL for name, _ in names
    )
    several = len(units) > len(names)
    found = []
    for unit in units:
        number = names.index((unit.worker, unit.host))
        name = unit.worker if short else f"worker {number}"
        device = f"device {unit.device}" if not unit.worker else f"{name}/{unit.device}"
        found.append(device if several or not unit.worker else name)
    return found


def counts(found: Distribution) -> str:
    """Return the numbers of devices, workers and hosts as a text.

    The workers of a run in one process are not counted, since there is one. Devices are not counted if each
    worker has one.
    """
    devices, workers = _counted(len(found.units), "device"), _counted(found.workers, "worker")
    if not found.units[0].worker:
        return devices
    where = f"{workers} on {_counted(found.hosts, 'host')}"
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
    rows += [
        ("balance", format_percent(found.balance)),
        ("last operations end", ends),
        ("storage reads", reads),
    ]
    if lost["attempts"] or lost["flops"]:
        work = f"{format_flops(lost['flops'])} in {format_time(lost['seconds'])}"
        rows.append(("lost", f"{work}; {_counted(int(lost['attempts']), 'process')} died or failed"))
    if unread := timeline.header.get("unread"):
        rows.append(
            ("missing", f"{_counted(len(unread), 'log')} could not be read, the last one: {unread[-1]}")
        )
    return rows


def title(unit: UnitFigures) -> str:
    """Describe a device in one line, for tooltips."""
    number = f"device {unit.device}"
    return " on ".join(part for part in (unit.worker or number, unit.host) if part) + (
        f", {number}" if unit.worker else ""
    )


def row(unit: UnitFigures, label: str) -> list[str]:
    """Return the cells of a device, in the columns of `HEAD`. `label` is its name in charts (`labels`)."""
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


def _counted(count: int, noun: str) -> str:
    plural = {"process": "processes"}.get(noun, f"{noun}s")
    return f"{count} {noun if count == 1 else plural}"
