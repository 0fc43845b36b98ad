"""What is in device memory besides panels and tiles, as byte offsets and sizes.

- *Expanded panels*: those that the device has transformed (`oocgemm.Transform`). A slot of the operand "P"
  contains the results for one step: the expanded panel of op(A), and behind it that of op(B). A panel that is
  not transformed has no part there.
- *Numbers* of steps on elements of A, B and C, and what the device measures to find them.
- *Selected elements* of C. A device slot D contains the largest elements of all rows of C, or those elements
  of a strip that are above a threshold. Many warps of a GPU append to a slot of the second kind. Each append
  is a *segment*: some elements of one row, in ascending order of columns.
"""

from dataclasses import dataclass

from oocgemm.planning.problem import DTYPES, GemmProblem
from oocgemm.planning.sinks import Step
from oocgemm.planning.tiling import round_up

# Alignment of all parts, in bytes: what kernels of products need.
_ALIGNMENT = 512
# Bytes per index along k of the sums that the device finds in panels: the number of elements, their sum, and
# that of their squares.
SUM_BYTES = 24


@dataclass(frozen=True, slots=True)
class MeasureRoom:
    """Byte offsets of the numbers that the device measures. The sums are at 0. `end` is the total size.

    `weights` has a float64 per index along k, `products` one per row of X, and `square` is one number. These
    three are zero at first, and used only if C is corrected.
    """

    weights: int
    products: int
    square: int
    end: int


def measure_room(problem: GemmProblem) -> MeasureRoom:
    """Lay out the measured numbers. All offsets are 0 unless the device finds numbers of steps."""
    if not problem.finds_numbers:
        return MeasureRoom(0, 0, 0, 0)
    weights = SUM_BYTES * problem.depth
    products = weights + 8 * problem.depth
    square = products + 8 * problem.m
    return MeasureRoom(weights, products, square, round_up(square + 8, _ALIGNMENT))


def expanded_bytes(problem: GemmProblem, m: int, n: int, k: int) -> tuple[int, int]:
    """Return the bytes of the expanded panels of op(A) and of op(B) of an m x n x k step, aligned."""
    a, b = (
        round_up(rows * k * DTYPES[name].itemsize, _ALIGNMENT) if stored else 0
        for rows, name, stored in (
            (m, problem.a_dtype, problem.a.stored),
            (n, problem.b_dtype, problem.b.stored),
        )
    )
    return a, b


def correction_bytes(problem: GemmProblem) -> tuple[int, int]:
    """Return the bytes on the device of the numbers of rows and of columns that are subtracted from C."""
    rows, cols = (round_up(8 * extent, _ALIGNMENT) for extent in (problem.m, problem.n))
    return (rows, cols) if problem.is_corrected else (0, 0)


def number_offsets(steps: tuple[Step, ...], m: int, n: int) -> tuple[list[tuple[int, int]], int]:
    """Lay out the numbers of a chain for an m x n matrix C, as float64.

    Returns for each step the byte offsets of its numbers per row and per column, or -1, and the bytes of all.
    """
    offsets, end = list[tuple[int, int]](), 0
    for step in steps:
        at = [-1, -1]
        for axis, (used, extent) in enumerate(((step.rows, m), (step.cols, n))):
            if used:
                at[axis], end = end, end + round_up(8 * extent, _ALIGNMENT)
        offsets.append((at[0], at[1]))
    return offsets, end


def epilogue_bytes(problem: GemmProblem) -> int:
    """Return the bytes on the device of the numbers of the epilogue's steps, aligned."""
    return number_offsets(problem.epilogue, problem.m, problem.n)[1]


def scale_bytes(problem: GemmProblem) -> int:
    """Return the bytes on the device of the numbers by which rows and columns of C are scaled, aligned."""
    itemsize = DTYPES[problem.c_dtype].itemsize // 2  # that of a score
    return round_up(itemsize * problem.n, _ALIGNMENT) if problem.sink.scaled else 0


def step_offsets(problem: GemmProblem, operand: str) -> tuple[list[int], int]:
    """Lay out the numbers of an operand's steps on the device, as float64.

    Returns for each step that the device does the byte offset of its numbers, or -1, and the bytes of all.
    """
    offsets, end = list[int](), 0
    for step in (problem.a if operand == "A" else problem.b).prepared:
        offsets.append(end if step.axis else -1)
        end += 8 * problem.stored_extent(operand, step.axis) if step.axis else 0
    return offsets, round_up(end, _ALIGNMENT)


def vector_bytes(problem: GemmProblem) -> int:
    """Return the bytes on the device of the numbers of all operands' steps, aligned."""
    return sum(step_offsets(problem, operand)[1] for operand in problem.operands)


def factor_bytes(problem: GemmProblem) -> int:
    """Return the bytes on the device of a matrix that B or the sink needs there, aligned."""
    elements = problem.b.factor_elements(problem.m, problem.n) + problem.n * problem.sink.vector_elements
    return round_up(elements * problem.itemsizes["acc"], _ALIGNMENT)


# The value of all bytes of a selected element that stands for none: its score is NaN, and no index is larger.
NONE = 0xFF
# Maximum number of elements in a segment, and minimum number in a segment that is not the last of its row.
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
