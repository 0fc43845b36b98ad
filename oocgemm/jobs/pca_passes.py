"""The passes over X of `oocgemm.pca`: what is multiplied, and how the products are corrected.

With centers c and scales s of the columns, the transformed matrix is Xc = (X - 1 c^T) S, S = diag(1 / s). A
pass computes ``Z = X^T Y`` with Y = X S Q - 1 b^T and b = Q^T S c. Then ``Xc^T Xc Q = S (Z - c t^T)``, with
the column sums t of Y. Y has one more column, of ones. Its product has the column sums of X, from which t
follows, and after the first pass c. So centers and scales change neither X nor its panels.

Means that are far larger than what X varies by would lose its digits in these sums. Then, as if elements were
missing, each element is centered and scaled on its own when it is multiplied: c = 0 and S = 1 above.

The squares of very small or very large elements leave the range of the dtype, and their fourth powers that of
float64. If those of the first product do, each element is also multiplied by a power of two, which rounds
nothing, and singular values are divided by it.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from oocgemm import backends, stores
from oocgemm.errors import ExecutionError, InputError
from oocgemm.jobs.imputing import check_known, gaps, how_to_replace
from oocgemm.jobs.request import Chain, Destination, Request, parse
from oocgemm.jobs.result import Plan
from oocgemm.jobs.run import plan_request, run_request
from oocgemm.jobs.stats import stats_of
from oocgemm.jobs.subspace import MAX_MATRICES, Block, Subspace, advance, start
from oocgemm.jobs.transforms import memory_of, readable, transformed
from oocgemm.planning import Op
from oocgemm.planning.tiling import round_up
from oocgemm.stores import Array, Genotypes, Matrix
from oocgemm.stores.capabilities import MISSING
from oocgemm.stores.transform import Transform
from oocgemm.stores.transformed import TransformedMatrix, Vectors

# The width of Y is a multiple of this, so that rows of Q and of Z are aligned on a GPU.
WIDTH = 8
# Centers are subtracted from products as long as this bounds the relative rounding error of Xc^T Xc.
MAX_ROUNDING = 1e-4
# If the largest element of the first product is below this many of the smallest normal numbers, digits may
# have been lost by underflow.
MARGIN = 2.0**46
# The elements of the first Xc^T Xc Q. Then squares of products, which are fourth powers of singular values,
# stay in the range of float64 with all their digits.
MIN_PRODUCT, MAX_PRODUCT = 2.0**-400, 2.0**400
# Dtypes in which X is multiplied.
DTYPES = ("float32", "float64")

logger = logging.getLogger("oocgemm")


@dataclass(frozen=True, eq=False)
class PcaState:
    """What is known after some passes.

    Attributes:
        subspace: the state of the iteration.
        center: what is subtracted from the columns of X; None until the first pass has computed it. With
            missing elements, their transform subtracts it.
        folded: whether it is subtracted from the products. If not, it is subtracted from each element.
        tile: the tile shape of the first pass, MxNxK. With another one, later passes would be rounded
            differently.
        exponent: each element is multiplied by this power of two, unless it is folded.
    """

    subspace: Subspace
    center: Array | None
    folded: bool
    tile: str | None = None
    exponent: int = 0


class Passes:
    """An open X, and the arguments of its products.

    Attributes:
        matrix: X as it is stored.
        transform: the whole transform, with the centers.
        columns: the width of Q.
        dtype: the dtype in which X is multiplied.
        scale: what columns are divided by.
    """

    def __init__(
        self, x: Any, columns: int, transform: Transform | None, options: Mapping[str, Any], *, center: bool
    ) -> None:
        """Open X. Nothing is read.

        Args:
            x: the operand.
            columns: the least width of Q, unless X has fewer rows or columns.
            transform: of X, per column.
            options: of `gemm`.
            center: whether the transform centers columns by their means, unless it has other centers.

        Raises:
            InputError: X or the transform cannot be used.
        """
        self._x, self._options = x, dict(options)
        self._decodes = options.get("decode", True)
        self.matrix = stores.open_matrix("X", x, decode=self._decodes)
        self.transform = _centered(transform or Transform(), center=center)
        # Missing genotypes of a .bed file are replaced, if it has any.
        self._imputes = (
            self._decodes and isinstance(self.matrix, Genotypes) and self.transform.missing is None
        )
        if self._imputes:
            self.transform = replace(self.transform, missing=MISSING)
        self.dtype = _multiplied(self.matrix, self.transform)
        rows, cols = self.matrix.shape
        columns = min(columns, max(rows, cols))  # more have no use
        self._width = round_up(columns + 1, WIDTH)
        self.columns = max(1, min(self._width - 1, rows, cols))
        self.scale = np.ones(cols)
        self._means = isinstance(self.transform.center, str)  # whether means are subtracted
        self._vectors: Vectors | None = None  # of the transform, for missing elements
        self._memory = 0  # for passes over X that find statistics

    @property
    def reads_first(self) -> bool:
        """Whether the transform needs numbers per column before the first pass."""
        given = self.transform.scale is not None or isinstance(self.transform.center, np.ndarray)
        return self.transform.missing is not None or given

    @property
    def backend(self) -> str:
        """The name of the backend."""
        return backends.resolve(self._options.get("backend", "auto"))

    def plan(self) -> Plan:
        """Return the plan of a pass."""
        state = PcaState(Subspace(np.zeros((0, 0))), None, self.transform.missing is None)
        return plan_request(self._request(state, np.zeros(self._width), None))

    def begin(self, seed: int) -> PcaState:
        """Return the state before the first pass. X is read if its transform needs statistics."""
        request = Request.of(None, None, Destination.parse(None), **self._options)
        self._memory = memory = memory_of(request)
        if self._imputes and isinstance(self.matrix, Genotypes) and gaps(self.matrix, memory) is None:
            self.transform = replace(self.transform, missing=None)
        elif self._decodes:
            check_known("X", self._x, self.transform, lambda: memory, how_to_replace())
        whole, cols = self.transform, self.matrix.shape[1]
        center = np.zeros(cols) if whole.center is None else None
        folded = whole.missing is None
        if self.reads_first:
            view = readable(transformed(self.matrix, whole, Op.N, left=True), memory)
            assert isinstance(view, TransformedMatrix)
            assert view.vectors is not None
            center, self.scale = view.vectors.center, 1 / view.vectors.inverse
            self._vectors = None if folded else view.vectors
        return PcaState(start(cols, self.columns, seed), center, folded)

    def advance(self, state: PcaState) -> PcaState:
        """Return the state after one more pass over X.

        Raises:
            InputError: X has elements that are NaN or Inf.
        """
        factor, row = self._multiplied(state)
        result = run_request(replace(self._request(state, row, factor), tile=state.tile))
        product = np.asarray(result.out).astype(np.float64)
        if state.subspace.last is None and not state.exponent and self._leaves_range(state, product):
            exponent, center = self._exponent(state)
            if exponent:
                logger.info(
                    "the elements of X are multiplied by 2^%d, to keep their squares in range", exponent
                )
                subspace = Subspace(state.subspace.basis, passes=state.subspace.passes + 1)
                return PcaState(subspace, center, folded=False, exponent=exponent)
        self._check(product)
        center, block = self._corrected(state, factor, row, product)
        rounding = float(np.finfo(self.dtype).eps)
        subspace = advance(state.subspace, block, rounding)
        found = PcaState(subspace, center, state.folded, str(result.plan.tile), state.exponent)
        if state.folded and self._hides(center, subspace, rounding):
            logger.info("the means of X are so large that they are subtracted from each element")
            # The products so far are inaccurate. But they give a good next Q.
            found = PcaState(Subspace(subspace.basis, passes=subspace.passes), center, folded=False)
        return found

    def _multiplied(self, state: PcaState) -> tuple[Array, Array]:
        """Return S Q, with further columns of zeros, and the row that is added: -b, and 1 at its end."""
        (center, inverse), used = self._folded(state), slice(self.columns)
        factor = np.zeros((len(inverse), self._width), self.dtype)
        factor[:, used] = state.subspace.basis * inverse[:, None]
        row = np.zeros(self._width, self.dtype)
        row[used], row[-1] = -(center @ factor[:, used]), 1
        return factor, row

    def _corrected(self, state: PcaState, factor: Array, row: Array, product: Array) -> tuple[Array, Block]:
        """Return the centers, and the block of Q, as it was multiplied, and Xc^T Xc Q."""
        (center, inverse), used, rows = self._folded(state), slice(self.columns), self.matrix.shape[0]
        sums = product[:, -1]
        found = sums / rows if state.center is None else state.center
        if state.folded:
            center = found
            sums = rows * center if self._means else sums  # more accurate than the product
        elif self._means and self._vectors is None:
            # Rounding errors of the first pass are left.
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
        """Return the power of two by which the largest element is about 1, and the centers.

        It is 0 if all elements are 0, or if some are not finite. The extremes of X take a pass over it.
        """
        found = stats_of(self.matrix, 0, self.transform, self._memory)
        center = found.mean if state.center is None else state.center
        with np.errstate(all="ignore"):
            largest = np.maximum(abs(found.max - center), abs(found.min - center)) / self.scale
            largest = largest[found.count > 0].max(initial=0)
        return (-int(np.frexp(largest)[1]) if np.isfinite(largest) else 0), center

    def scores(self, state: PcaState, components: Array) -> Array:
        """Return Xc @ components^T, by one more read of X, in the dtype in which X is multiplied."""
        state = replace(state, exponent=0)
        center, inverse = self._folded(state)
        factor = (components.T * inverse[:, None]).astype(self.dtype)
        options = {"transform_a": self._each(state), **self._options}
        found: Array = np.asarray(run_request(parse(self._x, factor, None, options)).out)  # type: ignore[arg-type]
        found -= (center @ factor).astype(self.dtype)
        return found

    def _folded(self, state: PcaState) -> tuple[Array, Array]:
        """Return c and the diagonal of S; c is 0 as long as it is unknown."""
        cols = self.matrix.shape[1]
        if not state.folded:
            return np.zeros(cols), np.ones(cols)
        return np.zeros(cols) if state.center is None else state.center, 1 / self.scale

    def _each(self, state: PcaState) -> Transform | None:
        """Return what happens to each element when it is multiplied; None if nothing does."""
        whole = self.transform
        if whole.missing is not None:
            same = whole.result("X", self.matrix.dtype) == self.dtype
            return whole if same else replace(whole, cast=self.dtype.name)
        numbers: dict[str, Any] = {}
        if not state.folded:
            numbers = {"center": state.center, "scale": np.ldexp(self.scale, -state.exponent)}
        each = Transform(log1p=whole.log1p, cast=self.dtype.name, **numbers)
        return each if whole.log1p or numbers or self.matrix.dtype != self.dtype else None

    def _request(self, state: PcaState, row: Array, factor: Array | None) -> Request:
        x, each = stores.located("X", self._x), self._each(state)
        resident = MAX_MATRICES * 8 * self.matrix.shape[1] * self._width
        vectors = self._vectors
        if vectors is not None:
            larger = np.ldexp(1.0, state.exponent)
            vectors = replace(vectors, fill=vectors.fill * larger, inverse=vectors.inverse * larger)
        chain = Chain(self.columns, row, factor, vectors, resident)
        return Request.of(x, x, Destination.parse(None), transform_a=each, into=chain, **self._options)

    def _check(self, product: Array) -> None:
        """Raise an error if a product is not finite. Its last column has the column sums of X."""
        if np.isfinite(product).all():
            return
        if (wrong := np.flatnonzero(~np.isfinite(product[:, -1]))).size:
            hint = ""
            if self._vectors is None and np.isnan(product[wrong[0], -1]):
                hint = (
                    ": if NaN stands for missing elements, pass transform=oocgemm.Transform("
                    "missing=float('nan')) (--transform missing=nan)"
                )
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
    """Return the dtype in which a matrix is multiplied. Raises `InputError` if it cannot be."""
    if transform.cast is not None and transform.cast not in DTYPES:
        raise InputError(
            f"cast = {transform.cast!r}, but components are computed in float32 or float64: pass one"
        )
    found = transform.result("X", matrix.dtype)
    return found if found.name in DTYPES else np.dtype(np.float32)
