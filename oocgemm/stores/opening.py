"""Open operands and results, and create results, with the first store of a list that matches.

A store is the class for one format. The stores for .npy files, files of genetics, HDF5 datasets, open zarr
arrays and NumPy arrays come first, so no other package can replace them. Then come the stores of other
packages. The stores for zarr paths, lazy arrays and array-likes come last: they match everything else. The
store for URLs of object stores is the first of these, so another package can replace it.

A package adds a store by an entry point in its pyproject.toml, which names a subclass of
`oocgemm.stores.Store` whose constructor takes no arguments::

    [project.entry-points."oocgemm.stores"]
    parquet = "my_package.stores:ParquetStore"
"""

import os
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from oocgemm.errors import InputError
from oocgemm.planning import GemmProblem, Layout
from oocgemm.stores.arrays import ArrayLikes, Arrays
from oocgemm.stores.base import DtypeError, Folder, Matrix, NewArray, Store, is_path
from oocgemm.stores.capabilities import Resumable
from oocgemm.stores.declared import Declared, decoded, refuse_packed
from oocgemm.stores.formats import Stored, UnsupportedError
from oocgemm.stores.gcta import GrmFiles
from oocgemm.stores.hdf5 import HDF5Files
from oocgemm.stores.lazy import LazyArrays
from oocgemm.stores.npy import NpyFiles
from oocgemm.stores.objects import ObjectStores
from oocgemm.stores.plink import BedFiles
from oocgemm.stores.zarr_matrix import ZarrArrays, ZarrPaths
from oocgemm.system.installed import any_entry_point

GROUP = "oocgemm.stores"  # the group of the entry points by which other packages add stores
ARRAYS = Arrays()
# These stores are tried before those of other packages.
SPECIFIC: tuple[Store, ...] = (NpyFiles(), BedFiles(), GrmFiles(), HDF5Files(), ZarrArrays(), ARRAYS)
# These stores are tried last. Together they match any path and any object.
GENERAL: tuple[Store, ...] = (ObjectStores(), ZarrPaths(), LazyArrays(), ArrayLikes())


def stores() -> Iterator[Store]:
    """Yield all stores in the order in which they are tried."""
    yield from SPECIFIC
    yield from installed()
    yield from GENERAL


def store_of(operand: Any) -> Store:
    """Return the store that opens an operand, or creates a result at a path. Every operand has one."""
    if ARRAYS.matches(operand):  # the other specific stores match no ndarray
        return ARRAYS
    return next(store for store in stores() if store.matches(operand))


@cache
def installed() -> tuple[Store, ...]:
    """Load the stores of other packages, in the alphabetical order of their entry points.

    The result is cached, because a search of all installed packages can take a tenth of a second. A store
    that cannot be loaded is ignored with a warning.
    """
    if not any_entry_point(GROUP):
        return ()
    from importlib.metadata import entry_points

    found: list[Store] = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            store = entry.load()()
            if not isinstance(store, Store):
                raise TypeError(f"{type(store).__name__} is not a subclass of oocgemm.stores.Store")
        except Exception as error:  # another package's code may raise any exception
            warnings.warn(
                f"the store {entry.name} ({entry.value}) cannot be loaded and is ignored: {error}",
                stacklevel=2,
            )
        else:
            found.append(store)
    return tuple(found)


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
    new = NewArray(name, path, shape, dtype, chunks, compressor)
    return store_of(path).create(new, _local(folder))


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


def reserve(matrix: Matrix) -> None:
    """Allocate disk space for all of an existing result, or check that the disk has enough free space.

    Raises `InputError` if the free space is too small. Do nothing for a matrix that is not `Resumable`.
    """
    if isinstance(matrix, Resumable):
        try:
            matrix.reserve()
        except OSError as error:
            raise InputError(f"{matrix.name}: the disk has no room for the whole file: {error}") from error


def split_address(path: str) -> tuple[str, str]:
    """Split an address, such as ``x.h5::/a``, into the path of the file and the rest. Nothing is opened."""
    return next(filter(None, (store.split(path) for store in stores())), (path, ""))


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
