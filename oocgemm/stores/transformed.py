"""Matrices whose elements are computed from stored elements when they are read, on the CPU.

A `SteppedMatrix` applies a chain of steps to its elements (`oocgemm.planning.elements`). A GPU can apply the
steps instead. The steps of a `TransformedMatrix` are those of a `Transform`. The steps of a
`StandardizedMatrix` standardize lines. `ImputedMatrix` replaces missing genotypes by means, and `KnownMatrix`
has ones where genotypes are known.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isnan, nan
from pathlib import Path
from typing import Any, Self

import numpy as np

from oocgemm.errors import ExecutionError, InputError
from oocgemm.planning import MULTIPLIED
from oocgemm.planning.elements import MAX_STEPS, STREAMED, ElementStep
from oocgemm.planning.emulation import EXACT_LIMIT
from oocgemm.planning.tiling import Range
from oocgemm.stores.arrays import in_float64, read_block
from oocgemm.stores.base import (
    BATCH_BYTES,
    Array,
    Composite,
    Matrix,
    Store,
    View,
    dtype_name,
    not_writable,
    pieces,
)
from oocgemm.stores.formats import check_dtypes
from oocgemm.stores.transform import Transform
from oocgemm.values import dataclass

# Number of elements that are transformed at a time. With fewer elements, threads mostly wait for the GIL.
SLAB = 1 << 18
# Bytes of the temporary arrays for one slab: the elements in float64, and masks of missing elements.
SLAB_BYTES = SLAB * 10
# The dtype of standardized elements, by the dtype in storage. Other dtypes stay as they are.
RESULTS = dict.fromkeys(
    ("float16", "bfloat16", "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64"), "float32"
)
# Dtypes in storage whose elements are first converted to float64, then cast.
_BY_FLOAT64 = ("int32", "uint32", "int64")
DType = np.dtype[Any]
# The values of `ElementStep.axis`: a step has one number per row, or one per column.
_AXES = "rows", "cols"


# The numbers of a step, one per row or column of an array; None if the step has no numbers.
Numbers = Array | None


def apply(steps: Sequence[ElementStep], numbers: Sequence[Numbers], x: Array) -> Array:
    """Return the elements `x`, which are in float64, after a chain of steps. `x` may be overwritten.

    `numbers` has the numbers of each step for the rows or columns of `x`. Overflows and invalid operations
    give Inf and NaN.
    """
    decoding = sum(step.decodes for step in steps)
    with np.errstate(all="ignore"):
        for step, u in zip(steps[:decoding], numbers[:decoding], strict=True):
            x = _FORMS[step.kind](x, step, _along(step, u))
        missing = {
            i: is_missing(x, step.constants[0]) for i, step in enumerate(steps) if step.kind == "impute"
        }
        for i, (step, u) in list(enumerate(zip(steps, numbers, strict=True)))[decoding:]:
            if i in missing:
                lost = positions(missing[i])
                assert u is not None
                x[lost] = u[lost[step.axis == "cols"]]
            else:
                x = _FORMS[step.kind](x, step, _along(step, u))
    return x


def _along(step: ElementStep, u: Array | None) -> Array | None:
    return None if u is None else u.reshape((-1, 1) if step.axis == "rows" else (1, -1))


# The functions of all steps but `impute`, which needs to know the missing elements (`apply`).
_FORMS: dict[str, Callable[[Array, ElementStep, Any], Array]] = {
    "absent": lambda x, step, u: _set(x, x == step.constants[0], nan),
    "unsigned": lambda x, step, u: np.add(x, step.constants[0], out=x, where=x < 0),
    "normalize": lambda x, step, u: np.multiply(x, u, out=x),
    "unpack": lambda x, step, u: np.add(np.multiply(x, step.constants[0], out=x), step.constants[1], out=x),
    "log1p": lambda x, step, u: np.log1p(x, out=x),
    "center": lambda x, step, u: np.subtract(x, u, out=x),
    "scale": lambda x, step, u: np.multiply(x, u, out=x),
    "clip": lambda x, step, u: np.clip(x, *step.constants, out=x),
    "known": lambda x, step, u: np.subtract(1.0, is_missing(x, step.constants[0]), out=x),
    "or_zero": lambda x, step, u: _set(x, is_missing(x, step.constants[0]), 0),
    "equal": lambda x, step, u: np.equal(x, step.constants[0], out=x, casting="unsafe"),
    "shift": lambda x, step, u: np.add(x, step.constants[0], out=x),
    "square": lambda x, step, u: np.square(x, out=x),
    "correct": lambda x, step, u: x,
}


def _set(x: Array, where: Array, value: float) -> Array:
    np.copyto(x, value, where=where)
    return x


def is_missing(x: Array, code: float) -> Array:
    """Return a mask of the elements that are equal to `code`, the code of missing elements. It may be NaN."""
    # To compare integers with a float, NumPy would cast all of them.
    same = int(code) if x.dtype.kind in "iu" else code
    found: Array = np.isnan(x) if isnan(code) else x == same
    return found


def positions(mask: Array) -> tuple[Array, ...]:
    """Return the indices that `np.nonzero` returns, in a tenth of its time if the mask is mostly false."""
    return np.unravel_index(np.flatnonzero(mask), mask.shape)


class ElementView(View):
    """A read-only view that reads a matrix piece by piece, and computes its own elements from each piece.

    Attributes:
        stored: the matrix that is read.
        change: a text that distinguishes the elements from those of other views of the matrix.
    """

    purpose: str  # names the scratch memory for a piece (`read_block`)
    change = ""

    def __init__(self, matrix: Matrix, *, temporary_bytes: int, mask: bool, resident_bytes: int) -> None:
        """View a matrix. To compute a piece takes `temporary_bytes`, and with `mask` one byte per element."""
        super().__init__(matrix)
        self.stored, self.shape = matrix, matrix.shape
        found, itemsize = matrix.layout, matrix.dtype.itemsize
        self._chunk = (1, SLAB) if found.partial_reads else found.read_chunk
        self._batch = max(1, BATCH_BYTES // itemsize)
        piece = max(self._chunk[0] * self._chunk[1], 2 * self._batch) * (itemsize + mask)
        self.layout = found.computed(piece + temporary_bytes, resident_bytes)

    def _results_in(self, dtype: np.dtype[Any]) -> None:
        self.dtype, self.layout = dtype, replace(self.layout, itemsize=dtype.itemsize)

    def describe(self) -> dict[str, object]:
        return super().describe() | ({"transform": self.change} if self.change else {})

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        for (r0, r1), (c0, c1) in pieces(rows, cols, self._chunk, self._batch):
            raw = read_block(self.purpose, self.stored, (r0, r1), (c0, c1))
            part = out[r0 - rows[0] : r1 - rows[0], c0 - cols[0] : c1 - cols[0]]
            self._compute(raw, (r0, r1), (c0, c1), part)

    def _compute(self, raw: Array, rows: Range, cols: Range, out: Array) -> None:
        """Compute elements into `out` from `raw`, the block of the matrix at these rows and columns."""
        raise NotImplementedError


class SteppedMatrix(ElementView):
    """A read-only view of a matrix whose elements go through a chain of steps.

    A view of such a view has the steps of both, one after the other, and rounds once.

    Attributes:
        source: the matrix that is read.
        matrix: the matrix that is viewed: `source`, or a view of `source`.
        steps, numbers: the chain. Numbers are None if they are unknown: a plan does not need them.
    """

    purpose = "stored"
    # Whether the steps decode stored elements, of which missing ones become NaN.
    unpacks = False

    def __init__(
        self,
        matrix: Matrix,
        steps: Sequence[ElementStep],
        numbers: Sequence[Numbers] | None,
        dtype: np.dtype[Any],
    ) -> None:
        """View a matrix, and apply further steps to its elements. The results are rounded to `dtype`."""
        inner = matrix if isinstance(matrix, SteppedMatrix) else None
        self.source: Matrix = matrix if inner is None else inner.source
        self.matrix = matrix
        self.own_steps, self.own_numbers = tuple(steps), None if numbers is None else tuple(numbers)
        self.steps: tuple[ElementStep, ...] = (*(inner.steps if inner else ()), *self.own_steps)
        self.numbers: tuple[Numbers, ...] | None = self.own_numbers
        if inner is not None:
            known = inner.numbers is not None and self.own_numbers is not None
            self.numbers = (*inner.numbers, *self.own_numbers) if known else None  # type: ignore[misc]
        # The numbers, and a second copy of them for the transfer to a device.
        extents = dict(zip(_AXES, matrix.shape, strict=True))
        held = 2 * 8 * sum(extents[step.axis] for step in self.steps if step.axis)
        super().__init__(self.source, temporary_bytes=SLAB_BYTES, mask=False, resident_bytes=held)
        self._results_in(dtype)

    def on(
        self, matrix: Matrix, numbers: Sequence[Numbers] | None, dtype: np.dtype[Any] | None = None
    ) -> Self:
        """Return the same view of another matrix of the same shape, with these numbers."""
        raise NotImplementedError

    def wide(self) -> Self:
        """Return the same view with elements in float64, which are not rounded."""
        return self.on(self.matrix, self.own_numbers, np.dtype(np.float64))

    @property
    def is_copy(self) -> bool:
        """Whether stored elements are multiplied unchanged, and all steps are applied to C afterwards."""
        return bool(self.steps) and all(step.is_deferred for step in self.steps)

    @property
    def is_measurable(self) -> bool:
        """Whether a GPU can compute the numbers from panels: they are exact sums of small integers."""
        return False

    @property
    def is_expandable(self) -> bool:
        """Whether a GPU can do the steps: not too many, in float64, which complex elements do not fit."""
        return self.source.dtype.kind != "c" and len(self.steps) <= MAX_STEPS

    def exact(self) -> "SteppedMatrix":
        """Return a view that also applies the deferred steps. It is in float64 if there are such steps."""
        return self

    @property
    def is_known(self) -> bool:
        return self.numbers is not None

    def number(self, kind: str) -> Numbers:
        """Return the known numbers of the last step of a kind; None if there is no such step."""
        assert self.numbers is not None, "the matrix was opened only to plan"
        found = [u for step, u in zip(self.steps, self.numbers, strict=True) if step.kind == kind]
        return found[-1] if found else None

    @property
    def what(self) -> str:  # type: ignore[override]
        """A text that says what happens to the elements."""
        raise NotImplementedError

    @property
    def change(self) -> str:  # type: ignore[override]
        before = f"{self.matrix.change}; " if isinstance(self.matrix, SteppedMatrix) else ""
        numbers = "" if self.own_numbers is None else f", numbers {_digest(*self.own_numbers)}"
        return f"{before}{self.what} to {self.dtype}{numbers}"

    def _compute(self, raw: Array, rows: Range, cols: Range, out: Array) -> None:
        assert self.numbers is not None, "the matrix was opened only to plan"
        if not self.steps and self.source.dtype.name not in _BY_FLOAT64:
            np.copyto(out, raw, casting="unsafe")
            return
        for top, left in pieces((0, raw.shape[0]), (0, raw.shape[1]), (1, SLAB), SLAB):
            at = slice(*top), slice(*left)
            here = {
                axis: slice(first + start, first + stop)
                for axis, first, (start, stop) in zip(_AXES, (rows[0], cols[0]), (top, left), strict=True)
            }
            numbers = [
                None if u is None else u[here[step.axis]]
                for step, u in zip(self.steps, self.numbers, strict=True)
            ]
            with np.errstate(all="ignore"):
                np.copyto(out[at], apply(self.steps, numbers, in_float64(raw[at])), casting="unsafe")


def chain_of(matrix: Matrix) -> SteppedMatrix | None:
    """Return a matrix whose elements go through a chain of steps; None for any other matrix."""
    return matrix if isinstance(matrix, SteppedMatrix) else None


class ConvertedMatrix(SteppedMatrix):
    """A read-only view of a matrix, with its elements converted to another dtype.

    Integers of 64 bits that float64 cannot represent are refused when they are read.
    """

    def __init__(self, matrix: Matrix, dtype: np.dtype[Any]) -> None:
        super().__init__(representable(matrix), (), (), dtype)

    def on(
        self, matrix: Matrix, numbers: Sequence[Numbers] | None, dtype: np.dtype[Any] | None = None
    ) -> Self:
        return type(self)(matrix, dtype or self.dtype)

    @property
    def change(self) -> str:  # type: ignore[override]
        before = f"{self.matrix.change}; " if isinstance(self.matrix, SteppedMatrix) else ""
        return f"{before}converted to {self.dtype}"


class RepresentableMatrix(View):
    """A read-only view of a matrix of int64 that float64 can represent. Reading another one is an error."""

    def __init__(self, matrix: Matrix) -> None:
        super().__init__(matrix)
        self.shape, self.layout = matrix.shape, matrix.layout.computed(0, 0)

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        self._matrix.read(rows, cols, out)
        if out.size and (out.max() > EXACT_LIMIT or out.min() < -EXACT_LIMIT):
            i, j = (int(index) for index in np.argwhere((out > EXACT_LIMIT) | (out < -EXACT_LIMIT))[0])
            raise ExecutionError(
                f"the element at [{rows[0] + i}, {cols[0] + j}] of {self.name} is {out[i, j]}, and int64 are "
                f"multiplied as float64, which represents all integers up to {EXACT_LIMIT}: divide the "
                "elements by a power of 2 in a copy, or store it in float64"
            )


def representable(matrix: Matrix) -> Matrix:
    """Return a view of a matrix that refuses int64 beyond the integers of float64."""
    checked = isinstance(matrix, RepresentableMatrix) or dtype_name(matrix.dtype) != "int64"
    return matrix if checked else RepresentableMatrix(matrix)


def multiplied_dtype(*dtypes: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which operands of these dtypes are multiplied.

    It is NumPy's `result_type` of the dtypes in `MULTIPLIED`; float32 if these have no common dtype in NumPy.

    >>> multiplied_dtype(np.dtype("u1"), np.dtype("f2")), multiplied_dtype(np.dtype("i2"))
    (dtype('float16'), dtype('float32'))
    """
    kept = [x if MULTIPLIED[dtype_name(x)] == x.name else np.dtype(MULTIPLIED[x.name]) for x in dtypes]
    try:
        return np.result_type(*kept)
    except TypeError:  # bfloat16 and float16
        return np.dtype(np.float32)


