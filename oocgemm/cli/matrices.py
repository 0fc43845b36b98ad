"""Operands of commands that are not one matrix at one path: several files, and arrays of more dimensions.

A pattern, such as ``chr*.bed``, and a list of paths in a file, ``@files.txt``, stand for the matrices at
these paths, which are joined (`oocgemm.concat`). Files of a pattern are in natural order: chr2 before chr10.
The axes of each array are folded by ``--rows``, ``--cols`` and ``--isel`` (`oocgemm.as_matrix`). Of the
matrix, ``--keep-rows`` and ``--keep-cols`` keep a part (`oocgemm.keep`), and of .bed files ``--keep``,
``--extract``, ``--maf`` and ``--chromosomes`` (`oocgemm.genotypes`).
"""

import glob
import os
import re
from typing import Any

from oocgemm.cli.process import print_note
from oocgemm.errors import InputError
from oocgemm.stores.folded import as_matrix
from oocgemm.stores.formats import MARK
from oocgemm.stores.genetics import is_bed
from oocgemm.stores.joined import concat as join
from oocgemm.stores.kept import keep


def viewed(
    name: str,
    path: str,
    *,
    rows: str | None,
    cols: str | None,
    isel: str | None,
    concat: int | None,
    keep_rows: str | None,
    keep_cols: str | None,
    shown: bool = True,
    **filters: Any,
) -> Any:
    """Return the operand for what was given on the command line. Raises `InputError`.

    With `shown`, print the order of several files.
    """
    paths = _paths(name, path)
    parts: list[Any] = paths
    if not (rows is cols is isel is None):
        parts = [as_matrix(each, _axes(rows), _axes(cols), _parts(isel)) for each in paths]
    found = parts[0]
    if len(parts) > 1:
        axis = concat if concat is not None else int(is_bed(paths[0]))
        if shown:
            print_note(f"{name} has {len(paths)} parts, joined along axis {axis}: {', '.join(paths)}")
        found = join(parts, axis)
    if any(value is not None for value in filters.values()):
        from oocgemm.jobs.genotypes import genotypes

        if not is_bed(paths[0]):
            named = ", ".join(each for each, value in filters.items() if value is not None)
            raise InputError(f"{name}: {paths[0]} is no .bed file, which {named} would filter: drop {named}")
        found = genotypes(found, **filters)
    return found if keep_rows is keep_cols is None else keep(found, keep_rows, keep_cols)


def _paths(name: str, path: str) -> list[str]:
    """Return the paths for which a pattern or list stands; any other path alone."""
    if "://" in path or os.path.lexists(path):
        return [path]
    if path.startswith("@"):
        return _listed(name, path[1:])
    file, mark, dataset = path.partition(MARK)
    if not glob.has_magic(file):
        return [path]
    found = sorted(glob.glob(file), key=natural)
    if not found:
        raise InputError(f"{name}: no file matches {file}: check the pattern")
    return [f"{each}{mark}{dataset}" for each in found]


def _listed(name: str, path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.strip() for line in file]
    except (OSError, ValueError) as error:
        raise InputError(f"{name}: the list {path} cannot be read: {error}") from error
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise InputError(f"{name}: the list {path} has no paths: write one per line")
    return found


def natural(path: str) -> list[tuple[int, str]]:
    """Return a key that sorts numbers in paths by their values.

    >>> sorted(["chr10.bed", "chr2.bed", "chrX.bed"], key=natural)
    ['chr2.bed', 'chr10.bed', 'chrX.bed']
    """
    parts = re.split(r"(\d+)", path)
    return [(int(part), "") if at % 2 else (-1, part) for at, part in enumerate(parts)]


def _axes(given: str | None) -> list[str | int] | None:
    """Return the axes in a text: positions, or names."""
    if given is None:
        return None
    return [_axis(part.strip()) for part in given.split(",") if part.strip()]


def _axis(text: str) -> str | int:
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def _parts(given: str | None) -> dict[str | int, int | slice] | None:
    """Return the parts of axes in a text such as ``level=0,time=0:100``."""
    if given is None:
        return None
    found: dict[str | int, int | slice] = {}
    for part in given.split(","):
        axis, equals, text = (each.strip() for each in part.partition("="))
        ends = re.fullmatch(r"(-?\d+)?(:)?(-?\d+)?", text)
        if not axis or not equals or not ends or not text or (ends[3] and not ends[2]):
            raise InputError(
                f"--isel: {part!r} is not a part of an axis: write AXIS=INDEX or AXIS=START:STOP, such as "
                "level=0 or time=0:100"
            )
        first, last = (None if end is None else int(end) for end in (ends[1], ends[3]))
        found[_axis(axis)] = slice(first, last) if ends[2] else int(text)
    return found
