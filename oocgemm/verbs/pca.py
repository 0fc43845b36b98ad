"""The verb `pca`: principal components of a matrix, by its Gram matrix or by a randomized block method."""

import logging
import os
import warnings
from dataclasses import replace
from typing import Any, Literal, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from oocgemm.errors import DataWarning, InputError
from oocgemm.jobs.option_groups import Operand, PathLike, PcaOptions
from oocgemm.jobs.options import PcaArguments, check_choices, check_names, documented
from oocgemm.jobs.pca_gram import choose, found_by
from oocgemm.jobs.pca_passes import PcaPasses, PcaState, load_state, save_state, state_path
from oocgemm.jobs.request import Missing
from oocgemm.jobs.run import Plan
from oocgemm.planning.units import format_size
from oocgemm.stores.transform import Transform
from oocgemm.stores.zarr_matrix import check_free, save_arrays
from oocgemm.values import dataclass

# Version of the arithmetic: a run of another version is not resumed.
VERSION = 4
# Minimum number of times that the randomized method reads X, unless `iterations` is lower.
MIN_PASSES = 3

logger = logging.getLogger("oocgemm")


@dataclass(frozen=True, eq=False)
class PCA:
    """The principal components of an n x d matrix X, after its transform: X = scores @ components + mean.

    Attributes:
        components: k x d, orthonormal rows. The element of largest magnitude of each row is positive.
        singular_values: the k largest singular values of the transformed X, in descending order, float64.
        explained_variance: the squared singular values divided by n - 1; Inf or 0 outside float64's range.
        mean: what was subtracted from each column, float64; zeros if X was not centered.
        scale: what each column was divided by, float64; ones if X was not scaled.
        scores: n x k, the coordinates of the rows of X; None unless they were asked for.
        passes: how many times X was read, besides a pass for its statistics if they are needed.
        residuals: ``|X^T X v - s^2 v| / s_1^2`` for each component v and its singular value s, where s_1 is
            the largest one; X is the transformed matrix. float64.
        errors: the residual of each component divided by the estimated gap between s^2 and its neighbours,
            float64. An error bounds the sine of the angle between the component and the exact component. It
            is 0 if the residual consists of rounding errors alone.
        converged: whether all `errors` are below `tol`.
    """

    components: NDArray[np.floating]
    singular_values: NDArray[np.float64]
    explained_variance: NDArray[np.float64]
    mean: NDArray[np.float64]
    scale: NDArray[np.float64]
    scores: NDArray[np.floating] | None
    passes: int
    residuals: NDArray[np.float64]
    errors: NDArray[np.float64]
    converged: bool

    def save(self, path: PathLike) -> None:
        """Write the arrays to a new zarr group at a local path, by their names.

        Raises:
            InputError: something exists at the path, or nothing can be written there.
        """
        arrays = {"components": self.components, "singular_values": self.singular_values}
        arrays |= {"explained_variance": self.explained_variance, "mean": self.mean, "scale": self.scale}
        arrays |= {"residuals": self.residuals, "errors": self.errors}
        save_arrays(os.fspath(path), arrays | ({} if self.scores is None else {"scores": self.scores}))


