"""The steps of an epilogue, as callers pass them to `gemm`, `gram` and `reduce`."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any, ClassVar

import numpy as np

from oocgemm import stores
from oocgemm.backends.base import numpy_dtype
from oocgemm.errors import InputError
from oocgemm.planning import GemmProblem
from oocgemm.planning.sinks import MAX_STEPS, Step
from oocgemm.stores import Array, Matrix
from oocgemm.stores.base import named_dtype
from oocgemm.values import dataclass

# dtypes to which C may be cast.
CASTS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, eq=False)
class Scale:
    """Multiply element (i, j) of C by ``value * rows[i] * cols[j]``.

    `rows` has a number per row of C, and `cols` has one per column. An array that is not given counts as
    ones. So ``Scale(value=0.5)`` halves C.
    """

    rows: Any = None
    cols: Any = None
    value: float = 1.0


@dataclass(frozen=True, eq=False)
class RankOne:
    """Add ``value * rows[i] * cols[j]`` to element (i, j) of C.

    `rows` has a number per row of C, and `cols` has one per column. An array that is not given counts as
    ones. So ``RankOne(cols=bias)`` adds a bias to each row.
    """

    rows: Any = None
    cols: Any = None
    value: float = 1.0


@dataclass(frozen=True, eq=False)
class Add:
    """Add ``value * D`` to C, for an operand D of C's shape and dtype. It is read strip by strip.

    D must be symmetric for `gram` with uplo="full", which computes only the lower triangle.
    """

    d: Any
    value: float = 1.0


@dataclass(frozen=True, eq=False)
class Divide:
    """Divide C by D, element by element, for an operand D of C's shape and dtype.

    As in NumPy, a number divided by 0 is Inf, and 0 divided by 0 is NaN. D must be symmetric for `gram` with
    uplo="full", which computes only the lower triangle.
    """

    d: Any


@dataclass(frozen=True, eq=False)
class DivideOrZero(Divide):
    """Divide C by D as `Divide` does, but replace an element by 0 where D is 0."""


@dataclass(frozen=True)
class Correlation:
    """Divide element (i, j) of C by the norms of row i of op(A) and column j of op(B).

    This gives cosines, or the correlations of rows whose mean is 0. The result is clipped to [-1, 1], because
    rounding could make its magnitude larger. NaN stays NaN. A zero row has the cosine 0. `Correlation` must
    be the first step, with alpha = 1 and beta = 0.
    """

    # The end of the message about a row that has no cosines, and what the caller calls a column of op(B).
    instead: ClassVar[str] = "drop Correlation"
    right: ClassVar[str] = "column"


class Cosines(Correlation):
    """The `Correlation` by which `similarity` compares rows."""

    instead = "pass metric='dot' (--metric dot)"
    right = "row"


class Coefficients(Correlation):
    """The `Correlation` of rows that are standardized before they are multiplied.

    The norms of these rows are 1. Correlations with a row of equal elements are NaN.
    """


class Pearson(Correlation):
    """The `Correlation` of rows of integers, which are multiplied as they are, so that no product is rounded.

    The product of the means of two rows is subtracted from their product, in float64. The divisor is that of
    their deviations from the means.
    """


@dataclass(frozen=True)
class Gaussian:
    """Replace C by ``exp(-gamma |x - y|^2)`` for each row x of op(A) and column y of op(B).

    The squared distance is computed as ``|x|^2 + |y|^2 - 2 c``. So `Gaussian` must be the first step, with
    alpha = 1 and beta = 0. So that this does not cancel, a common center is subtracted from x and y when they
    are read. They are multiplied in float64 if ``gamma * eps * max |x|^2`` would be above 1e-4 in float32,
    and refused if it would be in float64. For equal x and y, the result is exactly 1.
    """

    gamma: float


@dataclass(frozen=True)
class Distance:
    """Replace C by ``factor |x - y|^2`` for each row x of op(A) and column y of op(B), as `Gaussian` does.

    If `factor` is negative, distances are only compared: products in the accumulator's dtype suffice.
    Otherwise they are computed in float64, and distances of equal vectors are 0.
    """

    factor: float = 1.0

    @property
    def step(self) -> Step:
        return Step("distance", True, True, self.factor)


@dataclass(frozen=True)
class Jaccard:
    """Replace C, of rows x of op(A) and columns y of op(B) of 0 and 1, by their Jaccard distances.

    A distance is the number of places where x and y differ, divided by the number where one of them is 1.
    """

    @property
    def step(self) -> Step:
        return Step("jaccard", True, True)


@dataclass(frozen=True)
class Hamming:
    """Replace C, of rows x of op(A) and columns y of op(B) of 0 and 1, by Hamming distances.

    A distance is the number of places where x and y differ, divided by `most`.
    """

    most: int

    @property
    def step(self) -> Step:
        return Step("hamming", True, True, float(self.most))


@dataclass(frozen=True)
class SquareRoot:
    """Replace elements of C by their square roots."""

    @property
    def step(self) -> Step:
        return Step("root")


@dataclass(frozen=True)
class Squared:
    """Replace a correlation r by ``r^2 - bias (1 - r^2)``: its square, without the bias of a sample."""

    bias: float = 0.0

    @property
    def step(self) -> Step:
        return Step("squared", value=self.bias)


@dataclass(frozen=True, eq=False)
class Within:
    """Keep the elements (i, j) of C with ``rows[i] <= cols[j]``. Replace the others by 0.

    With `drops`, replace them by NaN, which no sink selects.
    """

    rows: Any
    cols: Any
    drops: bool = False

    @property
    def step(self) -> Step:
        return Step("within", True, True, float(self.drops))


@dataclass(frozen=True)
class Combined:
    """Make C of the sums of several terms (`oocgemm.planning.sinks.COMBINING`). It is the first step."""

    kind: str
    value: float = 0.0

    @property
    def step(self) -> Step:
        return Step(self.kind, value=self.value)


@dataclass(frozen=True, eq=False)
class Kinship:
    """Make KING's robust kinship of the product of genotypes -1, 0 and 1 of individuals without missing ones.

    `heterozygous` has the number of heterozygous genotypes of each individual, of `variants`.
    """

    heterozygous: Array
    variants: int

    @property
    def step(self) -> Step:
        return Step("kinship", True, True, float(self.variants))


@dataclass(frozen=True)
class Cast:
    """Round C to float16, bfloat16, float32 or float64, as the last step. It replaces out_dtype."""

    dtype: Any


# The steps that callers pass, and those that verbs add.
EpilogueStep = Scale | RankOne | Add | Divide | Correlation | Gaussian | Cast
AnyStep = EpilogueStep | Distance | Jaccard | Hamming | SquareRoot | Squared | Within | Combined | Kinship
Epilogue = Sequence[AnyStep]


def steps_of(given: Epilogue | None) -> tuple[AnyStep, ...]:
    """Return the steps that a caller passed. Raises `InputError` for a step that is not in a sequence.

    If a `Cast` is the only step, a `Scale` by 1 is put before it: only the kernel of a chain of steps casts
    to any dtype.
    """
    if given is not None and not isinstance(given, Iterable):
        raise InputError(
            f"epilogue is of type {type(given).__name__}: pass a list of steps, such as [Scale(value=0.5)]"
        )
    steps = tuple(given or ())
    return (Scale(), *steps) if len(steps) == 1 and isinstance(steps[0], Cast) else steps


def with_epilogue(problem: GemmProblem, given: Epilogue, *, casts: bool) -> GemmProblem:
    """Return the problem with an epilogue. Raises `InputError` if a step cannot be applied to C.

    C gets the dtype of the `Cast` at the end. Without a `Cast`, C of int8 operands becomes float64 if
    `casts`, which tells that the caller has chosen no dtype.
    """
    if not given:
        return problem
    _check(problem, given)
    steps = [step for step in given if not isinstance(step, Cast)]
    last = given[-1]
    dtype = "float64" if isinstance(steps[0], Pearson) else problem.c_dtype
    if isinstance(last, Cast):
        dtype = _cast(last)
    elif casts and problem.exact:
        dtype = "float64"
    if dtype.startswith("int"):
        raise InputError(
            f"C has dtype {dtype}, and an epilogue gives floating-point numbers: pass out_dtype='float64'"
        )
    chain = [_step(step, problem, f"epilogue[{number}]") for number, step in enumerate(steps)]
    if isinstance(steps[0], Pearson):
        chain.insert(0, Step("rank_one", True, True, -float(problem.depth)))
    if marks_equal(steps[0]):
        chain.insert(1, Step("identical", True, True, float(isinstance(steps[0], Gaussian))))
    return replace(problem, sink=replace(problem.sink, dtype=dtype, epilogue=tuple(chain)))


def marks_equal(step: AnyStep) -> bool:
    """Return whether a step gives an exact result for equal vectors, which takes a further step."""
    return isinstance(step, Gaussian) or (isinstance(step, Distance) and step.factor > 0)


def _check(problem: GemmProblem, given: Epilogue) -> None:
    """Raise `InputError` if the product can have no epilogue, or not this epilogue."""
    wrong = next((x for x in given if not isinstance(x, AnyStep)), None)
    if wrong is not None:
        names = ", ".join(kind.__name__ for kind in EpilogueStep.__args__)
        raise InputError(f"{wrong!r} is no step of an epilogue: pass a sequence of {names}")
    if problem.a_dtype.startswith("complex"):
        raise InputError(
            f"A is of dtype {problem.a_dtype}, and an epilogue changes real numbers: drop the epilogue, and "
            "change C afterwards"
        )
    if problem.is_corrected:
        raise InputError(
            "an epilogue cannot follow the centers that are subtracted from a product of int8: pass another "
            "cast than int8, such as cast='float32'"
        )
    if any(isinstance(step, Cast) for step in given[:-1]):
        raise InputError("a Cast is followed by other steps: make it the last one")
    steps = [step for step in given if not isinstance(step, Cast)]
    if len(steps) >= MAX_STEPS:
        raise InputError(f"the epilogue has {len(steps)} steps, and {MAX_STEPS - 1} are allowed: join some")
    _check_derived(problem, steps)
    read = [step for step in steps if isinstance(step, Add | Divide)]
    if len(read) > 1 or (read and problem.updates_c):
        raise InputError(
            "one further matrix can be read for each element of C: pass one Add or Divide, with beta = 0"
        )


def _check_derived(problem: GemmProblem, steps: Epilogue) -> None:
    """Raise `InputError` if a step that uses norms of the operands would not get their product."""
    name = next((type(x).__name__ for x in steps if isinstance(x, Correlation | Gaussian | Distance)), None)
    if name is None:
        return
    why = f"{name} combines the product of a row and a column with their norms"
    if (problem.alpha, problem.beta) != (1, 0):
        raise InputError(
            f"alpha = {problem.alpha} and beta = {problem.beta}, but {why}: pass alpha = 1 and beta = 0, and "
            "a Scale or an Add as a later step"
        )
    if any(isinstance(x, Correlation | Gaussian | Distance) for x in steps[1:]):
        raise InputError(
            f"{name} is not the first step, but {why}: make it the first step, and the only such step"
        )


def _step(given: AnyStep, problem: GemmProblem, name: str) -> Step:
    """Return a caller's step as the step of a problem. Raises `InputError` if its numbers do not fit."""
    match given:
        case Scale() | RankOne():
            found = [
                vector_of(x, extent, f"{side} of {name}") is not None
                for x, extent, side in ((given.rows, problem.m, "rows"), (given.cols, problem.n, "cols"))
            ]
            kind = "scale" if isinstance(given, Scale) else "rank_one"
            return Step(kind, found[0], found[1], _number(given.value, f"value of {name}"))
        case Add():
            return Step("add", value=_number(given.value, f"value of {name}"))
        case Divide():
            return Step("divide_or_zero" if isinstance(given, DivideOrZero) else "divide")
        case Correlation():
            return Step("correlation", True, True)
        case (
            Distance() | Jaccard() | Hamming() | SquareRoot() | Squared() | Within() | Combined() | Kinship()
        ):
            return given.step
        case Gaussian():
            gamma = given.gamma
            if isinstance(gamma, bool) or not isinstance(gamma, int | float | np.number) or not gamma > 0:
                raise InputError(f"gamma = {gamma!r}: pass a positive number, such as 0.5")
            if not isfinite(gamma):
                raise InputError(f"gamma = {gamma!r} is not finite: pass a positive number, such as 0.5")
            return Step("gaussian", True, True, float(gamma))
    raise AssertionError(f"{given} is no step")


