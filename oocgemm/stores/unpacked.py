"""Decode what attributes of an array declare about its elements (`stores.declared`), when they are read.

Packed numbers are unpacked as in netCDF's conventions (CF): an element x stands for ``x * scale_factor +
add_offset``. Missing elements are errors, unless they are accepted: then they become NaN in packed arrays,
and stay as they are in others.
"""

from collections.abc import Sequence
from math import isfinite, isnan, nan
from typing import Any, Self

import numpy as np

from oocgemm.planning.elements import ElementStep
from oocgemm.stores.base import Matrix, View
from oocgemm.stores.declared import NOTHING, CompleteMatrix, Declared, place_of, refuse_packed
from oocgemm.stores.kept import KeptMatrix, kept, with_all
from oocgemm.stores.transformed import Numbers, SteppedMatrix, representable


class UnpackedMatrix(SteppedMatrix):
    """A read-only view of a matrix of packed numbers, with what they stand for, in float32 or float64."""

    unpacks = True

    def __init__(
        self,
        matrix: Matrix,
        declared: Declared,
        accepted: Sequence[Any] | None = None,
        dtype: np.dtype[Any] | None = None,
    ) -> None:
        """View a matrix. The stored numbers in `accepted` become NaN; None: missing elements are errors."""
        self._packed, self._declared, self._accepted = matrix, declared, accepted
        steps = [ElementStep("absent", constants=(float(code),)) for code in accepted or ()]
        if declared.unsigned:
            steps.append(ElementStep("unsigned", constants=(2.0 ** (8 * matrix.dtype.itemsize),)))
        steps.append(ElementStep("unpack", constants=(float(declared.scale), float(declared.offset))))
        narrow = matrix.dtype.itemsize <= 2 or matrix.dtype.name == "float32"
        refuses = accepted is None and declared.missing
        source = CompleteMatrix(matrix, declared.missing) if refuses else representable(matrix)
        default = np.dtype(np.float32 if narrow else np.float64)
        super().__init__(source, steps, (None,) * len(steps), dtype or default)

    def on(
        self, matrix: Matrix, numbers: Sequence[Numbers] | None, dtype: np.dtype[Any] | None = None
    ) -> Self:
        return type(self)(self._packed, self._declared, self._accepted, dtype or self.dtype)

    def accepting(self, code: float) -> Matrix:
        """Return a view in which missing elements are NaN, and those that are stored as `code`."""
        known = self._declared.missing
        codes = known if isnan(code) or any(code == each for each in known) else (*known, code)
        return type(self)(self._packed, self._declared, codes)

    @property
    def change(self) -> str:  # type: ignore[override]
        return f"{', '.join(map(str, self.steps))} to {self.dtype}"


def decoded(matrix: Matrix) -> Matrix:
    """Return a view of an operand as its attributes declare it, or the matrix itself if they change nothing.

    Raises `InputError` if the attributes cannot be obeyed.
    """
    found: Declared = getattr(matrix, "declared", NOTHING)
    if found == NOTHING:
        return matrix
    if not found.packs:
        return CompleteMatrix(matrix, found.missing) if found.missing else matrix
    numbers = all(isinstance(x, int | float) and isfinite(x) for x in (found.scale, found.offset))
    if (
        not numbers
        or found.partly
        or matrix.dtype.kind == "c"
        or (found.unsigned and matrix.dtype.kind != "i")
    ):
        refuse_packed(place_of(matrix), found)
    return UnpackedMatrix(matrix, found)


def known_missing(matrix: Matrix) -> tuple[Matrix, float | None]:
    """Return an operand whose missing elements are those that it declares, and their code; None for none.

    If it has several codes, or is packed, the elements become NaN.
    """
    if isinstance(matrix, KeptMatrix):
        inner, code = known_missing(matrix.viewed)
        return kept(inner, matrix.axis, matrix.kept), code
    if isinstance(matrix, UnpackedMatrix):
        return matrix.accepting(nan), nan
    if not isinstance(matrix, CompleteMatrix) or matrix.dtype.kind == "c":
        return matrix, None
    if len(matrix.missing) == 1:
        return matrix, float(matrix.missing[0])
    plain: Matrix = matrix
    for code in matrix.missing:
        plain = accepting(plain, code)
    return UnpackedMatrix(plain, Declared(missing=matrix.missing), matrix.missing), nan


def with_nan(matrix: Matrix, code: float | None) -> Matrix:
    """Return a matrix with NaN in place of `code`, or if that is None, of what it declares as missing."""
    if code is None:
        matrix, code = known_missing(matrix)
    plain = accepting(matrix, code)
    if code is None or isnan(code):
        return plain
    return UnpackedMatrix(plain, Declared(missing=(code,)), (code,))


def accepting(matrix: Matrix, code: float | None) -> Matrix:
    """Return a view of a matrix that accepts `code` in its elements. The caller replaces these elements."""
    if isinstance(matrix, KeptMatrix):
        inner = accepting(matrix.viewed, code)
        return matrix if inner is matrix.viewed else kept(inner, matrix.axis, matrix.kept)
    if code is None or not isinstance(matrix, CompleteMatrix | UnpackedMatrix):
        return matrix
    if isnan(code) and isinstance(matrix, CompleteMatrix) and matrix.dtype.kind == "f":
        return known_missing(matrix)[0] if len(matrix.missing) > 1 else matrix
    return matrix.accepting(code)


def with_left_out(matrix: Matrix, axis: int) -> Matrix:
    """Return an operand with all lines along an axis, if `keep` has kept only some of them."""
    stored = matrix
    while isinstance(stored, View) and not isinstance(stored, KeptMatrix):
        stored = stored.viewed
    whole = with_all(stored, axis)
    if whole is stored:
        return matrix
    return whole if stored is matrix else decoded(whole)
