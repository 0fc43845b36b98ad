"""A product of matrices: its extents, operands, arithmetic, and what becomes of C."""

from collections.abc import Mapping
from dataclasses import fields, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, ClassVar, Self

from oocgemm.planning.cover import WHOLE, Cover, cover_of
from oocgemm.planning.elements import IN_PANEL, ElementStep, parsed_steps
from oocgemm.planning.sinks import SINKS, Sink, Step, Stored
from oocgemm.planning.terms import ONE, Terms
from oocgemm.values import dataclass


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
    may have, the default first. Both are empty if elements of the dtype are not multiplied. `planes` is the
    maximum number of int8 matrices (residue planes) into which emulation splits a block of A or B; 0 if
    products of the dtype cannot be emulated.

    If products are summed without rounding, `largest` is the largest magnitude of an element; else 0.
    `wide` is the dtype in which a GPU multiplies the elements if it cannot multiply them as they are. The
    host multiplies such elements as fast as int8.
    """

    name: str
    itemsize: int
    accumulator: str = ""
    results: tuple[str, ...] = ()
    is_complex: bool = False
    planes: int = 0
    largest: int = 0
    wide: str = ""

    @property
    def rate(self) -> str:
        """The dtype whose measured rate is that of products of such elements."""
        return "int8" if self.wide else self.name


_EXACT = ("int32", "int64", "float32", "float64")
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
        DType("int8", 1, "float64", _EXACT, largest=128),
        DType("uint8", 1, "float64", _EXACT, largest=255, wide="float64"),
        DType("int16", 2, "float64", _EXACT, largest=255, wide="float64"),  # int8 and uint8, mixed
        # Dtypes in storage. Elements are converted when they are loaded: see `MULTIPLIED`.
        DType("bool", 1),
        DType("uint16", 2),
        DType("int32", 4),
        DType("uint32", 4),
        DType("int64", 8),
        # Elements of C that are selected (`sinks.Selected`): a score and the index of its column, float32
        # and uint32, or float64 and uint64.
        DType("void64", 8),
        DType("void128", 16),
    )
}
# Dtypes that GPUs multiply as they are, and whose rates are measured.
OPERANDS = tuple(d.name for d in DTYPES.values() if d.results and not d.wide)
# The dtype in which elements of A or B are multiplied, by their dtype in storage. Operands with different
# dtypes in this table are multiplied in the dtype in which NumPy would multiply them.
MULTIPLIED = {name: name for name in OPERANDS} | {
    "bool": "int8",
    "uint8": "uint8",
    "int16": "float32",
    "uint16": "float32",
    "int32": "float64",
    "uint32": "float64",
    "int64": "float64",
}

# Values of `Arithmetic.compute`, each with the dtypes of A and B for which it is allowed.
COMPUTES = {
    "native": tuple(d.name for d in DTYPES.values() if d.results),
    "tf32": ("float32",),
    "bf16": ("float32",),
    "emulated": tuple(d.name for d in DTYPES.values() if d.planes),
}


@dataclass(frozen=True)
class Operand:
    """A or B as the product multiplies it: op(X) of elements of `dtype`.

    `elements` are the steps that are left to do when panels are in slots. If `stored` is not empty, panels
    have this dtype until the device expands them: it does these steps just before it multiplies the panels.
    Deferred steps correct C instead.

    Class attributes, which say what B demands of the product:

    - `shares`: whether panels of A are used in place of panels of B.
    - `one_tile`: whether C must be one tile.
    """

    dtype: str
    op: Op = Op.N
    stored: str = ""
    elements: tuple[ElementStep, ...] = ()

    shares: ClassVar[bool] = False
    one_tile: ClassVar[bool] = False

    @property
    def changed_columns(self) -> int:
        """The columns of a panel of B that a Multiply changes in its slot, before it multiplies the panel."""
        return 0

    def factor_elements(self, m: int, n: int) -> int:
        """Count the elements of the device's matrix from which panels of B are made, if C is m x n."""
        return 0

    def flops(self, product: int, n: int) -> int:
        """Count the operations of a step, given those of its `product` of panels. C has n columns."""
        return product

    def factors(self, m: int, n: int, k: int, cover: str) -> tuple[str, str]:
        """Return the two factors of the product, as text. `cover` is the label of its cover."""
        return f"op(A) {m} x {k}", f"op(B) {k} x {n}"

    @property
    def slot_dtype(self) -> str:
        """The dtype of panels in slots."""
        return self.stored or self.dtype

    @property
    def prepared(self) -> tuple[ElementStep, ...]:
        """The steps that the device does when it expands a panel."""
        return tuple(step for step in self.elements if not step.is_deferred) if self.stored else ()

    def with_numbers_in_panels(self) -> Self:
        """Return the operand for which the device finds in panels the numbers that are not given."""
        found = (replace(step, source=IN_PANEL) if step.rule else step for step in self.elements)
        return replace(self, elements=tuple(found))


