"""Products of int8 matrices, exactly: what their sums fit into, and the room that a device forms them in.

A product of two int8 numbers is at most 2^14 in size, so that int32 holds every sum of 131071 of them, and float64 every
sum of less than 2^39. A BLAS of the host has no int8 products: panels are brought to float64, and summed in it. A device
sums in int32 as deep as that holds, and of deeper products those of each step, which it adds up in float64.
"""

from dataclasses import dataclass

from oocgemm.planning.emulation import STRIP, pitch

MAX_DEPTH = (2**31 - 1) >> 14  # that int32 holds
DEEPEST = (2**53 - 1) >> 14  # that float64 holds exactly
LIMIT = 2**53  # integers below it are exact in float64


@dataclass(frozen=True, slots=True)
class Room:
    """Where the parts of the room begin that a step is multiplied in, in bytes, and its size: op(A) and the transpose of
    op(B) with rows of `pitch(k)` bytes, as int8 products want them, and a strip of sums in int32, rows of `pitch(n)`."""

    b: int
    sums: int
    end: int


def room(m: int, n: int, k: int) -> Room:
    """The room for an m x n x k step."""
    b = m * pitch(k)
    sums = b + n * pitch(k)
    return Room(b, sums, sums + 4 * min(m, STRIP) * pitch(n))
