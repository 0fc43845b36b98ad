"""The verbs `lstsq` and `ridge`: linear least squares of a tall X, by a few reads of X and Y."""

import os
from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from oocgemm.errors import InputError
from oocgemm.jobs.normal_equations import NormalEquations, Solution, solve
from oocgemm.jobs.option_groups import Operand, PathLike, PcaOptions
from oocgemm.jobs.options import LstsqArguments, RidgeArguments, Weights, check_names, documented
from oocgemm.jobs.run import Plan
from oocgemm.stores.zarr_matrix import check_free, save_arrays
from oocgemm.values import dataclass


@dataclass(frozen=True, eq=False)
class LeastSquares:
    """The coefficients b of a linear model Y = intercept + X b, for n columns of X and r of Y.

    Without a second axis of Y, there is none here. With several penalties, arrays have a first axis for them.

    Attributes:
        coefficients: n x r.
        intercept: r numbers; zeros if there is no intercept.
        residual_ss: the sum of squares of the residuals of each column of Y, with weights if they were given.
        condition: the estimated condition number of X, with its column of ones, weights and penalty. It is
            right to some percent.
        passes: how many times X and Y were read.
    """

    coefficients: NDArray[np.float64]
    intercept: NDArray[np.float64]
    residual_ss: NDArray[np.float64]
    condition: NDArray[np.float64]
    passes: int

    def save(self, path: PathLike) -> None:
        """Write the arrays to a new zarr group at a local path, by their names.

        Raises:
            InputError: something exists at the path, or nothing can be written there.
        """
        names = ("coefficients", "intercept", "residual_ss", "condition")
        save_arrays(os.fspath(path), {name: np.atleast_1d(getattr(self, name)) for name in names})


@overload
def lstsq(
    x: Operand,
    y: Operand,
    out: PathLike | None = None,
    *,
    dry_run: Literal[False] = False,
    **options: Unpack[LstsqArguments],
) -> LeastSquares: ...
@overload
def lstsq(
    x: Operand,
    y: Operand,
    out: PathLike | None = None,
    *,
    dry_run: Literal[True],
    **options: Unpack[LstsqArguments],
) -> Plan: ...
@documented("lstsq", PcaOptions)
def lstsq(
    x: Operand,
    y: Operand,
    out: PathLike | None = None,
    *,
    intercept: bool = False,
    weights: Weights | None = None,
    refine: bool = True,
    dry_run: bool = False,
    **options: Unpack[PcaOptions],
) -> LeastSquares | Plan:
    """Find the b for which the sum of squares of Y - X b is smallest, in float64.

    X and Y are read together, and stay as they are stored. X is read twice if its condition number is below
    about 1e6, and at most four times up to 1e12.

    Args:
        x: a real two-dimensional operand as for `gemm`, with at least as many rows as columns. About twelve
            matrices of the size of X^T X must fit into host memory.
        y: an operand with as many rows as X, and one or more columns, or a vector. It may have another dtype.
        out: path of a new zarr group, to which the result is also saved (`LeastSquares.save`). A run that was
            killed starts again.
        {options}

    Returns:
        The `LeastSquares`; with `dry_run`, the `Plan` of the first read.

    Raises:
        InputError, BudgetError, BackendError, ExecutionError: as `gemm` does. `InputError` also if columns of
            X are linearly dependent as far as float64 can tell, if weights are negative, or if there are
            missing elements.

    >>> import oocgemm
    >>> found = oocgemm.lstsq([[1.0], [2.0], [3.0]], [3.0, 5.0, 7.0], intercept=True, backend="host")
    >>> found.coefficients.round(6).tolist(), float(found.intercept.round(6))
    ([2.0], 1.0)
    """
    check_names("lstsq", options, PcaOptions)
    given: dict[str, Any] = {"intercept": intercept, "weights": weights, "refine": refine}
    return _fitted(x, y, None, out, given, options, dry_run=dry_run)


