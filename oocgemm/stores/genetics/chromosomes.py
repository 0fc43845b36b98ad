"""Find the variants of a .bed file that are on some chromosomes, by the names in its .bim file.

PLINK writes the names of chromosomes in several ways. "X", "x", "chrX" and "23" are equal, and so are Y and
24, XY and 25, MT and 26. The numbers are those of humans. So they are not equal in a file with numbers above
26, or with names of both kinds.
"""

import re
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from oocgemm.errors import DataWarning, InputError
from oocgemm.stores.base import Array

# What a caller may pass: a text such as "1-22,X", a number, or several of them.
Chromosomes = str | int | Sequence[str | int]

AUTOSOMES, LAST_AUTOSOME, LAST_OF_HUMANS = "autosomes", 22, 26
ALL, UNPLACED = "all", "0"
_NUMBERS = {"X": "23", "Y": "24", "XY": "25", "MT": "26"}
_SYNONYMS = {"M": "MT", "PAR1": "XY", "PAR2": "XY"}
# Names that a message shows, at most.
_SHOWN = 12


def on_chromosomes(path: Path, given: Chromosomes | None) -> Array:
    """Return whether each variant of a .bed file is on one of the given chromosomes.

    Args:
        path: of the .bed file.
        given: the chromosomes. None: the autosomes, or all if the .bim file names no chromosome, but has 0 in
            each line.

    Raises:
        InputError: the .bim file cannot be read, or names no variant on a chromosome that is given.
    """
    place = path.with_suffix(".bim")
    names, inverse = np.unique(_first_words(place), return_inverse=True)
    codes = [_code(str(name)) for name in names]
    if given is None and set(codes) <= {UNPLACED}:
        given = ALL
    numbers = {int(code) for code in codes if code.isdigit()}
    highest = max(numbers, default=0)
    both = numbers & {int(x) for x in _NUMBERS.values()} and set(codes) & _NUMBERS.keys()
    human = highest <= LAST_OF_HUMANS and not both
    if given is None and highest > LAST_OF_HUMANS:
        warnings.warn(
            f"{place} names chromosome {highest}, and the variants on chromosomes 1 to {LAST_AUTOSOME}, the "
            f"autosomes of humans, are used: pass those of this species as chromosomes (--chromosomes), such "
            f"as 1-{highest}, or {ALL}",
            DataWarning,
            stacklevel=2,
        )
    known = [_numbered(code) if human else code for code in codes]
    wanted = np.zeros(len(known), bool)
    for entry in _entries(AUTOSOMES if given is None else given):
        matching = _matching(entry, known, human=human)
        if not any(matching):
            shown = ", ".join(map(str, names[:_SHOWN])) + (", ..." if len(names) > _SHOWN else "")
            raise InputError(
                f"no variant of {path} is on chromosome {entry}: {place.name} names {shown}; pass some of "
                f"these as chromosomes (--chromosomes), or {ALL}"
            )
        wanted |= matching
    return np.asarray(wanted[inverse])


def _matching(entry: str, known: Sequence[str], *, human: bool) -> list[bool]:
    """Return which of the known codes an entry stands for."""
    if entry == ALL:
        return [True] * len(known)
    span = re.fullmatch(r"(\d+)-(\d+)", f"1-{LAST_AUTOSOME}" if entry == AUTOSOMES else entry)
    if span:
        first, last = map(int, span.groups())
        return [code.isdigit() and first <= int(code) <= last for code in known]
    code = _code(entry)
    return [(_numbered(code) if human else code) == other for other in known]


def _entries(given: Chromosomes) -> Iterable[str]:
    """Return the names and ranges that a caller passed. Raises `InputError` for anything else."""
    parts = [given] if isinstance(given, str | int | np.integer) else given
    found = list[str]()
    if isinstance(parts, Iterable):
        for part in parts:
            if isinstance(part, bool) or not isinstance(part, str | int | np.integer):
                break
            found += [word.strip() for word in str(part).split(",")]
        else:
            if found and all(found):
                return found
    raise InputError(
        f"chromosomes = {given!r}: pass names, numbers or ranges, such as '1-22,X', '{AUTOSOMES}' or '{ALL}'"
    )


def _first_words(place: Path) -> list[str]:
    """Return the first word of each line of a file."""
    try:
        with open(place, encoding="utf-8", errors="surrogateescape") as file:
            return [(line.split(maxsplit=1) or [UNPLACED])[0] for line in file]
    except OSError as error:
        raise InputError(f"{place} cannot be read: {error.strerror}") from error


def _code(name: str) -> str:
    """Return the name of a chromosome without "chr", leading zeros and lower case.

    >>> _code("chr01"), _code("chrM"), _code("x")
    ('1', 'MT', 'X')
    """
    short = name.upper().removeprefix("CHR")
    return str(int(short)) if short.isascii() and short.isdigit() else _SYNONYMS.get(short, short)


def _numbered(code: str) -> str:
    return _NUMBERS.get(code, code)
