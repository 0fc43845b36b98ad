"""Exact int8 products: of int8 matrices, and to emulate products of float64 and float32.

*Emulation.* The method is Ozaki scheme II (Ozaki, Uchino and Imamura, 2025):

1. Each row a of a panel of op(A) is scaled and rounded to integers a' = rint(a 2^s), with an exponent s per
   row. The columns of a panel of op(B) are rounded likewise. The exponents keep every element of A'B' between
   -P/2 and P/2, where P is the product of the first N moduli.
2. The residues of A' and B' modulo each modulus fit into a byte. They are multiplied in int8 and summed in
   int32, which gives the residues of A'B'.
3. The Chinese remainder theorem reconstructs A'B' exactly.

The only error left comes from step 1. `suffices` bounds it from a few facts about each panel. A step whose
error could exceed that of a native product is multiplied natively.

*Products of int8 matrices.* The product of two int8 numbers is at most 2^14 in magnitude. Therefore int32
holds any sum of 131071 products, and float64 holds any sum of fewer than 2^39 products exactly.

- On the host, BLAS has no int8 product: panels are cast to float64 and summed in float64.
- On a GPU, each step sums its products in int32. A step is therefore at most `MAX_INT32_DEPTH` deep along k.
  The sums of several steps are added in float64.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from math import ceil, log2, prod, sqrt

from oocgemm.planning.problem import DTYPES
from oocgemm.planning.tiling import round_up
from oocgemm.values import dataclass

# Moduli that are pairwise coprime and fit into a byte, largest first. A product uses the first N of them.
MODULI = (256, 255, 253, 251, 247, 241, 239, 233, 229, 227, 223, 217, 211, 199, 197, 193)
# Numbers of moduli to try, fewest first. Fewer would exceed the error of a native product even on well-scaled
# panels. More would take longer than a native product, or overflow int64.
MODULI_COUNTS = {d.name: (d.planes - 2, d.planes - 1, d.planes) for d in DTYPES.values() if d.planes}
# Unit roundoff of each dtype.
UNITS = {"float64": 2.0**-53, "float32": 2.0**-24}
# Maximum depth of an emulated step. In deeper steps, int32 sums of int8 products could overflow.
MAX_DEPTH = 1 << 17
# Minimum depth of an emulated step. In shallower steps, rounding the result alone comes close to the error of
# a native product.
MIN_DEPTH = 16
# `PanelFacts.above` counts the elements of a row that are at least these multiples of the row's root mean
# square.
LEVELS = (0.25, 0.5, 1.0, 1.5)
# Margin in the base-2 logarithm of the largest 2-norm to which rows are scaled (`Residues.exponent`). It
# covers rounding errors of the norm and of the scaled elements.
_MARGIN = 2.0**-10
# Maximum rounding error after the exact product, in units of u (the unit roundoff) times (|A||B|): two for
# the reconstruction, one for alpha, one for the addition to C, and one for second-order terms.
_ROUNDINGS = 5
_LARGEST_RESIDUE = 128
_MANTISSA = 53


@dataclass(frozen=True, slots=True)
class Residues:
    """The first N moduli, and the constants that reconstruct an integer from its remainders (residues).

    P is the product of the moduli. `exponent` is L: if every row of A' and every column of B' has a 2-norm of
    at most 2^L, then |A'B'| < P/2.

    `weights[l]` is (P/p) ((P/p)^-1 mod p) as a sum of three parts, where p is modulus number l. `modulus` is
    P as a sum of three parts. A number with the residues c_0, c_1, ... is reconstructed in three steps:

    1. S_j = sum over l of weights[l][j] c_l, for each part j.
    2. Q = rint(S_0 / P).
    3. The number is the sum over j of S_j - Q modulus[j].

    The parts have so few bits that S_j and Q modulus[j] are exact in float64.
    """

    moduli: tuple[int, ...]
    exponent: float
    weights: tuple[tuple[float, float, float], ...]
    modulus: tuple[float, float, float]

    @property
    def inverse(self) -> float:
        return 1 / float(prod(self.moduli))


@lru_cache
def residues(number: int) -> Residues:
    """Compute the constants for products with the first `number` moduli."""
    moduli = MODULI[:number]
    whole = prod(moduli)
    # Maximum bits of the parts into which constants are split. A sum of `number` products of a part and a
    # residue then has at most 53 bits, so that it is exact in float64.
    room = _MANTISSA - ceil(log2(number * _LARGEST_RESIDUE))
    units = [1 << max(0, whole.bit_length() - rank * room) for rank in (1, 2, 3)]
    weights = (whole // p * pow(whole // p, -1, p) for p in moduli)
    return Residues(
        moduli,
        (log2(whole) - 1) / 2 - _MARGIN,
        tuple(_parts(weight, units) for weight in weights),
        _parts(whole, units),
    )


def _parts(value: int, units: Sequence[int]) -> tuple[float, float, float]:
    parts = []
    for unit in units:
        parts.append(float(value // unit * unit))
        value %= unit
    assert value == 0
    return parts[0], parts[1], parts[2]


@dataclass(frozen=True, slots=True)
class PanelFacts:
    """Facts about a panel that was scaled to integers, from which `suffices` bounds the error of its product.

    "Rows" are the nonzero rows of a panel of op(A), or the nonzero columns of a panel of op(B). Row i was
    scaled by 2^s_i. A panel of zeros is exact, and its other facts are 0.

    - `finite`: no element is Inf or NaN.
    - `exact`: scaling to integers rounded no element.
    - `grain`: the maximum of 2^-s_i / |row|_2.
    - `max_ratio`, `min_ratio`: the extremes of |row|_1 / |row|_2.
    - `above`: per level in `LEVELS`, a minimum over all rows: how many elements of a row are at least the
      level times the row's root mean square in magnitude.
    """

    finite: bool
    exact: bool
    grain: float
    max_ratio: float
    min_ratio: float
    above: tuple[int, ...]

    @property
    def rounded(self) -> float:
        """Maximum rounding interval 2^-s of an element, divided by its row's 2-norm; 0 if `exact`."""
        return 0.0 if self.exact else self.grain