def as_multiplied(*matrices: Matrix) -> list[Matrix]:
    """Return operands with elements of the dtype in which they are multiplied with each other.

    Raises `UnsupportedError` if a dtype is not multiplied.
    """
    check_dtypes(*matrices)
    dtype = multiplied_dtype(*(matrix.dtype for matrix in matrices))
    return [matrix if matrix.dtype == dtype else ConvertedMatrix(matrix, dtype) for matrix in matrices]


def code_in(matrix: Matrix, transform: Transform) -> float | None:
    """Return the code of missing elements in a matrix before a transform; None if there is no code."""
    code, chain = transform.code(matrix.name, matrix.dtype), chain_of(matrix)
    return nan if code is not None and chain is not None and chain.unpacks else code


class TransformedMatrix(SteppedMatrix):
    """A read-only view of a matrix, with its elements transformed."""

    def __init__(
        self,
        matrix: Matrix,
        transform: Transform,
        k_axis: int,
        lines: str,
        numbers: Sequence[Numbers] | None = None,
        dtype: np.dtype[Any] | None = None,
    ) -> None:
        """View a matrix. Raises `InputError` if the transform cannot be applied to it.

        The product sums over `k_axis`, whose indices are called `lines` in messages: "rows" or "columns".
        """
        self.transform, self.k_axis, self.lines = transform, k_axis, lines
        self.code = code_in(matrix, transform)
        found = transform.result(matrix.name, matrix.dtype)
        super().__init__(matrix, transform.steps(self.code, _AXES[k_axis]), numbers, dtype or found)
        for given in ("center", "scale", "impute"):
            values = getattr(transform, given)
            if isinstance(values, np.ndarray) and len(values) != matrix.shape[k_axis]:
                raise InputError(
                    f"{given} has {len(values)} elements, and {matrix.name} has {matrix.shape[k_axis]} "
                    f"{lines}: pass one number for each of them"
                )

    def on(
        self, matrix: Matrix, numbers: Sequence[Numbers] | None, dtype: np.dtype[Any] | None = None
    ) -> Self:
        return type(self)(matrix, self.transform, self.k_axis, self.lines, numbers, dtype or self.dtype)

    @property
    def is_measurable(self) -> bool:
        transform = self.transform
        small = self.matrix is self.source and self.source.dtype.name == "int8" and not transform.log1p
        return (
            small and transform.needs_stats and (isinstance(transform.center, str) or not transform.corrects)
        )

    def exact(self) -> SteppedMatrix:
        if not self.transform.corrects:
            return self
        transform = replace(self.transform, cast="float64")
        return type(self)(self.matrix, transform, self.k_axis, self.lines, self.own_numbers)

    @property
    def what(self) -> str:  # type: ignore[override]
        return str(self.transform or "no change")


