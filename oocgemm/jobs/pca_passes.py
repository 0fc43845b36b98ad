"""The passes over X of `oocgemm.pca`: what is multiplied, and how the products are corrected.

With centers c and scales s of the columns, the transformed matrix is Xc = (X - 1 c^T) S, S = diag(1 / s). A
pass computes ``Z = X^T Y`` with Y = X S Q - 1 b^T and b = Q^T S c. Then ``Xc^T Xc Q = S (Z - c t^T)``, with
the column sums t of Y. Y has one more column, of ones. The product with this column gives the column
sums of X. From these sums follow t and, after the first pass, c. So centers and scales change neither X nor
its panels.

If means are far larger than standard deviations, these sums would lose digits of X. In this case, and if X
has missing elements, each element is centered and scaled on its own when it is multiplied: c = 0 and S = 1
above.

The squares of very small or very large elements leave the range of the dtype, and their fourth powers leave
the range of float64. If the first product or its squares do, each element is also multiplied by a power of
two, which rounds nothing, and singular values are divided by this power.

Eigenvectors of X^T X come from these products by a randomized block method.
The first block Q is random (Halko, Martinsson and Tropp, *Finding structure with randomness*, 2011). Each
pass over X gives Z = X^T X Q. The next Q is the best block in the span of the last two Z, as in LOBPCG
(Knyazev, 2001). So X is read once per iteration, and few iterations suffice, even if singular values decay
slowly.

The results of a pass are the Ritz vectors V of X^T X in that span. Since X^T X V is known there, so are their
residuals ``X^T X v - s^2 v``. The next Q is half an iteration ahead of V.

All of this is computed in float64, with matrices that have as many rows as X has columns.

With several devices, Z is the sum of products of slices of the rows (`oocgemm.jobs.row_slices`).

The state of an unfinished run is kept in a file beside the result.
After each pass, a new file is written, flushed to the disk, and renamed into its place. So a
run that is killed at any time loses one pass at most, and a resumed run computes the same bits.
"""

import io
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from oocgemm import stores
from oocgemm.errors import ExecutionError, InputError
from oocgemm.jobs.prepare import sweep_of
from oocgemm.jobs.request import Chain, Destination, Gram, Missing, Request, Source, parse
from oocgemm.jobs.row_slices import RowSlices
from oocgemm.jobs.run import Plan
from oocgemm.jobs.stats import Sweep, stats_of
from oocgemm.jobs.transforming import (
    check_known,
    gaps,
    how_to_replace,
    memory_of,
    normalized,
    readable,
    transformed,
    with_missing,
)
from oocgemm.planning import Op
from oocgemm.planning.tiling import round_up
from oocgemm.stores import Array, Genotypes, Matrix
from oocgemm.stores.capabilities import MISSING
from oocgemm.stores.files import open_regular, sync_path
from oocgemm.stores.transform import Transform
from oocgemm.stores.transformed import Changed, chain_of
from oocgemm.values import dataclass

# A block Q of orthonormal columns, and the product X^T X Q.
Block = tuple[Array, Array]
# Singular values count as 0 below ROUNDINGS units of rounding, or below FLOOR, times the largest one.
ROUNDINGS, FLOOR = 8, 1e-7
# The directions of the present block are removed from the last block. What remains is left out if it is
# shorter than MIN_LENGTH square roots of the unit of rounding, or than MIN_DIFFERENCE.
MIN_LENGTH, MIN_DIFFERENCE = 3, 1e-6
# Smallest eigenvalues of the inner products of the columns of X V, and of X^T U, scaled to length 1.
# Directions with smaller eigenvalues are nearly dependent, and left out.
MIN_EIGENVALUE, MIN_SHARE = 1e-3, 1e-10
# Residuals below this many units of rounding, relative to the largest eigenvalue, are rounding errors.
# Eigenvalues that differ by less count as equal.
NOISE = 4
# Maximum number of matrices of the size of Q that exist at the same time.
MAX_MATRICES = 16

