"""Requests of correlations of the variants that are near one another, for `ld` and `ld_scores`."""

from dataclasses import replace
from typing import Any

import numpy as np

from oocgemm import stores
from oocgemm.backends import resolve
from oocgemm.errors import InputError
from oocgemm.jobs.option_groups import Operand
from oocgemm.jobs.options import check_choices
from oocgemm.jobs.request import Request, Source, parse_gram
from oocgemm.jobs.stats import stats_of
from oocgemm.jobs.steps import AnyStep, Coefficients, Pearson
from oocgemm.jobs.transforming import gaps, memory_of
from oocgemm.jobs.windows import places
from oocgemm.stores import Array, Genotypes, Matrix
from oocgemm.stores.transform import Transform
from oocgemm.stores.transformed import multiplied_dtype
from oocgemm.verbs.correlation import with_constant
from oocgemm.verbs.pairwise import pairwise as in_pairs

# All integers up to this number are exact in float32.
EXACT_FLOAT32 = 2**24


def near(
    x: Operand,
    axis: int,
    constant: str,
    where: dict[str, Any],
    options: dict[str, Any],
    *,
    dry_run: bool,
    pairwise: bool = False,
) -> tuple[Request, AnyStep, Array]:
    """Return a request of products of variants, the step that makes them correlations, and first variants.

    There is a number for each variant: that of the first one near it. Only used variants count. `where` has
    the options of the window. With `pairwise`, correlations are those of the individuals that are known at
    both variants. A dry run reads no genotypes, so that all variants are used.
    """
    check_choices("ld", constant=constant, unit=where["unit"])
    if pairwise and constant == "drop":
        raise InputError(
            "constant = 'drop' is about whole variants, and with pairwise every pair of variants has its own "
            "individuals: drop constant (--constant), or drop pairwise"
        )
    request = parse_gram(x, None, axis, "full", options)  # type: ignore[arg-type]
    matrix = stores.open_matrix("X", stores.located("X", x), decode=request.decode)
    found = places(matrix, axis, **where)
    if pairwise:
        request = in_pairs(request, "correlation")
        return request, request.epilogue[0], found.firsts()
    request = request.with_operands(standardize="scale", impute=True)
    if not dry_run:
        request = with_constant(request, constant)
    first: AnyStep = Coefficients()
    if (how := _integers(request, matrix, axis, dry_run=dry_run)) is not None:
        request, first = request.with_operands(standardize="", transform=how.transform), Pearson()
    return request, first, found.kept(request.a.kept).firsts()


def _integers(request: Request, matrix: Matrix, axis: int, *, dry_run: bool) -> Source | None:
    """Return how genotypes are multiplied as they are, so that sums are exact; None if they are standardized.

    A GPU multiplies int8 several times as fast as float32. The host multiplies float32, in which sums of
    genotypes are exact. A dry run does not read the genotypes.
    """
    plain = request.a.transform is None is request.a.missing and request.compute == "native"
    if not (plain and matrix.shape[1 - axis]) or multiplied_dtype(matrix.dtype) != np.int8:
        return None
    genotypes, memory = isinstance(matrix, Genotypes), memory_of(request)
    if isinstance(matrix, Genotypes) and not (dry_run or gaps(matrix, memory) is None):
        return None
    if resolve(request.where.backend) != "host":
        return replace(request.a, transform=None)
    largest = 2.0
    if not (genotypes or dry_run):
        found = stats_of(matrix, 1 - axis, Transform(), memory)
        largest = float(np.maximum(abs(found.min), abs(found.max)).max(initial=0))
    if matrix.shape[1 - axis] * largest**2 > EXACT_FLOAT32:
        return None
    return replace(request.a, transform=Transform(cast="float32"))
