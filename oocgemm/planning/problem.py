"""What is to be computed: ``C = alpha * op(A) @ op(B) + beta * C``, by sizes and dtypes alone."""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from oocgemm.planning.emulation import NUMBERS


class Op(StrEnum):
    """What is done to an operand before it is multiplied; BLAS's letters."""

    N = "N"
    T = "T"
    C = "C"

    @property
    def swaps(self) -> bool:
        """Whether rows of the stored array are columns of op(X)."""
        return self is not Op.N


@dataclass(frozen=True, slots=True)
class DType:
    """An element type: its NumPy name, bytes, what products of it are accumulated in, and what they can be stored as,
    that which they are by default first. Nothing where operands cannot be of it."""

    name: str
    itemsize: int
    accumulator: str = ""
    results: tuple[str, ...] = ()
    is_complex: bool = False


DTYPES = {
    d.name: d
    for d in (
        DType("float16", 2, "float32", ("float16", "float32")),
        DType("bfloat16", 2, "float32", ("bfloat16", "float32")),  # ml_dtypes' in NumPy
        DType("float32", 4, "float32", ("float32",)),
        DType("float64", 8, "float64", ("float64",)),
        DType("complex64", 8, "complex64", ("complex64",), is_complex=True),
        DType("complex128", 16, "complex128", ("complex128",), is_complex=True),
        # On a device in int32 where that holds the sums, see planning/integers.py.
        DType("int8", 1, "float64", ("int32", "int64", "float32", "float64")),
        DType("int32", 4),
        DType("int64", 8),
    )
}
# What A and B can be of.
OPERANDS = tuple(d.name for d in DTYPES.values() if d.results)

# The precisions that a product may be computed in, and the dtypes that have each.
COMPUTES = {
    "native": OPERANDS,
    "tf32": ("float32",),
    "bf16": ("float32",),
    "emulated": ("float32", "float64"),
}


@dataclass(frozen=True)
class GemmProblem:
    """``C (m x n) = alpha * op(A) (m x k) @ op(B) (k x n) + beta * C``, each tile `checked` against checksums or not: "host" and
    "device" say which tier takes these, "" that none does.

    The dtypes of a, b, the accumulator and c are kept apart, so that wider accumulators and results fit in. `compute`
    is one of `COMPUTES`: what float32 operands may be rounded to before they are multiplied, or "emulated" for exact
    products of residues (`oocgemm.planning.emulation`).
    """

    m: int
    n: int
    k: int
    a_dtype: str
    b_dtype: str
    acc_dtype: str
    c_dtype: str
    alpha: complex = 1.0
    beta: complex = 0.0
    trans_a: Op = Op.N
    trans_b: Op = Op.N
    compute: str = "native"
    checked: str = ""

    @property
    def depth(self) -> int:
        """The extent along k that is really multiplied: as in BLAS, alpha = 0 never reads A and B; nor does a C
        that is empty."""
        return 0 if self.alpha == 0 or 0 in (self.m, self.n) else self.k

    @property
    def applied_alpha(self) -> complex:
        """alpha, or 0 where nothing is multiplied: as in BLAS, C is beta C then, even where alpha is Inf or NaN."""
        return self.alpha if self.depth else 0.0

    @property
    def reads_c(self) -> bool:
        """beta = 0 never reads C."""
        return self.beta != 0

    @property
    def planes(self) -> int:
        """Planes of residues, a byte an element, that a panel may be turned into before it is multiplied."""
        return NUMBERS[self.a_dtype][-1] if self.compute == "emulated" else 0

    @property
    def rate(self) -> str:
        """The name of the kernel rate that counts."""
        return f"emulated {self.a_dtype}" if self.planes else self.a_dtype

    @property
    def exact(self) -> bool:
        """Whether the product of op(A) and op(B) is summed without rounding."""
        return self.a_dtype == "int8"

    @property
    def finishes(self) -> bool:
        """Whether a Finish must turn the accumulator into C's dtype (and then applies alpha and beta too, which exact
        sums must not meet before)."""
        return self.acc_dtype != self.c_dtype or (self.exact and (self.alpha, self.beta) != (1, 0))

    @property
    def flops(self) -> int:
        """Real floating-point operations of the whole product."""
        return self.step_flops(self.m, self.n, self.depth)

    def step_flops(self, m: int, n: int, k: int) -> int:
        """Real floating-point operations of an m x n x k part of it."""
        return (8 if DTYPES[self.acc_dtype].is_complex else 2) * m * n * k

    @cached_property
    def itemsizes(self) -> dict[str, int]:
        """Bytes an element of A, B, C as stored, and of the accumulator."""
        names = {"A": self.a_dtype, "B": self.b_dtype, "C": self.c_dtype, "acc": self.acc_dtype}
        return {operand: DTYPES[name].itemsize for operand, name in names.items()}
