"""The verb `grm`: the genetic relationship matrix of the individuals in a matrix of genotypes."""

import logging
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, Unpack, overload

import numpy as np

from oocgemm import stores
from oocgemm.errors import InputError
from oocgemm.jobs.execute import check_places
from oocgemm.jobs.option_groups import DenseOptions, Operand, Output
from oocgemm.jobs.options import GrmArguments, check_choices, check_names, documented
from oocgemm.jobs.request import Destination, Known, Request, parse_gram
from oocgemm.jobs.run import Plan, Result, plan_request, run_request
from oocgemm.jobs.stats import Stats, stats_of
from oocgemm.jobs.steps import DivideOrZero
from oocgemm.jobs.transforming import accepted, memory_of
from oocgemm.planning import Op
from oocgemm.stores import Array, Genotypes
from oocgemm.stores.capabilities import MISSING
from oocgemm.stores.genetics import (
    ALL,
    Chromosomes,
    companions,
    is_grm,
    on_chromosomes,
    write_companions,
)
from oocgemm.stores.transform import Transform
from oocgemm.values import dataclass

logger = logging.getLogger("oocgemm")

# Genotypes of variants on other chromosomes are divided by this. Their products are 0 in every dtype.
_VANISHING = 1e300


@dataclass(frozen=True, repr=False)
class Relationships(Result):
    """The `Result` of `grm`, with counts of variants.

    Attributes:
        variants: number of variants that the matrix was computed from.
        excluded: number of variants that were left out: all known genotypes are homozygous for the same
            allele, or none is known.
        elsewhere: number of variants that were left out, because they are on other chromosomes.
        counts: with `pairwise`, the array with the number of variants that are known for both individuals of
            each pair. It is stored beside the matrix, or in memory as the matrix is. None if no genotype is
            missing.
    """

    variants: int = 0
    excluded: int = 0
    elsewhere: int = 0
    counts: Any = None


