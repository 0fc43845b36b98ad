"""Apply transforms to the operands of a product: find the means and scales that they need.

Rows are standardized for covariances and correlations. Missing genotypes of .bed files are replaced by means
in statistics, and refused in products. The counts of genotypes per variant, which `stats` caches,
show whether genotypes are missing.
"""

from collections.abc import Callable
from dataclasses import replace
from math import isnan, nan
from typing import Any

import numpy as np

from oocgemm import stores
from oocgemm.backends.base import PanelNumbers
from oocgemm.errors import InputError, warn_of_data
from oocgemm.jobs.request import Missing, Request, Source
from oocgemm.jobs.stats import MIN_SQUARES, Stats, Sweep, equal_lines, factors, stats_of, undefined
from oocgemm.planning import GemmProblem, Op
from oocgemm.planning.elements import GIVEN, ElementStep
from oocgemm.planning.problem import Operand
from oocgemm.planning.units import parse_size
from oocgemm.stores import Array, Genotypes, Matrix
from oocgemm.stores.base import View
from oocgemm.stores.capabilities import MISSING
from oocgemm.stores.declared import AS_STORED
from oocgemm.stores.formats import OperandFacts, python_command
from oocgemm.stores.transform import Transform
from oocgemm.stores.transformed import (
    ConvertedMatrix,
    FilledMatrix,
    ImputedMatrix,
    NormalizedMatrix,
    Numbers,
    ShiftedMatrix,
    StandardizedMatrix,
    SteppedMatrix,
    TransformedMatrix,
    chain_of,
)
from oocgemm.stores.unpacked import accepting, known_missing, with_left_out, with_nan
from oocgemm.system.resources import RECENT, available_memory

# The name of a line, by the axis that numbers the lines.
_LINE = ("row", "column")

# The names of the indices along each axis of an array.
_LINES = ("rows", "columns")


def standardized(matrix: Matrix, how: str, line_axis: int) -> Matrix:
    """Return an operand whose lines are standardized, which can be planned with but not read.

    `how` is "center" to subtract the mean of each line, or "scale" to also divide by the norm of the result.
    With "shift", the mean is that of the elements that are not NaN, which stay NaN.
    `line_axis` is the axis of the stored matrix that numbers the lines. Raises `InputError` for a complex
    operand.
    """
    if matrix.dtype.kind == "c":
        raise InputError(
            f"{matrix.name} is of dtype {matrix.dtype}: covariances and correlations are computed of real "
            "operands; pass its real or imaginary part"
        )
    if how == "scale" and matrix.shape[line_axis] and not matrix.shape[1 - line_axis]:
        raise InputError(
            f"{matrix.name} has shape {matrix.shape}, so that its {_LINE[line_axis]}s have no elements, and "
            "no correlations: pass an X with at least 1 element in each"
        )
    if how == "shift":
        return ShiftedMatrix(matrix, line_axis)
    return StandardizedMatrix(matrix, line_axis, scaled=how == "scale")


def _of_lines(matrix: StandardizedMatrix, memory: int, sweep: Sweep | None) -> tuple[Numbers, ...]:
    """Return the numbers that standardize lines. Raises `InputError` if a line cannot be standardized."""
    axis = matrix.line_axis
    found = _stats(matrix.matrix, axis, memory, sweep)
    squares = found.count * found.variance
    wrong = [(~np.isfinite(squares), "has elements that are Inf or NaN: replace them, or leave it out")]
    if matrix.scaled:
        small = ~_constant(found) & (squares < MIN_SQUARES)
        wrong.append((small, "has elements that differ by too little for float64: multiply X by 2.0**400"))
    else:
        wrong.append(_underflowing(found, matrix.dtype))
        wrong.append(_overflowing(squares, matrix.dtype))
    for lines, what in wrong:
        if (numbers := np.flatnonzero(lines)).size:
            raise InputError(
                f"{_LINE[axis]} {numbers[0]} of {matrix.name} {what} (one of {numbers.size} such "
                f"{_LINE[axis]}s)"
            )
    if not matrix.scaled:
        return (found.mean,)
    with np.errstate(divide="ignore"):
        return found.mean, np.where(_constant(found), 0.0, 1 / np.sqrt(squares))