def suffices(a: PanelFacts, b: PanelFacts, depth: int, unit: float) -> bool:
    """Tell whether the emulated product of two panels is as accurate as a native one.

    Both conditions below must hold. In them, u = `unit` is the unit roundoff, k = `depth`, a is a row of
    op(A), b is a column of op(B), and 2^sA and 2^sB are their scales.

    - Worst case: the error of every element is at most min(k, 6 sqrt(k)) u (|A||B|). k u is the bound of a
      native product for any data. 6 sqrt(k) u is its bound for independent roundings, with which
      `oocgemm.integrity` checks results. The emulated error is at most
      2^-sA |b|_1 / 2 + 2^-sB |a|_1 / 2 + k 2^-(sA + sB) / 4, plus `_ROUNDINGS` u (|A||B|).
    - Typical case: the standard deviation of the error is at most u/2 (|A||B|), if elements and roundings are
      independent. The error of a native product has about this standard deviation.
    """
    if not (a.finite and b.finite) or not MIN_DEPTH <= depth <= MAX_DEPTH:
        return False
    error = max_error(a, b, depth)
    if error == 0:
        return True
    deviation = sqrt((a.rounded**2 + b.rounded**2) / 12)
    typical = a.min_ratio * b.min_ratio / depth
    cosine = min_cosine(a.above, b.above, depth)
    return (
        error <= (min(depth, 6 * sqrt(depth)) - _ROUNDINGS) * unit * cosine
        and deviation <= unit / 2 * typical
    )


