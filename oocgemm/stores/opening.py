"""Open operands and results, and create results, with the store (the class for one format) that matches."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from oocgemm.errors import InputError
from oocgemm.planning import GemmProblem, Layout
from oocgemm.stores.base import DtypeError, Folder, Matrix, is_path
from oocgemm.stores.declared import Declared, decoded, refuse_packed
from oocgemm.stores.formats import Stored, UnsupportedError
from oocgemm.stores.registry import ARRAYS, store_of


def open_matrix(
    name: str, source: Any, *, writable: bool = False, folder: Folder | None = None, decode: bool = True
) -> Matrix:
    """Open an operand, or with `writable` an existing result.

    Arguments:
        name: the operand's name in messages
        source: a path or URL, a zarr array, a lazy array, an array-like, or anything that a plugin opens
        writable: open an existing result, to which the run writes
        folder: for the result of an interrupted run, the folder with its journal
        decode: respect what the attributes of an operand declare about its elements (`stores.declared`)

    Raises `InputError`, for an unsupported dtype `UnsupportedError`.
    """
    operand = os.fspath(source) if is_path(source) else source
    store = store_of(operand)
    try:
        matrix = store.open(name, operand, writable=writable, journal=_local(folder))
    except DtypeError as error:
        if writable:
            raise InputError(f"{error}: give {name} another path") from None
        kind, path = store.location(operand)
        missing: tuple[Any, ...] = ()
        if decode and isinstance(error.declared, Declared):
            refuse_packed(f"{name}: {path}" if path else name, error.declared)
            missing = error.declared.missing
        raise UnsupportedError(Stored(name, error.dtype, kind, path, missing)) from None
    return decoded(matrix) if decode and not writable else matrix


def open_pair(a: tuple[str, Any], b: tuple[str, Any], *, decode: bool = True) -> tuple[Matrix, Matrix]:
    """Open A and B, each given by its name and its source, as `open_matrix` does.

    If a dtype is not supported, the error says how to convert both operands to one dtype.
    """
    found, stored = [], []
    for name, source in (a, b):
        try:
            found.append(open_matrix(name, source, decode=decode))
            stored.append(Stored.of(found[-1]))
        except UnsupportedError as error:
            stored += error.stored
    if len(found) < len(stored):
        raise UnsupportedError(*stored)
    return found[0], found[1]


def create_output(
    name: str,
    path: str,
    shape: tuple[int, int],
    dtype: np.dtype[Any],
    chunks: tuple[int, int],
    compressor: str | None,
    *,
    folder: Folder | None = None,
) -> Matrix:
    """Create a result at a path. A store may keep it in the journal's `folder` until it is complete.

    `name` is its name in messages. Raises `InputError` if it cannot be created, or if the disk is too full.
    """
    return store_of(path).create(name, path, shape, dtype, chunks, compressor, journal=_local(folder))


def _local(folder: Folder | None) -> Path | None:
    """Return the folder of a journal if it is local: no store keeps a result in another one."""
    return folder if isinstance(folder, Path) else None


def new_layout(
    place: Any, problem: GemmProblem, chunks: tuple[int, int] | None, compressor: str | None
) -> Layout:
    """Return the layout (the chunks and the memory to read and write them) of a new result at `place`.

    If `place` is None, the result is an array in memory. If `chunks` is None and the store has chunks, the
    planner chooses their shape. Raises `InputError` for `chunks` or a `compressor` that the store does not
    support.
    """
    if place is None:
        return ARRAYS.new_layout("", problem, chunks, compressor)
    path = os.fspath(place)
    return store_of(path).new_layout(path, problem, chunks, compressor)


def record_uplo(matrix: Matrix, uplo: str) -> None:
    """Let the next `set_finished` also record which triangle of a Gram matrix a result stores.

    `uplo` is "lower", "upper" or "full", or "" for other products. Do nothing for stores without a method
    `record_uplo`.
    """
    act = getattr(matrix, "record_uplo", None)
    if act is not None:
        act(uplo)


def reserve(matrix: Matrix) -> None:
    """Allocate disk space for all of an existing result, or check that the disk has enough free space.

    Raises `InputError` if the free space is too small. Do nothing for stores without a method `reserve`.
    """
    act = getattr(matrix, "reserve", None)
    if act is not None:
        try:
            act()
        except OSError as error:
            raise InputError(f"{matrix.name}: the disk has no room for the whole file: {error}") from error


def load(*operands: Any) -> None:
    """Import the packages that operands need, so that the time of a run does not include the imports."""
    for given in operands:
        operand = os.fspath(given) if is_path(given) else given
        store_of(operand).prepare(operand)


def load_without_cupy(*operands: Any) -> None:
    """Do what `load` does, but prevent zarr from importing cupy, which takes seconds.

    zarr then has no GPU buffers in this process, which a program that uses this library may need. So only the
    command line may call this function.
    """
    hidden = "cupy" not in sys.modules
    if hidden:
        sys.modules["cupy"] = None  # type: ignore[assignment]  # None makes `import cupy` fail
    try:
        load(*operands)
    finally:
        if hidden:
            del sys.modules["cupy"]
