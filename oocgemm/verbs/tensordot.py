"""Contract axes of two arrays of any number of dimensions, as one product of matrices."""

from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np

from oocgemm.errors import InputError
from oocgemm.jobs.option_groups import Options
from oocgemm.jobs.options import check_names
from oocgemm.jobs.request import parse
from oocgemm.jobs.run import outcome
from oocgemm.stores import Array
from oocgemm.stores.folded import as_matrix, fold_of
from oocgemm.stores.folding import Folding

# Axes by position, or by name.
Axes = int | str | Sequence[int | str]


def tensordot(a: Any, b: Any, axes: int | tuple[Axes, Axes] = 2, **options: Unpack[Options]) -> Array:
    """Sum products of the elements of two arrays over some axes of both, as `numpy.tensordot` does.

    Args:
        a, b: arrays of any number of dimensions, as for `as_matrix`.
        axes: the axes that are summed: a number N for the last N axes of a and the first N of b, in this
            order, or the axes of a and those of b, by position or by name.
        options: as for `gemm`.

    Returns:
        A new ndarray, with the other axes of a, and then those of b.

    Raises:
        InputError: the arrays do not have these axes, or their extents along them differ; and as `gemm` does.
        BudgetError, BackendError, ExecutionError: as `gemm` does.

    >>> import numpy as np, oocgemm
    >>> a, b = np.arange(24.0).reshape(2, 3, 4), np.arange(12.0).reshape(4, 3)
    >>> oocgemm.tensordot(a, b, axes=((1, 2), (1, 0)), backend="host")
    array([ 440., 1232.])
    """
    check_names("tensordot", options, Options)
    of_a: tuple[int | str, ...]
    of_b: tuple[int | str, ...]
    if isinstance(axes, int):
        if axes < 0:
            raise InputError(f"axes = {axes}: pass 0 or more")
        of_a, of_b = tuple(range(-axes, 0)), tuple(range(axes))
    else:
        of_a, of_b = map(_tuple, axes)
    left, right = fold_of("A", a, Folding(cols=of_a)), fold_of("B", b, Folding(rows=of_b))
    summed = [[axis.extent for axis in group] for group in (left.cols, right.rows)]
    if summed[0] != summed[1]:
        raise InputError(
            f"the summed axes {list(of_a)} of A have the extents {summed[0]}, and {list(of_b)} of B "
            f"{summed[1]}: pass axes of equal extents, in the same order"
        )
    request = parse(as_matrix(a, cols=of_a), as_matrix(b, rows=of_b), None, options)
    found = outcome(request, lambda result: result.out, dry_run=False)
    return np.asarray(found).reshape([axis.extent for axis in (*left.rows, *right.cols)])


def _tuple(axes: Axes) -> tuple[int | str, ...]:
    return (axes,) if isinstance(axes, int | str) else tuple(axes)