def max_error(a: PanelFacts, b: PanelFacts, depth: int) -> float:
    """Return a bound on the error of an element of the product, relative to |x|_2 |y|_2.

    x is the row of op(A), and y the column of op(B), whose product the element is.
    """
    return (a.rounded * b.max_ratio + b.rounded * a.max_ratio) / 2 + depth * a.rounded * b.rounded / 4


def min_cosine(a: Sequence[int], b: Sequence[int], depth: int) -> float:
    """Return a lower bound on |x|.|y| / (|x|_2 |y|_2) for a row x and a column y of `depth` elements.

    `a` and `b` have one number per level in `LEVELS`: a lower bound on the number of elements of x (or y)
    whose magnitude is at least the level times the root mean square of x (or y). By the rearrangement
    inequality, the minimum pairs the largest elements of x with the smallest of y.
    """
    # Divide |x| and |y| by their root mean squares, and sort x in ascending and y in descending order. For a
    # pair (position, level) in `up`, all elements of x from this position on are at least `level`. For a pair
    # in `down`, all elements of y before this position are.
    up = [(depth - count, level) for count, level in zip(a, LEVELS, strict=True)]
    down = [(count, level) for count, level in zip(b, LEVELS, strict=True)]
    borders = sorted({0, depth, *(at for at, _ in up), *(at for at, _ in down)})
    total = 0.0
    for start, stop in pairwise(borders):
        left = max((level for at, level in up if at <= start), default=0.0)
        right = max((level for at, level in down if at >= stop), default=0.0)
        total += (stop - start) * left * right
    return total / depth


# Maximum number of rows of C that are computed at a time. It bounds the workspace.
STRIP_ROWS = 4096
# Bytes of the facts about one row of op(A) or one column of op(B).
_ROW_FACTS = 32
# Bytes of the verdict: the device's summary of the facts about the two panels of a step.
VERDICT_BYTES = 256
# Alignment, in bytes, of the parts that `Offsets` lists.
_ALIGNMENT = 512


@dataclass(frozen=True, slots=True)
class Offsets:
    """Byte offsets in the buffer for the int8 matrices (planes) of one step. `end` is its size.

    The parts are the planes of A and of B in rows of `pitch(depth)` bytes, the int32 exponents of the
    scales of A's rows and B's columns, the facts about each row and column, and the verdict (a summary of
    these facts).
    """

    a: int
    b: int
    a_exponents: int
    b_exponents: int
    facts: int
    verdict: int
    end: int


def pitch(depth: int) -> int:
    """Return the bytes of a padded row of `depth` int8 elements: int8 kernels need multiples of 16."""
    return round_up(depth, 16)


@lru_cache(64)
def plane_offsets(planes: int, m: int, n: int, depth: int) -> Offsets:
    """Lay out the buffer for the `planes` int8 matrices of each panel of an m x n x `depth` step."""
    row = planes * pitch(depth)
    at = [0]
    for size in (m * row, n * row, 4 * m, 4 * n, _ROW_FACTS * (m + n), VERDICT_BYTES):
        at.append(round_up(at[-1] + size, _ALIGNMENT))
    return Offsets(*at)


# Bytes of workspace of the host backend. It multiplies block by block, so that the size is the same for all
# tile shapes.
HOST_WORK = 6 << 20


def work_bytes(planes: int, m: int, n: int) -> int:
    """Return the device bytes of workspace to multiply an m x n tile.

    It has the residues of at most `STRIP_ROWS` rows of C for `planes` moduli, and their int32 sums for one.
    """
    return min(m, STRIP_ROWS) * pitch(n) * (planes + 4)


def describe_steps(steps: Mapping[int, int]) -> list[str]:
    """Describe how many steps used how many moduli; 0 moduli stand for a native product.

    >>> describe_steps({14: 30, 0: 2})
    ['30 steps by 14 moduli', '2 steps natively']
    """
    return [
        f"{count} steps {f'by {number} moduli' if number else 'natively'}"
        for number, count in sorted(steps.items(), reverse=True)
    ]


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
