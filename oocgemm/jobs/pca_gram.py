"""The exact components of X: eigenvectors of its smaller Gram matrix, which one pass over X computes.

With singular values S, left singular vectors U and right ones V, the transformed matrix is X = U S V^T. So
X^T X = V S^2 V^T, and X X^T = U S^2 U^T. For an X with more columns than rows, V S = X^T U takes one more
pass.

*Rounding.* If the Gram matrix G has the error E, an eigenvalue s^2 has the error v^T E v. The rounding errors
of most sums of products are random. But all terms of a sum of squares are positive, and if they are equal,
their errors are equal too. So the diagonal of G may have relative errors of `_bias` units of rounding, which
was measured for OpenBLAS and columns of two values. BLAS adds some hundred products at a time, and then their
sums. In units of rounding, the error of s^2 is estimated to be at most
``_bias * sum of v_i^2 G_ii + NOISE * s_1^2``, and that of s is this number divided by 2 s.

If the error of s may be above MAX_ERROR times s_1, or that of s^2 above MAX_SHARE times s^2, a Gram matrix in
this precision *hides* the component. This happens in float32 if s is below some 0.01 to 0.1 of s_1, and in
float64 if it is below 1e-6. Such components are refined by further passes (`oocgemm.jobs.pca_passes`), which
begin with the components found so far. Rounding errors of these passes are relative to s_1 s, not to s_1^2.

*Eigenvectors.* A block Lanczos method (Golub and Underwood, 1977) finds them: the space of Q, S Q, S^2 Q, ...
contains good approximations for a random block Q. All blocks are orthogonal to each other in working
precision, so no eigenvalue is found twice. As long as the block is wider than the number of wanted
eigenvectors, equal eigenvalues are found as often as they occur. Multiplying S by a few hundred vectors takes
far less time than the decomposition of a large S. Where the method needs too many vectors, for a small S or a
flat spectrum, S is decomposed by LAPACK.

*Which method.* The clock predicts the time of the Gram matrix, and that of a pass of the randomized method.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from oocgemm.errors import BudgetError
from oocgemm.jobs.pca_passes import MAX_MATRICES, PcaPasses, PcaState, Ritz, Subspace, completed, ritz
from oocgemm.jobs.run import Plan
from oocgemm.planning.tiling import ceil_div
from oocgemm.planning.units import ceil_size, format_size
from oocgemm.stores import Array

# Maximum error of a singular value, relative to s_1, and of its square, relative to itself. If errors may be
# larger, components are refined.
MAX_ERROR, MAX_SHARE = 1e-5, 0.01
# Random errors of an eigenvalue of G, relative to s_1^2, in units of rounding.
NOISE = 4
# Number of products that BLAS adds before it adds their sum to C.
DEPTH = 256
# Estimated number of passes of the randomized method. For 200000 x 2000 and slowly decaying singular values,
# six passes were not enough.
PASSES = 6


def found_by(passes: PcaPasses, state: PcaState, k: int, seed: int) -> PcaState:
    """Return the state after the pass that computes the Gram matrix, with the first k components.

    The errors of components that the Gram matrix hides are 1: nothing is known about their angles.
    """
    state, gram = passes.gram(state)
    values, vectors = largest(gram, k, passes.columns, seed, passes.decomposed)
    found = ritz(vectors, gram @ vectors, values, float(np.finfo(np.float64).eps))
    if passes.gram_dtype == passes.dtype:
        hidden = _hidden(gram, found, max(passes.matrix.shape), passes.gram_dtype)
        found = replace(found, errors=np.where(hidden, 1.0, found.errors))
    del gram
    count = state.subspace.passes
    if not passes.is_tall:
        found, count = _turned(found, passes.turned(state, found.components)), count + 1
    subspace = Subspace(completed(found.components, passes.columns), passes=count, found=found)
    return replace(state, subspace=subspace, exact=True)


def _hidden(gram: Array, found: Ritz, length: int, dtype: np.dtype[Any]) -> Array:
    """Return which components rounding errors of the Gram matrix hide. Its elements sum `length` products."""
    squares = np.square(found.values)
    largest = squares.max(initial=0)
    if not largest:
        return np.zeros(len(squares), bool)
    error = errors_of(gram, found.components, largest, length, dtype)
    # An error of s^2 that is larger than s^2 may be all of s^2.
    of_value = error / (2 * np.sqrt(np.maximum(squares / largest, error / 4)))
    of_square = (squares > 0) & (error * largest > MAX_SHARE * squares)
    return np.asarray((of_value > MAX_ERROR) | of_square)


def errors_of(gram: Array, vectors: Array, largest: float, length: int, dtype: np.dtype[Any]) -> Array:
    """Return the error of each eigenvalue of a Gram matrix in a dtype, relative to the `largest` one."""
    share = np.square(vectors).T @ gram.diagonal() / largest
    return np.asarray(float(np.finfo(dtype).eps) * (_bias(length) * share + NOISE))


def _bias(length: int) -> float:
    return DEPTH / 4 + length / (64 * DEPTH)


def _turned(found: Ritz, product: Array) -> Ritz:
    """Return the right singular vectors, given the left ones U, in `found`, and the product X^T U."""
    right, triangle = np.linalg.qr(product)
    right *= np.where(np.diagonal(triangle) < 0, -1.0, 1.0)
    # X^T X v - s^2 v is X^T r / s, if r is the residual of u.
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = np.where(found.values > 0, found.values[0] / found.values, 1.0)
    return replace(found, components=right, residuals=found.residuals * factors)


def choose(
    passes: PcaPasses, method: str, iterations: int, tol: float, *, running: bool
) -> tuple[bool, Plan]:
    """Return whether the exact method is used, and the plan of the first pass.

    With "auto", it is the method that is predicted to be faster. `running` tells whether X will be
    multiplied, and not only planned. Raises `BudgetError` if the budgets are too small for the method.
    """
    makers: dict[bool, Callable[..., Plan]] = {True: planned, False: PcaPasses.plan}
    wanted = [True, False] if method == "auto" else [method == "exact"]
    if method == "auto" and (not tol or iterations < passes.gram_reads):
        wanted = [False]  # without a tolerance, X is read as often as `iterations` says
    plans, failure = dict[bool, Plan](), None
    for exact in wanted:
        try:
            plans[exact] = makers[exact](passes, running=running)
        except BudgetError as error:
            failure = error
    if not plans:
        assert failure is not None
        raise failure
    if len(plans) == 2:
        read = _waves(passes) * plans[False].prediction.total
        exact = _seconds(passes, plans[True], read) <= min(PASSES, iterations) * read
    else:
        (exact,) = plans
    return exact, plans[exact]


def planned(passes: PcaPasses, *, running: bool) -> Plan:
    """Return the plan of the Gram matrix. Raises `BudgetError` if its decomposition needs too much memory."""
    plan = passes.plan_gram(running=running)
    rows, cols = passes.matrix.shape
    whole, vectors = 8 * min(rows, cols) ** 2, MAX_MATRICES * 8 * cols * passes.columns
    unified, budgets = passes.backend == "host", plan.budgets
    budget = budgets.host + unified * budgets.device
    beside = (1 + (len(passes.slices) > 1)) * whole  # the matrices in float64, beside the memory of the plan
    needed = max(_used(plan, unified=unified) + beside, EIGEN_MATRICES * whole + vectors)
    if needed > budget >= EIGEN_MATRICES * whole + vectors:
        try:
            plan = passes.plan_gram(running=running, memory=budget - beside)
            needed = _used(plan, unified=unified) + beside
        except BudgetError as error:
            needed = max(needed, (error.least or 0) + beside)
    if needed > budget:
        raise BudgetError(
            f"method = 'exact' needs {format_size(needed)} of host memory, for a Gram matrix of "
            f"{min(rows, cols)} x {min(rows, cols)} and its eigenvectors, and the budget is "
            f"{format_size(budget)}: pass memory={ceil_size(needed)!r} (--memory), or method='randomized' "
            "(--method randomized)",
            least=needed,
        )
    return plan


def _used(plan: Plan, *, unified: bool) -> int:
    """Return the bytes of host memory that a plan takes, with those of the device if it is the host."""
    return plan.footprint.host_total + unified * plan.footprint.device_total


def _waves(passes: PcaPasses) -> int:
    """Return how many slices of X a device multiplies, one after the other."""
    return ceil_div(len(passes.slices), passes.sessions)


def _seconds(passes: PcaPasses, gram: Plan, read: float) -> float:
    """Predict the time of the exact method. `read` is that of a pass of the randomized one."""
    others = passes.reads_means + passes.gram_reads - 1  # each takes about as long as a pass
    multiplied = gram.prediction.total * (_waves(passes) if passes.is_tall else 1)
    rows, on_device = min(passes.matrix.shape), passes.backend != "host"
    return multiplied + eigen_seconds(rows, passes.columns, on_device=on_device) + others * read


# The space has at most 1 / SHARE of the dimensions of S. Usually, BLOCKS blocks are enough.
SHARE, BLOCKS = 3, 12
# An eigenvector v with the eigenvalue a has converged if |S v - a v| is at most RESIDUAL times the largest
# eigenvalue of S.
RESIDUAL = 2.0**-43
# Flop/s of the decomposition by LAPACK, and of the Lanczos method. Two Zen 5 cores reached 0.8e11 to 1e11 and
# 2e10 to 4e10 for 1000 to 4000 rows, 16 cores of a Xeon 1.9e11 and 4.7e10 for 2000 rows.
LAPACK_RATE, RATE = 1e11, 4e10
# Matrices of the size of S in float64 that exist at the same time: S, and what LAPACK needs.
EIGEN_MATRICES = 5
# A GPU decomposes an S with at least so many rows, at so many flop/s. On an H200 with 16 cores, the host took
# 6.2 s for 110 eigenvectors of 5000 rows with a flat end of the spectrum.
MIN_ON_DEVICE, DEVICE_RATE = 4096, 1e12


class Eigen(NamedTuple):
    """Eigenvalues in descending order, and eigenvectors of the first ones of them as columns."""

    values: Array
    vectors: Array


# A function that decomposes a matrix on a device; None if the host must do it.
Decomposition = Callable[[Array, int], tuple[Array, Array] | None]


def largest(s: Array, count: int, width: int, seed: int, on_device: Decomposition | None = None) -> Eigen:
    """Return the `count` largest eigenvalues of S and their eigenvectors.

    S is symmetric, in float64. `width` is the number of vectors in a block, more than `count` unless S has
    fewer rows. The result has `width` vectors and at least as many values: those beyond `count` are
    approximations. The same seed gives the same bits. `on_device` is tried for large S.
    """
    rows = len(s)
    width = min(width, rows)
    if on_device is not None and rows >= MIN_ON_DEVICE and (found := on_device(s, width)) is not None:
        return Eigen(*found)
    if _is_small(rows, width):
        return _decomposed(s, width)
    room = rows // SHARE
    v, t = np.empty((rows, room), order="F"), np.zeros((room, room))
    block = np.linalg.qr(np.random.default_rng(seed).standard_normal((rows, width)))[0]
    scale, used, tried = 0.0, 0, 0
    while used + width <= room:
        v[:, used : used + width] = block
        product, used = s @ block, used + width
        basis = v[:, :used]
        shares = basis.T @ product
        t[:used, used - width : used] = shares
        t[used - width : used, :used] = shares.T
        product -= basis @ shares
        product -= basis @ (basis.T @ product)  # once leaves rounding errors
        block, coupling = np.linalg.qr(product)
        # The small decompositions together take about as long as the last one.
        if 4 * used >= 5 * tried or used + width > room:
            tried = used
            values, directions = np.linalg.eigh(t[:used, :used])
            values, directions = values[::-1], directions[:, ::-1]
            scale = max(scale, float(np.abs(values).max()))
            residuals = np.linalg.norm(coupling @ directions[used - width :, :count], axis=0)
            if (residuals <= RESIDUAL * scale).all():
                return Eigen(values, basis @ directions[:, :width])
        # Where S maps the space to itself, the next block consists of rounding errors.
        block -= basis @ (basis.T @ block)
        block = np.linalg.qr(block)[0]
    return _decomposed(s, width)


def _decomposed(s: Array, width: int) -> Eigen:
    values, vectors = np.linalg.eigh(s)
    return Eigen(values[::-1], np.ascontiguousarray(vectors[:, ::-1][:, :width]))


def _is_small(rows: int, width: int) -> bool:
    return SHARE * BLOCKS * width > rows


def eigen_seconds(rows: int, width: int, *, on_device: bool) -> float:
    """Estimate the time that `largest` takes."""
    if on_device and rows >= MIN_ON_DEVICE:
        return 9.0 * rows**3 / DEVICE_RATE
    if _is_small(rows, width):
        return 9.0 * rows**3 / LAPACK_RATE
    return BLOCKS * (2.0 * rows * rows * width + 4.0 * rows * (BLOCKS * width) * width) / RATE
