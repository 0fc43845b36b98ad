"""The verbs `king` and `ibs`: kinship and identity by state of the individuals in a matrix of genotypes."""

from dataclasses import replace
from math import nan
from typing import Any, Literal, NamedTuple, Unpack, overload

import numpy as np

from oocgemm import backends, stores
from oocgemm.errors import InputError
from oocgemm.jobs.execute import check_places
from oocgemm.jobs.genotype_counts import GenotypeCounts, genotypes_of
from oocgemm.jobs.operands import op_of
from oocgemm.jobs.option_groups import DenseOptions, Operand, Output, SelectionOptions
from oocgemm.jobs.options import (
    IbsArguments,
    KingArguments,
    KinshipOptions,
    check_choices,
    check_names,
    documented,
)
from oocgemm.jobs.prepare import sweep_of
from oocgemm.jobs.request import Request, parse_gram
from oocgemm.jobs.run import Pairs, Plan, Result, outcome
from oocgemm.jobs.steps import Cast, Combined, Kinship
from oocgemm.jobs.transforming import completed, memory_of
from oocgemm.planning.elements import ElementStep
from oocgemm.planning.terms import Map, Terms
from oocgemm.stores import Matrix
from oocgemm.stores.capabilities import MISSING
from oocgemm.stores.genetics import Chromosomes
from oocgemm.stores.kept import keep
from oocgemm.stores.transform import Transform
from oocgemm.stores.unpacked import known_missing
from oocgemm.verbs.pairwise import known, or_zero
from oocgemm.verbs.relationship import chosen_variants
from oocgemm.verbs.similarity import check_options, selected, selection_of

# The terms of each step. m is 1 where a genotype is known, h where it is heterozygous. x is the genotype
# less 1, and q its square; both are 0 where it is missing.
_TERMS = {
    "kinship": "xx",
    "pairwise_kinship": "mm hm mh xx",
    "shared_alleles": "mm hh xx",
    "ibs0": "qq xx",
    "ibs1": "mm hh qq",
    "ibs2": "hh qq xx",
}
# Arrays that a GPU multiplies as int8.
_BYTES = "int8", "uint8", "bool"


@overload
def king(
    x: Operand,
    out: Output = None,
    *,
    threshold: None = None,
    dry_run: Literal[False] = False,
    **options: Unpack[KinshipOptions],
) -> Result: ...
@overload
def king(
    x: Operand,
    *,
    threshold: float,
    dry_run: Literal[False] = False,
    **options: Unpack[KinshipOptions],
) -> Pairs: ...
@overload
def king(
    x: Operand, out: Output = None, *, dry_run: Literal[True], **options: Unpack[KingArguments]
) -> Plan: ...
@documented("king", DenseOptions)
def king(
    x: Operand,
    out: Output = None,
    *,
    threshold: float | None = None,
    axis: int = 0,
    uplo: str | None = None,
    missing: float | None = MISSING,
    chromosomes: Chromosomes | None = None,
    dry_run: bool = False,
    **options: Unpack[DenseOptions],
) -> Result | Pairs | Plan:
    """Compute KING's robust kinship of the individuals in a matrix of genotypes, as ``plink2 --make-king``.

    A genotype is the number of copies of one allele: 0, 1 or 2. Over the variants that are known for both of
    two individuals, let D be the sum of the squared differences of their genotypes, and H the smaller of
    their numbers of heterozygous genotypes. Their kinship is 1/2 - D / (4 H): about 1/2 for duplicates, 1/4
    for parents and children, and 1/8 for half siblings. It needs no allele frequencies. If H is 0, it is
    -Inf, or NaN if D is 0 too.

    All counts are exact. Without missing genotypes, one product is computed. With missing ones, four products
    of the same panels are. X is read once more before, to count and check genotypes.

    Args:
        x: the genotypes, individuals x variants: a PLINK 1 .bed file, or any real operand of `gemm`.
        out: where the matrix is stored, as for `gram`. By default a new ndarray. It is float32.
        {options}

    Returns:
        A `Result`, or with `threshold` the `Pairs`, without those of an individual with itself. With
            `dry_run`, the `Plan`, which reads nothing, and has the products for missing genotypes unless
            `missing` is None.

    Raises:
        InputError, BudgetError, BackendError, ExecutionError: as `gemm` does. `InputError` also if an element
            that is not missing is no genotype.

    >>> import oocgemm
    >>> oocgemm.king([[0, 1, 2, 1], [0, 1, 2, 1], [1, 1, 0, -1]], backend="host").out
    array([[ 0.5 ,  0.5 , -0.75],
           [ 0.5 ,  0.5 , -0.75],
           [-0.75, -0.75,  0.5 ]], dtype=float32)
    """
    calls = _opened("king", x, out, (axis, uplo, threshold), missing, chromosomes, options)
    individuals, variants = calls.matrix.shape[:: 1 if calls.variant_axis else -1]
    step: Combined | Kinship = Combined("pairwise_kinship")
    if dry_run and missing is None:
        step = Kinship(np.ones(individuals), variants)
    elif not dry_run and not (found := calls.counted()).missing.any():
        step = Kinship(found.heterozygous, variants)
    return calls.outcome(step, dry_run=dry_run)