def with_numbers(matrix: Matrix) -> Transform | None:
    """Return the transform of a readable operand, with numbers in place of "mean", "k" and "hwe"."""
    view = chain_of(matrix)
    while view is not None and not isinstance(view, TransformedMatrix):
        view = chain_of(view.matrix)
    if view is None or view.own_numbers is None:
        return None
    known: dict[str, Any] = {}
    for step, numbers in zip(view.own_steps, view.own_numbers, strict=True):
        if numbers is not None:
            name = "center" if step.kind == "correct" else step.kind
            known[name] = np.array(1 / numbers if name == "scale" else numbers)
    return replace(view.transform, **known)


class FilledMatrix(TransformedMatrix):
    """A transformed matrix whose missing elements become means, and 0 where all elements are missing."""


class NormalizedMatrix(SteppedMatrix):
    """A read-only view of a matrix whose rows are multiplied by factors, so that their sums are `target`.

    `target` may be an array with the factors themselves. NaN does not count in sums, and rows of zeros stay.

    Attributes:
        whole: the matrix whose rows are summed, before columns of it were selected.
        axis: the axis of `matrix` that numbers the rows: 1 if `matrix` is the transpose of what is stored.
    """

    unpacks = True

    def __init__(
        self,
        matrix: Matrix,
        target: float | Array,
        axis: int,
        whole: Matrix | None = None,
        numbers: Sequence[Numbers] | None = None,
        dtype: np.dtype[Any] | None = None,
    ) -> None:
        self.target, self.axis, self.whole = target, axis, matrix if whole is None else whole
        if isinstance(target, np.ndarray):
            if len(target) != matrix.shape[axis]:
                raise InputError(
                    f"target_sum has {len(target)} elements, and {matrix.name} has {matrix.shape[axis]} "
                    "rows: pass a number, or one factor for each row"
                )
            numbers = (target,)
        step = ElementStep("normalize", _AXES[axis], STREAMED)
        super().__init__(
            matrix, [step], numbers, dtype or Transform(log1p=True).result(matrix.name, matrix.dtype)
        )

    def on(
        self, matrix: Matrix, numbers: Sequence[Numbers] | None, dtype: np.dtype[Any] | None = None
    ) -> Self:
        return type(self)(matrix, self.target, self.axis, self.whole, numbers, dtype or self.dtype)

    @property
    def what(self) -> str:  # type: ignore[override]
        return f"rows of axis {self.axis} normalized"


