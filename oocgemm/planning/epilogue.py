"""The epilogue of a product: what happens to the elements of C before they are stored.

It is a chain of steps. Each replaces every element c of C, in row i and column j, by a number. A step may use
a number u[i] per row, a number v[j] per column, one number `value`, and the element d of a further matrix D
of C's shape. The numbers are computed in float64, and rounded to C's dtype after the last step.
"""

from dataclasses import dataclass

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
    "identical": "1 where u[i] = v[j], unless c is NaN; c elsewhere",
    "squared": "c^2 - value (1 - c^2)",
    "within": "c where u[i] and v[j] differ by at most value; 0 elsewhere",
}
# The steps that read D, and the steps whose vectors u and v are computed from the operands.
_MERGING, _DERIVED = ("add", "divide", "divide_or_zero"), ("correlation", "gaussian", "identical")

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
    def derives(self) -> bool:
        """Whether its numbers are norms of rows of op(A) and columns of op(B)."""
        return self.kind in _DERIVED
