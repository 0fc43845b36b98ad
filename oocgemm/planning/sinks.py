"""What becomes of the finished tiles of C: the sinks of a product.

A tile is finished when all of its steps have been added. Then its sink stores it, or makes something smaller
of it. Every sink is a class of its own. Planning, engine and journal ask a sink what they need to know, and
never which one it is.

Before that, the *epilogue* of the product changes each element. It is a chain of steps. Each replaces every
element c of C, in row i and column j, by a number. A step may use a number u[i] per row, a number v[j] per
column, one number `value`, and the element d of a further matrix D of C's shape. The numbers are computed in
float64, and rounded to C's dtype after the last step.
"""

from dataclasses import fields
from typing import Any, ClassVar

from oocgemm.values import dataclass

# Maximum number of steps in a chain: their numbers are an argument of the kernel. Callers may pass one less,
# since a Gaussian takes two.
MAX_STEPS = 9

# The kinds of steps, with what becomes of c. A number per row or column that a step does not have is 1.
STEPS = {
    "scale": "value u[i] v[j] c",
    "rank_one": "c + value u[i] v[j]",
    "add": "c + value d",
    "divide": "c / d",
    "divide_or_zero": "c / d, but 0 where d is 0",
    "correlation": "u[i] v[j] c, but at least -1 and at most 1",
    "gaussian": "exp(-value max(u[i] + v[j] - 2 c, 0))",
    "distance": "value max(u[i] + v[j] - 2 c, 0)",
    "jaccard": "(u[i] + v[j] - 2 c) / (u[i] + v[j] - c), but 0 where all three numbers are 0",
    "hamming": "(u[i] + v[j] - 2 c) / value",
    "root": "the square root of c",
    "identical": "value where u[i] = v[j], unless c is NaN; c elsewhere",
    "squared": "c^2 - value (1 - c^2)",
    "kinship": "1 / 2 - (2 value - u[i] - v[j] - 2 c) / (4 min(u[i], v[j]))",
    "within": "c where u[i] <= v[j]; elsewhere 0, or NaN if value is not 0",
}
# The steps that combine the sums of several terms (`oocgemm.planning.terms`) to c, with the terms in their
# order. Terms are written for a row x of op(A) and a column y of op(B): m is 1 where x is known and 0
# elsewhere, and n is the same for y. Unknown elements of x and y are 0.
COMBINING = {
    # The covariance over what both know. `value` is subtracted from the count of it.
    "pairwise_covariance": ("m n", "x n", "m y", "x y"),
    # The correlation. It is NaN where a variance is at most `value` times the mean square of its elements.
    "pairwise_correlation": ("m n", "x n", "m y", "x y", "x^2 n", "m y^2"),
    # Genotypes x and y are -1, 0 and 1. h is 1 where x is heterozygous (0), and g is the same for y. KING's
    # robust kinship; the share of alleles that are identical by state; how many genotypes share 0, 1, 2.
    "pairwise_kinship": ("m n", "h n", "m g", "x y"),
    "shared_alleles": ("m n", "h g", "x y"),
    "ibs0": ("x^2 y^2", "x y"),
    "ibs1": ("m n", "h g", "x^2 y^2"),
    "ibs2": ("h g", "x^2 y^2", "x y"),
}
# The steps that read D, and the steps whose vectors u and v are computed from the operands.
_MERGING = ("add", "divide", "divide_or_zero")
_DERIVED = ("correlation", "gaussian", "distance", "jaccard", "hamming", "identical")