@overload
def ibs(
    x: Operand,
    out: Output = None,
    *,
    measure: str = "similarity",
    threshold: None = None,
    dry_run: Literal[False] = False,
    **options: Unpack[KinshipOptions],
) -> Result: ...
@overload
def ibs(
    x: Operand,
    *,
    measure: str = "similarity",
    threshold: float,
    dry_run: Literal[False] = False,
    **options: Unpack[KinshipOptions],
) -> Pairs: ...
@overload
def ibs(
    x: Operand, out: Output = None, *, dry_run: Literal[True], **options: Unpack[IbsArguments]
) -> Plan: ...
@documented("ibs", DenseOptions)
def ibs(
    x: Operand,
    out: Output = None,
    *,
    measure: str = "similarity",
    threshold: float | None = None,
    axis: int = 0,
    uplo: str | None = None,
    missing: float | None = MISSING,
    chromosomes: Chromosomes | None = None,
    dry_run: bool = False,
    **options: Unpack[DenseOptions],
) -> Result | Pairs | Plan:
    """Compute the identity by state (IBS) of the individuals in a matrix of genotypes.

    A genotype is the number of copies of one allele: 0, 1 or 2. At a variant that is known for both, two
    individuals share 2 alleles less the difference of their genotypes: 0, 1 or 2 (IBS0, IBS1, IBS2). Their
    similarity is the share of alleles that they share, ``(IBS2 + IBS1 / 2) / (IBS0 + IBS1 + IBS2)``. This is
    DST of ``plink --genome``, and what SNPRelate's `snpgdsIBS` computes. The matrix of ``plink --distance
    ibs`` is the same where no genotype is missing. The similarity of individuals without a common variant is
    NaN.

    All counts are exact. X is read once more before, to check genotypes.

    Args:
        x: the genotypes, individuals x variants: a PLINK 1 .bed file, or any real operand of `gemm`.
        out: where the matrix is stored, as for `gram`. By default a new ndarray. It is float32.
        {options}

    Returns:
        A `Result`, or with `threshold` the `Pairs`, without those of an individual with itself. With
            `dry_run`, the `Plan`, which reads nothing.

    Raises:
        InputError, BudgetError, BackendError, ExecutionError: as `gemm` does. `InputError` also if an element
            that is not missing is no genotype.

    >>> import oocgemm
    >>> oocgemm.ibs([[0, 1, 2, 1], [0, 1, 2, 1], [1, 1, 0, -1]], backend="host").out
    array([[1. , 1. , 0.5],
           [1. , 1. , 0.5],
           [0.5, 0.5, 1. ]], dtype=float32)
    """
    check_choices("ibs", measure=measure)
    calls = _opened("ibs", x, out, (axis, uplo, threshold), missing, chromosomes, options)
    if not dry_run:
        calls.counted()
    kind = "shared_alleles" if measure == "similarity" else measure
    return calls.outcome(Combined(kind), dry_run=dry_run)


