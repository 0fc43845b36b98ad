"""Open operands and results, and create results, with the first store of a list that matches.

A store is the class for one format. The stores for .npy files, files of genetics, HDF5 datasets, open zarr
arrays and NumPy arrays come first, so no other package can replace them. Then come the stores of other
packages. The stores for zarr paths, lazy arrays and array-likes come last: they match everything else. The
store for URLs of object stores is the first of these, so another package can replace it.

A package adds a store by an entry point in its pyproject.toml, which names a subclass of
`oocgemm.stores.Store` whose constructor takes no arguments::

    [project.entry-points."oocgemm.stores"]
    parquet = "my_package.stores:ParquetStore"

This module also derives the paths of results and of their journals, and finds out whether matrices share
data.
"""

import os
import shutil
import sys
import warnings
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from oocgemm.errors import InputError
from oocgemm.planning import GemmProblem, Layout
from oocgemm.stores.arrays import ArrayLikes, ArrayMatrix, Arrays
from oocgemm.stores.base import (
    Array,
    Composite,
    DtypeError,
    Folder,
    Matrix,
    NewArray,
    Store,
    is_path,
    leaves,
    mapped,
    not_writable,
    underlying,
)
from oocgemm.stores.boxes import BoxMatrix
from oocgemm.stores.capabilities import SIDECAR, Resumable
from oocgemm.stores.declared import Declared, refuse_packed
from oocgemm.stores.formats import OperandFacts, UnsupportedError
from oocgemm.stores.genetics import BedFiles, GrmFiles
from oocgemm.stores.hdf5 import HDF5Files
from oocgemm.stores.joined import JoinedMatrix
from oocgemm.stores.lazy import LazyArrays
from oocgemm.stores.npy import NpyFiles
from oocgemm.stores.objects import ObjectStores, check_url
from oocgemm.stores.sparse import SparseArrays
from oocgemm.stores.transformed import CHANGED
from oocgemm.stores.unpacked import decoded
from oocgemm.stores.zarr_matrix import ZarrArrays, ZarrPaths
from oocgemm.system.installed import any_entry_point


class Composites(Store):
    """Open operands that describe a matrix by other operands."""

    kind = "a view of other operands"

    def matches(self, operand: Any) -> bool:
        return isinstance(operand, Composite)

    def open(self, name: str, operand: Any, *, writable: bool = False, journal: Path | None = None) -> Matrix:
        if writable:
            raise not_writable(name)
        found: Matrix = operand.open(name)
        return found

    def location(self, operand: Any) -> tuple[str, str | None]:
        first = leaves(operand)[0]
        return store_of(first).location(first)


GROUP = "oocgemm.stores"  # the group of the entry points by which other packages add stores
ARRAYS = Arrays()
# These stores are tried before those of other packages.
SPECIFIC: tuple[Store, ...] = (
    *(NpyFiles(), BedFiles(), GrmFiles(), HDF5Files(), SparseArrays(), ZarrArrays(), ARRAYS),
    *(Composites(), CHANGED),
)
# These stores are tried last. Together they match any path and any object.
GENERAL: tuple[Store, ...] = (ObjectStores(), ZarrPaths(), LazyArrays(), ArrayLikes())


def stores() -> Iterator[Store]:
    yield from SPECIFIC
    yield from installed()
    yield from GENERAL


def store_of(operand: Any) -> Store:
    """Return the store that opens an operand, or creates a result at a path. There always is such a store."""
    if ARRAYS.matches(operand):  # the other specific stores match no ndarray
        return ARRAYS
    return next(store for store in stores() if store.matches(operand))


@cache
def installed() -> tuple[Store, ...]:
    """Return the stores of other packages, ordered by the names of their entry points.

    Warns of stores that cannot be loaded.
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
    """Open an operand or, with `writable`, an existing result. `folder` is that of the result's journal.

    With `decode`, obey the declarations in an operand's attributes about its elements (`stores.declared`).
    Raises `InputError`; its subclass `UnsupportedError` if the dtype of an operand is not supported.
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
        raise UnsupportedError(OperandFacts(name, error.dtype, kind, path, missing)) from None
    return decoded(matrix) if decode and not writable else matrix


def open_pair(a: tuple[str, Any], b: tuple[str, Any], *, decode: bool = True) -> tuple[Matrix, Matrix]:
    """Open and return A and B. If a dtype is not supported, the error says how to convert both operands."""
    found, stored = [], []
    for name, source in (a, b):
        try:
            found.append(open_matrix(name, source, decode=decode))
            stored.append(OperandFacts.of(found[-1]))
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
    """Create a result. A store may keep it in `folder` until it is complete. Raises `InputError`."""
    new = NewArray(name, path, shape, dtype, chunks, compressor)
    return store_of(path).create(new, _local(folder))


def _local(folder: Folder | None) -> Path | None:
    """Return the folder of a journal if it is local, else None: stores keep results in local folders only."""
    return folder if isinstance(folder, Path) else None


