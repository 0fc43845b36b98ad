"""Emulate float64 and float32 products by exact int8 products: constants, error bounds and memory layouts.

The method is Ozaki scheme II (Ozaki, Uchino and Imamura, 2025):

1. Each row of a panel of op(A) is scaled and rounded to integers a' = rint(a 2^s), each column of op(B) to
   b'. The scales keep every element of A'B' between -P/2 and P/2, where P is the product of the first N
   moduli.
2. The residues of a' and b' fit into a byte. Their products are summed in int32 and reduced: these are the
   residues of A'B'.
3. The Chinese remainder theorem reconstructs A'B' exactly.

The only error left comes from rounding to a' and b'. `suffices` bounds this error from a few facts about each
panel and compares it with the bound of a native product, k u (|A||B|) in each element. A step that is not
shown to meet this bound is multiplied natively.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import ceil, log2, prod, sqrt

from oocgemm.planning.problem import DTYPES

# Pairwise coprime, largest first.
MODULI = (256, 255, 253, 251, 247, 241, 239, 233, 229, 227, 223, 217, 211, 199, 197, 193)
# Numbers of moduli to try, fewest first. With fewer, even well-scaled panels exceed the native error. With
# more, the emulation is slower than a native product, or a' does not fit into int64.
MODULI_COUNTS = {d.name: (d.planes - 2, d.planes - 1, d.planes) for d in DTYPES.values() if d.planes}
UNITS = {"float64": 2.0**-53, "float32": 2.0**-24}  # unit roundoff
MAX_DEPTH = 1 << 17  # int32 holds sums of as many products of residues
MIN_DEPTH = 16  # in shallower steps, rounding the result is a large part of the bound k u
# `PanelFacts.above` counts the elements of a row that are at least these multiples of the row's root mean
# square.
LEVELS = (0.25, 0.5, 1.0, 1.5)
# Bound, in units of the exponent, on the rounding of a row's sum of squares and of a'.
_MARGIN = 2.0**-10
# Roundings after the exact product: two for the reconstruction, one for alpha, one for adding to C (or one
# for the cast to float32), and one for second-order terms and the roundings of norms and counts.
_ROUNDINGS = 5
_LARGEST_RESIDUE = 128
_MANTISSA = 53


@dataclass(frozen=True, slots=True)
class Residues:
    """The first N moduli and the constants that reconstruct a number from its residues.

    `exponent` is L: if every row of A' and every column of B' has a 2-norm of at most 2^L, then |A'B'| < P/2.
    `weights` has, per modulus p, the number (P/p) ((P/p)^-1 mod p), split into three parts. `modulus` is P,
    split likewise. With residues c_l, S_j = sum over l of weights[l][j] c_l, and Q = rint(S_0 / P), the
    number is the sum over j of S_j - Q modulus[j]. The parts of one rank j are multiples of one unit and
    short enough that S_j and Q modulus[j] are exact in float64.
    """

    moduli: tuple[int, ...]
    exponent: float
    weights: tuple[tuple[float, float, float], ...]
    modulus: tuple[float, float, float]

    @property
    def inverse(self) -> float:
        """1 / P."""
        return 1 / float(prod(self.moduli))


@lru_cache
def residues(number: int) -> Residues:
    """Compute the constants for the first `number` moduli."""
    moduli = MODULI[:number]
    whole = prod(moduli)
    room = _MANTISSA - ceil(log2(number * _LARGEST_RESIDUE))  # bits per part that leave room for the sum
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
    """Facts about a prepared panel, over its nonzero rows (of op(A)) or columns (of op(B)).

    `finite` means that no element is Inf or NaN. `exact` means that scaling to integers rounded no element.
    `grain` is the maximum of 2^-s / |row|_2. `max_ratio` and `min_ratio` are the extremes of |row|_1 /
    |row|_2. `above` has, for each of `LEVELS`, the minimum count of elements of a row that are at least that
    multiple of the row's root mean square. A panel of zeros is exact, and its other facts are 0.
    """

    finite: bool
    exact: bool
    grain: float
    max_ratio: float
    min_ratio: float
    above: tuple[int, ...]

    @property
    def rounded(self) -> float:
        """Maximum of 2^-s / |row|_2 over the rows that rounding changed; 0 if it changed none."""
        return 0.0 if self.exact else self.grain


def suffices(a: PanelFacts, b: PanelFacts, depth: int, unit: float) -> bool:
    """Tell whether the emulated product of two panels is as accurate as a native one.

    Both of these conditions must hold, with the unit roundoff u = `unit` and k = `depth`:

    - Worst case: the error of every element is at most min(k, 6 sqrt(k)) u (|A||B|). k u is the bound of a
      native product for any data. 6 sqrt(k) u is its bound for independent roundings, which verification
      uses. The emulated error is at most 2^-sA |b|_1 / 2 + 2^-sB |a|_1 / 2 + k 2^-(sA + sB) / 4, plus
      `_ROUNDINGS` u (|A||B|).
    - Typical case: the standard deviation of the error, for independent roundings, is at most u/2 (|A||B|),
      for independent elements. That is about the standard deviation of a native product.
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
    """Bound the error of an element of the product relative to |row|_2 |column|_2."""
    return (a.rounded * b.max_ratio + b.rounded * a.max_ratio) / 2 + depth * a.rounded * b.rounded / 4


