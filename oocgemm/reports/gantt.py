"""A Gantt chart in characters: one line per lane, one character per part of the run.

The height of a character shows the share of that part in which the lane was busy.
"""

from collections import defaultdict
from collections.abc import Sequence

from oocgemm.timeline.activities import COMPUTE, activities
from oocgemm.timeline.spans import LANES, Interval, Timeline, union

SHADES = " ▁▂▃▄▅▆▇█"


def busy_cells(intervals: list[Interval], wall: int, cells: int) -> list[float]:
    """Divide the run into `cells` equal parts and return the share of each part that the intervals cover.

    `wall` is the length of the run, in the unit of the intervals.

    >>> busy_cells([(0, 25), (50, 100)], 100, 4)
    [1.0, 0.0, 1.0, 1.0]
    """
    shares = [0.0] * cells
    if wall <= 0:
        return shares
    width = wall / cells
    for start, end in union(intervals):
        for cell in range(int(start / width), min(cells, int(end / width) + 1)):
            shares[cell] += max(0.0, min(end, (cell + 1) * width) - max(start, cell * width)) / width
    return [min(1.0, share) for share in shares]


def gantt(timeline: Timeline, width: int = 80) -> list[tuple[str, str]]:
    """Return (lane, line) for each lane that was used, in the order of data flow.

    A line has `width` characters.
    """
    lanes: defaultdict[str, list[Interval]] = defaultdict(list)
    for span in timeline.spans:
        lanes[span.lane].append((span.start, span.end))
    return [
        (lane, "".join(_shade(share) for share in busy_cells(lanes[lane], timeline.wall, width)))
        for lane in LANES
        if lanes[lane]
    ]


def unit_gantt(timeline: Timeline, numbers: Sequence[int], width: int = 80) -> list[str]:
    """Return a line for each device with one of these numbers, which shows when the device computed.

    The numbers are positions in the list of all devices. A line has `width` characters.
    """
    did = [*activities(timeline).values()]
    computed = [[(start, end) for start, end, cause in did[number] if cause == COMPUTE] for number in numbers]
    return ["".join(map(_shade, busy_cells(one, timeline.wall, width))) for one in computed]


def _shade(share: float) -> str:
    # Round down to eighths, so that full height means always busy; 0.02 allows for rounding errors. Any
    # activity gets at least one eighth, to be visible.
    level = 0 if share <= 0 else max(1, min(8, int(share * 8 + 0.02)))
    return SHADES[level]
