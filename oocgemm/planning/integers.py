"""Exact products of int8 matrices: which sums are exact, and the workspace that a device needs.

The product of two int8 numbers is at most 2^14 in magnitude. Therefore int32 holds any sum of 131071
products, and float64 holds any sum of fewer than 2^39 products exactly.

- On the host, BLAS has no int8 product: panels are cast to float64 and summed in float64.
- On a device, each step sums in int32, at most `MAX_INT32_DEPTH` deep. Sums over several steps are added in
  float64.
"""

from dataclasses import dataclass

from oocgemm.planning.emulation import STRIP_ROWS, pitch

MAX_INT32_DEPTH = (2**31 - 1) >> 14
MAX_FLOAT64_DEPTH = (2**53 - 1) >> 14
EXACT_LIMIT = 2**53  # float64 represents every integer below it


@dataclass(frozen=True, slots=True)
class Workspace:
    """Byte offsets of the parts of a step's workspace, and its size `end`.

    op(A) starts at 0. It and the transpose of op(B) at `b` have rows of `pitch(k)` bytes, as int8 products
    need them. `sums` is a strip of int32 sums with rows of `pitch(n)` elements.
    """

    b: int
    sums: int
    end: int


def workspace_layout(m: int, n: int, k: int) -> Workspace:
    """Lay out the workspace of an m x n x k step."""
    b = m * pitch(k)
    sums = b + n * pitch(k)
    return Workspace(b, sums, sums + 4 * min(m, STRIP_ROWS) * pitch(n))
