"""The operand that `as_matrix` returns: an array of any number of dimensions, folded into a matrix.

It is a description, which is sent to other processes if its array has a path. The store of the array opens it
(`Store.fold`): as a matrix with the same chunks, if these are rectangles of it, else as a `BoxMatrix`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, Self

from oocgemm.stores.base import Composite, Matrix
from oocgemm.stores.folding import Fold, Folding, Names
from oocgemm.values import dataclass


@dataclass(frozen=True, eq=False)
class Folded(Composite):
    """An array as a matrix, for any verb. `as_matrix` makes it."""

    source: Any
    folding: Folding

    def open(self, name: str) -> Matrix:
        from oocgemm.stores.opening import store_of

        return store_of(self.source).fold(name, self.source, self.folding)

    def mapped(self, change: Callable[[Any], Any]) -> Self:
        return replace(self, source=change(self.source))


def as_matrix(
    x: Any,
    rows: Names | None = None,
    cols: Names | None = None,
    isel: Mapping[Any, int | slice] | None = None,
) -> Folded:
    """Return an array of any number of dimensions as a matrix that every verb takes. Nothing is copied.

    Row number r of the matrix stands for the indices along the axes `rows`, in C order: the last of these
    axes varies fastest. Columns are numbered likewise. If the last axes of the rows and of the columns are
    whole in a chunk, the matrix is read as fast as a two-dimensional array with these chunks.

    Args:
        x: an operand as for `gemm`, with any number of dimensions: a zarr array, an HDF5 dataset, a .npy
            file, an ndarray, or a lazy array such as an xarray DataArray.
        rows, cols: the axes of the rows and of the columns, by position or by name: dimension names of zarr,
            dimension scales of HDF5 and netCDF, dims of xarray. One of them may be left out: it then has all
            other axes.
        isel: the part that is used of an axis: an index, which drops the axis, or a slice without a step.

    Returns:
        An operand for the verbs of this package. The array is opened by the verb, which raises `InputError`
            for axes that it does not have.

    >>> import numpy as np, oocgemm
    >>> x = np.arange(24.0).reshape(2, 3, 4)  # time, lat, lon
    >>> oocgemm.gram(oocgemm.as_matrix(x, rows=[0], cols=[1, 2], isel={2: slice(0, 2)}), backend="host").out
    array([[ 187.,  511.],
           [ 511., 1699.]])
    """
    return Folded(x, Folding.of(rows, cols, isel))


@dataclass(frozen=True)
class _Noted(Folding):
    """A folding that notes the folds of the arrays which it folds."""

    folds: list[Fold] = field(default_factory=list, compare=False)

    def fold(self, place: str, shape: Sequence[int], names: Sequence[str | None] | None = None) -> Fold:
        self.folds.append(super().fold(place, shape, names))
        return self.folds[-1]


def fold_of(name: str, x: Any, folding: Folding) -> Fold:
    """Open an array, and return which of its axes the folding takes for rows and for columns."""
    from oocgemm.stores.opening import store_of

    noted = _Noted(folding.rows, folding.cols)
    store_of(x).fold(name, x, noted)
    return noted.folds[0]
