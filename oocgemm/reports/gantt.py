"""A Gantt chart in characters: one line per lane, one character per part of the run.

The height of a character shows in how much of that part the lane was busy.
"""

from collections import defaultdict

from oocgemm.timeline.metrics import Interval, union
from oocgemm.timeline.spans import LANES, Timeline

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
    """Return a line of `width` characters for each lane that was busy, as pairs of a name and a line.

    The lanes are in the order of data flow.
    """
    lanes: defaultdict[str, list[Interval]] = defaultdict(list)
    for span in timeline.spans:
        lanes[span.lane].append((span.start, span.end))
    return [
        (lane, "".join(_shade(share) for share in busy_cells(lanes[lane], timeline.wall, width)))
        for lane in LANES
        if lanes[lane]
    ]


def _shade(share: float) -> str:
    # Even the shortest activity is visible, and only a part of the run in which the lane was always busy gets
    # the full height.
    level = 0 if share <= 0 else max(1, min(8, int(share * 8 + 0.02)))
    return SHADES[level]
