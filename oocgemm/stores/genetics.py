"""Files of genetics: genotypes of PLINK 1 (.bed), and relationship matrices of GCTA (.grm.bin).

A .bed file is a read-only matrix of int8 with a row per individual. The file has two bits per genotype, and a
line of whole bytes per variant::

    bits    genotype                    element
    00      homozygous for allele 1     2
    10      heterozygous                1
    11      homozygous for allele 2     0
    01      missing                     MISSING

An element counts copies of allele 1 (A1, column 5 of the .bim file), as PLINK 1 does. The individual whose
number in a byte is j has the bits 2 j and 2 j + 1. The .fam and .bim files beside the .bed file have a line
per individual and per variant (https://www.cog-genomics.org/plink/1.9/formats#bed).

`on_chromosomes` finds variants by the names of chromosomes in the .bim file. PLINK writes these names in
several ways. "X", "x", "chrX" and "23" are equal, and so are Y and 24, XY and 25, MT and 26. The numbers are
those of humans. So they are not equal in a file with numbers above 26, or with names of both kinds.

GCTA's file of a genetic relationship matrix, X.grm.bin, has the elements on and below the diagonal, row by
row, in little-endian float32, without a header. So element (i, j) is number ``i (i + 1) / 2 + j``. X.grm.id
has the family ID and the individual ID of each row, and X.grm.N.bin the number of variants that each element
was computed from (https://yanglab.westlake.edu.cn/software/gcta/#MakingaGRM).
"""

import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, lru_cache
from math import isqrt
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np

from oocgemm.errors import DataWarning, InputError, NotFoundError
from oocgemm.planning import GemmProblem, Layout, Lines
from oocgemm.planning.tiling import Range, ceil_div
from oocgemm.stores.base import (
    Array,
    Matrix,
    NewArray,
    ReadOnly,
    Store,
    checked,
    described,
    file_identities,
    is_path,
    pieces,
    refuse_zarr_options,
)
from oocgemm.stores.capabilities import (
    MISSING,
    found_locally,
)
from oocgemm.stores.files import (
    Opener,
    OpenFile,
    fingerprints,
    open_regular,
    read_fully,
    read_regular,
    sync_path,
    worth_caching,
    write_fully,
)
from oocgemm.stores.formats import check_found
from oocgemm.stores.lines import StoredLines, read_block, scratch_bytes
from oocgemm.stores.npy import NpyFiles, NpyMatrix, in_new_file

# The chromosomes that a caller may pass: a text such as "1-22,X", a number, or a sequence of both.
Chromosomes = str | int | Sequence[str | int]

AUTOSOMES, LAST_AUTOSOME, LAST_OF_HUMANS = "autosomes", 22, 26
ALL, UNPLACED = "all", "0"
_NUMBERS = {"X": "23", "Y": "24", "XY": "25", "MT": "26"}
_SYNONYMS = {"M": "MT", "PAR1": "XY", "PAR2": "XY"}
# Maximum number of names that a message shows.
_SHOWN = 12


def on_chromosomes(words: Sequence[str], paths: Sequence[str], given: Chromosomes | None) -> Array:
    """Return whether each variant is on one of the given chromosomes. Raises `InputError`.

    `words` has the name of the chromosome of each variant, from the .bim files of .bed files at `paths`. If
    `given` is None, the chromosomes are the autosomes. If the .bim file has 0, for an unknown chromosome,
    in each line, they are all chromosomes.
    """
    place = Path(paths[0]).with_suffix(".bim")
    names, inverse = np.unique(words, return_inverse=True)
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
            files = ", ".join(paths[:_SHOWN])
            shown = ", ".join(map(str, names[:_SHOWN])) + (", ..." if len(names) > _SHOWN else "")
            raise InputError(
                f"no variant of {files} is on chromosome {entry}: {place.name} names {shown}; pass some of "
                f"these as chromosomes (--chromosomes), or {ALL}"
            )
        wanted |= matching
    return np.asarray(wanted[inverse])


def _matching(entry: str, known: Sequence[str], *, human: bool) -> list[bool]:
    if entry == ALL:
        return [True] * len(known)
    span = re.fullmatch(r"(\d+)-(\d+)", f"1-{LAST_AUTOSOME}" if entry == AUTOSOMES else entry)
    if span:
        first, last = map(int, span.groups())
        return [code.isdigit() and first <= int(code) <= last for code in known]
    code = _code(entry)
    return [(_numbered(code) if human else code) == other for other in known]


def _entries(given: Chromosomes) -> Iterable[str]:
    """Return the names and ranges in `given`. Raises `InputError` if it has anything else."""
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