@overload
def ridge(
    x: Operand,
    y: Operand,
    alpha: float | Sequence[float],
    out: PathLike | None = None,
    *,
    dry_run: Literal[False] = False,
    **options: Unpack[RidgeArguments],
) -> LeastSquares: ...
@overload
def ridge(
    x: Operand,
    y: Operand,
    alpha: float | Sequence[float],
    out: PathLike | None = None,
    *,
    dry_run: Literal[True],
    **options: Unpack[RidgeArguments],
) -> Plan: ...
@documented("ridge", PcaOptions)
def ridge(
    x: Operand,
    y: Operand,
    alpha: float | Sequence[float],
    out: PathLike | None = None,
    *,
    intercept: bool = False,
    weights: Weights | None = None,
    refine: bool = True,
    dry_run: bool = False,
    **options: Unpack[PcaOptions],
) -> LeastSquares | Plan:
    """Find the b for which the sum of squares of Y - X b, plus alpha times that of b, is smallest.

    Several penalties alpha take no more reads than one. The intercept has no penalty.

    Args:
        x, y, out: as for `lstsq`. X may have more columns than rows.
        alpha: a penalty, or several: positive numbers.
        {options}

    Returns:
        The `LeastSquares`; with `dry_run`, the `Plan` of the first read.

    Raises:
        InputError, BudgetError, BackendError, ExecutionError: as `lstsq` does.

    >>> import oocgemm
    >>> oocgemm.ridge([[1.0], [2.0]], [2.0, 4.0], [0.0001, 5.0], backend="host").coefficients.round(3)
    array([[2.],
           [1.]])
    """
    check_names("ridge", options, PcaOptions)
    given: dict[str, Any] = {"intercept": intercept, "weights": weights, "refine": refine}
    return _fitted(x, y, alpha, out, given, options, dry_run=dry_run)


def _fitted(
    x: Operand,
    y: Operand,
    alpha: float | Sequence[float] | None,
    out: PathLike | None,
    given: dict[str, Any],
    options: PcaOptions,
    *,
    dry_run: bool,
) -> LeastSquares | Plan:
    """Return the solutions for penalties; None for no penalty."""
    alphas = [0.0] if alpha is None else _penalties(alpha)
    refine = given.pop("refine")
    equations = NormalEquations(x, y, options, **given)
    if alpha is None and equations.rows < equations.unknowns:
        raise InputError(
            f"X has {equations.rows} rows for {equations.unknowns} coefficients, which are not unique: pass "
            "more rows, or use ridge"
        )
    plan = equations.plan(running=not dry_run)
    if dry_run:
        return plan
    if out is not None:
        count = (equations.unknowns + 1) * equations.targets + 1
        check_free(os.fspath(out), 8 * len(alphas) * count)
    solutions, passes = solve(equations, alphas, refine=refine)
    found = _gathered(equations, solutions, passes, several=alpha is not None and np.ndim(alpha) > 0)
    if out is not None:
        found.save(out)
    return found


def _penalties(alpha: Any) -> list[float]:
    given = np.asarray(alpha)
    numbers = given.ndim < 2 and given.size and given.dtype.kind in "fiu"
    if not numbers or not ((given > 0) & np.isfinite(given)).all():
        raise InputError(
            f"alpha = {alpha!r}: pass a positive number, or a list of them; lstsq has no penalty"
        )
    return [float(each) for each in np.atleast_1d(given)]


def _gathered(
    equations: NormalEquations, solutions: list[Solution], passes: int, *, several: bool
) -> LeastSquares:
    b, squares = np.stack([each.b for each in solutions]), np.stack([each.squares for each in solutions])
    before = b[:, 0] if equations.before else np.zeros_like(squares)
    arrays = [b[:, equations.before :], before, squares]
    if equations.is_vector:
        arrays = [each[..., 0] for each in arrays]
    arrays.append(np.array([each.condition for each in solutions]))
    coefficients, intercept, residual_ss, condition = (
        each if several else np.asarray(each[0]) for each in arrays
    )
    return LeastSquares(coefficients, intercept, residual_ss, condition, passes)
