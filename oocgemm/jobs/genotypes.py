"""Filters of .bed files: individuals and variants that are kept, as by PLINK's --keep, --extract and --maf.

The filters are applied in PLINK's order: individuals first. The frequencies of alleles are those among the
individuals that are kept. Neither individuals nor variants change their order.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from oocgemm import stores
from oocgemm.errors import InputError, warn_of_data
from oocgemm.jobs.stats import stats
from oocgemm.planning.units import counted
from oocgemm.stores import Array, Genotypes
from oocgemm.stores.genetics import Chromosomes, on_chromosomes
from oocgemm.stores.joined import concat
from oocgemm.stores.kept import Kept

Ids = Sequence[tuple[str, str]]
T = TypeVar("T", str, tuple[str, str])

# Maximum number of IDs that a message lists.
_LISTED = 3


def genotypes(
    x: Any,
    *,
    keep: str | os.PathLike[str] | Ids | None = None,
    extract: str | os.PathLike[str] | Sequence[str] | None = None,
    maf: float | None = None,
    chromosomes: Chromosomes | None = None,
) -> Kept:
    """Return some individuals and variants of .bed files as a matrix that every verb takes.

    Nothing is copied. With `maf`, the genotypes are read once for their frequencies, which are cached.

    Args:
        x: the path of a .bed file, or a sequence of paths, such as one per chromosome, whose individuals must
            agree; or what `concat` or `keep` makes of .bed files.
        keep: the individuals that are kept: the path of a file with a family ID and an individual ID in each
            line, as for PLINK's --keep, or a sequence of such pairs. None keeps all.
        extract: the variants that are kept: the path of a file with variant IDs, as for PLINK's --extract,
            or a sequence of them. None keeps all.
        maf: the minimum frequency of the rarer allele, among the known genotypes of individuals that are
            kept. With a number above 0, variants without any known genotype are left out too.
        chromosomes: the chromosomes whose variants are kept, such as "1-22,X", as for `grm`. None keeps all.

    Returns:
        An operand for the verbs of this package, with a row per individual and a column per variant, in the
            order of the files.

    Raises:
        InputError: a file cannot be read, or nothing is kept.

    Warns:
        DataWarning: IDs are not in the .bed files.
    """
    several = not (stores.is_path(x) or isinstance(x, stores.Composite))
    x = stores.located("X", concat(list(x), axis=1) if several else x)
    matrix = stores.open_matrix("X", x)
    if not isinstance(matrix, Genotypes) or matrix.variant_axis != 1:
        raise InputError("X has no genotypes of .bed files: pass the path of a .bed file, or several paths")
    rows = None if keep is None else _matching("keep", keep, _pairs, matrix.individuals())
    cols: Array | None = None
    if chromosomes is not None:
        cols = on_chromosomes(matrix.chromosomes(), stores.leaves(x), chromosomes)
    if extract is not None:
        named = _matching("extract", extract, _words, matrix.variant_ids())
        cols = named if cols is None else cols & named
        _check_any("extract", cols, "none of these variants is on the chromosomes")
    if maf is not None and not (_is_number(maf) and 0 <= maf <= 0.5):
        raise InputError(f"maf = {maf!r}: pass a frequency from 0 to 0.5, such as 0.01")
    if maf:
        cols = np.ones(matrix.shape[1], bool) if cols is None else cols
        share = stats(Kept(x, rows, cols)).mean / 2
        with np.errstate(invalid="ignore"):
            cols[cols] = np.minimum(share, 1 - share) >= maf  # false for NaN
        _check_any("maf", cols, f"no variant has two alleles of a frequency of at least {maf:g}")
    return Kept(x, rows, cols)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def _check_any(option: str, kept: Array, what: str) -> None:
    if not kept.any():
        raise InputError(f"{option}: {what}, so that nothing is kept: pass other filters")


def _matching(option: str, given: Any, read: Callable[[str, list[str]], T], known: Sequence[T]) -> Array:
    """Return which of the known IDs are given, in a file or a sequence. Warns of other IDs."""
    place = option
    if stores.is_path(given):
        place = f"{option}: {os.fspath(given)}"
        wanted = set(_read(option, os.fspath(given), read))
    elif isinstance(given, Sequence | np.ndarray) and not isinstance(given, bytes):
        wanted = {read(option, [each] if isinstance(each, str) else list(each)) for each in given}
    else:
        raise InputError(f"{option} = {given!r}: pass the path of a file, or a sequence of IDs")
    kept = np.fromiter((each in wanted for each in known), bool, len(known))
    absent = sorted(wanted - set(known))
    shown = ", ".join(each if isinstance(each, str) else " ".join(each) for each in absent[:_LISTED])
    shown += ", ..." if len(absent) > _LISTED else ""
    count = counted(len(wanted), "ID")
    if not kept.any():
        raise InputError(f"{place} has {count} ({shown}), and X has none of them: pass those of X")
    if absent:
        warn_of_data(f"{place}: {len(absent)} of {count} are not in X ({shown})")
    return kept


def _read(option: str, path: str, read: Callable[[str, list[str]], T]) -> list[T]:
    """Return the IDs in a file. Lines that begin with #, and empty lines, are left out."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            lines = enumerate(file.read().splitlines(), 1)
    except OSError as error:
        raise InputError(f"{option}: {path} cannot be read: {error.strerror}") from error
    where = partial("{0}: line {1} of {2}".format, option)
    return [
        read(where(number, path), line.split()) for number, line in lines if line.strip() and line[0] != "#"
    ]


def _pairs(place: str, words: list[str]) -> tuple[str, str]:
    if len(words) < 2:
        raise InputError(f"{place} has no family ID and individual ID: write both, separated by a space")
    return words[0], words[1]


def _words(place: str, words: list[str]) -> str:
    if len(words) != 1:
        raise InputError(f"{place} has {len(words)} words: write one variant ID per line")
    return words[0]
