"""The verb `distances`: the distances of the rows of a matrix from one another, or from those of another."""

from dataclasses import replace
from typing import Any, Literal, Unpack, overload

import numpy as np

from oocgemm import stores
from oocgemm.errors import InputError
from oocgemm.jobs.codes import COUNTS, check_bits, counting
from oocgemm.jobs.option_groups import CorrelationOptions, Operand, Output
from oocgemm.jobs.options import DistancesArguments, check_choices, check_names, documented
from oocgemm.jobs.request import Between, Request, parse_gram
from oocgemm.jobs.run import Plan, Result, outcome
from oocgemm.jobs.steps import Cast, Cosines, Distance, RankOne, Scale, SquareRoot
from oocgemm.stores.transform import Transform
from oocgemm.verbs.similarity import between

# The steps that make distances of products of rows.
_STEPS: dict[str, tuple[Any, ...]] = {
    "euclidean": (Distance(), SquareRoot()),
    "sqeuclidean": (Distance(),),
    "cosine": (Cosines(), Scale(value=-1), RankOne()),
}


@overload
def distances(
    x: Operand, out: Output = None, *, dry_run: Literal[False] = False, **options: Unpack[DistancesArguments]
) -> Result: ...
@overload
def distances(
    x: Operand, out: Output = None, *, dry_run: Literal[True], **options: Unpack[DistancesArguments]
) -> Plan: ...
@documented("distances", CorrelationOptions)
def distances(
    x: Operand,
    out: Output = None,
    *,
    y: Operand | None = None,
    metric: str = "euclidean",
    bits: int | None = None,
    bitorder: str = "big",
    dry_run: bool = False,
    **options: Unpack[CorrelationOptions],
) -> Result | Plan:
    """Compute the distance of each row of X to each row of X, or of Y, as SciPy's ``cdist(X, Y)`` does.

    Args:
        x: a real two-dimensional operand as for `gemm`, m x k. Missing genotypes of a .bed file are replaced
            by the means of their variants, but refused by the metric hamming.
        out: where the distances are stored, as `c` of `gemm`. By default a new ndarray.
        {options}

    Returns:
        A `Result` with the m x n distances: float32, but float64 for float64 and int8 operands, and with the
            metrics jaccard and hamming, whose distances come from exact counts. Without `y`,
            both triangles are exact mirror images. Products are computed in float64 of rows from which the
            mean of all rows is subtracted. An error of a squared distance is about 1e-16 times the squared
            norms of such rows. With the metrics euclidean and sqeuclidean, equal rows have the distance 0.
            With `dry_run`, the `Plan`.

    Raises:
        InputError, BudgetError, BackendError, ExecutionError: as `gemm` does. `InputError` also if squares
            overflow float64.

    >>> import oocgemm
    >>> oocgemm.distances([[0.0, 0.0], [3.0, 4.0]], backend="host").out
    array([[0., 5.],
           [5., 0.]])
    """
    check_names("distances", options, CorrelationOptions)
    check_choices("distances", metric=metric, bitorder=bitorder)
    check_bits(metric, bits, options)
    if metric in COUNTS:
        request = _between(x, y, out, dict(options)).with_operands(impute=True)
        request, step = counting(request, ("X", "X" if y is None else "Y"), metric, bits, bitorder)
        return outcome(replace(request, epilogue=(step,)), dry_run=dry_run)
    given, steps = dict[str, Any](options), _STEPS[metric]
    both = (("X", x),) if y is None else (("X", x), ("Y", y))
    dtypes = [stores.open_matrix(name, stores.located(name, each), decode=False).dtype for name, each in both]
    if (dtype := dtypes[0]).kind == "c":
        raise InputError(f"X is of dtype {dtype}, and distances are computed of real numbers: pass a real X")
    if metric == "cosine":
        given["transform"] = replace(given.get("transform") or Transform(), cast="float64")
        wide = np.float64 in dtypes or all(each == np.int8 for each in dtypes)
        steps = (*steps, Cast("float64" if wide else "float32"))
    elif all(each.name in ("float16", "bfloat16") for each in dtypes):
        given["out_dtype"] = "float32"
    given["epilogue"] = steps
    return outcome(_between(x, y, out, given).with_operands(impute=True), dry_run=dry_run)


def _between(x: Operand, y: Operand | None, out: Output, given: dict[str, Any]) -> Request:
    """Return the request of a number per pair of rows: of X, or of X and Y."""
    if y is None:
        return parse_gram(x, out, 0, "full", given)  # type: ignore[arg-type]
    return between(("X", x), ("Y", y), out, 0, Between(), given)
