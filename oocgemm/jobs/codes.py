"""Distances of rows of codes, from exact counts: Jaccard's for bits, and Hamming's for bits and categories.

For rows x and y of 0 and 1, the product x y counts the columns where both are 1. With the sums of the rows,
it gives the number of columns where they differ, ``|x| + |y| - 2 x y``, and the number where one of them is
1, ``|x| + |y| - x y``. Rows of more than two codes are replaced by indicators (`oocgemm.stores.indicators`).
A column in which two rows differ then counts twice. Products of int8 are exact, and so are these counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from oocgemm import stores
from oocgemm.errors import InputError
from oocgemm.jobs.request import Request
from oocgemm.jobs.steps import AnyStep, Hamming, Jaccard
from oocgemm.jobs.streaming import SCRATCH, reduced
from oocgemm.jobs.transforming import check_known, memory_of
from oocgemm.planning.tiling import Range
from oocgemm.stores import Array, Matrix
from oocgemm.stores.indicators import Indicators, table_of_bits, table_of_codes

# The metrics that compare codes. No transform changes the elements of X before.
COUNTS = ("jaccard", "hamming")
# Maximum number of codes for Hamming distances.
MAX_CODES = 16


def check_bits(metric: str, bits: int | None, options: Mapping[str, Any]) -> None:
    """Raise `InputError` for options that do not fit the metric."""
    if bits is not None and metric not in COUNTS:
        raise InputError(
            f"bits = {bits}, but the distance {metric!r} is that of numbers: drop bits (--bits), or pass "
            "metric='jaccard' or 'hamming'"
        )
    given = [name for name in ("transform", "missing", "impute") if options.get(name) is not None]
    if metric in COUNTS and given:
        raise InputError(
            f"metric = {metric!r} compares codes, which {given[0]} would change: drop {given[0]} "
            f"(--{given[0]})"
        )


def counting(
    request: Request, names: Sequence[str], metric: str, bits: int | None, bitorder: str
) -> tuple[Request, AnyStep]:
    """Return a request with operands of 0 and 1, and the step that makes distances of their product.

    `names` are those of the operands. They are equal if op(B) is the transpose of op(A). Operands that are
    neither bool nor packed bits are read once, for their codes. Raises `InputError` if the metric is not
    defined for them.
    """
    sources = request.a, request.b
    matrices = [
        stores.open_matrix(name, source.given, decode=request.decode)
        for name, source in zip(names, sources, strict=True)
    ]
    table, width, columns = None, matrices[0].shape[1], None
    if bits is not None:
        for matrix in matrices:
            _check_bits(matrix, bits)
        table, width, columns = table_of_bits(bitorder), int(bits), int(bits)
    else:
        found = set[int]()
        for matrix, source in list(zip(matrices, sources, strict=True))[: len(set(names))]:
            found |= _codes(matrix, source.given, request, metric)
        codes = [0, 1] if found <= {0, 1} else sorted(found)
        _check_codes(codes, metric, matrices[0])
        if codes != [0, 1] or any(matrix.dtype.name == "uint8" for matrix in matrices):
            table = table_of_codes(codes)
        width *= 1 if len(codes) <= 2 else 2
    step: AnyStep = Jaccard() if metric == "jaccard" else Hamming(max(1, width))
    if table is None:
        return request, step
    a, b = (
        replace(source, given=Indicators(source.given, table, columns, request.decode)) for source in sources
    )
    return replace(request, a=a, b=b), step


def _check_bits(matrix: Matrix, bits: int) -> None:
    """Raise `InputError` if rows of a matrix cannot have so many packed bits."""
    if matrix.dtype.name != "uint8":
        raise InputError(
            f"{matrix.name} has dtype {matrix.dtype}, and packed bits are uint8: drop bits (--bits)"
        )
    most = 8 * matrix.shape[1]
    if isinstance(bits, bool) or not isinstance(bits, int | np.integer) or not most - 7 <= bits <= most:
        raise InputError(
            f"bits = {bits!r}, but rows of {matrix.name} have {matrix.shape[1]} bytes: pass the number of "
            f"bits that were packed, from {max(0, most - 7)} to {most}"
        )


def _codes(matrix: Matrix, given: Any, request: Request, metric: str) -> set[int]:
    """Return the codes in a matrix of bytes. Raises `InputError` for another matrix."""
    if matrix.dtype.name == "bool":
        return {0, 1}
    if matrix.dtype.name not in ("int8", "uint8"):
        kinds = "bool" if metric == "jaccard" else "bool, or codes in int8 or uint8"
        raise InputError(
            f"{matrix.name} has dtype {matrix.dtype}, and the distance {metric!r} is that of {kinds}: pass "
            "such a copy, or packed bits with bits (--bits)"
        )
    if request.decode:
        remedy = "store a copy in which they have a code of their own"
        check_known(matrix.name, given, None, partial(memory_of, request), remedy)

    def act(rows: Range, cols: Range, raw: Array) -> Array:
        return np.bincount(np.ascontiguousarray(raw).view(np.uint8).ravel(), minlength=256)

    counts = np.zeros(256, np.int64)
    for _, _, part in reduced(matrix, 1, memory_of(request), SCRATCH, act):
        counts += part
    return set(np.flatnonzero(counts).astype(np.uint8).view(matrix.dtype).tolist())


def _check_codes(codes: Sequence[int], metric: str, matrix: Matrix) -> None:
    """Raise `InputError` if a metric is not defined for these codes."""
    if metric == "jaccard" and list(codes) != [0, 1]:
        other = next(code for code in codes if code not in (0, 1))
        raise InputError(
            f"{matrix.name} has the element {other}, and Jaccard distances are those of 0 and 1: pass a copy "
            "of dtype bool, or packed bits with bits (--bits)"
        )
    if len(codes) > MAX_CODES:
        raise InputError(
            f"{matrix.name} has {len(codes)} different elements, and Hamming distances are those of at most "
            f"{MAX_CODES} codes: join some, or pass metric='euclidean'"
        )
