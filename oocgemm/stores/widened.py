"""The operand that is another one in float64: parts of different dtypes can then be joined (`concat`)."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from oocgemm.stores.base import Composite, Matrix, Store, not_writable
from oocgemm.stores.transformed import ConvertedMatrix
from oocgemm.values import dataclass


@dataclass(frozen=True, eq=False)
class Widened(Composite):
    """An operand whose elements are converted to float64, after they are decoded if `decode` is set."""

    source: Any
    decode: bool = True

    def mapped(self, change: Callable[[Any], Any]) -> Self:
        return replace(self, source=change(self.source))


class WidenedArrays(Store):
    """Open operands in float64."""

    kind = "an array in float64"

    def matches(self, operand: Any) -> bool:
        return isinstance(operand, Widened)

    def open(self, name: str, operand: Any, *, writable: bool = False, journal: Path | None = None) -> Matrix:
        if writable:
            raise not_writable(name)
        from oocgemm.stores.opening import open_matrix

        matrix = open_matrix(name, operand.source, decode=operand.decode)
        return matrix if matrix.dtype == np.float64 else ConvertedMatrix(matrix, np.dtype(np.float64))

    def location(self, operand: Any) -> tuple[str, str | None]:
        from oocgemm.stores.opening import store_of

        return store_of(operand.source).location(operand.source)


WIDENED = WidenedArrays()