def min_cosine(a: Sequence[int], b: Sequence[int], depth: int) -> float:
    """Bound |a|.|b| / (|a|_2 |b|_2) from below, for rows with `a` and `b` elements above each of `LEVELS`.

    By the rearrangement inequality, the minimum pairs the largest elements of one row with the smallest of
    the other.
    """
    # One row in ascending, the other in descending order: the positions at which each is known to reach a
    # level.
    up = [(depth - count, level) for count, level in zip(a, LEVELS, strict=True)]
    down = [(count, level) for count, level in zip(b, LEVELS, strict=True)]
    borders = sorted({0, depth, *(at for at, _ in up), *(at for at, _ in down)})
    total = 0.0
    for start, stop in pairwise(borders):
        left = max((level for at, level in up if at <= start), default=0.0)
        right = max((level for at, level in down if at >= stop), default=0.0)
        total += (stop - start) * left * right
    return total / depth


STRIP_ROWS = 4096  # rows of C whose residues are in the workspace at a time
_ROW_FACTS = 32  # bytes
VERDICT_BYTES = 256  # a device's summary of the facts about two panels
_ALIGNMENT = 512


@dataclass(frozen=True, slots=True)
class Offsets:
    """Byte offsets of the parts of a plane slot, and its size `end`.

    The parts are the planes of A and of B in rows of `pitch(depth)` bytes, the int32 exponents of the scales
    of A's rows and B's columns, the facts about each row and column, and the verdict.
    """

    a: int
    b: int
    a_exponents: int
    b_exponents: int
    facts: int
    verdict: int
    end: int


def pitch(depth: int) -> int:
    """Round a row of a plane up to 16 bytes, as int8 products need it."""
    return -(-depth // 16) * 16


@lru_cache(64)
def plane_offsets(planes: int, m: int, n: int, depth: int) -> Offsets:
    """Lay out a slot for `planes` planes of an m x depth panel of op(A) and of a depth x n panel of op(B)."""
    row = planes * pitch(depth)
    at = [0]
    for size in (m * row, n * row, 4 * m, 4 * n, _ROW_FACTS * (m + n), VERDICT_BYTES):
        at.append(-(-(at[-1] + size) // _ALIGNMENT) * _ALIGNMENT)
    return Offsets(*at)


# Bytes that the host backend needs to multiply a tile of any size: it multiplies block by block.
HOST_WORK = 6 << 20


def work_bytes(planes: int, m: int, n: int) -> int:
    """Device bytes to multiply an m x n tile: residues of a strip and int32 sums for one modulus."""
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
