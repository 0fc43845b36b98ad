"""The verb `ld_scores`: how much of the variation at nearby variants each variant of genotypes tags."""

import os
from dataclasses import replace
from typing import Any, Literal, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from oocgemm import stores
from oocgemm.errors import InputError
from oocgemm.jobs.option_groups import Operand, PathLike, SimilarityOptions
from oocgemm.jobs.options import LdScoresArguments, documented
from oocgemm.jobs.request import Reduction
from oocgemm.jobs.run import Plan, Result, outcome
from oocgemm.jobs.stats import keeping
from oocgemm.jobs.steps import AnyStep, Squared
from oocgemm.jobs.windows import band_of, within
from oocgemm.values import dataclass
from oocgemm.verbs.similarity import check_options
from oocgemm.verbs.variants import near


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
    with keeping({}):  # statistics are found once
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