# The width of Y is a multiple of this, so that rows of Q and of Z are aligned on a GPU.
WIDTH = 8
# Centers are subtracted from products as long as this bounds the relative rounding error of Xc^T Xc.
MAX_ROUNDING = 1e-4
# If the largest element of the first product is below MARGIN times the smallest normal number, digits may
# have been lost by underflow.
MARGIN = 2.0**46
# Range of the largest element of the first Xc^T Xc Q. In this range, squares of products, which are fourth
# powers of singular values, keep all their digits in float64.
MIN_PRODUCT, MAX_PRODUCT = 2.0**-400, 2.0**400
# On the CPU, the Gram matrix is computed in float32 if each element is a sum of at most MAX_NARROW products.
# Rounding then changes a sum of squares by about 1e-5 of its value, at most.
MAX_NARROW = 1 << 20
# Dtypes in which X is multiplied.
DTYPES = ("float32", "float64")

logger = logging.getLogger("oocgemm")


@dataclass(frozen=True, eq=False)
class Subspace:
    """The state of the iteration, after a number of `passes`.

    - `basis`: Q of the next pass, with orthonormal columns.
    - `last`: the block of the last pass; None before the first pass.
    - `found`: what the passes have found; None before the first pass.
    """

    basis: Array
    last: Block | None = None
    passes: int = 0
    found: "Ritz | None" = None


@dataclass(frozen=True, eq=False)
class Ritz:
    """Approximate singular vectors and values of X, in descending order of the values.

    - `components`: the right singular vectors, orthonormal columns.
    - `values`: the singular values.
    - `residuals`: |X^T X v - s^2 v| / s_1^2 for each vector v and its value s.
    - `errors`: each residual divided by the estimated gap between s^2 and the other eigenvalues of X^T X.
      This bounds the sine of the angle between v and the exact singular vector. It is 0 where the residual
      consists of rounding errors alone.
    """

    components: Array
    values: Array
    residuals: Array
    errors: Array


# The arrays of `Ritz`.
RITZ = tuple(field.name for field in fields(Ritz))


def start(rows: int, columns: int, seed: int) -> Subspace:
    return Subspace(_orthonormal(np.random.default_rng(seed).standard_normal((rows, columns))))


def advance(state: Subspace, block: Block, rounding: float) -> Subspace:
    """Return the state after a pass.

    `block` is the Q that was multiplied, which is `state.basis` except for rounding, and the product.
    `rounding` is the relative error of the products, such as 1.2e-7 for float32.
    """
    q, z = _joined(block, state.last, rounding)
    eigenvalues, directions = np.linalg.eigh(_gram(q, z))
    eigenvalues, directions = eigenvalues[::-1], directions[:, ::-1][:, : block[0].shape[1]]
    v, product = q @ directions, z @ directions
    found = ritz(v, product, eigenvalues, rounding)
    # In the first product, rounding errors of the largest singular value hide small ones. So the next basis
    # is only this product, orthogonalized.
    ahead = block[1] if state.last is None else completed(_ahead(v, product, rounding), state.basis.shape[1])
    basis = _orthonormal(ahead) if state.last is None else ahead
    return Subspace(basis, block, state.passes + 1, found)


def ritz(v: Array, product: Array, eigenvalues: Array, rounding: float) -> Ritz:
    """Return the `Ritz` of vectors V, given X^T X V and all eigenvalues in the span, in descending order."""
    squares = np.maximum(np.einsum("ij,ij->j", v, product), 0)
    squares[squares <= max(FLOOR, ROUNDINGS * rounding) ** 2 * squares.max(initial=0)] = 0
    order = np.argsort(-squares, kind="stable")
    v, product, squares = v[:, order], product[:, order], squares[order]
    largest = squares.max(initial=0) or 1.0
    difference = product - v * squares
    residuals = np.linalg.norm(difference, axis=0) / largest
    # The part of a residual in the span of V is rounding error.
    difference -= v @ (v.T @ difference)
    outside = np.linalg.norm(difference, axis=0) / largest
    known = np.append(np.maximum(np.append(squares, eigenvalues[len(squares) :]), 0) / largest, 0.0)
    apart = np.abs(known[: len(squares), None] - known)
    noise = NOISE * rounding
    gaps = np.where(apart > noise, apart, np.inf).min(axis=1)
    errors = np.where(outside <= noise, 0.0, outside / gaps)  # NaN stays NaN: it has not converged
    return Ritz(v, np.sqrt(squares), residuals, errors)


