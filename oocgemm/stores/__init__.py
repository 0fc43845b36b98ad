"""Stores: everything that can be an operand or a result. Opening decides; nothing is written before `create`."""

import os
import shutil
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from oocgemm.errors import InputError
from oocgemm.planning import GemmProblem, Layout
from oocgemm.planning.setting import CHUNK_BYTES
from oocgemm.stores import formats
from oocgemm.stores.arrays import ArrayMatrix, by_rows, memory, span
from oocgemm.stores.base import BATCH_BYTES, Array, DtypeError, Matrix, pieces, transient
from oocgemm.stores.durable import DATA, SIDECAR
from oocgemm.stores.files import padded
from oocgemm.stores.formats import check_dtypes
from oocgemm.stores.lazy import LazyMatrix, is_lazy, package
from oocgemm.stores.npy import create_npy, open_npy
from oocgemm.stores.space import FULL, check_room, no_room, raw_bytes

__all__ = [
    "BATCH_BYTES",
    "COMPRESSORS",
    "FULL",
    "Array",
    "Matrix",
    "by_rows",
    "check_apart",
    "check_compressor",
    "check_dtypes",
    "clear",
    "create_output",
    "exists",
    "is_path",
    "load",
    "load_zarr",
    "located",
    "memory",
    "new_layout",
    "no_room",
    "open_matrix",
    "pieces",
    "place",
    "reserve",
    "same_place",
    "sidecar",
    "span",
    "transient",
]

COMPRESSORS = ("none", "zstd", "blosc-lz4", "blosc-zstd", "gzip")


def is_path(value: object) -> bool:
    """Whether a value names a place rather than being an array."""
    return isinstance(value, str | os.PathLike)


def located(name: str, source: Any) -> Any:
    """The path or URL that a value names, a file:// URL as the path in it; any other value as it is.

    Raises `InputError` for what can be no path: the empty one would be the folder that the process runs in.
    """
    if not is_path(source):
        return source
    path = os.fsdecode(source).removeprefix("file://")
    if not path or "\0" in path:
        raise InputError(f"{name}: {path!r} is not a path")
    return path


def exists(path: str) -> bool:
    """Whether there is anything at a path or URL; also at what a path with ``..`` would come to be. A folder that is
    empty but for that of a journal, where a run was killed as it began, is nothing."""
    if "://" not in path:
        with suppress(OSError):
            if set(os.listdir(path)) <= {SIDECAR}:
                return False
        return os.path.lexists(path) or os.path.lexists(os.path.realpath(path))
    from oocgemm.stores.zarr.opening import remote_exists

    return remote_exists(path)


def sidecar(source: Any) -> Path | None:
    """The folder that keeps the journal of a run whose C this is; None for memory, and for stores elsewhere."""
    if is_path(source):
        path = os.fspath(source)
        if "://" in path:
            return None
        if path.endswith(".npy"):
            return Path(os.path.realpath(path) + SIDECAR)
        return None if os.path.isfile(path) else Path(path) / SIDECAR
    if package(source) == "zarr":
        from oocgemm.stores.zarr.matrix import local_folder

        folder = local_folder(source)
        return None if folder is None else folder / SIDECAR
    return None


def place(folder: Path) -> Path:
    """The C of a journal's folder."""
    return folder.parent if folder.name == SIDECAR else folder.with_name(folder.name.removesuffix(SIDECAR))


def clear(folder: Path, keep: Collection[str] = (), *, c: bool = True) -> None:
    """Take away what is in a journal's folder, all but the files to `keep`, and with `c` the C that its run has
    created."""
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


def load(*operands: Any) -> None:
    """Import what these operands need: imports are no part of a run's time."""
    if any(is_path(x) and not os.fspath(x).endswith(".npy") for x in operands):
        from oocgemm.stores.zarr import opening as zarr_open  # noqa: F401


def load_zarr() -> None:
    """Import zarr with cupy hidden from it: it would import cupy wherever that is installed, which takes seconds.

    For programs only, not for the library: in this process zarr will offer no buffers on the GPU.
    """
    hidden = "cupy" not in sys.modules
    if hidden:
        sys.modules["cupy"] = None  # type: ignore[assignment]  # how an import is made to fail
    try:
        from oocgemm.stores.zarr import opening as zarr_open  # noqa: F401
    finally:
        if hidden:
            del sys.modules["cupy"]


def check_compressor(name: str) -> None:
    """Raises `InputError` for a compressor that is not known."""
    if name not in COMPRESSORS:
        raise InputError(f"unknown compressor {name!r}: choose one of {', '.join(COMPRESSORS)}")


def new_layout(
    place: Any, problem: GemmProblem, chunks: tuple[int, int] | None, compressor: str | None
) -> Layout:
    """Return the layout that a result created at `place` will have. Without `chunks` they are cut to suit the plan."""
    if place is not None:
        formats.check_new("C", os.fspath(place))
    if place is None or os.fspath(place).endswith(".npy"):
        if chunks or compressor not in (None, "none"):
            kind = "an ndarray" if place is None else "a .npy file"
            raise InputError(
                f"C is to be {kind}: chunks and compressor are for a zarr array, give C such a path"
            )
        if place is None:
            return Layout(in_memory=True)
        return Layout(line=problem.n, itemsize=problem.itemsizes["C"])
    if chunks is not None and not (
        isinstance(chunks, tuple | list)
        and len(chunks) == 2
        and all(isinstance(extent, int | np.integer) and extent > 0 for extent in chunks)
    ):
        raise InputError(f"chunks = {chunks!r}: write (rows, columns), integers of at least 1")
    itemsize = problem.itemsizes["C"]
    size = (
        chunks[0] * chunks[1] * itemsize if chunks else min(2 * CHUNK_BYTES, problem.m * problem.n * itemsize)
    )
    encodes = compressor not in (None, "none")
    return Layout(
        write_chunk=chunks or (1, 1),
        free_chunks=chunks is None,
        encode_bytes=(3 if encodes else 1) * padded(size),
        encodes=encodes,
    )


