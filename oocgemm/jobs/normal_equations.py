"""Least squares with penalties, by reads of Z = [1 | X | Y]: a Gram matrix, and then corrections.

With b = P P^T X^T Y from the Gram matrix (`oocgemm.jobs.orthonormal`), the solution has errors of about eps
times the square of the condition number of X. Each further read computes X^T r for the residuals r = Y - X b,
row by row, and P P^T X^T r is added to b: the corrected seminormal equations (Bjorck, *Stability analysis of
the method of seminormal equations for linear least squares problems*, 1987). The same read makes P better
where it has to be. So a well-conditioned X is read twice, and one with a condition number of 1e12 three or
four times.

A penalty a |b|^2 is the same as further rows sqrt(a) I of X, with zeros in Y. Weights multiply the rows of Z
by their square roots when they are read.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from oocgemm import stores
from oocgemm.errors import BudgetError, InputError
from oocgemm.jobs.options import Weights
from oocgemm.jobs.orthonormal import EPS, QRFactors, norm
from oocgemm.jobs.request import Destination, Gram, Request, Source
from oocgemm.jobs.row_slices import RowSlices
from oocgemm.jobs.run import Plan
from oocgemm.jobs.transforming import check_known, memory_of
from oocgemm.planning import Op
from oocgemm.planning.units import ceil_size, format_size
from oocgemm.stores import Array
from oocgemm.stores.declared import NOTHING
from oocgemm.stores.folded import as_matrix, fold_of
from oocgemm.stores.folding import Folding
from oocgemm.stores.joined import concat
from oocgemm.stores.transform import Transform
from oocgemm.stores.transformed import Widened

# Maximum number of reads of X.
MAX_READS = 4
# Columns of P whose error is above WIDE are multiplied again. A solution is refused if an error stays above
# LOST.
WIDE, LOST = 1e-6, 0.1
# A solution has converged if its next correction is below this many roundings, times the condition number.
ROUNDINGS = 10
# Matrices of the size of X^T X in float64 that exist at the same time.
MATRICES = 12
# The scale of rows of weight 0: what they add to any sum is rounded to 0.
NOTHING_LEFT = 1e300


class NormalEquations(RowSlices):
    """Z = [1 | X | Y], opened, and the arguments of its products.

    - `rows`, `cols`: the shape of X. `targets`: the number of columns of Y.
    - `before`: 1 if Z begins with a column of ones, else 0.
    - `is_vector`: whether Y was passed as a vector.
    """

    def __init__(
        self,
        x: Any,
        y: Any,
        options: Mapping[str, Any],
        *,
        intercept: bool,
        weights: Weights | None,
    ) -> None:
        """Open X and Y. Nothing is read. Raises `InputError` for operands or weights that do not fit."""
        decode = options.get("decode", True)
        x, y = stores.located("X", x), stores.located("Y", y)
        self.is_vector = not fold_of("Y", y, Folding(rows=(0,))).cols
        y = as_matrix(y, rows=(0,))
        opened = [stores.open_matrix(*each, decode=decode) for each in (("X", x), ("Y", y))]
        (self.rows, self.cols), (rows, self.targets) = (each.shape for each in opened)
        for name, matrix in zip("XY", opened, strict=True):
            if matrix.dtype.kind == "c":
                raise InputError(f"{name} is of dtype {matrix.dtype}: pass real numbers")
        if rows != self.rows:
            raise InputError(f"X has {self.rows} rows, and Y has {rows}: pass a row of Y for each row of X")
        if not self.cols or not self.targets:
            raise InputError(f"X has {self.cols} columns, and Y {self.targets}: pass at least one of each")
        request = Request.of(None, None, Destination.parse(None), **options)
        remedy = "replace them in a copy"
        for name, each in (("X", x), ("Y", y)) if decode else ():
            check_known(name, each, None, lambda: memory_of(request), remedy)
        self.before = int(intercept)
        self._scale = None if weights is None else _scale(weights, self.rows)
        declared = (
            getattr(stores.open_matrix(*each, decode=False), "declared", NOTHING) != NOTHING
            for each in (("X", x), ("Y", y))
        )
        plain = opened[0].dtype == opened[1].dtype and not (decode and any(declared))
        parts = [x, y] if plain else [Widened(x, decode), Widened(y, decode)]
        ones = [np.ones((self.rows, 1), opened[0].dtype if plain else np.float64)] * self.before
        super().__init__("[X | Y]", concat([*ones, *parts], axis=1), options)

    @property
    def unknowns(self) -> int:
        """The number of rows of b, with the intercept."""
        return self.before + self.cols

    def gram(self) -> Array:
        """Return Z^T Z. Raises `InputError` if it is not finite."""
        found = self.sum(self._request())[0]
        wrong = np.flatnonzero(~np.isfinite(found.diagonal()))
        if wrong.size:
            raise InputError(
                f"the sum of squares of {self.named(wrong[0])} is {found[wrong[0], wrong[0]]}: it has "
                "elements that are NaN or Inf, or too large for float64: replace or scale them in a copy"
            )
        return found

    def product(self, factor: Array) -> Array:
        """Return Z^T (Z factor)."""
        return self.chained(self._source(Op.N), factor, MATRICES * 8 * len(factor) ** 2)

    def plan(self, *, running: bool) -> Plan:
        """Return the plan of the Gram matrix. Raises `BudgetError` if the host memory is too small for it."""
        plan = self.planned(self._request(), running=running)
        unified = self.backend == "host"
        budget = plan.budgets.host + unified * plan.budgets.device
        used = plan.footprint.host_total + unified * plan.footprint.device_total
        beside = MATRICES * 8 * self.matrix.shape[1] ** 2
        if max(used, beside) > budget:
            needed = max(used, beside)
            raise BudgetError(
                f"{self.unknowns} coefficients need {format_size(needed)} of host memory, and the budget is "
                f"{format_size(budget)}: pass memory={ceil_size(needed)!r} (--memory)",
                least=needed,
            )
        return plan

    def named(self, column: int) -> str:
        """Return what a column of Z is."""
        at = column - self.before
        if at < 0:
            return "the intercept"
        return f"column {at} of X" if at < self.cols else f"column {at - self.cols} of Y"

    def _request(self) -> Request:
        z = self._source(Op.T)
        return Request(a=z, b=z, c=Destination.parse(None), into=Gram()).with_options(**self._options)

    def _source(self, op: Op) -> Source:
        is_plain = self._scale is None and self.matrix.dtype == np.float64
        return Source(self._x, op, None if is_plain else Transform(scale=self._scale, cast="float64"))


def _scale(weights: Any, rows: int) -> Array:
    """Return the numbers by which the rows of Z are divided. Raises `InputError` for other weights."""
    given = np.load(weights, allow_pickle=False) if isinstance(weights, str | os.PathLike) else weights
    found = np.asarray(given)
    if found.shape != (rows,) or found.dtype.kind not in "fiub":
        raise InputError(
            f"weights have the shape {found.shape} and dtype {found.dtype}, and X has {rows} rows: pass a "
            "real number for each"
        )
    found = found.astype(np.float64)
    wrong = np.flatnonzero(~(np.isfinite(found) & (found >= 0)))
    if wrong.size:
        raise InputError(f"weights[{wrong[0]}] = {found[wrong[0]]}: pass finite numbers of at least 0")
    with np.errstate(divide="ignore"):
        return np.where(found > 0, 1 / np.sqrt(found), NOTHING_LEFT)


class Solution:
    """The solution b for one penalty, and how it is corrected. Columns of X are divided by `scale`.

    - `squares`: the sums of squares of residuals.
    - `factors`: those of X with the rows of the penalty.
    """

    def __init__(self, gram: Array, unknowns: int, penalty: Array) -> None:
        inner, right = gram[:unknowns, :unknowns], gram[:unknowns, unknowns:]
        lengths = np.sqrt(inner.diagonal() + penalty)
        # Powers of two: nothing is rounded.
        self.scale = np.exp2(-np.round(np.log2(np.where(lengths > 0, lengths, 1))))[:, None]
        self._penalty = penalty[:, None] * self.scale**2
        inner = inner * self.scale * self.scale.T
        self.factors = QRFactors.of(inner + np.diag(self._penalty[:, 0]))
        self._b = self._step = self.factors.solved(self.scale * right)
        share = np.einsum("ij,ij->j", self._b, 2 * self.scale * right - inner @ self._b)
        self.squares = np.maximum(0, gram.diagonal()[unknowns:] - share)

    @property
    def b(self) -> Array:
        """The solution."""
        return np.asarray(self.scale * self._b)

    @property
    def error(self) -> float:
        """The largest error of the factors, which is about that of the next correction."""
        return float(self.factors.errors.max())

    @property
    def condition(self) -> float:
        """The estimated condition number of X, with the rows of the penalty."""
        return norm(self.scale * self.factors.p) * norm(self.factors.r / self.scale.T)

    @property
    def is_done(self) -> bool:
        """Whether a further correction would be a rounding error."""
        if self.error > LOST:
            return False
        left = self.error * np.linalg.norm(self._step, axis=0)
        least = ROUNDINGS * EPS * np.linalg.norm(self._b, axis=0)
        return bool((left <= least).all() or (left <= least * self.factors.condition()).all())

    def factor(self) -> Array:
        """Return the columns that are to be multiplied: those of P that matter, and [-b; I]."""
        self._chosen = self.factors.errors > WIDE
        targets = self._b.shape[1]
        above = np.hstack([self.scale * self.factors.p[:, self._chosen], -self.b])
        below = np.hstack([np.zeros((targets, above.shape[1] - targets)), np.eye(targets)])
        return np.vstack([above, below])

    def correct(self, factor: Array, product: Array) -> None:
        """Use Z^T (Z factor)."""
        unknowns, count = len(self._b), int(self._chosen.sum())
        above, right = self.scale * product[:unknowns, :count], self.scale * product[:unknowns, count:]
        if count:
            above += self._penalty * self.factors.p[:, self._chosen]
            self.factors = self.factors.refined(self._chosen, above)
        coordinates = self.factors.p.T @ (right - self._penalty * self._b)
        self._step = step = np.asarray(self.factors.p @ coordinates)
        # |X step|^2 with the rows of the penalty is |coordinates|^2. X^T X would have larger errors.
        squares = np.einsum("ij,ij->j", factor[:, count:], product[:, count:])
        squares -= np.square(coordinates).sum(axis=0)
        squares -= np.einsum("ij,ij->j", step, self._penalty * (2 * self._b + step))
        self.squares = np.maximum(0, squares)
        self._b = self._b + step


def solve(equations: NormalEquations, alphas: Sequence[float], *, refine: bool) -> tuple[list[Solution], int]:
    """Return the solution for each penalty, and how often X was read.

    Raises `InputError` if X, with the penalty, is so ill-conditioned that float64 does not give a solution.
    """
    gram, reads, unknowns = equations.gram(), 1, equations.unknowns
    penalized = np.arange(unknowns) >= equations.before
    _check(equations, gram, alphas)
    found = [Solution(gram, unknowns, alpha * penalized) for alpha in alphas]
    while refine and reads < MAX_READS:
        active = [each for each in found if reads == 1 or not each.is_done]
        if not active:
            break
        factors = [each.factor() for each in active]
        product, reads = equations.product(np.hstack(factors)), reads + 1
        at = 0
        for each, factor in zip(active, factors, strict=True):
            each.correct(factor, product[:, at : at + factor.shape[1]])
            at += factor.shape[1]
    for alpha, each in zip(alphas, found, strict=True):
        if each.error > LOST:
            raise _refusal(equations, each, alpha, reads, refine=refine)
    return found, reads


def _check(equations: NormalEquations, gram: Array, alphas: Sequence[float]) -> None:
    """Raise `InputError` if a column of X is 0, and no penalty decides about its coefficient."""
    zero = np.flatnonzero(gram.diagonal()[: equations.unknowns] < np.finfo(np.float64).tiny / EPS)
    if zero.size and not all(alphas):
        raise InputError(
            f"the sum of squares of {equations.named(zero[0])} is {gram[zero[0], zero[0]]:g}, so that its "
            "coefficient is unknown: drop the column, or scale it in a copy"
        )


def _refusal(
    equations: NormalEquations, found: Solution, alpha: float, reads: int, *, refine: bool
) -> InputError:
    """Return the error for a solution that float64 does not give."""
    last = found.factors.p[:, int(np.argmax(found.factors.errors))]
    column = equations.named(int(np.argmax(np.abs(last))))
    condition, times = found.factors.condition(), "one read" if reads == 1 else f"{reads} reads"
    limit = "1e7" if reads == 1 else "1e12"
    remedy = (
        "drop columns that depend on others, or use ridge"
        if not alpha
        else f"pass an alpha above {alpha:g}, such as {max(alpha, EPS * found.factors.size) * 1e6:.2g}"
    )
    if not refine:
        remedy = f"pass refine=True, which reads X again; or {remedy}"
    return InputError(
        f"the columns of X, scaled to length 1, have a condition number of at least {condition:.2g}, and "
        f"{times} in float64 decide up to about {limit}: {column} is nearly a combination of others: {remedy}"
    )