def completed(vectors: Array, columns: int) -> Array:
    """Return `columns` orthonormal columns: the first ones of `vectors`, then random ones if needed."""
    if vectors.shape[1] >= columns:
        return vectors[:, :columns]
    more = np.random.default_rng(columns).standard_normal((len(vectors), columns - vectors.shape[1]))
    for _ in range(2):  # once is not enough if a random column is nearly in the span
        more -= vectors @ (vectors.T @ more)
        more, _ = np.linalg.qr(more)
    return np.hstack([vectors, more])


def _ahead(v: Array, z: Array, rounding: float) -> Array:
    """Return better right singular vectors of X than its Ritz vectors V, from Z = X^T X V.

    U = X V T is orthonormal if T = (V^T X^T X V)^(-1/2). Then X^T U = X^T X V T, so that the products with X
    need not be computed again. Its singular vectors are more accurate than V, by half an iteration.
    """
    gram = _gram(v, z)
    lengths = np.sqrt(np.maximum(np.diagonal(gram), 0))
    used = lengths > max(FLOOR, ROUNDINGS * rounding) * lengths.max()
    # Columns of X V have very different lengths. Scaled to length 1, short columns are as accurate as long
    # ones.
    found, directions = np.linalg.eigh(gram[np.ix_(used, used)] / np.outer(lengths[used], lengths[used]))
    wide = found > MIN_EIGENVALUE
    return _left(z[:, used] @ (directions[:, wide] / np.sqrt(found[wide]) / lengths[used, None]))


def _left(x: Array) -> Array:
    """Return the left singular vectors of a matrix of nearly orthogonal columns.

    With the lengths D of the columns, x = P K D, where K K^T are the inner products of the columns scaled to
    length 1, and P is orthonormal. So only K D, which is small, needs an SVD.
    """
    lengths = np.linalg.norm(x, axis=0)
    used = lengths > 0
    x, lengths = x[:, used] / lengths[used], lengths[used]
    found, directions = np.linalg.eigh(x.T @ x)
    wide = found > MIN_SHARE
    roots, directions = np.sqrt(found[wide]), directions[:, wide]
    left, _, _ = np.linalg.svd(roots[:, None] * directions.T * lengths, full_matrices=False)
    return np.asarray(x @ (directions / roots @ left))


def _joined(block: Block, last: Block | None, rounding: float) -> Block:
    """Return an orthonormal basis of the span of both blocks, and its product with X^T X.

    Directions that rounding errors hide are left out.
    """
    q, z = _normalized(*block, least=0.5)
    if last is None:
        return q, z
    more, product = last
    for _ in range(2):  # once is not enough for columns that are nearly in the span
        shares = q.T @ more
        more, product = more - q @ shares, product - z @ shares
    # The products of the remaining columns are differences. Scaling columns to length 1 divides the rounding
    # errors of these products by the length.
    more, product = _normalized(more, product, least=max(MIN_LENGTH * np.sqrt(rounding), MIN_DIFFERENCE))
    more, product = _normalized(more, product, least=0.5)
    return np.hstack([q, more]), np.hstack([z, product])


def _normalized(q: Array, z: Array, least: float) -> Block:
    """Return orthonormal combinations of the columns of Q, and the same combinations of those of Z.

    Combinations that are shorter than `least`, before they are scaled to length 1, are left out.
    """
    directions = _directions(q, least)
    return q @ directions, z @ directions


def _orthonormal(x: Array) -> Array:
    """Return orthonormal columns that span those of x, and random ones if x has a lower rank."""
    lengths = np.linalg.norm(x, axis=0)
    found = x[:, lengths > 0] / lengths[lengths > 0]
    for least in (MIN_DIFFERENCE, 0.5):
        found = found @ _directions(found, least)
    return completed(found, x.shape[1])


def _directions(q: Array, least: float) -> Array:
    """Return T such that Q T has orthonormal columns. Combinations shorter than `least` are left out.

    Q^T Q and its small decomposition take less time than the decomposition of the tall matrix Q.
    """
    found, directions = np.linalg.eigh(q.T @ q)
    kept = found >= least * least
    return np.asarray(directions[:, kept] / np.sqrt(found[kept]))


def _gram(q: Array, z: Array) -> Array:
    """Return Q^T Z, which is symmetric except for rounding. The shorter columns of Z are more accurate."""
    gram, lengths = q.T @ z, np.linalg.norm(z, axis=0)
    return np.asarray(np.where(lengths <= lengths[:, None], gram, gram.T))