def open_matrix(name: str, source: Any, *, writable: bool = False, folder: Path | None = None) -> Matrix:
    """Open an operand or an existing result: a path or URL (.npy, else zarr), a zarr array, a lazy array, anything
    array-like. With the `folder` of its journal, open what an unfinished run has created.

    Raises `InputError`, naming what is wrong and what would do.
    """
    try:
        return _opened(name, source, writable, folder)
    except DtypeError as error:
        if writable:
            raise InputError(f"{error}: give {name} another place") from None
        raise formats.unsupported(name, error.dtype, *_where(name, source)) from None


def _where(name: str, source: Any) -> tuple[str, str | None]:
    """Return the kind of store that a source is in, and its path."""
    if is_path(source):
        path = os.fspath(source)
        return "npy" if path.endswith(".npy") else "zarr", path
    if package(source) == "zarr":
        return "zarr", str(source.store_path).removeprefix("file://")
    return package(source) if is_lazy(name, source) else "memory", None


def _opened(name: str, source: Any, writable: bool, folder: Path | None) -> Matrix:
    if is_path(source):
        path = os.fspath(source)
        if folder is not None and (folder / DATA).exists():
            return open_npy(name, folder / DATA, writable=writable, place=Path(path))
        if "://" not in path and not os.path.exists(path):
            raise InputError(f"{name}: {_nothing_at(path)}")
        if path.endswith(".npy"):
            return open_npy(name, Path(path), writable=writable)
        from oocgemm.stores.zarr.opening import open_zarr

        return open_zarr(name, path, writable=writable)
    if package(source) == "zarr":
        from oocgemm.stores.zarr.opening import wrap_zarr

        return wrap_zarr(name, source, writable=writable)
    if isinstance(source, np.ma.MaskedArray):
        raise InputError(f"{name} is a masked array: say what stands for what is masked, with .filled(value)")
    if writable and not (isinstance(source, np.ndarray) and source.flags.writeable):
        raise InputError(f"{name} cannot be written to: pass a writable ndarray, a zarr array or a path")
    if not isinstance(source, np.ndarray) and is_lazy(name, source):
        return LazyMatrix(name, source)
    try:
        array = source if isinstance(source, np.ndarray) else np.asarray(source)
    except Exception as error:  # whatever the object's own conversion raises
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"{name}: {type(source).__name__} cannot be turned into an array: {reason}"
        ) from error
    return ArrayMatrix(name, array)


def _nothing_at(path: str) -> str:
    """Say that there is nothing at a path, and where a symbolic link leads."""
    if not os.path.islink(path):
        return f"there is nothing at {path}"
    return (
        f"there is nothing at {path}: it is a symbolic link to {os.path.realpath(path)}, which does not exist; "
        "remove the link, or give another path"
    )


def create_output(
    name: str,
    path: str,
    shape: tuple[int, int],
    dtype: np.dtype[Any],
    chunks: tuple[int, int],
    compressor: str | None,
    *,
    folder: Path | None = None,
) -> Matrix:
    """Create a new result at a path: .npy by that ending, else zarr. With the `folder` of a journal a .npy file is written
    there, and goes to its path when it is finished.

    Raises `InputError` if it cannot be created, or if the disk has no room for it. What compressed chunks will take is not
    known.
    """
    if path.endswith(".npy"):
        check_room(name, path, shape[0] * shape[1] * dtype.itemsize)
    elif "://" not in path and compressor in (None, "none"):
        check_room(name, path, raw_bytes(shape, chunks, dtype.itemsize))
    if path.endswith(".npy"):
        try:
            Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
            at = Path(path) if folder is None else folder / DATA
            return create_npy(name, at, shape, dtype, Path(path))
        except (OSError, ValueError, OverflowError) as error:
            raise InputError(f"{name}: cannot create {path}: {error}") from error
    from oocgemm.stores.zarr.opening import create_zarr

    return create_zarr(name, path, shape, dtype, chunks, compressor)


def reserve(matrix: Matrix) -> None:
    """Allocate disk space for all of an existing result, or check that there is enough. Raises `InputError` if not."""
    act = getattr(matrix, "reserve", None)
    if act is not None:
        try:
            act()
        except OSError as error:
            raise InputError(f"{matrix.name}: the disk refuses room for all of its file: {error}") from error


def check_apart(name: str, path: str, operand: Matrix) -> None:
    """Refuse to create something at an operand's own path, or in its folder."""
    if "://" in path:
        return
    place = Path(os.path.realpath(path))
    for parent in (place, *place.parents):
        if os.path.exists(parent):
            status = parent.stat()
            if ("file", status.st_dev, status.st_ino) in operand.identities():
                raise InputError(f"{name} at {path} would lie in {operand.name}: give it a place of its own")


def same_place(one: Matrix, other: Matrix) -> bool:
    """Whether two matrices share memory or files, by whatever path they were reached."""
    if isinstance(one, ArrayMatrix) and isinstance(other, ArrayMatrix) and _overlap(one.array, other.array):
        return True
    return not one.identities().isdisjoint(other.identities())


def _overlap(one: Array, other: Array) -> bool:
    try:
        return bool(np.shares_memory(one, other, max_work=100_000))  # type: ignore[arg-type]  # its stub knows the extremes only
    except np.exceptions.TooHardError:
        return True
