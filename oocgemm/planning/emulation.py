"""Products of float64 or float32 matrices from exact int8 products: the numbers behind them, and when they will do.

After Ozaki, Uchino and Imamura, *Ozaki scheme II* (2025). A panel of op(A) is scaled by row to integers a' =
rint(a 2^s), a panel of op(B) by column, so that every element of A'B' lies between -P/2 and P/2, P being the product of
the first N moduli. The residues of a' and b' fit into a byte; their products, summed in int32 and reduced, are the
residues of A'B', from which the Chinese remainder theorem gives it back exactly. What is left of error is that of
rounding to a' and b'.

The rest of this module says how large that error can be, from a few facts about each panel, and compares it with the
bound that a native product has, k u (|A||B|) in each element. A step that cannot be shown to meet it is multiplied
natively.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import ceil, log2, prod, sqrt

# Largest first, each prime to all the others.
MODULI = (256, 255, 253, 251, 247, 241, 239, 233, 229, 227, 223, 217, 211, 199, 197, 193)
# How many moduli are tried, fewest first: of less a normal product's error would be seen, more than the last do not
# pay or do not fit into int64.
NUMBERS = {"float64": (14, 15, 16), "float32": (7, 8, 9)}
UNITS = {"float64": 2.0**-53, "float32": 2.0**-24}  # roundoff
MAX_DEPTH = 1 << 17  # so many products of residues fit into int32
MIN_DEPTH = 16  # below, rounding the result weighs against k u
# Elements are counted from these fractions of their row's root mean square up.
LEVELS = (0.25, 0.5, 1.0, 1.5)
# The sums of squares of a row are rounded, and so is a': by less than this part of an exponent.
_MARGIN = 2.0**-10
# Two where the number is put together of its parts, one each for alpha and for adding to C (or one to float32, of a number
# in float64); the last is for second orders, and for the norms and counts that the rest is reckoned from.
_ROUNDINGS = 5
_LARGEST_RESIDUE = 128
_MANTISSA = 53


@dataclass(frozen=True, slots=True)
class Residues:
    """The first N moduli, and how a number is brought back from its residues.

    `exponent`: L, so that norms of at most 2^L of each row of A' and column of B' keep |A'B'| below P/2. `weights`: of
    each modulus, (P/p) ((P/p)^-1 mod p) in three parts; `modulus`: P in three parts likewise. The parts of one rank
    are multiples of one unit and so short that sums over all residues, and products with the quotient, are exact in
    float64: with S_j = sum of weights[l][j] c_l and Q = rint(S_0 / P), the number is the sum of S_j - Q modulus[j].
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
    """The first `number` moduli."""
    moduli = MODULI[:number]
    whole = prod(moduli)
    room = _MANTISSA - ceil(log2(number * _LARGEST_RESIDUE))  # bits of a part, beside the sum's
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
    """What is known of a prepared panel; rows are those of op(A), or columns of op(B), that are not zero throughout.

    `finite`: no element is infinite or NaN. `exact`: rounding to integers changed none. `grain`: most of 2^-s over the
    2-norm of a row. `most`, `least`: of 1-norm over 2-norm of a row. `above`: for each of `LEVELS` the fewest elements
    of a row that are at least so many of its root mean squares. A panel of zeros: exact, the rest 0.
    """

    finite: bool
    exact: bool
    grain: float
    most: float
    least: float
    above: tuple[int, ...]

    @property
    def rounded(self) -> float:
        """Most of 2^-s over the 2-norm of a row that rounding can have changed."""
        return 0.0 if self.exact else self.grain


