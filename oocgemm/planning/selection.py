"""The memory of elements of C that are selected: the largest ones of each row, or those above a threshold.

A device slot D contains the largest elements of all rows of C, or the elements above a threshold of a strip.
Many warps of a GPU append to the latter. Each append is a *segment*: some elements of one row, in ascending
order of columns.
"""

from dataclasses import dataclass

from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.tiling import round_up

# The value of all bytes of a selected element that stands for none: its score is NaN, and no index is larger.
NONE = 0xFF
# Alignment of the parts of a slot, in bytes.
_ALIGNMENT = 512
# Maximum number of elements in a segment, and minimum number in one that is not the last one of its row.
SEGMENT, MIN_SEGMENT = 256, 225
# Bytes of the counters of elements and of segments, and of the description of a segment: its row, its number
# of elements, and its first element.
COUNTER_BYTES, SEGMENT_BYTES = 16, 16


@dataclass(frozen=True, slots=True)
class FoundLayout:
    """Byte offsets in a slot. The counters start at 0. `end` is the size of the slot."""

    segments: int
    elements: int
    end: int


def found_layout(problem: GemmProblem, rows: int, cols: int) -> FoundLayout:
    """Lay out a slot with room for all elements of a strip."""
    segments = round_up(COUNTER_BYTES, _ALIGNMENT)
    elements = segments + round_up(rows * (cols // MIN_SEGMENT + 1) * SEGMENT_BYTES, _ALIGNMENT)
    return FoundLayout(
        segments, elements, elements + round_up(rows * cols * problem.itemsizes["C"], _ALIGNMENT)
    )