class StandardizedMatrix(SteppedMatrix):
    """A read-only view of a matrix with ``(x - mean) * inverse`` in place of each element x.

    A *line* is a row or a column. The mean of each line, and the inverse of its scale, are in float64. The
    inverse is 0 for a line of equal elements. Lines that are not `scaled` have no inverse. The result has the
    dtype in `RESULTS`, or the given `dtype`.
    """

    purpose = "unstandardized"

    def __init__(
        self,
        matrix: Matrix,
        line_axis: int,
        *,
        scaled: bool,
        centered: bool = True,
        numbers: Sequence[Numbers] | None = None,
        dtype: np.dtype[Any] | None = None,
    ) -> None:
        """View a matrix whose lines are its rows (`line_axis` 0) or its columns (1)."""
        self.line_axis, self.scaled, self.centered = line_axis, scaled, centered
        kinds = [kind for kind, used in (("center", centered), ("scale", scaled)) if used]
        steps = [ElementStep(kind, _AXES[line_axis], STREAMED, kind) for kind in kinds]
        super().__init__(matrix, steps, numbers, dtype or _standardized(matrix))

    def on(
        self, matrix: Matrix, numbers: Sequence[Numbers] | None, dtype: np.dtype[Any] | None = None
    ) -> Self:
        how: Any = {"scaled": self.scaled, "centered": self.centered}
        return type(self)(matrix, self.line_axis, numbers=numbers, dtype=dtype or self.dtype, **how)

    @property
    def what(self) -> str:  # type: ignore[override]
        return f"lines of axis {self.line_axis} {'scaled' if self.scaled else 'centered'}"


