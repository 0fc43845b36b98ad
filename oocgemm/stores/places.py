"""Check and derive the paths of results and of their journals. Find out whether two matrices share data."""

import os
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from oocgemm.errors import InputError
from oocgemm.stores.arrays import ArrayMatrix
from oocgemm.stores.base import Array, Folder, Matrix, is_path
from oocgemm.stores.durable import SIDECAR
from oocgemm.stores.objects import check_url
from oocgemm.stores.opening import store_of
from oocgemm.stores.view import underlying


def located(name: str, source: Any) -> Any:
    """Return a path or URL as a string, without a leading "file://". Return any other object unchanged.

    Raises `InputError` for an invalid path; `name` is its name in the message. The empty path is invalid: it
    would name the working directory.
    """
    if not is_path(source):
        return source
    path = os.fsdecode(source).removeprefix("file://")
    check_url(name, path)
    if not path or "\0" in path:
        raise InputError(f"{name}: {path!r} is not a path")
    return path


def exists(path: str) -> bool:
    """Return whether a file or array exists at a path or URL."""
    return store_of(path).exists(path)


def sidecar(source: Any) -> Folder | None:
    """Return the folder for the journal of a run whose result is `source`.

    The journal is the record of finished tiles from which a run is resumed. None means that such a run cannot
    be resumed, because C is in memory or in a store without conditional writes.
    """
    operand = os.fspath(source) if is_path(source) else source
    return store_of(operand).journal_folder(operand)


def place(folder: Path) -> Path:
    """Return the path of the result (C) whose journal is in `folder`."""
    return folder.parent if folder.name == SIDECAR else folder.with_name(folder.name.removesuffix(SIDECAR))


def c_exists(folder: Folder) -> bool:
    """Return whether the result (C) whose journal is in `folder` exists."""
    return place(folder).exists() if isinstance(folder, Path) else folder.array_exists()


def remove(folder: Folder) -> None:
    """Delete a folder of redo files or objects with its content. It need not exist."""
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
    """Raise `InputError` if a new file or array would overwrite an operand, or be inside its folder.

    `name` is the name of the new file in the message, and `path` is where it would be created.
    """
    if "://" in path:
        return
    real = Path(os.path.realpath(path))
    for parent in (real, *real.parents):
        if os.path.exists(parent):
            status = parent.stat()
            if ("file", status.st_dev, status.st_ino) in operand.identities():
                raise InputError(f"{name} at {path} would be inside {operand.name}: give it another path")


def same_place(one: Matrix, other: Matrix) -> bool:
    """Return whether two matrices share memory or files, even if they were opened by different paths.

    Blocks of one memory map do not if they are disjoint.
    """
    one, other = underlying(one), underlying(other)
    if isinstance(one, ArrayMatrix) and isinstance(other, ArrayMatrix):
        if overlap(one.array, other.array):
            return True
        if one.shares_map(other):
            return False
    return not one.identities().isdisjoint(other.identities())


def overlap(one: Array, other: Array) -> bool:
    """Return whether two arrays share memory. If an exact answer would take too long, return True."""
    try:
        return bool(np.shares_memory(one, other, max_work=100_000))  # type: ignore[arg-type]  # incomplete stub
    except np.exceptions.TooHardError:
        return True