@overload
def grm(
    x: Operand, out: Output = None, *, dry_run: Literal[False] = False, **options: Unpack[GrmArguments]
) -> Relationships: ...
@overload
def grm(
    x: Operand, out: Output = None, *, dry_run: Literal[True], **options: Unpack[GrmArguments]
) -> tuple[Plan, ...]: ...
@documented("grm", DenseOptions)
def grm(
    x: Operand,
    out: Output = None,
    *,
    method: str = "gcta",
    axis: int = 0,
    uplo: str | None = None,
    missing: float | None = MISSING,
    cast: str | None = None,
    pairwise: bool = False,
    chromosomes: Chromosomes | None = None,
    dry_run: bool = False,
    **options: Unpack[DenseOptions],
) -> Relationships | tuple[Plan, ...]:
    """Compute the genetic relationship matrix (GRM) of the individuals in a matrix of genotypes.

    A genotype is the number of copies of one allele: 0, 1 or 2. With the frequency p of this allele among the
    known genotypes of a variant, the relationship of the individuals j and k is, over all variants::

        gcta        mean of (x_j - 2 p) (x_k - 2 p) / (2 p (1 - p))
        vanraden    sum of (x_j - 2 p) (x_k - 2 p), divided by the sum of 2 p (1 - p)

    A missing genotype is replaced by 2 p. In a .bed file, only the variants on the `chromosomes` are used, by
    default the autosomes. Variants with p = 0 or 1 and those without any known genotype are left out. The
    genotypes are read twice, the first time for the frequencies, with `stats`. If they are in files, `stats`
    caches the frequencies for later calls.

    Args:
        x: the genotypes, individuals x variants: a PLINK 1 .bed file, or any real operand of `gemm`. It may
            have elements between 0 and 2 (dosages).
        out: where the matrix is stored, as for `gram`, or the path of a new .grm.bin file of GCTA, such as
            "x.grm.bin". Then x.grm.id and x.grm.N.bin are written beside it. The IDs are those in the .fam
            file of x, or row numbers from 1 if x is no .bed file.
        {options}

    Returns:
        The `Relationships`, a `Result` with the number of variants. `out` of a .grm.bin file is a memory map
            of the elements on and below the diagonal, row by row. With `dry_run`, a tuple with the plan of
            the matrix. With `pairwise`, the plan that counts the variants known for both individuals of each
            pair comes first. A dry run does not read the genotypes.

    Raises:
        InputError, BudgetError, BackendError, ExecutionError: as `gemm` does. `InputError` also if an element
            that is not missing is below 0 or above 2, if all variants are left out, and if none is on a
            chromosome that was passed.

    >>> import oocgemm
    >>> oocgemm.grm([[0, 2], [1, 2], [2, -1]], backend="host").out
    array([[ 2.,  0., -2.],
           [ 0.,  0.,  0.],
           [-2.,  0.,  2.]])
    """
    check_names("grm", options, DenseOptions)
    check_choices("grm", method=method, cast=cast)
    x, out = stores.located("X", x), stores.located("C", out)
    if isinstance(out, str) and out.endswith(".grm"):
        raise InputError(
            f"C at {out}: GCTA's files are written to a path that ends in .grm.bin: pass {out}.bin, or "
            f"{out}.zarr for an array"
        )
    gcta = Path(out) if isinstance(out, str) and is_grm(out) else None
    if gcta is not None and uplo not in (None, "lower"):
        raise InputError(f"uplo = {uplo!r}: a .grm.bin file has the lower triangle: drop uplo")
    request = parse_gram(x, out, axis, uplo, dict[str, Any](options))  # type: ignore[arg-type]
    matrix = stores.open_matrix("X", x, decode=request.decode)
    # The genotypes of .bed files, whose individuals and variants have names.
    named = matrix if axis == 0 and isinstance(matrix, Genotypes) else None
    if missing == MISSING and matrix.dtype.kind in "bu":
        missing = None  # no element can have the default code
    known = Transform(missing=missing)
    known.result("X", matrix.dtype)  # refuses complex operands
    matrix, op = stores.by_rows(accepted(matrix, known), Op.T if axis else Op.N)
    chosen = chosen_variants(x, named, chromosomes, matrix.shape[1 - int(op.swaps)])
    individuals: Sequence[tuple[str, str]] = ()
    if gcta is not None and not dry_run:
        individuals = _individuals(named, matrix.shape[int(op.swaps)])
        if not (request.durability.resume or request.durability.overwrite):
            _check_free(gcta)
    if not dry_run:
        check_places(request, _bytes_stored(request, matrix.shape[int(op.swaps)], counts=gcta is not None))
    # A dry run reads nothing: its plans have the numbers of genotypes with frequencies of one half.
    found = _halves(len(chosen)) if dry_run else stats_of(matrix, int(op.swaps), known, memory_of(request))
    _check(found, ("column", "row")[axis])
    change, divisor, used = _standardizing(found, method, chosen)
    pairwise, variants = pairwise and (dry_run or bool(found.missing[used].any())), int(used.sum())
    del found  # 48 bytes per variant
    transform = Transform(missing=missing, cast=cast, **change)
    request = replace(request, alpha=1 / divisor).with_operands(transform=transform)
    counting = _counting(request, matrix.dtype, used, out) if pairwise else None
    if dry_run:
        return tuple(map(plan_request, filter(None, (counting, request))))
    elsewhere = int((~chosen).sum())
    excluded = len(chosen) - elsewhere - variants
    logger.info("%d of %d variants are on other chromosomes", elsewhere, len(chosen))
    logger.info("%d others have one allele or no known genotype", excluded)
    counted: Result | None = None
    if counting is not None:
        check_places(request, _bytes_stored(request, matrix.shape[int(op.swaps)], counts=True))
        counted = run_request(counting)
        divided = (DivideOrZero(_place(counted, request)),)
        request = replace(request, alpha=variants / divisor, epilogue=divided)
    result = run_request(request)
    if gcta is not None:
        write_companions(gcta, individuals, None if pairwise else variants)
    facts = {field.name: getattr(result, field.name) for field in fields(Result)}
    counts = None if counted is None else counted.out
    return Relationships(**facts, variants=variants, excluded=excluded, elsewhere=elsewhere, counts=counts)


def _halves(count: int) -> Stats:
    """Return statistics for planning, of variants whose alleles are equally frequent."""
    ones = np.ones(count)
    return Stats(ones, np.zeros(count), ones, ones, ones, ones)


def _bytes_stored(request: Request, individuals: int, *, counts: bool) -> int:
    """Return the minimum number of bytes of the matrix and, with `counts`, of the counts of variants."""
    if request.compressor not in (None, "none"):
        return 0
    elements = individuals * (individuals + 1) // 2 if request.into.uplo != "full" else individuals**2
    return (1 + counts) * 4 * elements