@dataclass(frozen=True, eq=False)
class PcaState:
    """The state of a run after some passes.

    - `center`: what is subtracted from the columns of X; None until the first pass has computed it.
    - `folded`: whether `center` is subtracted from the products. If not, it is subtracted from each element.
    - `tile`: the tile shape of the first pass, MxNxK. With another tile, later passes would round
      differently.
    - `exponent`: each element is multiplied by 2^exponent, unless `folded` is set.
    - `exact`: whether the first pass computed the Gram matrix of X (`oocgemm.jobs.pca_gram`).
    """

    subspace: Subspace
    center: Array | None
    folded: bool
    tile: str | None = None
    exponent: int = 0
    exact: bool = False


class PcaPasses(RowSlices):
    """An open X, and the arguments of its products.

    - `transform`: the whole transform, with the centers.
    - `columns`: the number of columns of Q.
    - `dtype`: the dtype in which X is multiplied.
    - `scale`: the numbers by which the columns of X are divided.
    """

    def __init__(
        self,
        x: Any,
        columns: int,
        transform: Transform | None,
        options: Mapping[str, Any],
        *,
        center: bool,
        missing: Missing | None = None,
    ) -> None:
        """Open X. Nothing is read. Raises `InputError` if X or the transform cannot be used.

        Q has the width `columns`, unless X has fewer rows or columns. The `options` are those of `gemm`.
        `center` tells whether the transform centers columns by their means, unless it has other centers.
        """
        super().__init__("X", x, options)
        transform = with_missing(self.matrix, Source(x, transform=transform, missing=missing))
        # If elements are clipped, X is the result of the whole transform, and centered again.
        self.changes = transform if transform is not None and transform.clip is not None else None
        if self.changes is not None:
            if isinstance(self.matrix, Genotypes) and self._decodes and self.changes.missing is None:
                self.changes = replace(self.changes, missing=MISSING)
            self._replace(transformed(self.matrix, self.changes, Op.N, left=True))
            transform = None
        self.transform = _centered(transform or Transform(), center=center)
        # Whether the means of all elements are subtracted, also of those that replace missing ones.
        self._moves = center and (transform is None or transform.center is None)
        # Missing genotypes of a .bed file are replaced, if it has any.
        self._imputes = (
            self._decodes and isinstance(self.matrix, Genotypes) and self.transform.missing is None
        )
        if self._imputes:
            self.transform = replace(self.transform, missing=MISSING)
        self.dtype = _multiplied(self.matrix, self.transform)
        rows, cols = self.matrix.shape
        columns = min(columns, max(rows, cols))  # more columns have no use
        self._width = round_up(columns + 1, WIDTH)
        self.columns = max(1, min(self._width - 1, rows, cols))
        self.scale = np.ones(cols)
        self._means = isinstance(self.transform.center, str)  # whether means are subtracted
        self._fill: Array | None = None  # what missing elements become
        self._counted = self.matrix  # X with normalized rows, of which statistics are
        self._memory = 0  # bytes that a pass over X for statistics may take
        self._given: dict[str, Any] = {}  # budgets of the Gram matrix, if they are not those of all passes

    @property
    def reads_first(self) -> bool:
        """Whether the transform needs numbers per column before the first pass."""
        given = self.transform.scale is not None or isinstance(self.transform.center, np.ndarray)
        return self.transform.missing is not None or given

    @property
    def reads_means(self) -> bool:
        """Whether means must be found before a Gram matrix of centered columns is computed."""
        return self._means or self.reads_first

    def plan(self, *, running: bool) -> Plan:
        """Return the plan of a pass. Only if X will be `running` through a device, it is opened."""
        state = PcaState(Subspace(np.zeros((0, 0))), None, self.transform.missing is None)
        return self.planned(self._request(state, np.zeros(self._width), None), running=running)

    def plan_gram(self, *, running: bool, memory: int | None = None) -> Plan:
        """Return the plan of the Gram matrix, or of the first of its slices. `running` is as for `plan`.

        With `memory`, the plan, and the run after it, takes only so many bytes of the budgets.
        """
        if memory is not None:
            self._given = {"memory": memory, "host_memory": None}
            if self.backend == "host":
                self._given["device_memory"] = None
        return self.planned(self._gram_request(None), running=running)

    @property
    def gram_reads(self) -> int:
        """How many times the exact method reads X: twice if components follow from left singular vectors."""
        return 1 if self.is_tall else 2

    @property
    def gram_dtype(self) -> np.dtype[Any]:
        """The dtype in which X is multiplied for its Gram matrix: float64, unless that would be much slower.

        CPUs multiply float32 at twice the rate, but float32 sums of very many products are inaccurate.
        """
        narrow = self.backend == "host" and max(self.matrix.shape) <= MAX_NARROW
        return self.dtype if narrow else np.dtype(np.float64)

    def begin(self, seed: int, *, centered: bool = False) -> PcaState:
        """Return the state before the first pass. X is read if its transform needs statistics.

        With `centered`, X is also read for its means, if they are subtracted.
        """
        request = Request.of(None, None, Destination.parse(None), **self._options)
        self._memory = memory = memory_of(request)
        if self.changes is not None:
            self._replace(readable(self.matrix, memory, self._sweep()))
            self._counted = self.matrix
        if self._imputes and isinstance(self.matrix, Genotypes) and gaps(self.matrix, memory) is None:
            self.transform = replace(self.transform, missing=None)
        elif self._decodes:
            check_known("X", self._x, self.transform, lambda: memory, how_to_replace())
        if self.transform.target_sum is not None:
            only = Transform(missing=self.transform.missing, target_sum=self.transform.target_sum)
            self._counted = readable(normalized(self.matrix, only, 0), memory, self._sweep())
            rows = chain_of(self._counted)
            assert rows is not None
            self.transform = replace(self.transform, target_sum=rows.number("normalize"))
        whole, cols = self.transform, self.matrix.shape[1]
        center = np.zeros(cols) if whole.center is None else None
        folded = whole.missing is None
        if self.reads_first:
            view = readable(transformed(self.matrix, whole, Op.N, left=True), memory, self._sweep())
            chain = chain_of(view)
            assert chain is not None
            center, inverse = chain.number("center"), chain.number("scale")
            center = np.zeros(cols) if center is None else center
            self.scale = np.ones(cols) if inverse is None else 1 / inverse
            self._fill = None if folded else chain.number("impute")
            if self._fill is not None and self._moves and not whole.imputes_mean:
                center = self._mean(center, self._fill)
        if centered and center is None:
            center = stats_of(self._counted, 0, whole, memory, extremes=False, sweep=self._sweep()).mean
            self._check(center[:, None])
        return PcaState(start(cols, self.columns, seed), center, folded and not centered)

    def _mean(self, known: Array, fill: Array) -> Array:
        """Return the means of columns, given those of their known elements, and what replaces the others."""
        found = stats_of(self._counted, 0, self.transform, self._memory, extremes=False, sweep=self._sweep())
        share = found.missing / np.maximum(1, found.count + found.missing)
        return np.asarray(known + (fill - known) * share)

    def _replace(self, matrix: Matrix) -> None:
        """Use another matrix as X."""
        self.matrix, self._x = matrix, Changed(matrix)

    def _sweep(self) -> Sweep | None:
        """Return a function that makes a pass for statistics on the device; None if the host makes it."""
        request = Request.of(None, None, Destination.parse(None), **self._options)
        return None if self.backend == "host" else sweep_of(request, self.engine())

    def gram(self, state: PcaState) -> tuple[PcaState, Array]:
        """Return the Gram matrix of Xc, in float64, and the state of which it is.

        It is Xc^T Xc if X `is_tall`, else Xc Xc^T. The state has the exponent by which X was multiplied, and
        the number of passes. Raises `InputError` for NaN or Inf in X.
        """
        gram = self.sum(self._gram_request(state))[0]
        passes, least = state.subspace.passes + 1, MARGIN * float(np.finfo(self.gram_dtype).tiny)
        largest = gram.diagonal().max(initial=0)
        if not max(least, MIN_PRODUCT) <= largest <= MAX_PRODUCT:
            exponent, center = self._exponent(state)
            if exponent:
                state = replace(state, center=center, exponent=exponent)
                gram, passes = self.sum(self._gram_request(state))[0], passes + 1
            elif not np.isfinite(largest):
                self._check(stats_of(self._counted, 0, self.transform, self._memory).mean[:, None])
        return replace(state, subspace=replace(state.subspace, passes=passes)), gram

    def _gram_request(self, state: PcaState | None) -> Request:
        """Return the request for the Gram matrix; without a state, to plan it."""
        if state is None:
            known = None if self.transform.center is None else np.ones(self.matrix.shape[1])
            state = PcaState(Subspace(np.zeros((0, 0))), known, folded=False)
        op = Op.T if self.is_tall else Op.N
        each = self._each(state, self.gram_dtype)
        x = Source(stores.located("X", self._x), op, each, of_lines=self.is_tall)
        request = Request(a=x, b=x, c=Destination.parse(None), into=Gram())
        return request.with_options(**self._options | self._given)

    def turned(self, state: PcaState, left: Array) -> Array:
        """Return the product of Xc^T and `left`, in float64. It reads X once more."""
        each, b = self._each(state, self.gram_dtype), left.astype(self.gram_dtype)
        x = Source(stores.located("X", self._x), Op.T, each, of_lines=True)
        request = Request(a=x, b=Source(b), c=Destination.parse(None))
        return np.asarray(self.run(request.with_options(**self._options)).out).astype(np.float64)

    def advance(self, state: PcaState) -> PcaState:
        """Return the state after one more pass over X. Raises `InputError` for NaN or Inf in X."""
        factor, row = self._multiplied(state)
        product, tile = self._product(state, row, factor)
        if state.subspace.last is None and not state.exponent and self._leaves_range(state, product):
            exponent, center = self._exponent(state)
            if exponent:
                logger.info(
                    "the elements of X are multiplied by 2^%d, to keep their squares in range", exponent
                )
                subspace = Subspace(state.subspace.basis, passes=state.subspace.passes + 1)
                return replace(state, subspace=subspace, center=center, folded=False, exponent=exponent)
        self._check(product)
        center, block = self._corrected(state, factor, row, product)
        rounding = float(np.finfo(self.dtype).eps)
        subspace = advance(state.subspace, block, rounding)
        found = replace(state, subspace=subspace, center=center, tile=tile)
        if state.folded and self._hides(center, subspace, rounding):
            logger.info("the means of X are so large that they are subtracted from each element")
            # The products so far are inaccurate. But they give a good next Q.
            unknown = Subspace(subspace.basis, passes=subspace.passes)
            found = PcaState(unknown, center, folded=False)
        return found

    def _product(self, state: PcaState, row: Array, factor: Array) -> tuple[Array, str]:
        """Return ``X^T (X Q + 1 row)``, in float64, and the tile shape of the products."""
        return self.sum(replace(self._request(state, row, factor), tile=state.tile))

    def _multiplied(self, state: PcaState) -> tuple[Array, Array]:
        """Return S Q with further columns of zeros, and the row to add to X S Q: -b, and 1 at its end."""
        (center, inverse), used = self._folded(state), slice(self.columns)
        factor = np.zeros((len(inverse), self._width), self.dtype)
        factor[:, used] = state.subspace.basis * inverse[:, None]
        row = np.zeros(self._width, self.dtype)
        row[used], row[-1] = -(center @ factor[:, used]), 1
        return factor, row

    def _corrected(self, state: PcaState, factor: Array, row: Array, product: Array) -> tuple[Array, Block]:
        """Return the centers, and the block: Q as it was multiplied, and Xc^T Xc Q."""
        (center, inverse), used, rows = self._folded(state), slice(self.columns), self.matrix.shape[0]
        sums = product[:, -1]
        found = sums / rows if state.center is None else state.center
        if state.folded:
            center = found
            sums = rows * center if self._means else sums  # more accurate than the sums in the product
        elif self._means and self._fill is None:
            # Means of centered columns are the rounding errors that the centers have from the first pass.
            found = found + sums / rows * np.ldexp(self.scale, -state.exponent)
        multiplied, offset = factor[:, used].astype(np.float64), row[used].astype(np.float64)
        product = product[:, used] - np.outer(center, sums @ multiplied + rows * offset)
        return found, (multiplied / inverse[:, None], product * inverse[:, None])

    def _hides(self, center: Array, subspace: Subspace, rounding: float) -> bool:
        """Tell whether rounding errors of the means may hide digits of Xc^T Xc."""
        assert subspace.found is not None
        square = self.matrix.shape[0] * np.square(center / self.scale).sum()
        return bool(rounding * square > MAX_ROUNDING * subspace.found.values.max(initial=0) ** 2)

    def _leaves_range(self, state: PcaState, product: Array) -> bool:
        """Tell whether the first product of X or its square overflows, or may lose digits by underflow."""
        used = np.abs(product[:, : self.columns])
        largest = used.max(initial=0)
        if not np.isfinite(largest):
            return bool(np.isfinite(product[:, -1]).all())
        with np.errstate(over="ignore"):
            scaled = (used * self._folded(state)[1][:, None]).max(initial=0)
        inside = MIN_PRODUCT <= scaled <= MAX_PRODUCT
        return not inside or bool(largest < MARGIN * np.finfo(self.dtype).tiny)

    def _exponent(self, state: PcaState) -> tuple[int, Array | None]:
        """Return the exponent e for which 2^e times the largest element is about 1, and the centers.

        The exponent is 0 if all elements are 0, or if some are not finite. A pass over X finds the extremes.
        """
        found = stats_of(self._counted, 0, self.transform, self._memory)
        center = found.mean if state.center is None else state.center
        with np.errstate(all="ignore"):
            largest = np.maximum(abs(found.max - center), abs(found.min - center)) / self.scale
            largest = largest[found.count > 0].max(initial=0)
        return (-int(np.frexp(largest)[1]) if np.isfinite(largest) else 0), center

    def product(self, state: PcaState, factor: Array) -> Array:
        """Return Xc^T Xc factor, in float64, by one more read of X. `state` is that of the Gram matrix."""
        x = Source(stores.located("X", self._x), transform=self._each(state), of_lines=True)
        return self.chained(x, factor, MAX_MATRICES * 8 * factor.size)

    def scores(self, state: PcaState, components: Array) -> Array:
        """Return Xc @ components^T, by one more read of X, in the dtype in which X is multiplied."""
        state = replace(state, exponent=0)
        center, inverse = self._folded(state)
        factor = (components.T * inverse[:, None]).astype(self.dtype)
        found = np.asarray(self.projected(state, factor, None))
        found -= (center @ factor).astype(self.dtype)
        return found

    def projected(self, state: PcaState, factor: Array, out: Any) -> Any:
        """Return the product of X, as it is loaded in this state, and a factor, stored at `out`."""
        given = {"transform_a": self._each(state), "devices": self._devices, **self._options}
        return self.run(parse(self._x, factor, out, given)).out  # type: ignore[arg-type]

    def _folded(self, state: PcaState) -> tuple[Array, Array]:
        """Return c and the diagonal of S; c is 0 as long as it is unknown."""
        cols = self.matrix.shape[1]
        if not state.folded:
            return np.zeros(cols), np.ones(cols)
        return np.zeros(cols) if state.center is None else state.center, 1 / self.scale

    def _each(self, state: PcaState, dtype: np.dtype[Any] | None = None) -> Transform | None:
        """Return the transform of each element when X is multiplied; None if elements do not change.

        X is multiplied in `dtype`, by default that of passes.
        """
        whole, dtype = self.transform, dtype or self.dtype
        if whole.missing is not None and self._fill is None:  # X has not been read: this is only planned
            return replace(whole, cast=dtype.name)
        numbers: dict[str, Any] = {}
        if not state.folded:
            numbers = {"center": state.center, "scale": np.ldexp(self.scale, -state.exponent)}
            unchanged = {"center": 0, "scale": 1}
            numbers = {
                name: u for name, u in numbers.items() if u is not None and (u != unchanged[name]).any()
            }
        if whole.missing is not None:
            numbers |= {"missing": whole.missing, "impute": self._fill}
        each = Transform(log1p=whole.log1p, target_sum=whole.target_sum, cast=dtype.name, **numbers)
        changed = whole.log1p or whole.target_sum is not None or numbers
        return each if changed or self.matrix.dtype != dtype else None

    def _request(self, state: PcaState, row: Array, factor: Array | None) -> Request:
        x = Source(stores.located("X", self._x), transform=self._each(state), of_lines=True)
        resident = MAX_MATRICES * 8 * self.matrix.shape[1] * self._width
        chain = Chain(self.columns, row, factor, resident)
        return Request(a=x, b=x, c=Destination.parse(None), into=chain).with_options(**self._options)

    def _check(self, product: Array) -> None:
        """Raise an error if a product is not finite. Its last column has the column sums of X."""
        if np.isfinite(product).all():
            return
        if (wrong := np.flatnonzero(~np.isfinite(product[:, -1]))).size:
            hint = ""
            if self._fill is None and np.isnan(product[wrong[0], -1]):
                hint = ": if NaN stands for missing elements, pass missing=float('nan') (--missing nan)"
            raise InputError(
                f"column {wrong[0]} of X has elements that are NaN or Inf (one of {wrong.size} such "
                f"columns){hint}"
            )
        raise ExecutionError(
            f"the elements of X are so large that X^T X overflows {self.dtype}: pass cast='float64'"
        )


