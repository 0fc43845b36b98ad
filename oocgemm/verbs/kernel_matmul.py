"""The verb `kernel_matmul`: products of Gaussian kernel matrices, which are never stored."""

from typing import Any, Literal, Unpack, overload

from oocgemm import stores
from oocgemm.jobs.options import Operand, PairOptions, documented
from oocgemm.jobs.request import Destination
from oocgemm.jobs.run import Plan
from oocgemm.jobs.steps import Gaussian
from oocgemm.planning import Op
from oocgemm.stores import Array
from oocgemm.verbs.reduce import product, transforms_of
from oocgemm.verbs.similarity import check_options


@overload
def kernel_matmul(
    x: Operand,
    v: Any,
    y: Operand | None = None,
    *,
    gamma: float,
    dry_run: Literal[False] = False,
    **options: Unpack[PairOptions],
) -> Array: ...
@overload
def kernel_matmul(
    x: Operand,
    v: Any,
    y: Operand | None = None,
    *,
    gamma: float,
    dry_run: Literal[True],
    **options: Unpack[PairOptions],
) -> Plan: ...
@documented("kernel_matmul", PairOptions)
def kernel_matmul(
    x: Operand,
    v: Any,
    y: Operand | None = None,
    *,
    gamma: float,
    dry_run: bool = False,
    **options: Unpack[PairOptions],
) -> Array | Plan:
    """Return K @ V for a Gaussian kernel matrix K, which is not stored.

    ``K[i, j] = exp(-gamma |x_i - y_j|^2)``. K is m x n, for the m rows of X and the n rows of Y. Its tiles
    are computed on the device, and multiplied by V there. So the time is about that of the product X Y^T.

    Args:
        x: a two-dimensional operand as for `gemm`, float16, bfloat16, float32 or float64.
        v: V, an ndarray of shape (n,) or (n, r), in memory. It is used in X's dtype, in float32 at least.
        y: an operand like x, with as many columns. By default x itself.
        {options}

    Returns:
        An ndarray of shape (m,) or (m, r), in the dtype in which V is used. Squared distances come from
            inner products of rows, from which a common center is subtracted. They are computed in float32 if
            this gives elements of K to about 4 digits, otherwise in float64. K is exactly 1 for equal rows.
            With `dry_run`, the `Plan`.

    Raises:
        InputError, BudgetError, BackendError, ExecutionError: as `gemm` does. `InputError` also if rows lie
            so far apart that float64 does not give these digits.

    >>> import numpy as np
    >>> import oocgemm
    >>> x = np.array([[0.0], [1.0], [2.0]])
    >>> oocgemm.kernel_matmul(x, np.ones(3), gamma=1.0, backend="host").round(6)
    array([1.386195, 1.735759, 1.386195])
    """
    check_options("kernel_matmul", options, PairOptions)
    same = y is None
    a, b = stores.located("X", x), stores.located("X" if y is None else "Y", x if y is None else y)
    given = {"a": a, "b": b, "c": Destination.parse(None), "trans_b": Op.T, **options}
    given |= transforms_of(given, same=same)
    given["epilogue"] = (Gaussian(gamma),)
    return product(v, ("X", "X" if same else "Y"), given, same=same, dry_run=dry_run)