def suffices(a: PanelFacts, b: PanelFacts, depth: int, unit: float) -> bool:
    """Whether the product of two prepared panels of that depth is as good as a native one, with unit roundoff `unit`.

    Two things are asked. The error is at most k u (|A||B|) in every element, whatever the data, and at most 6 sqrt(k) u
    (|A||B|), the bound that a native product keeps to where its roundings are not of one mind (and that a product is
    verified by): it is at most 2^-sA |b|_1 / 2 + 2^-sB |a|_1 / 2 + k 2^-(sA + sB) / 4 and `_ROUNDINGS`. And its standard
    deviation, for roundings that know nothing of one another, is at most u/2 of what (|A||B|) is for elements
    that know nothing of one another: what a native product's is about.
    """
    if not (a.finite and b.finite) or not MIN_DEPTH <= depth <= MAX_DEPTH:
        return False
    error = largest_error(a, b, depth)
    if error == 0:
        return True
    deviation = sqrt((a.rounded**2 + b.rounded**2) / 12)
    typical = a.least * b.least / depth
    share = least_share(a.above, b.above, depth)
    return (
        error <= (min(depth, 6 * sqrt(depth)) - _ROUNDINGS) * unit * share and deviation <= unit / 2 * typical
    )


def largest_error(a: PanelFacts, b: PanelFacts, depth: int) -> float:
    """What an element of A'B', scaled back, can be off by at most, over the 2-norms of its row and column."""
    return (a.rounded * b.most + b.rounded * a.most) / 2 + depth * a.rounded * b.rounded / 4


def least_share(a: Sequence[int], b: Sequence[int], depth: int) -> float:
    """Least that |a||b| can be, over the product of their 2-norms, for rows with so many elements at `LEVELS`.

    By the rearrangement inequality it is least where the largest elements of one meet the smallest of the other.
    """
    # Where each row, sorted, steps up: from so many places on it is at least so much.
    up = [(depth - count, level) for count, level in zip(a, LEVELS, strict=True)]
    down = [(count, level) for count, level in zip(b, LEVELS, strict=True)]
    borders = sorted({0, depth, *(at for at, _ in up), *(at for at, _ in down)})
    total = 0.0
    for start, stop in pairwise(borders):
        left = max((level for at, level in up if at <= start), default=0.0)
        right = max((level for at, level in down if at >= stop), default=0.0)
        total += (stop - start) * left * right
    return total / depth


STRIP = 4096  # rows of C whose residues are held at a time
_ROW_FACTS = 32  # bytes
VERDICT_BYTES = 256  # what a device has to say of two panels
_ALIGNMENT = 512


@dataclass(frozen=True, slots=True)
class Offsets:
    """Where the parts of a plane slot begin, in bytes, and its size: planes of A and of B, each row `pitch(depth)` bytes,
    exponents of the scales of rows of A and columns of B (int32), facts about each, and the verdict."""

    a: int
    b: int
    a_exponents: int
    b_exponents: int
    facts: int
    verdict: int
    end: int


def pitch(depth: int) -> int:
    """Bytes of a row of a plane: what int8 products want."""
    return -(-depth // 16) * 16


@lru_cache(64)
def plane_offsets(planes: int, m: int, n: int, depth: int) -> Offsets:
    """The parts of a slot for that many planes of an m x depth panel of op(A) and a depth x n panel of op(B)."""
    row = planes * pitch(depth)
    at = [0]
    for size in (m * row, n * row, 4 * m, 4 * n, _ROW_FACTS * (m + n), VERDICT_BYTES):
        at.append(-(-(at[-1] + size) // _ALIGNMENT) * _ALIGNMENT)
    return Offsets(*at)


HOST_WORK = 6 << 20  # bytes, the same on the host, which multiplies block by block


def work_bytes(planes: int, m: int, n: int) -> int:
    """Bytes beside the slots to multiply an m x n tile: for a strip of it the residues, and sums of one modulus."""
    return min(m, STRIP) * pitch(n) * (planes + 4)


def described(steps: Mapping[int, int]) -> list[str]:
    """How many steps used how many moduli, 0 being those that fell back to a native product.

    >>> described({14: 30, 0: 2})
    ['30 steps by 14 moduli', '2 steps natively']
    """
    return [
        f"{count} steps {f'by {number} moduli' if number else 'natively'}"
        for number, count in sorted(steps.items(), reverse=True)
    ]