def _centered(transform: Transform, *, center: bool) -> Transform:
    if not center and transform.center is not None:
        raise InputError("center = False, but the transform has centers: drop one of them")
    return replace(transform, center="k") if center and transform.center is None else transform


def _multiplied(matrix: Matrix, transform: Transform) -> np.dtype[Any]:
    """Return the dtype in which X is multiplied. Raises `InputError` if the cast is not possible."""
    if transform.cast is not None and transform.cast not in DTYPES:
        raise InputError(
            f"cast = {transform.cast!r}, but components are computed in float32 or float64: pass one"
        )
    found = transform.result("X", matrix.dtype)
    return found if found.name in DTYPES else np.dtype(np.float32)


def state_path(out: str) -> Path:
    """Return the path of the state of a run that writes to `out`."""
    return Path(f"{out.rstrip('/')}.pca-state.npz")


def save_state(path: Path, identity: Mapping[str, Any], state: PcaState) -> None:
    """Save a state after a pass. Raises `InputError` if nothing can be written there."""
    subspace = state.subspace
    arrays = {
        "basis": subspace.basis,
        "last": None if subspace.last is None else np.stack(subspace.last),
        "center": state.center,
    }
    if subspace.found is not None:
        arrays |= {name: getattr(subspace.found, name) for name in RITZ}
    facts = {"identity": identity, "passes": subspace.passes, "tile": state.tile, "folded": state.folded}
    facts |= {"exponent": state.exponent, "exact": state.exact}
    file = io.BytesIO()
    named: dict[str, Any] = {name: array for name, array in arrays.items() if array is not None}
    np.savez(file, facts=np.array(json.dumps(facts)), **named)
    new = path.with_name(f"{path.name}.new")
    try:
        with open(new, "wb") as target:
            target.write(file.getbuffer())
            target.flush()
            os.fsync(target.fileno())
        os.replace(new, path)
        sync_path(path.absolute().parent)
    except OSError as error:
        raise InputError(f"the state of the run cannot be written to {path}: {error.strerror}") from error