@dataclass(frozen=True)
class Same(Operand):
    """B is the conjugate transpose of op(A), so that m = n, and C is Hermitian if alpha and beta are real.

    There are no panels of B: a panel of A is used in both roles.
    """

    shares = True

    def factors(self, m: int, n: int, k: int, cover: str) -> tuple[str, str]:
        return f"op(X) {m} x {k}", f"its adjoint, {cover}"


def same(operand: Operand) -> Same:
    """Return an operand B that is the conjugate transpose of op(A)."""
    return Same(operand.dtype, operand.op, operand.stored, operand.elements)


@dataclass(frozen=True)
class Updated(Operand):
    """Two products are computed for each panel, with one read of op(A): ``C = op(A) @ (B + op(A)^H Q)``.

    The product of the adjoint of a panel of op(A) and a matrix Q, m x `columns`, is added to the first
    columns of the panel of B before it is multiplied. Q stays on the device. Its rows are as long as those
    of C. The two products sum over both axes of op(A).
    """

    columns: int = 1

    one_tile = True

    @property
    def changed_columns(self) -> int:
        return self.columns

    def factor_elements(self, m: int, n: int) -> int:
        """Count the elements of Q and the additional elements of its rows."""
        return m * n

    def flops(self, product: int, n: int) -> int:
        return product * (n + self.columns) // n

    def factors(self, m: int, n: int, k: int, cover: str) -> tuple[str, str]:
        return f"X^T {m} x {k}", f"(X Q + 1 row) {k} x {n}"


@dataclass(frozen=True)
class Arithmetic:
    """How sums are computed.

    `acc` is the accumulator's dtype. `compute` is a key of `COMPUTES`: "tf32" and "bf16" round float32
    operands before the product, and "emulated" computes it from exact int8 products
    (`oocgemm.planning.emulation`). `checked` says whether the "host" or the "device" computes checksums; ""
    means that C is not checked.
    """

    acc: str
    compute: str = "native"
    checked: str = ""