def chosen_variants(x: Any, named: Genotypes | None, chromosomes: Chromosomes | None, extent: int) -> Array:
    """Return whether each of the `extent` variants of X is on one of the chromosomes."""
    if named is not None:
        return on_chromosomes(named.chromosomes(), stores.leaves(x), chromosomes)
    if chromosomes not in (None, ALL):
        raise InputError(
            f"chromosomes = {chromosomes!r}: chromosomes are named in the .bim file of a .bed file with "
            "individuals as rows, and X is no such file: drop chromosomes (--chromosomes), and select the "
            "variants in X"
        )
    return np.ones(extent, bool)


def _counting(request: Request, stored: np.dtype[Any], used: Array, out: Any) -> Request:
    """Return the request that counts the variants that are known for both individuals of each pair."""
    transform = request.a.transform
    assert transform is not None
    dtype = transform.result("X", stored).name
    counting = replace(
        request,
        c=Destination.parse(_beside(out)),
        alpha=1.0,
        out_dtype="float64" if dtype == "float64" else "float32",
        timeline=None,
    )
    return counting.with_operands(transform=None, known=Known(transform.code("X", stored), used))


def _beside(out: Any) -> Any:
    """Return the place of the counts of variants for a place of the matrix: a path, or None in memory.

    >>> _beside("a/x.zarr"), _beside("x.grm.bin")
    ('a/x.counts.zarr', 'x.grm.N.bin')
    """
    if not isinstance(out, str):
        return None
    if is_grm(out):
        return str(companions(Path(out))[1])
    folder, slash, name = out.rpartition("/")
    stem, dot, suffix = name.rpartition(".")
    return f"{folder}{slash}{stem}.counts.{suffix}" if dot else f"{out}.counts"


def _place(counted: Result, request: Request) -> Any:
    """Return the counts of variants as an operand: their path, or the array."""
    return _beside(request.c.path) if request.c.path else counted.out


def _standardizing(found: Stats, method: str, chosen: Array) -> tuple[dict[str, Any], float, Array]:
    """Return the transform of genotypes, the divisor of the product, and flags of the variants that are used.

    Variants outside of `chosen` are not used.

    Raises:
        InputError: all variants are left out.
    """
    # 2 p (1 - p), where the mean is 2 p. It is NaN if no genotype is known.
    variance = found.mean * (1 - found.mean / 2)
    used = (variance > 0) & chosen
    count = int(used.sum())
    if not count:
        raise InputError(
            f"none of the {chosen.sum()} variants of X has two alleles among its known genotypes: check "
            "whether axis (--axis) and missing (--missing) fit X"
        )
    center = np.where(found.count > 0, found.mean, 0)
    change: dict[str, Any] = {"impute": center, "center": center}
    # Centered elements of variants with one allele are 0, whatever their divisor is.
    scale = np.where(chosen, 1.0, _VANISHING)
    if method == "vanraden":
        return change if chosen.all() else change | {"scale": scale}, float(variance[used].sum()), used
    return change | {"scale": scale * np.sqrt(np.where(used, variance, 1))}, float(count), used


def _individuals(named: Genotypes | None, count: int) -> Sequence[tuple[str, str]]:
    """Return the IDs of the individuals for a .grm.id file: those of a .bed file, else numbers from 1."""
    if named is not None:
        return named.individuals()
    return [(str(number), str(number)) for number in range(1, count + 1)]


def _check_free(path: Path) -> None:
    """Raise `InputError` if a file exists that belongs to a new .grm.bin file at `path`."""
    if found := [str(place) for place in (path, *companions(path)) if place.exists()]:
        raise InputError(
            f"files exist that would be replaced: {', '.join(found)}: remove them, or give C another path"
        )


def _check(found: Stats, line: str) -> None:
    """Raise `InputError` if an element that is not missing is not a genotype.

    `line` is the word for a variant in messages: "row" or "column" of X.
    """
    with np.errstate(invalid="ignore"):
        fine = (found.count == 0) | ((found.min >= 0) & (found.max <= 2))
    if (wrong := np.flatnonzero(~fine)).size:
        first = wrong[0]
        least, most = found.min[first], found.max[first]
        code = f"{-9 if least >= 0 else least:g}"
        raise InputError(
            f"{line} {first} of X has elements from {least:g} to {most:g} (one of {wrong.size} such "
            f"{line}s), and genotypes are 0, 1 and 2: pass the code of missing genotypes, such as missing="
            f"{'np.nan' if code == 'nan' else code} (--missing {code}), or replace these elements"
        )