def _of_known(matrix: ShiftedMatrix, memory: int, sweep: Sweep | None) -> tuple[Numbers, ...]:
    """Return the means of what is known of lines. Raises `InputError` if a line has elements that are Inf."""
    axis = matrix.line_axis
    found = stats_of(matrix.matrix, 1 - axis, Transform(missing=nan), memory, extremes=False, sweep=sweep)
    if (lines := np.flatnonzero((found.count > 0) & ~np.isfinite(found.variance))).size:
        raise InputError(
            f"{_LINE[axis]} {lines[0]} of {matrix.name} has elements that are Inf (one of {lines.size} such "
            f"{_LINE[axis]}s): replace them by NaN to leave them out"
        )
    return (np.where(found.count > 0, found.mean, 0.0),)


def _underflowing(found: Stats, dtype: np.dtype[Any]) -> tuple[Array, str]:
    """Return which lines have variances too small for the dtype of covariances, and text for a message."""
    limit, remedy = float(np.finfo(dtype).tiny), "pass X in float64"
    if dtype.itemsize == 8:
        limit, remedy = MIN_SQUARES, "multiply X by 2.0**400, which multiplies covariances by 2.0**800"
    small = ~_constant(found) & (found.variance < limit)
    return small, (
        f"has a variance below {limit:.2g}, so that its covariances underflow {dtype.name}: {remedy}"
    )


def _overflowing(squares: Array, dtype: np.dtype[Any]) -> tuple[Array, str]:
    """Return which lines have sums of squares too large for covariances, and text for a message.

    Elements of 2 bytes are summed in float32, whose range they cannot leave.
    """
    limit = float(np.finfo(dtype).max) if dtype.itemsize == 4 else np.inf
    return squares > limit, (
        f"has a sum of squares above {limit:.2g}, so that its covariances overflow {dtype.name}: "
        "pass X in float64"
    )


def varying_lines(matrix: Matrix, axis: int, memory: int) -> Array:
    """Return the numbers of the lines along an axis whose elements are not all equal; warn of the others."""
    constant = _constant(_stats(matrix, axis, memory))
    if constant.all():
        raise InputError(f"all {_LINE[axis]}s of {matrix.name} have equal elements: none would be kept")
    if constant.any():
        warn_of_data(f"{equal_lines(matrix, axis, constant)}: left out, as constant='drop' says")
    return np.flatnonzero(~constant)


def check_constant(matrix: Matrix, axis: int, constant: str) -> None:
    """Warn of lines of equal elements along an axis, or raise `InputError` if `constant` is "raise"."""
    if not (lines := np.isnan(factors(matrix))).any():
        return
    if constant == "raise":
        raise undefined(matrix, axis, lines)
    what = equal_lines(matrix, axis, lines)
    warn_of_data(f"{what}: their correlations are NaN; constant='drop' (--constant drop) leaves them out")


def _stats(matrix: Matrix, axis: int, memory: int, sweep: Sweep | None = None) -> Stats:
    return stats_of(matrix, 1 - axis, Transform(), memory, extremes=False, sweep=sweep)


def _constant(found: Stats) -> Array:
    """Return which lines have equal elements. (The variance of other lines may underflow to 0.)"""
    return np.asarray(found.min == found.max)


def gaps(matrix: Genotypes, memory: int) -> Stats | None:
    """Return the statistics of variants, from the cache or by a pass; None if no genotype is missing."""
    found = stats_of(matrix, 1 - matrix.variant_axis, Transform(missing=MISSING), memory, extremes=False)
    return found if found.missing.any() else None


def imputed(matrix: Matrix, memory: int) -> Matrix:
    """Return a matrix in which missing genotypes of a .bed file, if any, are the means of variants, or 0."""
    found = gaps(matrix, memory) if isinstance(matrix, Genotypes) else None
    if found is None:
        return matrix
    assert isinstance(matrix, Genotypes)
    return ImputedMatrix(matrix, matrix.variant_axis, MISSING, np.where(found.count > 0, found.mean, 0))


def opened(name: str, request: Request) -> Matrix:
    """Open and return A of a request, with missing genotypes replaced if the request asks for that."""
    return completed(stores.open_matrix(name, request.a.given, decode=request.decode), request.a, request)


def completed(matrix: Matrix, source: Source, request: Request) -> Matrix:
    """Return an operand of a request, with missing genotypes replaced if the request asks for that."""
    if source.absent is not None:
        return with_nan(matrix, None if isnan(source.absent) else source.absent)
    replaces = isinstance(source.transform, Transform) and source.transform.missing is not None
    by_variants = source.missing is None or means_of_variants(matrix, source.missing)
    wanted = source.impute and request.decode and not replaces and by_variants
    return imputed(matrix, memory_of(request)) if wanted else matrix


