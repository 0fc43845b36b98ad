"""Missing genotypes of .bed files: replaced by means in statistics, and refused in products.

They are found by the counts of genotypes per variant, which `stats` caches.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from oocgemm import stores
from oocgemm.errors import InputError
from oocgemm.jobs.request import Request
from oocgemm.jobs.stats import Stats, stats_of
from oocgemm.jobs.transforms import memory_of
from oocgemm.stores import Genotypes, Matrix
from oocgemm.stores.capabilities import MISSING
from oocgemm.stores.declared import AS_STORED
from oocgemm.stores.transform import Transform
from oocgemm.stores.transformed import ImputedMatrix


def gaps(matrix: Genotypes, memory: int) -> Stats | None:
    """Return the statistics of variants, from the cache or by a pass; None if no genotype is missing."""
    found = stats_of(matrix, 1 - matrix.variant_axis, Transform(missing=MISSING), memory, extremes=False)
    return found if found.missing.any() else None


def imputed(matrix: Matrix, memory: int) -> Matrix:
    """Return a matrix in which missing genotypes of a .bed file are the means of their variants.

    Other matrices, and .bed files without missing genotypes, are returned as they are. A variant without any
    known genotype becomes 0. Raises `ExecutionError` if the file cannot be read.
    """
    found = gaps(matrix, memory) if isinstance(matrix, Genotypes) else None
    if found is None:
        return matrix
    assert isinstance(matrix, Genotypes)
    return ImputedMatrix(matrix, matrix.variant_axis, MISSING, np.where(found.count > 0, found.mean, 0))


def opened(name: str, request: Request) -> Matrix:
    """Open A of a request, with its missing genotypes replaced if the request asks for that."""
    matrix = stores.open_matrix(name, request.a.given, decode=request.decode)
    return imputed(matrix, memory_of(request)) if request.a.impute and request.decode else matrix


def how_to_replace(name: str = "") -> str:
    """Return the remedy for missing genotypes of A or B, or of the only operand, for `check_known`."""
    end = f"_{name.lower()}" if name else ""
    return (
        f"pass transform{end}=Transform(missing={MISSING}) (--transform{end.replace('_', '-')} "
        f"missing={MISSING}) to replace them by means, or the same with impute=0"
    )


def check_known(
    name: str, operand: Any, transform: Transform | None, memory: Callable[[], int], remedy: str
) -> None:
    """Raise `InputError` if a .bed file has missing genotypes that its transform does not replace.

    Args:
        name: of the operand in messages.
        operand: what was passed for it.
        transform: of its elements.
        memory: returns the bytes that the pass may take that counts genotypes, unless counts are cached.
        remedy: what says how to replace them.
    """
    replaced = isinstance(transform, Transform) and transform.missing == MISSING
    if replaced or not stores.store_of(operand).has_genotypes:
        return
    matrix = stores.open_matrix(name, operand)
    if isinstance(matrix, Genotypes) and (found := gaps(matrix, memory())) is not None:
        raise InputError(
            f"{name}: {operand} has {found.missing.sum()} missing genotypes, which would count as {MISSING}: "
            f"{remedy}; or {AS_STORED}"
        )
