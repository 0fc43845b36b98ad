"""The verbs `reduce` and `kernel_matmul`: smaller results of a product, which is not stored."""

from dataclasses import replace
from typing import Any, Literal, Unpack, overload

import numpy as np

from oocgemm import stores
from oocgemm.errors import InputError
from oocgemm.jobs.operands import op_of
from oocgemm.jobs.option_groups import Operand, PairOptions, Transpose
from oocgemm.jobs.options import ReduceArguments, documented
from oocgemm.jobs.request import Destination, Reduction, Request
from oocgemm.jobs.run import Neighbors, Pairs, Plan, Result, outcome
from oocgemm.jobs.steps import Epilogue, Gaussian, RankOne, Scale, steps_of
from oocgemm.planning import DTYPES, Op
from oocgemm.planning.sinks import REDUCTIONS
from oocgemm.stores import Array
from oocgemm.stores.base import dtype_name
from oocgemm.values import dataclass
from oocgemm.verbs.similarity import check_options, selected, selection_of


@dataclass(frozen=True)
class TopK:
    """The k largest elements of each row of C.

    With `exclude_self`, elements on the diagonal are left out.
    """

    k: int
    exclude_self: bool = False


@dataclass(frozen=True)
class Threshold:
    """The elements of C that are at least `least`. With `absolute`, their magnitudes are compared.

    With `exclude_self`, elements on the diagonal are left out.
    """

    least: float
    absolute: bool = False
    exclude_self: bool = False


@dataclass(frozen=True)
class Reduce:
    """The "sum", the sum of squares ("sumsq") or the largest element ("max") of each row of C (`axis` 1).

    With `axis` 0, the same of each column.
    """

    kind: str
    axis: int = 1


@dataclass(frozen=True, eq=False)
class MatVec:
    """The product C @ V, for an ndarray V of shape (n,) or (n, r) in memory. Operands of int8 are refused."""

    v: Any


@overload
def reduce(
    a: Operand,
    b: Operand | None = None,
    *,
    to: TopK,
    dry_run: Literal[False] = False,
    **options: Unpack[ReduceArguments],
) -> Neighbors: ...
@overload
def reduce(
    a: Operand,
    b: Operand | None = None,
    *,
    to: Threshold,
    dry_run: Literal[False] = False,
    **options: Unpack[ReduceArguments],
) -> Pairs: ...
@overload
def reduce(
    a: Operand,
    b: Operand | None = None,
    *,
    to: Reduce | MatVec,
    dry_run: Literal[False] = False,
    **options: Unpack[ReduceArguments],
) -> Array: ...
@overload
def reduce(
    a: Operand,
    b: Operand | None = None,
    *,
    to: TopK | Threshold | Reduce | MatVec,
    dry_run: Literal[True],
    **options: Unpack[ReduceArguments],
) -> Plan: ...
@documented("reduce", PairOptions)
def reduce(
    a: Operand,
    b: Operand | None = None,
    *,
    to: TopK | Threshold | Reduce | MatVec,
    epilogue: Epilogue = (),
    trans_a: Transpose = Op.N,
    trans_b: Transpose = Op.N,
    dry_run: bool = False,
    **options: Unpack[PairOptions],
) -> Neighbors | Pairs | Array | Plan:
    """Compute something smaller from ``C = op(A) @ op(B)``, such as sums of its rows, without storing C.

    The steps of the epilogue change each element of C first; `Add`, `Divide` and `Cast` are refused. There is
    no alpha: pass ``Scale(value=alpha)`` as a step. Without b, trans_b has no effect.

    Args:
        a: a real two-dimensional operand as for `gemm`.
        b: an operand like a. By default C is ``op(A) @ op(A)^T``.
        to: what is computed: `TopK`, `Threshold`, `Reduce` or `MatVec`.
        {options}

    Returns:
        The `Neighbors` for `TopK`, the `Pairs` for `Threshold`. For `Reduce`, a float64 array with an element
            per row or column of C. For `MatVec`, an array of shape (m,) or (m, r), float32 or float64. All
            results are in memory. With `dry_run`, the `Plan`.

    Raises:
        InputError, BudgetError, BackendError, ExecutionError: as `gemm` does.

    >>> import oocgemm
    >>> x = [[1.0, 0.0], [3.0, 4.0]]
    >>> oocgemm.reduce(x, to=oocgemm.Reduce("max"), epilogue=[oocgemm.Correlation()], backend="host")
    array([1., 1.])
    """
    check_options("reduce", options, PairOptions)
    given, names = dict[str, Any](options), ("A", "A" if b is None else "B")
    a, other = stores.located("A", a), stores.located(names[1], a if b is None else b)
    given |= {"a": a, "b": other, "c": Destination.parse(None), "epilogue": steps_of(epilogue)}
    given |= {"trans_a": trans_a, "trans_b": trans_b}
    same = b is None
    given |= transforms_of(given, same=same)
    match to:
        case TopK() | Threshold():
            chosen = selection_of(to.k, None) if isinstance(to, TopK) else selection_of(None, to.least)
            absolute = isinstance(to, Threshold) and to.absolute
            how: dict[str, Any] = {"excludes_self": to.exclude_self, "absolute": absolute}
            chosen = replace(chosen, names=names, same=same, **how)
            return outcome(Request.of(**given, into=chosen), selected, dry_run=dry_run)
        case Reduce():
            if to.kind not in REDUCTIONS:
                raise InputError(f"Reduce({to.kind!r}): choose one of {', '.join(REDUCTIONS)}")
            if isinstance(to.axis, bool) or to.axis not in (0, 1):
                raise InputError(f"axis = {to.axis!r}: pass 1 for a number per row of C, or 0 per column")
            if to.axis == 0:
                given |= _transposed(given, same=same)
                names = names[::-1]
            request = Request.of(**given, into=Reduction(names, same, to.kind))
            return outcome(request, _column, dry_run=dry_run)
        case MatVec():
            return product(to.v, names, given, same=same, dry_run=dry_run)
    raise InputError(f"to = {to!r}: pass a TopK, a Threshold, a Reduce or a MatVec")


