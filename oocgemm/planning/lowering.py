"""What the operations of a run do, decided once: where each step of a product runs, and in which dtypes.

The schedule, and the backend of the host, ask a `Lowered` value for each operation, and not the problem.
"""

from collections.abc import Callable
from functools import cache

from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.schedule.operation import Slots
from oocgemm.values import dataclass


@dataclass(frozen=True, slots=True)
class Panel:
    """The blocks of an operand that operations move: panels of op(A) or op(B), or strips of C.

    - `dtype`: of the elements that are multiplied, or of those that C has. `itemsize`: bytes per element in
      slots, where panels may have another dtype until the device expands them.
    - `swaps`: whether rows of the stored operand are columns of op(X).
    - `coded`: whether the host decodes or encodes the chunks of the store.
    - `streams`: whether blocks go between the operand's memory and the device without host slots.
    """

    dtype: str
    itemsize: int
    swaps: bool
    coded: bool
    streams: bool


@dataclass(frozen=True, slots=True)
class Lowered:
    """A product with its slots, as the operations of a run see it.

    - `panels`: per operand "A", "B" and "C".
    - `right`: the operand whose panels are multiplied from the right: "A" if B is A^H, otherwise "B".
    - `accumulator`: the dtype in which products are summed.
    - `loads_old`: whether the old C is loaded into the accumulator before the first Multiply of a tile.
    - `finishes`: whether a Finish changes each strip of a tile. `finish_reads`: whether it reads loaded
      elements of C or of D.
    - `scalars`: alpha and beta of the first Multiply of a tile, and those of the other ones. If a Finish
      applies them, Multiplies only add up products.
    - `changes_b`: whether a Multiply changes its panel of op(B) in its slot.
    - `device_sums`: whether the device computes checksums.
    - `per_row`: how many elements are kept for each row of C (`Sink.per_row`).
    - `one_in`: one of this many elements of C is stored (`Sink.one_in`).
    - `flops`: returns the floating-point operations of an m x n x k step, given m * n * k.
    """

    panels: dict[str, Panel]
    right: str
    accumulator: str
    loads_old: bool
    finishes: bool
    finish_reads: bool
    scalars: tuple[tuple[complex, complex], tuple[complex, complex]]
    changes_b: bool
    device_sums: bool
    per_row: int
    one_in: int
    flops: Callable[[int], int]


def lower(problem: GemmProblem, slots: Slots, coded: frozenset[str] = frozenset()) -> Lowered:
    """Decide what the operations of a product do. The host decodes or encodes the operands in `coded`."""
    finishes, kinds = problem.finishes, {"A": problem.a_dtype, "B": problem.b_dtype, "C": problem.c_dtype}
    swaps = {"A": problem.trans_a.swaps, "B": problem.trans_b.swaps, "C": False}
    alpha = 1.0 if finishes else problem.applied_alpha
    return Lowered(
        panels={
            x: Panel(kinds[x], problem.itemsizes[x], swaps[x], x in coded, slots.streams(x)) for x in "ABC"
        },
        right=problem.operands[-1],
        accumulator=problem.acc_dtype,
        loads_old=problem.reads_c and not finishes,
        finishes=finishes,
        finish_reads=finishes and problem.reads_c,
        scalars=((alpha, 0.0 if finishes else problem.beta), (alpha, 1.0)),
        changes_b=problem.b.changed_columns > 0,
        device_sums=problem.checked == "device",
        per_row=problem.sink.per_row,
        one_in=problem.sink.one_in,
        flops=cache(lambda size: problem.step_flops(1, 1, size)),
    )