def load_state(path: Path, identity: Mapping[str, Any], *, resume: bool) -> PcaState | None:
    """Return the saved state; None if there is none.

    Raises `InputError` if there is a state and `resume` is not set, or if the state belongs to a run with
    other arguments, or cannot be read.
    """
    if path.exists() and not resume:
        raise InputError(
            f"there is an unfinished run, whose state is at {path}: pass resume=True (--resume) to continue "
            "it, or remove the file to start over"
        )
    try:
        with open(path, "rb", opener=open_regular) as stored, np.load(stored, allow_pickle=False) as file:
            facts = json.loads(str(file["facts"]))
            arrays = {name: file[name] for name in file.files if name != "facts"}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"the state of the run at {path} cannot be read ({error}): remove it to start over"
        ) from error
    known, earlier = json.loads(json.dumps(identity, default=str)), facts["identity"]
    changed = [name for name in known | earlier if known.get(name) != earlier.get(name)]
    if changed:
        raise InputError(
            f"the unfinished run at {path} has other arguments ({', '.join(changed)}): pass the same ones, "
            "or remove the file to start over"
        )
    last = (arrays["last"][0], arrays["last"][1]) if "last" in arrays else None
    found = Ritz(*(arrays[name] for name in RITZ)) if "values" in arrays else None
    subspace = Subspace(arrays["basis"], last, facts["passes"], found)
    rest = (facts[name] for name in ("folded", "tile", "exponent", "exact"))
    return PcaState(subspace, arrays["center"], *rest)
