"""The operand that is another one in float64: parts of different dtypes can then be joined (`concat`)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

import numpy as np

from oocgemm.stores.base import Composite, Matrix
from oocgemm.stores.transformed import ConvertedMatrix
from oocgemm.values import dataclass


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