def _number(value: Any, name: str) -> float:
    number = np.asarray(value)
    if number.ndim or number.dtype.kind not in "fiu" or not isfinite(number):
        raise InputError(f"{name} is {value!r}: pass a finite real number")
    return float(number)


def vector_of(given: Any, extent: int, name: str) -> Array | None:
    """Return numbers per row or column as float64; None if there are none. Raises `InputError` if wrong."""
    if given is None:
        return None
    found = np.asarray(given)
    if not found.ndim and found.dtype.kind in "fiu":
        raise InputError(f"{name} are one number, {found}: pass it as value, such as value={found}")
    if found.shape != (extent,) or found.dtype.kind not in "fiu":
        raise InputError(
            f"{name} have shape {found.shape} and dtype {found.dtype}: pass {extent} real numbers, one per "
            "row or column of C"
        )
    if not np.isfinite(found).all():
        raise InputError(f"{name} contain Inf or NaN: pass finite numbers")
    return np.ascontiguousarray(found, np.float64)


def _cast(step: Cast) -> str:
    name = named_dtype(step.dtype)
    if name not in CASTS:
        raise InputError(f"C cannot be cast to {step.dtype!r}: choose one of {', '.join(CASTS)}")
    numpy_dtype(name)
    return name


def further(given: Epilogue) -> Any:
    """Return D, the further matrix that a step reads, as the caller passed it; None if no step reads D."""
    return next((step.d for step in given if isinstance(step, Add | Divide)), None)


