"""The product ``C = alpha * op(A) @ op(B) + beta * C``: its extents, dtypes and scalars."""

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from oocgemm.planning.epilogue import Step


class Op(StrEnum):
    """Operation applied to a stored operand before the product, in BLAS's letters."""

    N = "N"
    T = "T"
    C = "C"

    @property
    def swaps(self) -> bool:
        """Whether rows of the stored array are columns of op(X)."""
        return self is not Op.N


@dataclass(frozen=True, slots=True)
class DType:
    """An element type: its NumPy name and its size in bytes.

    `accumulator` is the dtype in which products of such elements are summed. `results` are the dtypes that C
    may have, the default first. Both are empty if A and B cannot have the dtype. `planes` is the maximum
    number of int8 matrices (residue planes) into which emulation splits a block of A or B; 0 if products of
    the dtype cannot be emulated.
    """

    name: str
    itemsize: int
    accumulator: str = ""
    results: tuple[str, ...] = ()
    is_complex: bool = False
    planes: int = 0


DTYPES = {
    d.name: d
    for d in (
        DType("float16", 2, "float32", ("float16", "float32")),
        DType("bfloat16", 2, "float32", ("bfloat16", "float32")),  # defined by ml_dtypes
        DType("float32", 4, "float32", ("float32",), planes=9),
        DType("float64", 8, "float64", ("float64",), planes=16),
        DType("complex64", 8, "complex64", ("complex64",), is_complex=True),
        DType("complex128", 16, "complex128", ("complex128",), is_complex=True),
        # Products of int8 are summed in int32 within a step, and in float64 over the steps: see integers.py.
        DType("int8", 1, "float64", ("int32", "int64", "float32", "float64")),
        DType("int32", 4),
        DType("int64", 8),
        # Elements of C that are selected (`GemmProblem.topk`): a score and the index of its column, float32
        # and uint32, or float64 and uint64.
        DType("void64", 8),
        DType("void128", 16),
    )
}
# Dtypes of A and B.
OPERANDS = tuple(d.name for d in DTYPES.values() if d.results)

# Values of `GemmProblem.gram`: the triangle of C that is computed. With "full", it is the lower one, and the
# other one is mirrored.
GRAMS = ("lower", "upper", "full")

# The dtype of selected elements, by the accumulator's dtype.
SELECTED = {"float32": "void64", "float64": "void128", "int32": "void128"}

# Of the elements of C, plans assume that one in SPARSE is kept if those at or above a threshold are.
SPARSE = 64

# Values of `GemmProblem.compute`, each with the dtypes of A and B for which it is allowed.
COMPUTES = {
    "native": OPERANDS,
    "tf32": ("float32",),
    "bf16": ("float32",),
    "emulated": tuple(d.name for d in DTYPES.values() if d.planes),
}


