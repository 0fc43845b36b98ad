"""Check that the disk has enough free space for a result. Make the message for a disk that becomes full."""

import errno
import os
import shutil
import tempfile
from pathlib import Path

from oocgemm.errors import InputError, warn_of_data
from oocgemm.planning.units import format_size
from oocgemm.stores.base import Matrix
from oocgemm.stores.files import padded

FULL = (errno.ENOSPC, errno.EDQUOT)  # the error numbers of a write for which the disk or quota is too small


def check_new(name: str, path: str, wanted: int = 0) -> None:
    """Raise `InputError` if nothing can be created at a path, or if its disk has not `wanted` free bytes.

    Call this before a long computation. The path need not exist, nor its folder. `name` is the name of what
    would be created in the message.
    """
    place = Path(path).absolute().parent
    while not place.exists():
        place = place.parent
    try:
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        raise InputError(
            f"{name}: cannot create {path}: no file can be made in {place}: {error.strerror}"
        ) from error
    check_room(name, path, wanted)


def check_room(name: str, path: str, wanted: int) -> None:
    """Raise `InputError` unless the disk of a path has `wanted` free bytes. The path need not exist.

    `name` is the name of the array in the message.
    """
    free = free_bytes(path)
    if free < wanted:
        raise InputError(
            f"{name} at {path} takes {format_size(wanted)} more, and its disk has {format_size(free)} free: "
            f"make room for {format_size(wanted - free)}, or give a path on another disk"
        )


def no_room(matrix: Matrix, error: OSError, min_bytes: int) -> str:
    """Return the message for a full disk: the path of C, how many bytes are missing, and the remedy.

    The number of missing bytes is an estimate, and at least `min_bytes`, the size of the write that failed.
    """
    path = str(matrix.describe()["path"]).removeprefix("file://")
    missing = getattr(matrix, "missing_bytes", None)
    wanted = max(min_bytes, missing() if missing is not None else 0)
    free = ""
    if error.errno == errno.ENOSPC:
        left = free_bytes(path)
        free, wanted = f", {format_size(left)} are free", max(min_bytes, wanted - left)
    return (
        f"{error.strerror}: C at {path} needs about {format_size(wanted)} more{free}. Make room, then "
        "continue with --resume (resume=True)"
    )


def raw_bytes(shape: tuple[int, int], chunks: tuple[int, int], itemsize: int) -> int:
    """Return the bytes that an array takes on disk if its chunks are not compressed.

    zarr stores chunks at the edges of the array in full size, and each file takes whole pages.
    """
    count = -(-shape[0] // chunks[0]) * -(-shape[1] // chunks[1])
    return count * padded(chunks[0] * chunks[1] * itemsize)


def warn_of_folders(name: str, path: str) -> None:
    """Issue a `DataWarning` if a folder will be created for a new array or group at a path."""
    missing = [above for above in Path(path).absolute().parents if not os.path.lexists(above)]
    if missing:
        warn_of_data(f"{name}: the folder {missing[-1]} does not exist, and is created: check its name")


def free_bytes(path: str) -> int:
    """Return the free bytes of the file system that a path is on. The path need not exist."""
    place = Path(path).absolute()
    while not os.path.exists(place):
        place = place.parent
    return shutil.disk_usage(place).free
