"""Where the time of a run on a GPU goes: what ran before the first multiplication, between and after them."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from oocgemm.timeline.activities import exposed_intervals
from oocgemm.timeline.spans import Timeline, intersection, length, union

PARTS = ("before", "fill", "compute", "h2d", "accumulator", "issue", "other", "drain", "after")


def where(timeline: Timeline) -> dict[str, Any]:
    """Return the seconds of T by part, and the rates of the copies in bytes per second.

    `before`: until the first copy starts. `fill`: until the first Multiply starts. `compute`: while one ran.
    `h2d`, `accumulator`, `issue` and `other`: between Multiply operations, by the cause of the report.
    `drain`: from the last Multiply to the end of the last operation. `after`: until the call returns. `rates`
    are those of both links while they were busy, `both` is the share of this time in which both were.
    """
    spans, wall = timeline.spans, timeline.wall
    lanes = {name: union((s.start, s.end) for s in spans if s.lane == name) for name in ("h2d", "d2h")}
    multiplies = [s for s in spans if s.kind == "multiply"]
    first = min((s.start for s in multiplies), default=0)
    copy = min([start for start, _ in lanes["h2d"][:1]] + [first])
    last = max((s.end for s in multiplies), default=0)
    end = max((s.end for s in spans), default=0)
    parts = defaultdict[str, float](float)
    parts |= {
        "before": copy,
        "fill": first - copy,
        "drain": max(0, end - last),
        "after": wall - end,
    }
    for start, until, cause in exposed_intervals(spans, wall):
        if first <= start < last:
            parts[cause if cause in PARTS else "other"] += until - start
    parts["compute"] = length(union((s.start, s.end) for s in multiplies))
    moved = {name: sum(s.bytes for s in spans if s.lane == name) for name in lanes}
    busy = {name: length(of) for name, of in lanes.items()}
    together = length(intersection(lanes["h2d"], lanes["d2h"]))
    return {part: parts[part] / 1e9 for part in PARTS} | {
        "rates": {name: 1e9 * moved[name] / busy[name] for name in lanes if busy[name]},
        "both": together / max(1, sum(busy.values()) - together),
    }


def line(t: float, bound: float, repaired: float, scheduled: float | None, found: Mapping[str, Any]) -> str:
    """Return a line of a table: milliseconds, ratios, and the parts in percent of T."""
    parts = " ".join(f"{100 * found[part] / t:6.1f}" for part in PARTS)
    rates = " ".join(f"{found['rates'].get(name, 0) / 1e9:5.1f}" for name in ("h2d", "d2h"))
    ratio = f"{scheduled / t:6.2f}" if scheduled else f"{'-':>6}"
    return (
        f"{1e3 * t:8.2f} {1e3 * bound:8.2f} {bound / t:6.2f} {repaired / t:6.2f} {ratio} {parts} {rates} "
        f"{found['both']:5.2f}"
    )


HEADER = (
    f"{'T ms':>8} {'bound':>8} {'b/T':>6} {'rep/T':>6} {'sch/T':>6} "
    + " ".join(f"{part[:6]:>6}" for part in PARTS)
    + "   up  down  both"
)