def new_layout(
    place: Any, problem: GemmProblem, chunks: tuple[int, int] | None, compressor: str | None
) -> Layout:
    """Return the layout (`Store.new_layout`) of a new result at `place`, or in memory if `place` is None."""
    if place is None:
        return ARRAYS.new_layout("", problem, chunks, compressor)
    path = os.fspath(place)
    return store_of(path).new_layout(path, problem, chunks, compressor)


def reserve(matrix: Matrix) -> None:
    """Allocate or check the disk space for a `Resumable` result. Raises `InputError` if it is too little."""
    if isinstance(matrix, Resumable):
        try:
            matrix.reserve()
        except OSError as error:
            raise InputError(f"{matrix.name}: the disk has no room for the whole file: {error}") from error


def split_address(path: str) -> tuple[str, str]:
    """Split an address, such as ``x.h5::/a``, into the path of the file and the rest. Nothing is opened."""
    return next(filter(None, (store.split(path) for store in stores())), (path, ""))


def load(*operands: Any) -> None:
    """Import the packages that operands need, so that the time of a run does not include the imports.

    The parts of an operand are usually stored alike, so only the first part is looked at.
    """
    for given in (leaf for operand in operands for leaf in leaves(operand)[:1]):
        operand = os.fspath(given) if is_path(given) else given
        store_of(operand).prepare(operand)


def load_without_cupy(*operands: Any) -> None:
    """Import the packages that operands need, but prevent zarr from importing cupy, which takes seconds.

    Then zarr has no GPU buffers in this process. A program that uses this library may need them, so only the
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


def located(name: str, source: Any) -> Any:
    """Return a path or URL as a string without "file://"; other objects unchanged. Raises `InputError`."""

    def as_text(leaf: Any) -> Any:
        if not is_path(leaf):
            return leaf
        path = os.fsdecode(leaf).removeprefix("file://")
        check_url(name, path)
        if not path or "\0" in path:
            raise InputError(f"{name}: {path!r} is not a path")
        return path

    return mapped(source, as_text)


def exists(path: str) -> bool:
    return store_of(path).exists(path)


def sidecar(source: Any) -> Folder | None:
    """Return the folder for the journal of a run with this result; None if the run cannot be resumed."""
    operand = os.fspath(source) if is_path(source) else source
    return store_of(operand).journal_folder(operand)


def place(folder: Path) -> Path:
    """Return the path of the result (C) whose journal is in `folder`."""
    return folder.parent if folder.name == SIDECAR else folder.with_name(folder.name.removesuffix(SIDECAR))


def c_exists(folder: Folder) -> bool:
    """Return whether the result (C) whose journal is in `folder` exists."""
    return place(folder).exists() if isinstance(folder, Path) else folder.array_exists()


def remove(folder: Folder) -> None:
    """Delete a folder of redo files or objects with its content. The folder need not exist."""
    if isinstance(folder, Path):
        shutil.rmtree(folder, ignore_errors=True)
    else:
        folder.clear(array=False)


def clear(folder: Folder, keep: Collection[str] = (), *, c: bool = True) -> None:
    """Delete everything in the journal's folder except the files that are named in `keep`.

    Also delete the folder itself if `keep` is empty. If the folder is inside a zarr array, that array is the
    result C: delete it too, unless `c` is false. An unfinished .npy result is a file in the journal's folder,
    so `c` makes no difference for it.
    """
    if not isinstance(folder, Path):
        folder.clear(keep, array=c)
        return
    inside = place(folder) == folder.parent
    found = [path for path in folder.iterdir() if path.name not in keep]
    if inside and c:
        found += [path for path in folder.parent.iterdir() if path != folder]
    for path in found:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    if not keep:
        for empty in (folder, folder.parent) if inside else (folder,):
            with suppress(OSError):
                empty.rmdir()


def check_apart(name: str, path: str, operand: Matrix) -> None:
    """Raise `InputError` if a new result at `path` would overwrite an operand, or be inside its folder."""
    if "://" in path:
        return
    real = Path(os.path.realpath(path))
    for parent in (real, *real.parents):
        if os.path.exists(parent):
            status = parent.stat()
            if ("file", status.st_dev, status.st_ino) in operand.identities():
                raise InputError(f"{name} at {path} would be inside {operand.name}: give it another path")


def same_place(one: Matrix, other: Matrix) -> bool:
    """Return whether two matrices share memory or files, also if they were opened by different paths."""
    one, other = underlying(one), underlying(other)
    for whole, single in ((one, other), (other, one)):
        if isinstance(whole, JoinedMatrix):
            return any(same_place(part, single) for part in whole.parts)
    arrays = [x.array for x in (one, other) if isinstance(x, ArrayMatrix | BoxMatrix)]
    if len(arrays) == 2 and all(isinstance(array, np.ndarray) for array in arrays):
        if overlap(*arrays):
            return True
        if isinstance(one, ArrayMatrix) and isinstance(other, ArrayMatrix) and one.shares_map(other):
            return False
    return not one.identities().isdisjoint(other.identities())


def overlap(one: Array, other: Array) -> bool:
    """Return whether two arrays share memory; True if an exact answer would take too long."""
    try:
        return bool(np.shares_memory(one, other, max_work=100_000))  # type: ignore[arg-type]  # incomplete stub
    except np.exceptions.TooHardError:
        return True