@dataclass(frozen=True)
class GemmProblem:
    """``C (m x n) = alpha * op(A) (m x k) @ op(B) (k x n) + beta * C``.

    The accumulator and C may be wider than A and B. `compute` is a key of `COMPUTES`: "tf32" and "bf16" round
    float32 operands before the product, and "emulated" computes it from exact int8 products
    (`oocgemm.planning.emulation`). `checked` says whether the "host" or the "device" computes checksums; ""
    means that C is not checked.

    If `gram` is not empty, op(B) is the conjugate transpose of op(A), so that m = n and C is Hermitian. Only
    a triangle of C is computed (SYRK, HERK), which `gram` names: it is one of `GRAMS`. There is no operand B:
    a panel of A is used in both roles.

    If `stored_a` (or `stored_b`) is not empty, panels of A (or B) have this dtype until the device expands
    them: it transforms their elements to `a_dtype` just before they are multiplied.

    If the product is `centered`, A or B minus means along k are multiplied. The product of A and B themselves
    is computed, and a matrix of rank one is subtracted when C is finished.

    If it is `measured`, the device finds the means and scales for its transform in the panels themselves,
    just before they are transformed. That is possible for a Gram matrix of one tile: a panel has all rows of
    X.

    If `topk` is not 0, C is not stored. Of each of its rows, the `topk` largest elements are, as scores with
    the indices of their columns: m x topk elements of the dtype `c_dtype`. If they are `scaled`, row i and
    column j of C are first multiplied by s[i] and s[j], for a vector s, and clipped to [-1, 1].
    With `excludes_self`, the elements on C's diagonal are left out.

    If it is `sparse`, C is not stored either. Its elements (scaled, and without the diagonal, as above) that
    are at least `threshold` are, also as scores with indices. With `absolute`, their magnitudes are compared.

    If `chained` is not 0, two products are computed for each panel, by one read of op(A). The product of the
    adjoint of a panel of op(A) and a matrix Q, m x `chained`, is added to the first columns of the panel of B
    before it is multiplied: ``C = op(A) @ (B + op(A)^H Q)``. C is then one tile.

    The steps of the `epilogue` change each element of C before it is stored, selected or used in another way
    (`oocgemm.planning.epilogue`).

    If `applied` is not 0, C is not stored, but multiplied by a matrix V, n x `applied`. If there is a
    `reduction`, C is not stored either: of each of its rows, the sum, the sum of squares or the largest
    element is.
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
    gram: str = ""
    stored_a: str = ""
    stored_b: str = ""
    centered: bool = False
    topk: int = 0
    scaled: bool = False
    excludes_self: bool = False
    sparse: bool = False
    threshold: float = 0.0
    absolute: bool = False
    chained: int = 0
    applied: int = 0
    measured: bool = False
    epilogue: tuple[Step, ...] = ()
    reduction: str = ""

    @property
    def selects(self) -> bool:
        """Whether C is not stored: only some of its elements are, or a product of it."""
        return self.sparse or self.kept > 0

    @property
    def kept(self) -> int:
        """How many elements are kept for each row of C, and updated by each tile; 0 if C is stored."""
        return self.topk or self.applied or int(self.reduction != "")

    @property
    def triangle(self) -> str:
        """The triangle of C that is stored, "lower" or "upper", with the diagonal; "" if all of C is.

        The other one stays as it is: 0 in a new array.
        """
        return self.gram if self.gram in ("lower", "upper") and not self.selects else ""

    @property
    def operands(self) -> str:
        """Letters of the operands that have panels: "AB", or "A" for a Gram matrix."""
        return "A" if self.gram else "AB"

    @property
    def elements(self) -> int:
        """Elements of C, or of the triangle of C with its diagonal that a Gram matrix needs."""
        return self.m * (self.m + 1) // 2 if self.gram else self.m * self.n

    @property
    def depth(self) -> int:
        """Extent along k over which products are summed: `k`, or 0 if A and B are not read.

        As in BLAS, A and B are not read if alpha = 0 or C is empty.
        """
        return 0 if self.alpha == 0 or 0 in (self.m, self.n) else self.k

    @property
    def applied_alpha(self) -> complex:
        """alpha, or 0 if `depth` is 0: as in BLAS, the result is then beta * C, even if alpha is NaN."""
        return self.alpha if self.depth else 0.0

    @property
    def updates_c(self) -> bool:
        """Whether the old elements of C are read. They are not if beta = 0, as in BLAS."""
        return self.beta != 0

    @property
    def merges(self) -> bool:
        """Whether a step of the epilogue reads a further matrix, D."""
        return any(step.merges for step in self.epilogue)

    @property
    def measures_distances(self) -> bool:
        """Whether squared distances of rows of op(A) and columns of op(B) are computed from C."""
        return bool(self.epilogue) and self.epilogue[0].kind == "gaussian"

    @property
    def reads_c(self) -> bool:
        """Whether strips of C's shape are loaded: of the old C, or of D."""
        return self.updates_c or self.merges

    @property
    def planes(self) -> int:
        """Maximum number of int8 matrices that replace a block of A or B; 0 if not emulated."""
        return DTYPES[self.a_dtype].planes if self.compute == "emulated" else 0

    @property
    def expands(self) -> bool:
        """Whether panels of A or B are transformed on the device."""
        return bool(self.stored_a or self.stored_b)

    @property
    def prepares(self) -> bool:
        """Whether each step has a Prepare operation, which splits, measures or transforms its panels."""
        return bool(self.planes or self.expands or self.measured)

    def prepared_bytes(self, m: int, n: int, k: int) -> int:
        """Return the bytes of the panels that the Prepare of an m x n x k step reads."""
        a, b = (bool(self.planes or stored) for stored in (self.stored_a, self.stored_b))
        return (m * a * self.itemsizes["A"] + n * b * self.itemsizes["B"]) * k

    @property
    def rate(self) -> str:
        """Key in `MachineModel.kernels` of the speed at which the product is multiplied."""
        return f"emulated {self.a_dtype}" if self.planes else self.a_dtype

    @property
    def described_dtype(self) -> str:
        """The dtype of A and B in the product, and in storage if the device transforms them, as text."""
        stored = dict.fromkeys(filter(None, (self.stored_a, self.stored_b)))
        return f"{self.a_dtype} from {' and '.join(stored)}" if stored else self.a_dtype

    @property
    def exact(self) -> bool:
        """Whether op(A) @ op(B) is summed without rounding."""
        return self.a_dtype == "int8"

    @property
    def finishes(self) -> bool:
        """Whether a Finish operation follows the products of a tile: it changes or selects elements of C.

        It applies alpha and beta and casts the accumulator to C's dtype, or it selects elements.

        Otherwise the multiplication itself applies alpha and beta. For int8, this is allowed only with alpha
        = 1 and beta = 0, because partial sums must stay exact.
        """
        scales = self.exact and (self.alpha, self.beta) != (1, 0)
        changes = scales or self.centered or bool(self.epilogue)
        return self.acc_dtype != self.c_dtype or changes or self.kept > 0

    @property
    def checks_sums(self) -> bool:
        """Whether checksums are compared with the accumulator, before a Finish changes its elements."""
        return bool(self.checked) and (bool(self.epilogue) or self.centered or self.selects)

    @property
    def as_summed(self) -> "GemmProblem":
        """The product that the accumulator has when a Finish begins: without alpha, beta and an epilogue."""
        dtype = "int64" if self.exact else self.acc_dtype
        return replace(
            GemmProblem(self.m, self.n, self.k, self.a_dtype, self.b_dtype, self.acc_dtype, dtype),
            compute=self.compute,
            gram=self.gram,
            trans_a=self.trans_a,
            trans_b=self.trans_b,
        )

    @property
    def halves_diagonal(self) -> bool:
        """Whether the host's BLAS computes one triangle of the squares on the diagonal of a Gram matrix.

        The other one is mirrored before the strip is written. Nothing else may use the strip before.
        """
        real = self.acc_dtype in ("float32", "float64")
        return bool(self.gram) and real and not (self.finishes or self.planes or self.checked)

    @property
    def finish_slots(self) -> int:
        """Number of device slots that a Finish needs: two for strips, or one for the elements of all rows."""
        return (1 if self.kept else 2) if self.finishes else 0

    @property
    def stored_shape(self) -> tuple[int, int]:
        """Rows and columns of the array that is stored: C, or the selected elements of its rows."""
        return self.m, self.kept or self.n

    def stored(self, rows: int, elements: int) -> int:
        """Count the elements that are stored of `rows` rows of C, which have `elements` elements.

        If C is `sparse`, the number is an estimate.
        """
        if self.sparse:
            return elements // SPARSE
        return rows * self.kept if self.kept else elements

    @property
    def flops(self) -> int:
        """Floating-point operations that C needs. A complex operation counts as several real ones."""
        return self.step_flops(1, self.elements, self.depth)

    def step_flops(self, m: int, n: int, k: int) -> int:
        """Count the floating-point operations of an m x n x k part of the product.

        A multiplication and an addition together count as 2 operations, or as 8 if they are complex.
        """
        flops = (8 if DTYPES[self.acc_dtype].is_complex else 2) * m * n * k
        return flops * (self.n + self.chained) // self.n if self.chained else flops

    @property
    def vector_length(self) -> int:
        """How many numbers of each kind a transform of op(A) has: one per index along k, or along m.

        The products of a `chained` problem sum over both. Its transform has one per index along m.
        """
        return self.m if self.chained else self.depth

    @cached_property
    def itemsizes(self) -> dict[str, int]:
        """Bytes per element of A, B and C as stored, and of the accumulator ("acc")."""
        return {operand: DTYPES[name].itemsize for operand, name in self.dtypes.items()}

    @property
    def dtypes(self) -> dict[str, str]:
        """Names of the dtypes of A, B and C in slots, and of the accumulator ("acc")."""
        a, b = self.stored_a or self.a_dtype, self.stored_b or self.b_dtype
        return {"A": a, "B": b, "C": self.c_dtype, "acc": self.acc_dtype}
