"""Count the genotypes of individuals, and check that all elements are genotypes: 0, 1, 2 or missing."""

from math import isnan
from typing import NamedTuple

import numpy as np

from oocgemm.errors import InputError
from oocgemm.jobs.stats import Sweep, stats_of
from oocgemm.jobs.streaming import SCRATCH, reduced
from oocgemm.planning.tiling import Range
from oocgemm.stores import Array, Matrix
from oocgemm.stores.transform import Transform
from oocgemm.stores.transformed import is_missing


class GenotypeCounts(NamedTuple):
    """How many genotypes of each individual are heterozygous, and how many are missing."""

    heterozygous: Array
    missing: Array


def genotypes_of(matrix: Matrix, axis: int, code: float, memory: int, sweep: Sweep | None) -> GenotypeCounts:
    """Count the genotypes of each individual in one pass, in `memory` bytes.

    Args:
        matrix: genotypes. Missing ones are `code`, perhaps NaN.
        axis: the axis of variants.
        sweep: makes a pass over integers on a device; None for the host.

    Raises:
        InputError: an element is no genotype.
    """
    if sweep is None or matrix.dtype.kind not in "iub":
        return _counted(matrix, axis, code, memory)
    given = None if isnan(code) else code
    found = stats_of(matrix, axis, Transform(missing=given), memory, sweep=sweep)
    known = found.count > 0
    wrong = known & ~((found.min >= 0) & (found.max <= 2))
    if wrong.any():
        line = int(np.flatnonzero(wrong)[0])
        element = found.min[line] if found.min[line] < 0 else found.max[line]
        raise _refusal(matrix, axis, line, float(element))
    mean, variance = (np.where(known, each, 0) for each in (found.mean, found.variance))
    total, squares = found.count * mean, found.count * (variance + mean * mean)
    return GenotypeCounts(np.rint(2 * total - squares), found.missing)


def _counted(matrix: Matrix, axis: int, code: float, memory: int) -> GenotypeCounts:
    extent = matrix.shape[1 - axis]
    ones, lost, wrong = (np.zeros(extent, np.int64) for _ in range(3))

    def act(rows: Range, cols: Range, raw: Array) -> Array:
        missing = np.zeros(raw.shape, bool)
        if raw.dtype.kind == "f" or not isnan(code):
            missing = is_missing(raw, code)
        one = raw == 1
        other = ~(missing | one | (raw == 0) | (raw == 2))
        return np.stack([np.count_nonzero(each, axis=axis) for each in (one, missing, other)])

    for rows, cols, part in reduced(matrix, axis, memory, SCRATCH, act):
        here = slice(*(cols if axis == 0 else rows))
        for total, more in zip((ones, lost, wrong), part, strict=True):
            total[here] += more
    if wrong.any():
        raise _refusal(matrix, axis, int(np.flatnonzero(wrong)[0]), None)
    return GenotypeCounts(ones.astype(np.float64), lost)


def _refusal(matrix: Matrix, axis: int, line: int, element: float | None) -> InputError:
    which = "an element that is" if element is None else f"the element {element:g}, which is"
    return InputError(
        f"{('column', 'row')[axis]} {line} of {matrix.name} has {which} none of the genotypes 0, 1 and 2: "
        "pass the code of missing genotypes, such as missing=-9 (--missing -9), or round dosages in a copy"
    )