@dataclass(frozen=True)
class PCAPlan:
    """How `pca` would compute components. `str` describes it.

    Attributes:
        pass_plan: the plan of the first pass over X, or over the first of its slices.
        rows, cols: the shape of X.
        passes: the maximum number of times that X is read, including the pass for the scores.
        statistics: whether X is also read once for statistics, unless they are cached.
        checks: the maximum number of times that X is also read to check a product.
        slices: the number of slices of the rows of X that several devices multiply; 1 for all of X.
        devices: how many slices are multiplied at the same time.
        method: "exact" if the first pass computes a Gram matrix, else "randomized".
        bytes_stored: estimated maximum size in bytes of the saved result, and of the state beside it.
    """

    pass_plan: Plan
    rows: int
    cols: int
    passes: int
    statistics: bool
    checks: int = 0
    slices: int = 1
    devices: int = 1
    method: str = "randomized"
    bytes_stored: int = 0

    @property
    def bytes_read(self) -> int:
        """Maximum number of bytes of X that all passes read together, counted before compression."""
        reads = self.passes + self.statistics + self.checks
        return reads * self.rows * self.cols * self.pass_plan.problem.itemsizes["A"]

    @property
    def summary(self) -> str:
        """How often X is read, and for what, as text."""
        more = [", and once for its statistics"] if self.statistics else []
        more += [f", and {self.checks} times to check products"] if self.checks else []
        read = f"X is read at most {self.passes} times{''.join(more)}: {format_size(self.bytes_read)} in all"
        return f"Exact method: {read}" if self.method == "exact" else read

    @property
    def what(self) -> str:
        """A text that names the pass, or the slice, that `pass_plan` computes."""
        one = "The first pass" if self.method == "exact" else "A pass"
        if self.slices == 1:
            return one
        return f"{one} multiplies {self.slices} slices of X, {self.devices} at the same time. A slice"

    def __str__(self) -> str:
        return f"{self.summary}. {self.what}:\n{self.pass_plan}"