class _Called(NamedTuple):
    """The genotypes of a call: its request without terms, the opened matrix, and the code of missing ones."""

    request: Request
    matrix: Matrix
    code: float

    @property
    def variant_axis(self) -> int:
        return int(not op_of("trans_a", self.request.a.op).swaps)

    def counted(self) -> GenotypeCounts:
        """Count genotypes of individuals, after a check of the place of the result. Raises `InputError`."""
        check_places(self.request, 0)
        sweep, where = None, self.request.where
        if backends.resolve(where.backend) == "cuda" and not where.is_distributed:
            first = where.devices[0] if isinstance(where.devices, tuple) else where.device
            sweep = sweep_of(self.request, backends.open_backend(where.backend, first))
        return genotypes_of(self.matrix, self.variant_axis, self.code, memory_of(self.request), sweep)

    def outcome(self, step: Combined | Kinship, *, dry_run: bool) -> Result | Pairs | Plan:
        """Compute what a step makes of its terms."""
        code, stores_c = self.code, self.request.into.stores_c
        centered = (ElementStep("shift", constants=(-1.0,)), *or_zero(code - 1))
        maps: dict[str, Map] = {
            "m": known(code),
            "h": (ElementStep("equal", constants=(1.0,)),),
            "x": centered,
            "q": (*centered, ElementStep("square")),
        }
        factors = _TERMS[step.step.kind].split()
        letters = sorted(set("".join(factors)))
        used = tuple(maps[letter] for letter in letters)
        pairs = tuple((letters.index(each[0]), letters.index(each[1])) for each in factors)
        steps = (step, *([Cast("float32")] if stores_c else []))
        request = replace(self.request, terms=Terms(used, used, pairs, largest=1), epilogue=steps)
        if stores_c:
            return outcome(request, dry_run=dry_run)
        found: Any = outcome(request, selected, dry_run=dry_run)
        return found  # type: ignore[no-any-return]


def _opened(
    function: str,
    x: Operand,
    out: Output,
    how: tuple[int, str | None, float | None],
    missing: float | None,
    chromosomes: Chromosomes | None,
    options: Any,
) -> _Called:
    """Open genotypes. `how` is the axis of individuals, the triangle that is stored, and the threshold."""
    axis, uplo, threshold = how
    check_names(function, options, DenseOptions)
    request = parse_gram(x, out, axis, uplo, options)
    if threshold is not None:
        check_options(function, options, SelectionOptions)
        if out is not None or uplo is not None:
            raise InputError("the result of threshold is kept in memory, all pairs of it: drop out and uplo")
        request = replace(request, into=replace(selection_of(None, threshold), names=("X", "X")))
    matrix = stores.open_matrix("X", request.a.given, decode=request.decode)
    named = matrix if axis == 0 and isinstance(matrix, stores.Genotypes) else None
    chosen = chosen_variants(request.a.given, named, chromosomes, 0)
    if not chosen.all():
        request = request.with_operands(given=keep(request.a.given, cols=chosen))
        matrix = stores.open_matrix("X", request.a.given, decode=request.decode)
    if missing == MISSING and matrix.dtype.kind in "bu":
        missing = None  # no element can have the default code
    found = Transform(missing=missing).code("X", matrix.dtype)
    declared, code = known_missing(matrix)[1], nan if found is None else found
    if declared is None and matrix.dtype.name in _BYTES:
        return _Called(request, matrix, code)
    # Missing elements become NaN: those that X declares, or else those that are `missing`.
    request = request.with_operands(absent=code if declared is None else nan)
    return _Called(request, completed(matrix, request.a, request), nan)
