"""The verb `ld_scores`: how much of the variation at nearby variants each variant of genotypes tags."""

import os
from dataclasses import replace
from typing import Any, Literal, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from oocgemm import stores
from oocgemm.backends import resolve
from oocgemm.errors import InputError
from oocgemm.jobs.option_groups import Operand, PathLike, SimilarityOptions
from oocgemm.jobs.options import LdScoresArguments, check_choices, documented
from oocgemm.jobs.request import Reduction, Request, parse_gram
from oocgemm.jobs.run import Plan, Result, outcome
from oocgemm.jobs.steps import AnyStep, Coefficients, Correlation, Pearson, Squared
from oocgemm.jobs.transforming import gaps, memory_of
from oocgemm.jobs.windows import band_of, places, within
from oocgemm.stores import Array, Genotypes, Matrix
from oocgemm.stores.transformed import multiplied_dtype
from oocgemm.values import dataclass
from oocgemm.verbs.correlation import with_constant
from oocgemm.verbs.similarity import check_options


@dataclass(frozen=True, eq=False)
class LDScores:
    """LD scores of variants.

    Attributes:
        scores: a float64 number per variant, NaN for variants that were left out.
        run: the plan and the timeline of the run. It has no C.
    """

    scores: NDArray[np.float64]
    run: Result

    def save(self, path: PathLike) -> None:
        """Write the scores to a .npy file at a local path."""
        with open(os.fspath(path), "wb") as file:
            np.save(file, self.scores)


@overload
def ld_scores(
    x: Operand, *, dry_run: Literal[False] = False, **options: Unpack[LdScoresArguments]
) -> LDScores: ...
@overload
def ld_scores(x: Operand, *, dry_run: Literal[True], **options: Unpack[LdScoresArguments]) -> Plan: ...
@documented("ld_scores", SimilarityOptions)
def ld_scores(
    x: Operand,
    *,
    window: float | None = None,
    unit: str = "variants",
    positions: Any = None,
    chromosomes: Any = None,
    axis: int = 1,
    adjusted: bool = False,
    constant: str = "raise",
    dry_run: bool = False,
    **options: Unpack[SimilarityOptions],
) -> LDScores | Plan:
    """Sum the squared correlations of each variant with the variants near it, and with itself.

    Only correlations within the window are computed, and none is stored. The correlations are those of
    `corr`. Their squares are summed in float64, always in the same order. Source: Bulik-Sullivan et al., *LD
    Score regression distinguishes confounding from polygenicity in genome-wide association studies* (Nature
    Genetics 47, 2015).

    Args:
        x: genotypes as a real two-dimensional operand as for `corr`. Missing genotypes of a .bed file are
            replaced by the means of their variants.
        {options}

    Returns:
        The `LDScores`. With `dry_run`, the `Plan`.

    Raises:
        InputError, BudgetError, BackendError, ExecutionError: as `gemm` does.

    >>> import oocgemm
    >>> x = [[0, 0, 2], [1, 1, 0], [2, 2, 1], [0, 1, 1]]
    >>> oocgemm.ld_scores(x, window=1, backend="host").scores.round(4)
    array([1.7273, 1.9773, 1.25  ])
    """
    check_options("ld_scores", options, SimilarityOptions)
    if window is None:
        raise InputError(f"window = None is not a number of {unit}: pass one such as 1000")
    shape = stores.open_matrix("X", stores.located("X", x), decode=False).shape
    individuals = shape[1 - axis] if axis in (0, 1) else 0
    if adjusted and axis in (0, 1) and individuals < 3:
        raise InputError(
            f"X has {individuals} individuals, and adjusted scores need at least 3: pass adjusted=False, or "
            "the other axis"
        )
    where = {"window": window, "unit": unit, "positions": positions, "chromosomes": chromosomes}
    request, r, firsts = near(x, axis, constant, where, dict[str, Any](options), dry_run=dry_run)
    bias = 1 / (individuals - 2) if adjusted else 0.0
    steps: tuple[AnyStep, ...] = r, Squared(bias), *within(firsts, both=True)
    into = Reduction(("X", "X"), True, "sum", band=band_of(firsts))

    def scored(result: Result) -> LDScores:
        scores = np.full(shape[axis], np.nan)
        kept = request.a.kept
        scores[slice(None) if kept is None else kept] = np.asarray(result.out)[:, 0]
        return LDScores(scores, replace(result, c=None))

    return outcome(replace(request, into=into, epilogue=steps), scored, dry_run=dry_run)


def near(
    x: Operand, axis: int, constant: str, where: dict[str, Any], options: dict[str, Any], *, dry_run: bool
) -> tuple[Request, Correlation, Array]:
    """Return a request of products of variants, the step that makes them correlations, and first variants.

    There is a number for each variant: that of the first one near it. Only used variants count. `where` has
    the options of the window. A dry run reads no genotypes, so that all variants are used.
    """
    check_choices("ld_scores", constant=constant, unit=where["unit"])
    request = parse_gram(x, None, axis, "full", options)  # type: ignore[arg-type]
    matrix = stores.open_matrix("X", stores.located("X", x), decode=request.decode)
    found = places(matrix, axis, **where)
    request = request.with_operands(standardize="scale", impute=True)
    if not dry_run:
        request = with_constant(request, constant)
    first: Correlation = Coefficients()
    if matrix.shape[1 - axis] and _multiplies_integers(request, matrix, dry_run=dry_run):
        request, first = request.with_operands(standardize=""), Pearson()
    return request, first, found.kept(request.a.kept).firsts()


def _multiplies_integers(request: Request, matrix: Matrix, *, dry_run: bool) -> bool:
    """Return whether genotypes are multiplied as they are: int8 on a GPU, if none is replaced.

    There, these products are exact, and several times as fast as those of float32.
    """
    plain = request.a.transform is None and request.compute == "native" and request.decode
    if not plain or multiplied_dtype(matrix.dtype) != np.int8 or resolve(request.where.backend) != "cuda":
        return False
    return dry_run or not isinstance(matrix, Genotypes) or gaps(matrix, memory_of(request)) is None
