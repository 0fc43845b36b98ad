"""Exact products of int8 matrices: which sums are exact, and the workspace that a device needs.

The product of two int8 numbers is at most 2^14 in magnitude. Therefore int32 holds any sum of 131071
products, and float64 holds any sum of fewer than 2^39 products exactly.

- On the host, BLAS has no int8 product: panels are cast to float64 and summed in float64.
- On a GPU, each step sums its products in int32. A step is therefore at most `MAX_INT32_DEPTH` deep along k.
  The sums of several steps are added in float64.
"""

from dataclasses import dataclass

from oocgemm.planning.emulation import STRIP_ROWS, pitch

# Maximum numbers of products whose sum is exact in int32 and in float64.
MAX_INT32_DEPTH = (2**31 - 1) >> 14
MAX_FLOAT64_DEPTH = (2**53 - 1) >> 14
EXACT_LIMIT = 2**53  # float64 represents every integer of smaller magnitude exactly


@dataclass(frozen=True, slots=True)
class Workspace:
    """Byte offsets in the workspace of one int8 product on a GPU. `end` is the size of the workspace.

    A copy of op(A) starts at 0, and a copy of the transpose of op(B) at `b`. Their rows are padded to
    `pitch(k)` bytes, because int8 kernels need rows of a multiple of 16 bytes. The int32 sums of at most
    `STRIP_ROWS` rows of C start at `sums`, in rows of `pitch(n)` elements.
    """

    b: int
    sums: int
    end: int


def workspace_layout(m: int, n: int, k: int) -> Workspace:
    """Lay out the workspace to multiply m x k by k x n elements."""
    b = m * pitch(k)
    sums = b + n * pitch(k)
    return Workspace(b, sums, sums + 4 * min(m, STRIP_ROWS) * pitch(n))