def _column(result: Result) -> Array:
    return np.ascontiguousarray(np.asarray(result.out)[:, 0])


def product(
    v: Any, names: tuple[str, str], given: dict[str, Any], *, same: bool, dry_run: bool
) -> Array | Plan:
    """Return the product of C, which is not stored, and V. `given` are fields of the request."""
    decode = given.get("decode", True)
    if same:
        a = stores.open_matrix(names[0], given["a"], decode=decode)
    else:
        a, _ = stores.open_pair((names[0], given["a"]), (names[1], given["b"]), decode=decode)
    transform = given.get("transform_a")
    known = a.dtype if transform is None else transform.result(names[0], a.dtype)
    factor = _factor(v, names[0], dtype_name(known))
    reduction = Reduction(names, same, factor=factor.reshape(len(factor), -1))

    def shaped(result: Result) -> Array:
        found: Array = np.asarray(result.out).astype(factor.dtype, copy=False)  # distances may need float64
        return found if factor.ndim == 2 else found[:, 0]

    return outcome(Request.of(**given, into=reduction), shaped, dry_run=dry_run)


def transforms_of(given: dict[str, Any], *, same: bool) -> dict[str, Any]:
    """Return the transforms of A and B. If B is the `same` as A, refuse a transform of B alone."""
    first, second = given.get("transform_a"), given.get("transform_b")
    if same and second is not None:
        raise InputError("transform_b is the transform of B, and there is no B: pass transform_a alone")
    return {"transform_a": first, "transform_b": first if same else second}


def _transposed(given: dict[str, Any], *, same: bool) -> dict[str, Any]:
    """Return the fields of a request that computes the transpose of C."""
    epilogue = tuple(
        type(step)(step.cols, step.rows, step.value) if isinstance(step, Scale | RankOne) else step
        for step in given["epilogue"]
    )
    if same:
        return {"epilogue": epilogue}
    flipped = (Op.N if op_of(name, given[name]).swaps else Op.T for name in ("trans_b", "trans_a"))
    trans_a, trans_b = flipped
    return {
        "a": given["b"],
        "b": given["a"],
        "trans_a": trans_a,
        "trans_b": trans_b,
        "transform_a": given["transform_b"],
        "transform_b": given["transform_a"],
        "epilogue": epilogue,
    }


def _factor(v: Any, name: str, dtype: str) -> Array:
    """Return V in the dtype in which it is used. Raises `InputError` if V is not a vector or a matrix."""
    known = DTYPES.get(dtype)
    if known is None or known.accumulator not in ("float32", "float64") or dtype == "int8":
        raise InputError(
            f"{name} is of dtype {dtype}, and products with V are computed of float16, bfloat16, float32 and "
            f"float64: convert {name}"
        )
    given = np.asarray(v)
    if given.ndim not in (1, 2) or given.dtype.kind not in "fiub" or not given.size:
        raise InputError(
            f"V is an array of shape {given.shape} and dtype {given.dtype}: pass real numbers of shape "
            "(n,) or (n, r)"
        )
    return np.ascontiguousarray(given, known.accumulator)


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