def with_further(given: Epilogue, d: Any) -> tuple[AnyStep, ...]:
    """Return the steps with `d` as D, the further matrix that a step reads."""
    return tuple(replace(step, d=d) if isinstance(step, Add | Divide) else step for step in given)


def open_further(problem: GemmProblem, given: Epilogue, *, decode: bool) -> Matrix | None:
    """Open and return D; None if no step reads D. Raises `InputError` if D does not fit C."""
    operand = further(given)
    if not problem.sink.merges:
        return None
    d = stores.open_matrix("D", stores.located("D", operand), decode=decode)
    if (d.shape, d.dtype) != ((problem.m, problem.n), numpy_dtype(problem.c_dtype)):
        raise InputError(
            f"D has shape {d.shape} and dtype {d.dtype}, and C has shape {(problem.m, problem.n)} and dtype "
            f"{problem.c_dtype}: both must be equal"
        )
    return d


def is_symmetric(given: Epilogue) -> bool:
    """Return whether a symmetric C is known to stay symmetric. The elements of D are not read."""
    return all(_is_paired(x) and not isinstance(x, Add | Divide | Cast) for x in given)


def check_mirrored(given: Epilogue) -> None:
    """Raise `InputError` for a step after which one triangle of C does not mirror the other."""
    if not all(map(_is_paired, given)):
        raise InputError(
            "a step of the epilogue has other numbers for rows than for columns, and uplo = 'full' stores "
            "one triangle of C as the mirror image of the other: pass equal rows and cols, or another uplo, "
            "or use gemm"
        )


def _is_paired(step: AnyStep) -> bool:
    """Return whether a step has the same numbers for rows and for columns."""
    if not isinstance(step, Scale | RankOne) or step.rows is step.cols:
        return True
    return step.rows is not None and step.cols is not None and np.array_equal(step.rows, step.cols)


def digest_of(given: Epilogue) -> str:
    """Return a digest of the arrays in an epilogue. A resumed run must have the same. "" without arrays."""
    arrays = [x for step in given if isinstance(step, Scale | RankOne) for x in (step.rows, step.cols)]
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(b"-" if array is None else np.ascontiguousarray(array, np.float64).tobytes())
    return digest.hexdigest()[:16] if arrays else ""