class ShiftedMatrix(SteppedMatrix):
    """A read-only view of a matrix with the mean of each line subtracted, in float64. NaN stays NaN.

    A *line* is a row or a column. Its mean is that of its elements that are not NaN.
    """

    purpose = "shifted"

    def __init__(
        self,
        matrix: Matrix,
        line_axis: int,
        numbers: Sequence[Numbers] | None = None,
        dtype: np.dtype[Any] | None = None,
    ) -> None:
        """View a matrix whose lines are its rows (`line_axis` 0) or its columns (1)."""
        self.line_axis = line_axis
        steps = [ElementStep("center", _AXES[line_axis], STREAMED, "shift")]
        super().__init__(matrix, steps, numbers, dtype or np.dtype(np.float64))

    def on(
        self, matrix: Matrix, numbers: Sequence[Numbers] | None, dtype: np.dtype[Any] | None = None
    ) -> Self:
        return type(self)(matrix, self.line_axis, numbers, dtype or self.dtype)

    @property
    def what(self) -> str:  # type: ignore[override]
        return f"lines of axis {self.line_axis} shifted"


def _standardized(matrix: Matrix) -> np.dtype[Any]:
    """Return the dtype of standardized elements: the `cast` of a transform, or the dtype in `RESULTS`."""
    if isinstance(matrix, TransformedMatrix) and matrix.transform.cast is not None:
        return matrix.dtype
    return np.dtype(RESULTS.get(matrix.dtype.name, matrix.dtype.name))