# What a reduction makes of the elements of a row of C.
REDUCTIONS = ("sum", "sumsq", "max")


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a chain: one of `STEPS`, and whether it has a number per row and per column."""

    kind: str
    rows: bool = False
    cols: bool = False
    value: float = 1.0

    @property
    def merges(self) -> bool:
        """Whether the step reads D."""
        return self.kind in _MERGING

    @property
    def combines(self) -> int:
        """The number of terms whose sums the step combines; 0 if it changes an element of C."""
        return len(COMBINING.get(self.kind, ()))

    @property
    def derives(self) -> bool:
        """Whether its numbers are norms of rows of op(A) and columns of op(B)."""
        return self.kind in _DERIVED


# The dtype of selected elements, by the accumulator's dtype.
SELECTED = {"float32": "void64", "float64": "void128", "int32": "void128"}

# Values of `Sink.merge`.
DISJOINT, EXACT, ORDERED = "disjoint", "exact", "ordered"

# If the elements at or above a threshold are kept, plans assume that these are one in SPARSE elements of C.
SPARSE = 64


@dataclass(frozen=True)
class Sink:
    """What becomes of finished tiles. `dtype` is the dtype of the elements that are stored.

    The steps of the `epilogue` change each element of C before it is stored, selected or used in another way.
    For a sink that is not `Stored`, C is ``op(A) @ op(B)``: alpha = 1 and beta = 0.

    Class attributes, as they are for a sink that does not store C:

    - `name`: the sink's name in records, such as journals.
    - `stores_c`: whether the elements of C are stored. If they are not, they never leave the device, and a
      finished tile cannot be computed again: its elements have been merged with those of other tiles.
    - `bounded`: whether the number of elements that are stored is only known when the run has ended. It is at
      most the number of elements of C.
    - `scaled`: whether row i and column j of C are first multiplied by s[i] and s[j], for a vector s, and
      clipped to [-1, 1].
    - `one_in`: one of this many elements of a strip is stored, if elements of C are. It is an estimate if the
      number of stored elements depends on their values.
    - `begins_with_zeros`: whether the array in which results are stored needs zeros before the run.
    - `merge`: how the results of different tiles become one, if different devices or workers compute them:

        - `DISJOINT`: each tile has its own part of the result.
        - `EXACT`: the results of tiles are merged. Any order and grouping gives the same bits.
        - `ORDERED`: the results of tiles are added, and rounded. So one device computes all tiles of a tile
          row, in ascending order of their columns. Then bits do not depend on the number of devices.
    """

    dtype: str
    epilogue: tuple[Step, ...] = ()

    name: ClassVar[str]
    stores_c: ClassVar[bool] = False
    bounded: ClassVar[bool] = False
    one_in: ClassVar[int] = 1
    begins_with_zeros: ClassVar[bool] = False

    @property
    def merge(self) -> str:
        return ORDERED

    @property
    def alpha(self) -> complex:
        return 1.0

    @property
    def beta(self) -> complex:
        return 0.0

    @property
    def scaled(self) -> bool:
        return False

    @property
    def ranks_distances(self) -> bool:
        """Whether the epilogue only makes distances times -1, which are compared and not stored.

        Then no chain runs: where elements are selected, scores are computed in the dtype of scores.
        """
        return False

    @property
    def per_row(self) -> int:
        """How many elements are kept for each row of C, and updated by each tile; 0 if none are.

        The device keeps those of all rows in one slot. When the last tile with elements of a row has been
        finished, they are stored.
        """
        return 0

    @property
    def vector_elements(self) -> int:
        """Elements of the matrix on the device with which each strip is multiplied, per column of C."""
        return 0

    def count(self, rows: int, elements: int) -> int:
        """Count the elements that are stored of `rows` rows of C, which have `elements` elements."""
        return rows * self.per_row

    def searched(self, elements: int, *, twice: bool) -> int:
        """Count the elements of the accumulator that a Finish searches, of a strip with `elements` elements.

        With `twice`, elements of a triangle are also elements of the rows with the numbers of their columns.
        """
        return elements

    @property
    def merges(self) -> bool:
        return any(step.merges for step in self.epilogue)

    def record(self) -> dict[str, Any]:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        given["c_dtype"] = given.pop("dtype")
        return {"sink": self.name, "alpha": self.alpha, "beta": self.beta} | given


@dataclass(frozen=True)
class Stored(Sink):
    """C itself is stored: ``alpha * op(A) @ op(B) + beta * C``, changed by the epilogue."""

    alpha: complex = 1.0
    beta: complex = 0.0

    name = "stored"
    stores_c = True
    merge = DISJOINT

    def count(self, rows: int, elements: int) -> int:
        return elements

    def searched(self, elements: int, *, twice: bool) -> int:
        return 0


@dataclass(frozen=True)
class Selected(Sink):
    """Some elements of C are stored, as scores with the indices of their columns (`SELECTED`).

    With `excludes_self`, the elements on C's diagonal are left out.
    """

    scaled: bool = False
    excludes_self: bool = False

    merge = EXACT

    @property
    def ranks_distances(self) -> bool:
        return [(step.kind, step.value) for step in self.epilogue] == [("distance", -1.0)]


@dataclass(frozen=True)
class Largest(Selected):
    """The `topk` largest elements of each row of C."""

    topk: int = 1

    name = "largest"

    @property
    def per_row(self) -> int:
        return self.topk

    def searched(self, elements: int, *, twice: bool) -> int:
        return 2 * elements if twice else elements


@dataclass(frozen=True)
class AtLeast(Selected):
    """The elements of C that are at least `threshold`. With `absolute`, their magnitudes are compared."""

    threshold: float = 0.0
    absolute: bool = False

    name = "at least"
    bounded = True
    one_in = SPARSE

    def count(self, rows: int, elements: int) -> int:
        return elements // self.one_in


@dataclass(frozen=True)
class Reduced(Sink):
    """One number is stored per row of C: the sum, the sum of squares or the maximum of its elements.

    `reduction` is one of `REDUCTIONS`.
    """

    reduction: str = "sum"

    name = "reduced"
    begins_with_zeros = True

    @property
    def merge(self) -> str:
        return EXACT if self.reduction == "max" else ORDERED

    @property
    def per_row(self) -> int:
        return 1


@dataclass(frozen=True)
class Applied(Sink):
    """C is multiplied by a matrix V, n x `applied`."""

    applied: int = 1

    name = "applied"

    @property
    def per_row(self) -> int:
        return self.applied

    @property
    def vector_elements(self) -> int:
        return self.applied


SINKS: dict[str, type[Sink]] = {kind.name: kind for kind in (Stored, Largest, AtLeast, Reduced, Applied)}