@overload
def pca(
    x: Operand,
    k: int,
    out: PathLike | None = None,
    *,
    dry_run: Literal[False] = False,
    **options: Unpack[PcaArguments],
) -> PCA: ...
@overload
def pca(
    x: Operand,
    k: int,
    out: PathLike | None = None,
    *,
    dry_run: Literal[True],
    **options: Unpack[PcaArguments],
) -> PCAPlan: ...
@documented("pca", PcaOptions)
def pca(
    x: Operand,
    k: int,
    out: PathLike | None = None,
    *,
    center: bool = True,
    transform: Transform | None = None,
    missing: float | None = None,
    impute: float | str | None = None,
    method: str = "auto",
    iterations: int = 6,
    tol: float = 0.01,
    oversampling: int = 10,
    seed: int = 0,
    scores: bool = False,
    resume: bool = False,
    dry_run: bool = False,
    **options: Unpack[PcaOptions],
) -> PCA | PCAPlan:
    """Find the k principal components of X, exactly by one pass, or by a randomized method of several passes.

    The components are the right singular vectors of X with its columns centered. X stays as it is stored: the
    mean is subtracted from elements when they are loaded, or from the products. The computation ends when the
    components have converged, and a warning is issued if they have not after the last iteration.

    float16, bfloat16, bool and integers of up to 16 bits are multiplied as float32, other integers as
    float64; a transform may cast to float32 or float64. Without a code of missing elements, missing genotypes
    of a .bed file are replaced by the means of their columns. Means and scales are per column. If a
    transform clips elements, X is what the whole transform makes, and its columns are centered after that.
    With `devices`, the rows of X are cut into slices, which the devices multiply. With `verify`, X is read
    once more for each product, which is compared with random combinations of its columns
    (`oocgemm.integrity.freivalds`).

    Args:
        x: a real two-dimensional operand as for `gemm`, n samples x d features. It may be larger than memory.
            A few matrices of d x (k + oversampling) must fit into device memory, and about ten in float64
            into host memory, unless the exact method is used.
        k: number of components, at most min(n, d).
        out: path of a new zarr group, to which the result is also saved (`PCA.save`). During the run, the
            state is kept beside it, so that a run that was killed can be resumed.
        {options}

    Returns:
        The `PCA`; with `dry_run`, the `PCAPlan`.

    Raises:
        InputError, BudgetError, BackendError, ExecutionError: as `gemm` does. `InputError` also if k is above
            min(n, d), if X has NaN or Inf elements, or if a scale is zero.

    Warns:
        DataWarning: components have not converged.

    >>> import oocgemm
    >>> found = oocgemm.pca([[1.0, 2.0], [3.0, 6.0], [5.0, 10.0]], 1, backend="host")
    >>> found.singular_values.round(6)
    array([6.324555])
    """
    check_names("pca", options, PcaOptions)
    check_choices("pca", method=method)
    for name, value, least in (
        ("k", k, 1),
        ("iterations", iterations, 1),
        ("oversampling", oversampling, 0),
        ("seed", seed, 0),
    ):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
            raise InputError(f"{name} = {value!r}: pass an integer of at least {least}")
    if isinstance(tol, bool) or not isinstance(tol, int | float | np.number) or not 0 <= tol < np.inf:
        raise InputError(f"tol = {tol!r}: pass a number of at least 0, such as 0.01")
    passes = PcaPasses(
        x, int(k) + int(oversampling), transform, options, center=center, missing=Missing.of(missing, impute)
    )
    rows, cols = passes.matrix.shape
    _check_number(k, rows, cols)
    if dry_run:
        exact, plan = choose(passes, method, iterations, tol, running=False)
        statistics = exact and passes.reads_means
        statistics = statistics or (passes.transform.needs_stats and passes.reads_first)
        statistics = statistics or isinstance(passes.transform.target_sum, float)
        statistics = statistics or (passes.changes is not None and passes.changes.needs_stats)
        # The products for a Gram matrix and for the scores have checksums.
        checks = iterations - exact if options.get("verify") else 0
        of_slices = len(passes.slices), passes.sessions, "exact" if exact else "randomized"
        reads = max(iterations, passes.gram_reads * exact) + scores
        # A state has four blocks at most, and the next state is written before the last one is removed.
        stored = _bytes_saved(passes, k, scores=scores, begun=True) + 2 * 4 * 8 * cols * passes.columns
        return PCAPlan(plan, rows, cols, reads, statistics, checks, *of_slices, bytes_stored=stored)
    path, target = None, None if out is None else os.fspath(out)
    identity = _identity(passes, k, iterations, tol, seed) | {"method": method}
    saved = None
    if target is not None:
        path = state_path(target)
        check_free(target, _bytes_saved(passes, k, scores=scores, begun=path.exists()))
        saved = load_state(path, identity, resume=resume)
    elif resume:
        raise InputError("a run can be resumed only if its result is saved: pass out, or drop resume")
    exact = saved is not None and saved.exact
    if saved is None and method != "randomized":
        exact, _ = choose(passes, method, iterations, tol, running=True)
    state = passes.begin(seed, centered=exact and saved is None)
    state = saved or state
    while not _ends(state, k, iterations, tol):
        logger.info("pass %d of at most %d over X", state.subspace.passes + 1, iterations)
        begins = exact and state.subspace.found is None
        state = found_by(passes, state, k, seed) if begins else passes.advance(state)
        if path is not None:
            save_state(path, identity, state)
    found = _result(passes, state, k, tol)
    if scores:
        logger.info("reading X for the scores")
        projected = passes.scores(state, found.components.astype(np.float64))
        found = replace(found, scores=projected, passes=found.passes + 1)
    if path is not None and target is not None:
        found.save(target)
        path.unlink(missing_ok=True)
    if tol and not found.converged:
        warnings.warn(_unconverged(found, iterations, tol), DataWarning, stacklevel=2)
    return found


def _bytes_saved(passes: PcaPasses, k: int, *, scores: bool, begun: bool) -> int:
    """Return the minimum size in bytes of the result and, unless the run has `begun`, of its state."""
    rows, cols = passes.matrix.shape
    saved = k * (cols + rows * scores) * np.dtype(passes.dtype).itemsize + 16 * (2 * k + cols)
    return saved if begun else saved + 8 * cols * passes.columns


def _ends(state: PcaState, k: int, iterations: int, tol: float) -> bool:
    """Return whether no further pass is needed, or allowed."""
    found, passes = state.subspace.found, state.subspace.passes
    if found is None or passes >= iterations:
        return found is not None
    # In the first product, which the second pass uses too, rounding errors of the largest singular value hide
    # small ones.
    return passes >= (1 if state.exact else MIN_PASSES) and bool((found.errors[:k] < tol).all())