class ImputedMatrix(ElementView):
    """A read-only view of genotypes, with the mean of the variant in place of each missing genotype."""

    purpose = "genotypes"

    def __init__(self, matrix: Matrix, variant_axis: int, code: float, means: Array) -> None:
        """View genotypes. `variant_axis` numbers the variants, and `means` has the mean of each variant."""
        numbers = means.astype(np.float32)
        super().__init__(matrix, temporary_bytes=0, mask=True, resident_bytes=numbers.nbytes)
        self._variant_axis, self._code, self._means = variant_axis, code, numbers
        self._results_in(numbers.dtype)

    def fingerprint(self) -> dict[str, object] | None:
        found = self._matrix.fingerprint()
        return found and found | {"imputed": "means"}

    def _compute(self, raw: Array, rows: Range, cols: Range, out: Array) -> None:
        np.copyto(out, raw)
        at = positions(is_missing(raw, self._code))
        out[at] = self._means[at[self._variant_axis] + (rows, cols)[self._variant_axis][0]]


class KnownMatrix(ElementView):
    """A read-only view of a matrix with 1 where a genotype is known and its variant is used, else 0.

    The product of the view and its transpose counts the used variants that are known in both of two
    individuals.
    """

    purpose = "genotypes"

    def __init__(
        self, matrix: Matrix, variant_axis: int, code: float | None, used: Array, dtype: str
    ) -> None:
        """View genotypes as `dtype`. `variant_axis` numbers the variants; `used` tells which are used."""
        numbers = used.astype(dtype)
        super().__init__(matrix, temporary_bytes=0, mask=True, resident_bytes=numbers.nbytes)
        self._variant_axis, self._code, self._used = variant_axis, code, numbers
        self._results_in(np.dtype(dtype))

    @property
    def change(self) -> str:  # type: ignore[override]
        return f"known, missing={self._code}, variants {_digest(self._used)}"

    def _compute(self, raw: Array, rows: Range, cols: Range, out: Array) -> None:
        used = self._used[slice(*cols)] if self._variant_axis else self._used[slice(*rows), None]
        if self._code is None:
            np.copyto(out, used)
        else:
            missing = is_missing(raw, self._code)
            np.multiply(used, np.logical_not(missing, out=missing), out=out)


def change_of(matrix: Matrix) -> str:
    """Return a text that says how elements of a matrix differ from those in storage; "" if they do not."""
    return matrix.change if isinstance(matrix, ElementView) else ""


def _digest(*numbers: Array | None) -> str:
    digest = hashlib.sha256()
    for each in numbers:
        digest.update(b"" if each is None else np.ascontiguousarray(each).tobytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Changed:
    """An operand that is an open matrix of this process, such as a view that changes elements."""

    matrix: Matrix


class ChangedMatrices(Store):
    """Return matrices that are open already."""

    kind = "an open matrix"

    def matches(self, operand: Any) -> bool:
        return isinstance(operand, Changed)

    def open(self, name: str, operand: Any, *, writable: bool = False, journal: Path | None = None) -> Matrix:
        if writable:
            raise not_writable(name)
        found: Matrix = operand.matrix
        return found


CHANGED = ChangedMatrices()


@dataclass(frozen=True, eq=False)
class Widened(Composite):
    """An operand whose elements are converted to float64, after they are decoded if `decode` is set."""

    source: Any
    decode: bool = True

    def open(self, name: str) -> Matrix:
        from oocgemm.stores.opening import open_matrix

        matrix = open_matrix(name, self.source, decode=self.decode)
        return matrix if matrix.dtype == np.float64 else ConvertedMatrix(matrix, np.dtype(np.float64))

    def mapped(self, change: Callable[[Any], Any]) -> Self:
        return replace(self, source=change(self.source))