def means_of_variants(matrix: Matrix, missing: Missing) -> bool:
    """Return whether an operand has genotypes, whose missing ones the means of variants replace."""
    while isinstance(matrix, View) and not isinstance(matrix, Genotypes):
        matrix = matrix.viewed
    means = missing.impute in (None, "mean") and missing.code in (None, MISSING)
    return isinstance(matrix, Genotypes) and means


def with_missing(matrix: Matrix, source: Source) -> Transform | None:
    """Return the transform of an operand that also replaces missing elements as the options say.

    Raises `InputError` if the transform has a code of missing elements too.
    """
    transform, missing = source.transform, source.missing
    if missing is None or source.standardize == "shift":
        return transform
    change = transform or Transform()
    if change.missing is not None:
        raise InputError(
            f"the transform of {matrix.name} has missing = {change.missing}, and missing or impute is also "
            "passed: drop one of them"
        )
    code = missing.code
    if code is None:
        code = MISSING if isinstance(matrix, Genotypes) else known_missing(matrix)[1]
    if code is None and (matrix.dtype.kind == "f" or matrix.dtype.name == "bfloat16"):
        code = nan
    if code is None or means_of_variants(matrix, missing):
        return transform
    return replace(change, missing=code, impute="mean" if missing.impute is None else missing.impute)


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

    `name` names the operand in the message, and `remedy` ends the message. Unless counts are cached, a pass
    counts the genotypes, in as many bytes as `memory` returns.
    """
    replaced = isinstance(transform, Transform) and transform.missing == MISSING
    if replaced or not any(stores.store_of(leaf).has_genotypes for leaf in stores.leaves(operand)):
        return
    matrix = stores.open_matrix(name, operand)
    if isinstance(matrix, Genotypes) and (found := gaps(matrix, memory())) is not None:
        paths = ", ".join(map(str, stores.leaves(operand)))
        raise InputError(
            f"{name}: {paths} has {found.missing.sum()} missing genotypes, which would count as {MISSING}: "
            f"{remedy}; or {AS_STORED}"
        )


def by_rows(
    matrix: Matrix, transform: Transform | None, op: Op, *, left: bool, whole: Matrix | None = None
) -> tuple[Matrix, Op]:
    """Return an operand with its transform, and its op. Column-major operands become their transposes.

    Columns of `whole`, if given, were selected.
    """
    matrix = accepted(matrix, transform)
    by_row, new_op = stores.by_rows(matrix, op)
    turned = int(op.swaps != new_op.swaps)
    lines = _LINES[int(left != op.swaps)]
    return transformed(by_row, transform, new_op, left=left, lines=lines, rows=turned, whole=whole), new_op


def transformed(
    matrix: Matrix,
    transform: Transform | None,
    op: Op,
    *,
    left: bool,
    lines: str | None = None,
    rows: int = 0,
    whole: Matrix | None = None,
    kind: type[TransformedMatrix] = TransformedMatrix,
) -> Matrix:
    """Return an operand with its transform, a view of `kind`; without a transform, the operand itself.

    The result can be planned with, but not read before `readable` has found its numbers. `left` tells whether
    it is A, whose op() has k columns, and not B, whose op() has k rows. `lines` is what the caller calls the
    indices along k, "rows" or "columns", if not by this matrix. `rows` is the axis of this matrix that
    numbers stored rows. Columns of `whole`, if given, were selected.
    """
    if transform is None:
        return matrix
    if not isinstance(transform, Transform):
        raise InputError(f"the transform of {matrix.name} is {transform!r}: pass an oocgemm.Transform")
    k_axis, matrix = int(left != op.swaps), normalized(matrix, transform, rows, whole)
    return kind(matrix, transform, k_axis, lines or _LINES[k_axis])


def normalized(matrix: Matrix, transform: Transform, rows: int, whole: Matrix | None = None) -> Matrix:
    """Return an operand with rows that have the sums of a transform. Arguments are as for `transformed`."""
    matrix = accepted(matrix, transform)
    if transform.target_sum is None:
        return matrix
    summed = with_left_out(matrix if whole is None else whole, 1 - rows)
    whole = matrix if summed is matrix else accepted(summed, transform)
    return NormalizedMatrix(matrix, transform.target_sum, rows, whole)


def filled_lines(
    matrix: Matrix, source: Source, change: Transform | None, op: Op, *, left: bool, whole: Matrix
) -> tuple[Matrix, Transform | None]:
    """Return an operand whose lines are standardized, after all steps that are not per index along k.

    These are the first steps of its transform, `change`, and the means of lines in place of missing elements.
    Also return the rest of the transform.
    """
    if source.missing is None or change is None or not change.imputes_mean:
        return matrix, change
    rest = replace(change, missing=None, impute="mean", log1p=False, target_sum=None)
    first = replace(change, center=None, scale=None, clip=None, cast=None)
    kind = FilledMatrix if source.standardize == "scale" else TransformedMatrix
    found = transformed(matrix, first, op, left=not left, whole=whole, kind=kind)
    return found, rest if str(rest) else None


def accepted(matrix: Matrix, transform: Transform | None) -> Matrix:
    """Return an operand that may have the missing elements that its transform replaces."""
    if not isinstance(transform, Transform) or transform.missing is None:
        return matrix
    return accepting(matrix, transform.code(matrix.name, matrix.dtype))


def readable(matrix: Matrix, memory: int, sweep: Sweep | None = None) -> Matrix:
    """Return a view of an operand that can be read. Return an operand that can be read already as it is.

    If a step needs means or counts, they are taken from the cache, or from a pass over the operand in
    `memory` bytes, or with `sweep` on a device. Raises `InputError` if a scale is 0 or unknown, or there are
    missing elements that are not allowed.
    """
    chain = chain_of(matrix)
    if chain is None or chain.is_known:
        return matrix
    inner = readable(chain.matrix, memory, sweep)
    before = chain_of(inner)
    exact = inner if before is None else before.wide()  # the input of the step is not rounded
    return chain.on(inner, _NUMBERS[type(chain)](chain.on(exact, None), memory, sweep))


def _of_transform(matrix: TransformedMatrix, memory: int, sweep: Sweep | None) -> tuple[Numbers, ...]:
    found = None
    if matrix.transform.needs_stats:
        axis, how = 1 - matrix.k_axis, matrix.transform
        found = stats_of(matrix.matrix, axis, how, memory, extremes=False, sweep=sweep)
    return _numbers(matrix, found)


def _of_rows(matrix: NormalizedMatrix, memory: int, sweep: Sweep | None) -> tuple[Numbers, ...]:
    """Return the factors of rows. Raises `InputError` for a row whose sum is negative or not finite."""
    how = Transform(missing=None if matrix.whole.dtype.kind in "biu" else nan)
    found = stats_of(matrix.whole, 1 - matrix.axis, how, memory, extremes=False, sweep=sweep)
    sums = np.where(found.count > 0, found.mean, 0) * found.count
    if (rows := np.flatnonzero(~(np.isfinite(sums) & (sums >= 0)))).size:
        raise InputError(
            f"row {rows[0]} of {matrix.name} has the sum {sums[rows[0]]:g}, which cannot become "
            f"{matrix.target:g} (one of {rows.size} such rows): leave it out, or pass factors as target_sum"
        )
    with np.errstate(divide="ignore"):
        return (np.where(sums > 0, matrix.target / sums, 1.0),)


def _of_filled(matrix: FilledMatrix, memory: int, sweep: Sweep | None) -> tuple[Numbers, ...]:
    found = stats_of(matrix.matrix, 1 - matrix.k_axis, matrix.transform, memory, extremes=False, sweep=sweep)
    known = found.count > 0
    mean, variance = (np.where(known, x, 0) for x in (found.mean, found.variance))
    return _numbers(matrix, replace(found, count=np.maximum(found.count, 1), mean=mean, variance=variance))


# The function that finds the numbers of each kind of view.
_NUMBERS: dict[type[SteppedMatrix], Callable[..., tuple[Numbers, ...]]] = {
    TransformedMatrix: _of_transform,
    FilledMatrix: _of_filled,
    StandardizedMatrix: _of_lines,
    ShiftedMatrix: _of_known,
    ConvertedMatrix: lambda matrix, memory, sweep: (),
    NormalizedMatrix: _of_rows,
}


def _numbers(matrix: TransformedMatrix, found: Stats | None) -> tuple[Numbers, ...]:
    """Return the numbers of each step of a transform. Raises `InputError` if an element has none.

    If `found` is None, statistics are not needed or unknown. Steps that need statistics then get numbers that
    change nothing.
    """
    transform, extent = matrix.transform, matrix.shape[matrix.k_axis]
    zeros, ones = np.broadcast_to(0.0, extent), np.broadcast_to(1.0, extent)
    if found is not None:
        _check(matrix, found)
    given = {"impute": transform.impute, "scale": transform.scale}
    given |= {"correct" if transform.corrects else "center": transform.center}
    numbers = list[Numbers]()
    for step in matrix.own_steps:
        u = given.get(step.kind)
        if not step.axis:
            numbers.append(None)
        elif step.kind == "scale":
            scale = ones
            if isinstance(u, np.ndarray):
                scale = u
            elif found is not None:
                scale = _hwe(matrix, found) if step.rule == "hwe" else found.std
                _check_scale(matrix, scale, found)
            numbers.append(1 / scale)
        elif isinstance(u, np.ndarray):
            numbers.append(u)
        elif step.kind == "impute" and transform.imputed is not None:
            numbers.append(np.broadcast_to(transform.imputed, extent))
        elif found is None or step.source == GIVEN:
            numbers.append(zeros)
        elif step.kind == "impute":
            # Without missing elements, the mean of an index is not needed, and it may be NaN.
            numbers.append(np.where(found.missing > 0, found.mean, 0))
        else:
            numbers.append(found.mean)
    return tuple(numbers)


def memory_of(request: Request) -> int:
    """Return the bytes that a pass over an operand before the run may take."""
    given = request.budgets.all_host_memory
    return available_memory(RECENT) // 8 if given is None else parse_size(given)


def _line(matrix: TransformedMatrix, index: int) -> str:
    return f"{matrix.lines[:-1]} {index} of {matrix.name}"


def _check(matrix: TransformedMatrix, found: Stats) -> None:
    """Raise `InputError` if some element cannot be transformed with these statistics."""
    transform = matrix.transform
    if transform.raises and (lines := np.flatnonzero(found.missing)).size:
        raise InputError(
            f"{matrix.name} has {found.missing.sum()} missing elements (code {transform.missing}), the first "
            f"ones in {_line(matrix, lines[0])}: pass impute='mean' or impute=0 to replace them"
        )
    needed = isinstance(transform.center, str) or isinstance(transform.scale, str)
    used = needed | ((found.missing > 0) if transform.imputes_mean else np.zeros(len(found.count), bool))
    if (lines := np.flatnonzero(used & (found.count == 0))).size and matrix.shape[1 - matrix.k_axis]:
        raise InputError(
            f"{_line(matrix, lines[0])} has only missing elements, so that it has no mean (one of "
            f"{lines.size} such {matrix.lines}): leave them out, or {_own_numbers(matrix)}"
        )
    if (lines := np.flatnonzero(used & (found.count > 0) & ~np.isfinite(found.variance))).size:
        after = ", after log1p" if transform.log1p else ""
        raise InputError(
            f"{_line(matrix, lines[0])} has elements that are Inf or NaN{after}, so that it has no mean (one "
            f"of {lines.size} such {matrix.lines}): if NaN stands for missing elements, pass "
            "missing=float('nan')"
        )


def _hwe(matrix: TransformedMatrix, found: Stats) -> Array:
    """Return sqrt(2 p (1 - p)), the standard deviations of genotypes in Hardy-Weinberg equilibrium."""
    outside = np.flatnonzero((found.mean < 0) | (found.mean > 2))
    if outside.size:
        raise InputError(
            f"scale = 'hwe' is for genotypes 0, 1 and 2, and {_line(matrix, outside[0])} has the mean "
            f"{found.mean[outside[0]]:.6g}: give the code of missing genotypes, such as missing=-1, or pass "
            "scale='k'"
        )
    share = found.mean / 2
    return np.asarray(np.sqrt(2 * share * (1 - share)))


def _check_scale(matrix: TransformedMatrix, scale: Array, found: Stats) -> None:
    small = np.flatnonzero((found.min < found.max) & (found.count * found.variance < MIN_SQUARES))
    if small.size:
        raise InputError(
            f"{_line(matrix, small[0])} has elements that differ by too little for float64 (one of "
            f"{small.size} such {matrix.lines}): multiply {matrix.name} by 2.0**400, or pass scale as an "
            "array"
        )
    zeros = np.flatnonzero(scale == 0)
    if zeros.size:
        raise InputError(
            f"the scale of {_line(matrix, zeros[0])} is 0, because all of its elements are equal (one of "
            f"{zeros.size} such {matrix.lines}): leave them out, or {_own_numbers(matrix, 'scale')}"
        )


def _own_numbers(matrix: TransformedMatrix, *names: str) -> str:
    """Return the remedy for indices along k without a mean or a scale: to pass arrays, with 0 or 1 there.

    `names` are the arguments of the transform that are replaced; by default all that need statistics.
    """
    transform, stored = matrix.transform, OperandFacts.of(matrix.source)
    made = {"impute": "mean"} if transform.imputes_mean else {}
    made |= {"center": "mean"} if isinstance(transform.center, str) else {}
    made |= {"scale": "scale"} if isinstance(transform.scale, str) else {}
    made = {name: made[name] for name in names or made}
    if transform.target_sum is not None:  # statistics of rows as they are stored would be others
        return f"pass arrays of your own as {' and '.join(made)}"
    source = stored.name if stored.path is None else repr(stored.path)
    code = 'float("nan")' if transform.missing is not None and isnan(transform.missing) else transform.missing
    given = f"{source}, {1 - _LINES.index(matrix.lines)}, missing={code}, log1p={transform.log1p}"
    lines = [f"s = oocgemm.stats({given})", "mean = numpy.where(s.count > 0, s.mean, 0)"]
    if "scale" in made:
        std = "numpy.sqrt(abs(mean * (1 - mean / 2)))" if transform.scale == "hwe" else "s.std"
        lines += [f"d = {std}", "scale = numpy.where(d > 0, d, 1)"]
    if stored.path is None:
        arguments = ", ".join(f"{name}={number}" for name, number in made.items())
        return f"pass {arguments} after {'; '.join(lines)}"
    lines += [f'numpy.save("{number}.npy", {number})' for number in dict.fromkeys(made.values())]
    files = ",".join(f"{name}={number}.npy" for name, number in made.items())
    run = python_command("; ".join(["import numpy, oocgemm", *lines]))
    return f"run {run} and pass {files} in the transform, in Python the arrays that numpy.load returns"


def expanded(problem: GemmProblem, a: Matrix, b: Matrix, backend: str) -> GemmProblem:
    """Return the problem, with the steps that remain to be done on the elements of panels in slots.

    A GPU does all steps, on panels as they are stored, except for checksums and emulated products. These need
    transformed elements on the host. There, all but deferred steps are done when panels are read.
    """
    if not problem.depth:
        return problem
    here = backend == "cuda" and not (problem.checked or problem.planes)
    left, right = (_with_steps(*pair, here=here) for pair in ((problem.a, a), (problem.b, b)))
    return replace(problem, a=left, b=right)


def deferred_steps(matrix: Matrix) -> tuple[ElementStep, ...]:
    """Return the steps of a matrix that are deferred: they correct C instead of the elements."""
    chain = chain_of(matrix)
    return () if chain is None else tuple(step for step in chain.steps if step.is_deferred)


def _with_steps(operand: Operand, matrix: Matrix, *, here: bool) -> Operand:
    chain = chain_of(matrix)
    if chain is None:
        return operand
    if not (here and chain.is_expandable) or chain.is_copy:
        return replace(operand, elements=deferred_steps(matrix))
    return replace(operand, elements=chain.steps, stored=chain.source.dtype.name)


def as_read(operand: Operand, matrix: Matrix) -> Matrix:
    """Return the matrix from which the panels of an operand are read."""
    chain = chain_of(matrix)
    return chain.source if chain is not None and (chain.is_copy or operand.stored) else matrix


def on_device(problem: GemmProblem, a: Matrix, b: Matrix) -> dict[str, PanelNumbers]:
    """Return the numbers of the steps that the device does, by operand."""
    found = {}
    for name, operand, matrix in zip(problem.operands, (problem.a, problem.b), (a, b), strict=False):
        chain = chain_of(matrix)
        if chain is None or not (operand.stored or problem.finds_numbers):
            continue
        if problem.finds_numbers:
            found[name] = _MEASURED[type(chain)](chain)
        else:
            assert chain.numbers is not None, "the matrix was opened only to plan"
            found[name] = PanelNumbers(chain.numbers)
    return found


def _measuring(matrix: TransformedMatrix) -> PanelNumbers:
    """Return the given numbers of an operand whose statistics the device finds, and a check of these."""

    def check(count: Array, total: Array, squares: Array) -> None:
        extent = matrix.shape[1 - matrix.k_axis]
        with np.errstate(all="ignore"):
            mean, variance = total / count, (count * squares - total * total) / np.square(count, dtype=float)
        _numbers(matrix, Stats(count, extent - count, mean, variance, mean, mean))

    return PanelNumbers(_numbers(matrix, None), check)


# The function that gives the numbers of each kind of view whose statistics a device can find.
_MEASURED: dict[type[SteppedMatrix], Callable[..., PanelNumbers]] = {TransformedMatrix: _measuring}