def _unconverged(found: PCA, iterations: int, tol: float) -> str:
    """Return the text of the warning about components that have not converged."""
    wrong = np.flatnonzero(~(found.errors < tol))  # NaN has not converged either
    worst = wrong[found.errors[wrong].argmax()]
    return (
        f"{len(wrong)} of {len(found.errors)} components have not converged after {iterations} iterations: "
        f"the residual of component {worst + 1} is {found.residuals[worst]:.2g} of the largest eigenvalue, "
        f"which is {found.errors[worst]:.2g} of the gap to its neighbours, and tol is {tol:g}. Pass more "
        f"iterations, such as iterations={2 * iterations} (--iterations {2 * iterations}), fewer components, "
        "or a larger tol (--tol)"
    )


def plan_pca(
    x: Operand,
    k: int,
    *,
    center: bool = True,
    transform: Transform | None = None,
    missing: float | None = None,
    impute: float | str | None = None,
    method: str = "auto",
    iterations: int = 6,
    tol: float = 0.01,
    oversampling: int = 10,
    scores: bool = False,
    **options: Unpack[PcaOptions],
) -> PCAPlan:
    """Return how `pca` would compute components. Nothing is read or written, and no device is used.

    Args:
        x, k, center, transform, missing, impute, method, iterations, tol, oversampling, scores: as for `pca`.
        options: those of `pca`, except device and progress. The cuda backend requires `device_memory`.

    Returns:
        A `PCAPlan`.

    Raises:
        InputError, BudgetError: as `pca` does.
    """
    check_names("plan_pca", options, PcaOptions.__annotations__.keys() - {"device", "progress"})
    given: dict[str, Any] = {"center": center, "transform": transform, "method": method, "tol": tol}
    given |= {"missing": missing, "impute": impute}
    given |= {"iterations": iterations, "oversampling": oversampling, "scores": scores}
    return pca(x, k, dry_run=True, **given, **options)


def _check_number(k: int, rows: int, cols: int) -> None:
    """Raise `InputError` if a matrix has fewer than k components."""
    most = min(rows, cols)
    if not most:
        raise InputError(f"X has {rows} rows and {cols} columns, and so no components: pass a larger X")
    if k > most:
        raise InputError(
            f"k = {k}, but X has {rows} rows and {cols} columns, and so at most {most} components: pass a k "
            f"from 1 to {most}"
        )


def _identity(passes: PcaPasses, k: int, iterations: int, tol: float, seed: int) -> dict[str, Any]:
    """Return the arguments on which the bits of a result depend, by name, without the budgets."""
    return {
        "version": VERSION,
        "x": passes.matrix.fingerprint() or passes.matrix.describe(),
        "transform": f"{passes.changes or ''}{passes.transform} to {passes.dtype}",
        "k": int(k),
        "columns": passes.columns,
        "iterations": int(iterations),
        "tol": float(tol),
        "seed": int(seed),
        "backend": passes.backend,
    } | ({"devices": len(passes.slices)} if len(passes.slices) > 1 else {})


def _result(passes: PcaPasses, state: PcaState, k: int, tol: float) -> PCA:
    """Return the components that a state has found, with signs that do not depend on rounding."""
    found, rows = state.subspace.found, passes.matrix.shape[0]
    assert found is not None
    assert state.center is not None
    values = np.ldexp(found.values[:k], -state.exponent)
    vectors, errors = found.components[:, :k], found.errors[:k]
    largest = np.abs(vectors).argmax(axis=0)
    vectors = vectors * np.where(vectors[largest, np.arange(k)] < 0, -1.0, 1.0)
    with np.errstate(over="ignore", under="ignore"):
        variance = values**2 / max(1, rows - 1)
    return PCA(
        components=np.ascontiguousarray(vectors.T).astype(passes.dtype),
        singular_values=values,
        explained_variance=variance,
        mean=state.center,
        scale=passes.scale,
        scores=None,
        passes=state.subspace.passes,
        residuals=found.residuals[:k],
        errors=errors,
        converged=bool((errors < max(tol, np.finfo(np.float64).tiny)).all()),
    )