@dataclass(frozen=True)
class GemmProblem:
    """``C (m x n) = op(A) (m x k) @ op(B) (k x n)``, and what becomes of C (`oocgemm.planning.sinks`).

    The accumulator and C may be wider than A and B. `cover` says which elements of C are computed and stored.
    With several `terms`, several products of the same panels are summed, and combined to C.

    If elements of A or B have a deferred step, C `is_corrected`: A or B minus means along k are multiplied.
    The product of A and B themselves is computed, and a matrix of rank one is subtracted when C is finished.

    If the numbers of steps are found in panels, the device measures a panel just before it is transformed.
    That is possible for a Gram matrix of one tile: a panel has all rows of X.
    """

    m: int
    n: int
    k: int
    a: Operand
    b: Operand
    arithmetic: Arithmetic
    sink: Sink
    cover: Cover = WHOLE
    terms: Terms = ONE

    @classmethod
    def of(
        cls,
        m: int,
        n: int,
        k: int,
        a_dtype: str,
        b_dtype: str,
        acc_dtype: str,
        c_dtype: str,
        alpha: complex = 1.0,
        beta: complex = 0.0,
        trans_a: Op = Op.N,
        trans_b: Op = Op.N,
        compute: str = "native",
    ) -> "GemmProblem":
        """Return ``C = alpha * op(A) @ op(B) + beta * C`` of stored operands."""
        operands = Operand(a_dtype, trans_a), Operand(b_dtype, trans_b)
        return cls(m, n, k, *operands, Arithmetic(acc_dtype, compute), Stored(c_dtype, (), alpha, beta))

    @property
    def a_dtype(self) -> str:
        return self.a.dtype

    @property
    def b_dtype(self) -> str:
        return self.b.dtype

    @property
    def trans_a(self) -> Op:
        return self.a.op

    @property
    def trans_b(self) -> Op:
        return self.b.op

    @property
    def acc_dtype(self) -> str:
        return self.arithmetic.acc

    @property
    def compute(self) -> str:
        return self.arithmetic.compute

    @property
    def checked(self) -> str:
        return self.arithmetic.checked

    @property
    def c_dtype(self) -> str:
        return self.sink.dtype

    @property
    def alpha(self) -> complex:
        return self.sink.alpha

    @property
    def beta(self) -> complex:
        return self.sink.beta

    @property
    def epilogue(self) -> tuple[Step, ...]:
        return self.sink.epilogue

    def with_sums(self, acc: str) -> "GemmProblem":
        return replace(self, arithmetic=replace(self.arithmetic, acc=acc))

    def checked_on(self, tier: str) -> "GemmProblem":
        """Return the problem with checksums that the "host" or the "device" computes; "" for none."""
        return replace(self, arithmetic=replace(self.arithmetic, checked=tier))

    @property
    def operands(self) -> str:
        """Letters of the operands that have panels: "AB", or "A" if panels of A have both roles."""
        return "A" if self.b.shares else "AB"

    @property
    def elements(self) -> int:
        """Elements of C, or of the triangle of C with its diagonal that is needed."""
        return self.cover.elements(self.m, self.n)

    @property
    def triangle(self) -> str:
        """The triangle of C that is stored, "lower" or "upper", with its diagonal; "" if all is stored."""
        return self.cover.stored_triangle if self.sink.stores_c else ""

    @property
    def depth(self) -> int:
        """Extent along k over which products are summed; 0 if alpha = 0 or C is empty, as in BLAS."""
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
    def measures_distances(self) -> bool:
        """Whether squared distances of rows of op(A) and columns of op(B) are computed from C."""
        return bool(self.epilogue) and self.epilogue[0].kind in ("gaussian", "distance")

    @property
    def reads_c(self) -> bool:
        """Whether strips of C's shape are loaded: of the old C, or of D."""
        return self.updates_c or self.sink.merges

    @property
    def planes(self) -> int:
        """Maximum number of int8 matrices that replace a block of A or B; 0 if not emulated."""
        return DTYPES[self.a_dtype].planes if self.compute == "emulated" else 0

    @property
    def is_corrected(self) -> bool:
        """Whether a matrix of rank one is subtracted from C, for the centers of A or B."""
        return any(step.is_deferred for step in (*self.a.elements, *self.b.elements))

    @property
    def finds_numbers(self) -> bool:
        """Whether the device finds numbers of steps in panels of op(A), which have all of its rows."""
        return any(step.in_panel for step in self.a.elements)

    @property
    def min_panel_rows(self) -> int:
        """The least number of rows of op(A) in a panel."""
        return self.m if self.finds_numbers else 1

    @property
    def expanded_itemsize(self) -> int:
        """Bytes that expanded panels have for an element of a panel; 0 if no panel is expanded."""
        expands = self.a.stored or self.b.stored or self.terms.changes
        return DTYPES[self.a_dtype].itemsize * self.terms.maps if expands else 0

    @property
    def prepares(self) -> bool:
        """Whether each step has a Prepare operation, which splits, measures or transforms its panels."""
        return bool(self.planes or self.expanded_itemsize or self.finds_numbers)

    def prepared_bytes(self, m: int, n: int, k: int) -> int:
        """Return the bytes of the panels that the Prepare of an m x n x k step reads."""
        a, b = (
            len(maps) if self.planes or x.stored else sum(map(bool, maps))
            for x, maps in ((self.a, self.terms.a), (self.b, self.terms.b))
        )
        return (m * a * self.itemsizes["A"] + n * b * self.itemsizes["B"]) * k

    @property
    def rate(self) -> str:
        """Key in `MachineModel.kernels` of the speed at which the product is multiplied."""
        return f"emulated {self.a_dtype}" if self.planes else DTYPES[self.a_dtype].rate

    @property
    def described_dtype(self) -> str:
        """The dtype of A and B in the product, and in storage if the device transforms them, as text."""
        stored = dict.fromkeys(filter(None, (self.a.stored, self.b.stored)))
        return f"{self.a_dtype} from {' and '.join(stored)}" if stored else self.a_dtype

    @property
    def exact(self) -> bool:
        """Whether op(A) @ op(B) is summed without rounding."""
        return DTYPES[self.a_dtype].largest > 0

    @property
    def finishes(self) -> bool:
        """Whether a Finish follows the products of a tile: it changes, casts or selects elements of C.

        Otherwise the multiplication itself applies alpha and beta. For int8, this is allowed only with alpha
        = 1 and beta = 0, because partial sums must stay exact.
        """
        scales = self.exact and (self.alpha, self.beta) != (1, 0)
        changes = scales or self.is_corrected or bool(self.epilogue)
        return self.acc_dtype != self.c_dtype or changes or not self.sink.stores_c

    @property
    def checks_sums(self) -> bool:
        """Whether checksums are compared with the accumulator, before a Finish changes its elements."""
        return bool(self.checked) and (bool(self.epilogue) or self.is_corrected or not self.sink.stores_c)

    @property
    def as_summed(self) -> "GemmProblem":
        """The product that the accumulator has when a Finish begins: without alpha, beta and an epilogue."""
        b = Operand(self.b.dtype, self.b.op)
        return replace(
            self,
            a=Operand(self.a.dtype, self.a.op),
            b=same(b) if self.b.shares else b,
            arithmetic=replace(self.arithmetic, checked=""),
            sink=Stored("int64" if self.exact else self.acc_dtype),
        )

    @property
    def halves_diagonal(self) -> bool:
        """Whether the host's BLAS computes only one triangle of squares on C's diagonal, because B is A^T.

        The other triangle is mirrored before the strip is written. Nothing else may use the strip earlier.
        """
        real = self.acc_dtype in ("float32", "float64")
        same = self.b.shares and self.cover.halves
        kept = self.sink.stores_c and self.c_dtype in ("float32", "float64")
        several = self.terms.count > 1 or self.terms.a != self.terms.b
        return same and real and kept and not (self.planes or self.checked or several)

    @property
    def finish_slots(self) -> int:
        """Number of device slots that a Finish needs: two for strips, or one for the elements of all rows."""
        return (1 if self.sink.per_row else 2) if self.finishes else 0

    @property
    def keeps_rows(self) -> bool:
        """Whether one device computes all tiles of a tile row: the sink keeps numbers of each row of C."""
        return self.sink.per_row > 0 and not self.cover.halves

    @property
    def stored_shape(self) -> tuple[int, int]:
        """Rows and columns of the array that is stored: C, or the selected elements of its rows."""
        return self.m, self.sink.per_row or self.n

    @property
    def flops(self) -> int:
        """Floating-point operations that C needs. A complex operation counts as several real ones."""
        return self.step_flops(1, self.elements, self.depth)

    def step_flops(self, m: int, n: int, k: int) -> int:
        """Count the operations of an m x n x k part: 2 per product of elements, or 8 if complex."""
        each = (8 if DTYPES[self.acc_dtype].is_complex else 2) * self.terms.count
        return self.b.flops(each * m * n * k, self.n)

    def stored_extent(self, operand: str, axis: str) -> int:
        """Return the number of rows (`axis` "rows") or columns ("cols") of the stored operand "A" or "B"."""
        (rows, cols), op = (
            ((self.m, self.k), self.trans_a) if operand == "A" else ((self.k, self.n), self.trans_b)
        )
        return rows if (axis == "rows") != op.swaps else cols

    @property
    def factors(self) -> tuple[str, str]:
        return self.b.factors(self.m, self.n, self.k, self.cover.label)

    @cached_property
    def itemsizes(self) -> dict[str, int]:
        """Bytes per element of A, B and C as stored, and of the accumulators of an element of C ("acc")."""
        sizes = {operand: DTYPES[name].itemsize for operand, name in self.dtypes.items()}
        return sizes | {"acc": sizes["acc"] * self.terms.count}

    @property
    def acc_itemsize(self) -> int:
        """Bytes of an element of one accumulator."""
        return DTYPES[self.acc_dtype].itemsize

    @property
    def combined_dtype(self) -> str:
        """The dtype in which a GPU keeps elements in an accumulator, if an epilogue changes them there."""
        changes = self.epilogue and not self.sink.ranks_distances
        return "float32" if changes and self.acc_dtype == "int32" else self.acc_dtype

    @property
    def dtypes(self) -> dict[str, str]:
        slots = {"A": self.a.slot_dtype, "B": self.b.slot_dtype}
        return slots | {"C": self.c_dtype, "acc": self.acc_dtype}

    def record(self) -> dict[str, Any]:
        """Return the problem as plain data for records, such as journals and timeline logs."""
        return {
            "m": self.m,
            "n": self.n,
            "k": self.k,
            "a_dtype": self.a.dtype,
            "b_dtype": self.b.dtype,
            "acc_dtype": self.acc_dtype,
            "trans_a": self.a.op,
            "trans_b": self.b.op,
            "compute": self.compute,
            "checked": self.checked,
            "gram": self.cover.name,
            "stored_a": self.a.stored,
            "stored_b": self.b.stored,
            "chained": self.b.changed_columns,
            "elements_a": ", ".join(map(str, self.a.elements)),
            "elements_b": ", ".join(map(str, self.b.elements)),
        } | (self.terms.record() | self.sink.record())

    @classmethod
    def recorded(cls, data: Mapping[str, Any]) -> "GemmProblem":
        """Rebuild a problem from its `record`. Raises `KeyError`, `TypeError` or `ValueError`."""
        steps_a, steps_b = (parsed_steps(data.get(name, "")) for name in ("elements_a", "elements_b"))
        a = Operand(data["a_dtype"], data["trans_a"], data["stored_a"], steps_a)
        given = data["b_dtype"], data["trans_b"], data["stored_b"], steps_b
        b = Operand(*given)
        if data["gram"]:
            b = Same(*given)
        elif data["chained"]:
            b = Updated(*given, data["chained"])
        kind, own = SINKS[data["sink"]], dict(data, dtype=data["c_dtype"])
        return cls(
            data["m"],
            data["n"],
            data["k"],
            a,
            b,
            Arithmetic(data["acc_dtype"], data["compute"], data["checked"]),
            kind(**{field.name: own[field.name] for field in fields(kind)}),
            cover_of(data["gram"]),
            Terms.recorded(data),
        )