def _code(name: str) -> str:
    """Return the name of a chromosome without "chr", leading zeros and lower case.

    >>> _code("chr01"), _code("chrM"), _code("x")
    ('1', 'MT', 'X')
    """
    short = name.upper().removeprefix("CHR")
    return str(int(short)) if short.isascii() and short.isdigit() else _SYNONYMS.get(short, short)


def _numbered(code: str) -> str:
    return _NUMBERS.get(code, code)


SUFFIX = ".bed"
# Files beside a .bed file, which differ from its name in the suffix, and what each of their lines describes.
COMPANIONS = {".fam": "individual", ".bim": "variant"}
# Elements by their two bits, the high one first.
ELEMENTS = (2, MISSING, 1, 0)

_MAGIC, _BY_VARIANT, _BY_INDIVIDUAL = b"\x6c\x1b", b"\x01", b"\x00"
_HEADER = 3  # bytes
PER_BYTE = 4  # individuals
# About this many bytes of the file are decoded at a time. Temporary arrays for them take nine bytes per byte:
# the bytes, their elements, and the indices into which `numpy.take` converts pairs of bytes.
_SLAB = 128 << 10
_SLAB_BYTES = 2 * 9 * _SLAB  # a slab has less than twice its nominal bytes


class BedFiles(Store):
    """Open PLINK 1 .bed files. A path belongs to this store if it ends in .bed."""

    kind = "a PLINK .bed file"
    has_genotypes = True

    def matches(self, operand: Any) -> bool:
        return is_path(operand) and is_bed(os.fspath(operand))

    def open(self, name: str, operand: Any, *, writable: bool = False, journal: Path | None = None) -> Matrix:
        if writable:
            raise InputError(f"{name} at {operand} is read-only: give a path that ends in .zarr or .npy")
        return open_bed(name, Path(operand))

    def companions(self, path: str) -> list[Path]:
        return [Path(path).with_suffix(suffix) for suffix in COMPANIONS]

    def exists(self, path: str) -> bool:
        return found_locally(path)


class BedMatrix(ReadOnly):
    """The genotypes in a .bed file: a row per individual, or after `transposed` a row per variant."""

    what = "a .bed file"

    def __init__(
        self, name: str, path: Path, individuals: int, variants: int, *, by_variant: bool = False
    ) -> None:
        self.name, self._path, self._by_variant = name, path, by_variant
        self._individuals, self._variants = individuals, variants
        shape = (variants, individuals) if by_variant else (individuals, variants)
        self.shape, self.dtype = checked(name, shape, np.dtype(np.int8))
        self._line = ceil_div(individuals, PER_BYTE)
        self._size = _HEADER + variants * self._line
        self._past_cache = not worth_caching(self._size)
        self._opener = Opener()
        self.layout: Layout = Lines(
            contiguous=1 if by_variant else 0,
            line=individuals,
            itemsize=1,
            decode_bytes=scratch_bytes(past_cache=self._past_cache) + _SLAB_BYTES,
        )

    def transposed(self) -> Self:
        return type(self)(
            *(self.name, self._path, self._individuals, self._variants), by_variant=not self._by_variant
        )

    @property
    def variant_axis(self) -> int:
        return 0 if self._by_variant else 1

    def packed(self) -> Matrix:
        return NpyMatrix(self.name, self._path, (self._variants, self._line), self.dtype, _HEADER)

    def individuals(self) -> list[tuple[str, str]]:
        """Return the family ID and the individual ID of each individual."""
        return individuals_of(self._path)

    def chromosomes(self) -> list[str]:
        """Return the name of the chromosome of each variant."""
        return [line[0] if line else UNPLACED for line in _described(self._path)]

    def variant_ids(self) -> list[str]:
        """Return the ID of each variant."""
        return [line[1] if len(line) > 1 else "" for line in _described(self._path)]

    def positions(self) -> list[tuple[float, float]]:
        """Return the positions of each variant, in centimorgans and in base pairs."""
        found = list[tuple[float, float]]()
        for number, line in enumerate(_described(self._path), 1):
            try:
                genetic, physical = line[2].split(maxsplit=2)[:2]
                found.append((float(genetic), float(physical)))
            except (IndexError, ValueError):
                place = self._path.with_suffix(".bim")
                raise InputError(f"line {number} of {place} has no two positions after its ID") from None
        return found

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        variants, individuals, block = (rows, cols, out) if self._by_variant else (cols, rows, out.T)
        if not block.size:
            return
        first, last = individuals[0] // PER_BYTE, ceil_div(individuals[1], PER_BYTE)
        stored = StoredLines(_HEADER, self._line, np.dtype(np.uint8))
        with OpenFile(self._path, self._opener) as file:
            if file.size < self._size:
                raise EOFError(f"the file was truncated from {self._size} bytes to {file.size}")
            for (v0, v1), (b0, b1) in pieces(variants, (first, last), (1, _SLAB), _SLAB):
                raw = np.empty((v1 - v0) * (b1 - b0) + 1, np.uint8)  # the last byte completes a pair
                raw[-1] = 0
                lines = raw[:-1].reshape(v1 - v0, b1 - b0)
                read_block(file, stored, (v0, v1), (b0, b1), lines, past_cache=self._past_cache)
                decoded = _decoded(raw)[: PER_BYTE * lines.size].reshape(v1 - v0, -1)
                start, stop = max(individuals[0], PER_BYTE * b0), min(individuals[1], PER_BYTE * b1)
                np.copyto(
                    block[
                        v0 - variants[0] : v1 - variants[0], start - individuals[0] : stop - individuals[0]
                    ],
                    decoded[:, start - PER_BYTE * b0 : stop - PER_BYTE * b0],
                )

    def fingerprint(self) -> dict[str, object]:
        metadata = f"{self.shape} genotypes, {'variants' if self._by_variant else 'individuals'} as rows"
        return {"path": os.path.realpath(self._path), "metadata": metadata, **fingerprints([self._path])}

    def describe(self) -> dict[str, object]:
        # Decoding has a rate of its own, which differs from that of the disk.
        return described(self, "bed", str(self._path)) | {"codecs": ["plink"]}

    def identities(self) -> set[object]:
        return file_identities(self._path)


