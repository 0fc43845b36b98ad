"""What all read-only views of a matrix have in common."""

from typing import Any

import numpy as np

from oocgemm.planning.tiling import Range
from oocgemm.stores.base import Array, Matrix


class View:
    """A read-only view of a matrix. Subclasses define `shape`, `layout` and `read`."""

    def __init__(self, matrix: Matrix) -> None:
        self._matrix = matrix
        self.name = matrix.name
        self.dtype: np.dtype[Any] = matrix.dtype

    def write(self, rows: Range, cols: Range, data: Array) -> None:
        raise AssertionError(f"{type(self).__name__} is never written")

    def sync(self) -> None:
        pass

    def set_finished(self, finished: bool) -> None:
        pass

    def fingerprint(self) -> dict[str, object] | None:
        return self._matrix.fingerprint()

    def describe(self) -> dict[str, object]:
        return self._matrix.describe()

    def identities(self) -> set[object]:
        return self._matrix.identities()


def underlying(matrix: Matrix) -> Matrix:
    """Return the matrix that a view reads, or a matrix that is no view."""
    while isinstance(matrix, View):
        matrix = matrix._matrix
    return matrix
