"""The function `kernel_matmul`: products of Gaussian kernel matrices, which are never stored."""

from math import isfinite
from typing import Any, Unpack

import numpy as np

from oocgemm import stores
from oocgemm.errors import InputError
from oocgemm.jobs.api import run_request
from oocgemm.jobs.destination import Destination
from oocgemm.jobs.options import Operand, SelectionOptions
from oocgemm.jobs.request import Gaussian, Request
from oocgemm.jobs.similarity import check_options
from oocgemm.planning import DTYPES
from oocgemm.stores import Array
from oocgemm.stores.base import dtype_name


def kernel_matmul(
    x: Operand,
    v: Any,
    y: Operand | None = None,
    *,
    gamma: float,
    **options: Unpack[SelectionOptions],
) -> Array:
    """Return K @ V for a Gaussian kernel matrix K, which is not stored.

    ``K[i, j] = exp(-gamma |x_i - y_j|^2)``. K is m x n, for the m rows of X and the n rows of Y. Its tiles
    are computed on the device, and multiplied by V there. So the time is about that of the product X Y^T.

    Args:
        x: a two-dimensional operand as for `gemm`, float16, bfloat16, float32 or float64.
        v: V, an ndarray of shape (n,) or (n, r), in memory. It is used in X's dtype, in float32 at least.
        y: an operand like x, with as many columns. By default x itself.
        gamma: a positive number. 1 / (2 s^2) gives the kernel of the standard deviation s.
        options: those of `similarity`.

    Returns:
        An ndarray of shape (m,) or (m, r), in the dtype in which V is used. Squared distances come from
            inner products. In float32 their errors are about 1e-7 of the squared norms of rows: subtract a
            common center from X and Y if that is much more than the distances.

    Raises:
        InputError, BudgetError, BackendError, ExecutionError: as `gemm` does.

    >>> import numpy as np
    >>> import oocgemm
    >>> x = np.array([[0.0], [1.0], [2.0]])
    >>> oocgemm.kernel_matmul(x, np.ones(3), gamma=1.0, backend="host").round(6)
    array([1.386195, 1.735759, 1.386195])
    """
    check_options("kernel_matmul", options)
    if isinstance(gamma, bool) or not isinstance(gamma, int | float | np.number) or not gamma > 0:
        raise InputError(f"gamma = {gamma!r}: pass a positive number, such as 0.5")
    if not isfinite(gamma):
        raise InputError(f"gamma = {gamma!r} is not finite: pass a positive number, such as 0.5")
    a, b = stores.located("X", x), stores.located("X" if y is None else "Y", x if y is None else y)
    factor = _factor(v, dtype_name(stores.open_matrix("X", a).dtype))
    wide = factor.reshape(len(factor), -1)
    gaussian = Gaussian(float(gamma), wide, same=y is None)
    request = Request(a=a, b=b, c=Destination.parse(None), gaussian=gaussian, **options)
    found: Array = np.asarray(run_request(request).out)
    return found if factor.ndim == 2 else found[:, 0]


def _factor(v: Any, dtype: str) -> Array:
    """Return V in the dtype in which it is used. Raises `InputError` if it is not a vector or a matrix."""
    known = DTYPES.get(dtype)
    if known is None or known.accumulator not in ("float32", "float64") or dtype == "int8":
        raise InputError(
            f"X is of dtype {dtype}, and kernel matrices are computed of float16, bfloat16, float32 and "
            "float64: convert X"
        )
    given = np.asarray(v)
    if given.ndim not in (1, 2) or given.dtype.kind not in "fiub" or not given.size:
        raise InputError(
            f"V is an array of shape {given.shape} and dtype {given.dtype}: pass real numbers of shape "
            "(n,) or (n, r)"
        )
    return np.ascontiguousarray(given, known.accumulator)