def is_bed(path: str) -> bool:
    return path.endswith(SUFFIX) and "://" not in path


def open_bed(name: str, path: Path) -> BedMatrix:
    """Open a .bed file. Raises `InputError` if it, .bim or .fam is missing, or if they do not match."""
    check_found(name, str(path))
    individuals, variants = (_count_lines(name, path, suffix) for suffix in COMPANIONS)
    try:
        with open(path, "rb", opener=open_regular) as file:
            head, size = file.read(_HEADER), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise InputError(f"{name}: {path} cannot be read: {error.strerror}") from error
    stem = path.with_suffix("")
    if head[:2] != _MAGIC:
        raise InputError(
            f"{name}: {path} is not a PLINK 1 .bed file, which begins with the bytes 6c 1b: it begins with "
            f"{head[:2].hex(' ') or 'nothing'}; write one by plink2 --make-bed"
        )
    if head[2:] == _BY_INDIVIDUAL:
        raise InputError(
            f"{name}: {path} stores genotypes individual by individual, and only files that store them "
            f"variant by variant are read: convert it by plink --bfile {stem} --make-bed --out "
            f"{stem}-new (PLINK 1.9)"
        )
    if head[2:] != _BY_VARIANT:
        raise InputError(
            f"{name}: byte 3 of {path} is {head[2:].hex() or 'missing'} and must be 01: it is damaged"
        )
    matrix = BedMatrix(name, path, individuals, variants)
    wanted = _HEADER + variants * ceil_div(individuals, PER_BYTE)
    if size != wanted:
        raise InputError(
            f"{name}: {path} has {size} bytes, and {variants} variants ({stem.name}.bim) of {individuals} "
            f"individuals ({stem.name}.fam) take {wanted}: it is truncated, or the three files do not belong "
            "together"
        )
    return matrix


def individuals_of(path: Path) -> list[tuple[str, str]]:
    """Return the family ID and the individual ID of each individual of a .bed file. Raises `InputError`."""
    found, wrong = _ids_in(_fam(path))
    if wrong:
        place = path.with_suffix(".fam")
        raise InputError(f"line {wrong} of {place} has no family and individual ID: add them")
    return found


@lru_cache(1)
def _ids_in(content: bytes) -> tuple[list[tuple[str, str]], int]:
    """Return the IDs in a .fam file, and the number of a line without IDs; 0 if there is none.

    The files of all chromosomes usually have the same content.
    """
    lines = [line.split(maxsplit=2) for line in content.decode("utf-8", "surrogateescape").splitlines()]
    wrong = next((number for number, words in enumerate(lines, 1) if len(words) < 2), 0)
    return ([] if wrong else [(words[0], words[1]) for words in lines]), wrong


def _described(path: Path) -> Iterator[list[str]]:
    """Yield the first words of each line of the .bim file: the chromosome, the ID, and the rest."""
    place = path.with_suffix(".bim")
    try:
        with open(place, encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                yield line.split(maxsplit=2)
    except OSError as error:
        raise InputError(f"{place} cannot be read: {error.strerror}") from error


def _fam(path: Path) -> bytes:
    place = path.with_suffix(".fam")
    try:
        return read_regular(place)
    except OSError as error:
        raise InputError(f"{place} cannot be read: {error.strerror}") from error


def _count_lines(name: str, path: Path, suffix: str) -> int:
    place, count, last = path.with_suffix(suffix), 0, b"\n"
    try:
        with open(place, "rb", opener=open_regular) as file:
            while part := file.read(1 << 20):
                count, last = count + part.count(b"\n"), part
    except FileNotFoundError:
        raise NotFoundError(
            f"{name}: there is no {place}, which has a line per {COMPANIONS[suffix]}: put it beside "
            f"{path.name}"
        ) from None
    except OSError as error:
        raise InputError(f"{name}: {place} cannot be read: {error.strerror}") from error
    return count + (not last.endswith(b"\n"))


def _decoded(raw: Array) -> Array:
    """Return the elements in an array of bytes of a file, four per byte. An odd last byte is ignored."""
    pairs = raw[: len(raw) // 2 * 2].view("<u2")
    elements = np.empty(len(pairs), np.uint64)
    # With another mode, NumPy would check the indices and buffer the result.
    np.take(_elements_of_pairs(), pairs, out=elements, mode="clip")
    return elements.view(np.int8)


@cache
def _elements_of_pairs() -> Array:
    """Return the eight elements in each pair of bytes, in one word of eight bytes."""
    pairs = np.arange(1 << 16)
    each = np.array(ELEMENTS, np.int8)[pairs[:, np.newaxis] >> np.arange(0, 16, 2) & 3]
    return np.asarray(each.view(np.uint64).reshape(-1))


GRM_SUFFIX, COUNTS = ".grm.bin", ".grm.N.bin"
_STORED = np.dtype("<f4")
# Number of elements of X.grm.N.bin that are written at a time.
_BATCH = 1 << 18


class GrmFiles(NpyFiles):
    """Open and create .grm.bin files, which store the lower triangle of a Gram matrix."""

    kind = "a .grm.bin file"
    default_uplo = "lower"

    def matches(self, operand: Any) -> bool:
        return is_path(operand) and (is_grm(os.fspath(operand)) or _is_counts(os.fspath(operand)))

    def open(self, name: str, operand: Any, *, writable: bool = False, journal: Path | None = None) -> Matrix:
        if writable and journal is None:
            check_found(name, operand)
            raise InputError(f"{name} exists at {operand}, and .grm.bin files are not overwritten: remove it")
        return super().open(name, operand, writable=writable, journal=journal)

    def _opened(self, name: str, path: Path, *, writable: bool, place: Path | None = None) -> Matrix:
        try:
            with OpenFile(path) as file:
                size = file.size
        except OSError as error:
            raise InputError(f"{name}: {path} cannot be opened: {error.strerror}") from error
        count = size // _STORED.itemsize
        extent = (isqrt(8 * count + 1) - 1) // 2
        if _bytes(extent) != size:
            raise InputError(
                f"{name}: {path} has {size} bytes, and the triangle of {extent} x {extent} elements takes "
                f"{_bytes(extent)}, the next one {_bytes(extent + 1)}: it is truncated, or not a "
                ".grm.bin file"
            )
        return GrmMatrix(name, path, extent, place)

    def check_dtype(self, name: str, path: str, dtype: str) -> None:
        """Do nothing: `new_layout` checks the dtype."""

    def new_layout(
        self, path: str, problem: GemmProblem, chunks: tuple[int, int] | None, compressor: str | None
    ) -> Layout:
        refuse_zarr_options(self.kind, chunks, compressor)
        if problem.triangle != "lower":
            raise InputError(
                f"C at {path} would be {self.kind}, which stores the lower triangle of a Gram matrix: use "
                "grm, or gram with uplo='lower' (--uplo lower), or give a path that ends in .zarr or .npy"
            )
        if problem.c_dtype != "float32":
            raise InputError(
                f"C at {path} would be {self.kind}, which stores float32, and C has dtype {problem.c_dtype}: "
                "pass another cast, or give a path that ends in .zarr or .npy"
            )
        return Lines(problem.n, itemsize=_STORED.itemsize)

    def _bytes(self, new: NewArray) -> int:
        return _bytes(new.shape[0])

    def _created(self, new: NewArray, path: Path, place: Path) -> Matrix:
        return in_new_file(path, lambda: GrmMatrix(new.name, path, new.shape[0], place))


class GrmMatrix(NpyMatrix):
    """The symmetric matrix in a .grm.bin file, which stores no elements above the diagonal.

    A new file is first written in the folder of the journal. Then `place` is its final path.
    """

    def __init__(self, name: str, path: Path, extent: int, place: Path | None = None) -> None:
        super().__init__(name, path, (extent, extent), _STORED, 0, place=place)
        self._size = _bytes(extent)

    @property
    def array(self) -> Array:
        """The elements on and below the diagonal, row by row, as a memory map of the file."""
        count = self._size // _STORED.itemsize
        if not count:
            return np.empty(0, _STORED)
        return np.memmap(self._path, _STORED, "r", shape=(count,))

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        with OpenFile(self._path, self._opener) as file:
            self._check_length(file.size)
            for i in range(*rows):  # elements on and below the diagonal
                stop = min(cols[1], i + 1)
                if stop > cols[0]:
                    out[i - rows[0], : stop - cols[0]] = _read(file.descriptor, i, (cols[0], stop))
            for j in range(max(cols[0], rows[0] + 1), cols[1]):  # elements above it
                stop = min(rows[1], j)
                out[: stop - rows[0], j - cols[0]] = _read(file.descriptor, j, (rows[0], stop))

    def _read_back(self, rows: Range, cols: Range, out: Array, *, past_cache: bool = False) -> None:
        self.read(rows, cols, out)

    def _write(self, rows: Range, cols: Range, data: Array) -> None:
        descriptor = open_regular(self._path, os.O_WRONLY)
        try:
            self._check_length(os.fstat(descriptor).st_size)
            for i in range(max(rows[0], cols[0]), rows[1]):  # other rows end left of the block
                line = np.ascontiguousarray(data[i - rows[0], : i + 1 - cols[0]], _STORED)
                write_fully(descriptor, line.view(np.uint8), _offset(i, cols[0]))
        finally:
            os.close(descriptor)

    def fingerprint(self) -> dict[str, object]:
        return super().fingerprint() | {"metadata": f"{self.shape} lower triangle"}

    def describe(self) -> dict[str, object]:
        return super().describe() | {"store": "grm"}


def is_grm(path: str) -> bool:
    return path.endswith(GRM_SUFFIX) and "://" not in path


def _is_counts(path: str) -> bool:
    return path.endswith(COUNTS) and "://" not in path


def companions(path: Path) -> tuple[Path, Path]:
    """Return the paths of the files X.grm.id and X.grm.N.bin for the path X.grm.bin."""
    stem = os.fspath(path).removesuffix(".bin")
    return Path(f"{stem}.id"), Path(f"{stem}.N.bin")


def write_companions(path: Path, individuals: Sequence[tuple[str, str]], variants: int | None) -> None:
    """Write or replace X.grm.id and X.grm.N.bin beside X.grm.bin. Raises `InputError`.

    `individuals` has the family ID and the individual ID of each row. `variants` is the number of variants
    that every element was computed from; None if the numbers differ, and have been written already.
    """
    ids, counts = companions(path)

    def write_ids(file: BinaryIO) -> None:
        text = "".join(f"{family}\t{individual}\n" for family, individual in individuals)
        file.write(text.encode("utf-8", "surrogateescape"))

    def write_counts(file: BinaryIO) -> None:
        assert variants is not None
        left, batch = _bytes(len(individuals)) // _STORED.itemsize, np.full(_BATCH, variants, _STORED)
        while left:
            file.write(batch[:left].data)
            left -= min(left, _BATCH)

    _replace(ids, write_ids)
    if variants is not None:
        _replace(counts, write_counts)


def _replace(path: Path, write: Callable[[BinaryIO], None]) -> None:
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with open(temporary, "wb") as file:
            write(file)
        sync_path(temporary)
        os.replace(temporary, path)
        sync_path(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InputError(f"{path} cannot be written: {error.strerror}; then run again with resume") from error


def _offset(i: int, j: int) -> int:
    """Return the byte at which element (i, j) on or below the diagonal begins."""
    return (i * (i + 1) // 2 + j) * _STORED.itemsize


def _bytes(extent: int) -> int:
    return _offset(extent, 0)


def _read(descriptor: int, i: int, part: Range) -> Array:
    """Return the elements `part` of row `i`, on or below the diagonal. Raises `EOFError` for a short file."""
    line = np.empty(part[1] - part[0], _STORED)
    read_fully(descriptor, line.view(np.uint8), _offset(i, part[0]))
    return line
