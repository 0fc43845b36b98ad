"""Check that the disk has room for C, and explain a full disk."""

import errno
import os
import shutil
from pathlib import Path

from oocgemm.errors import InputError
from oocgemm.planning.units import format_size
from oocgemm.stores.base import Matrix
from oocgemm.stores.files import padded

FULL = (errno.ENOSPC, errno.EDQUOT)


def check_room(name: str, path: str, wanted: int) -> None:
    """Raise `InputError` unless `wanted` more bytes fit on the file system of a path, existing or not."""
    free = free_bytes(path)
    if free < wanted:
        raise InputError(
            f"{name} at {path} takes {format_size(wanted)} more, and its disk has {format_size(free)} free: "
            f"make room for {format_size(wanted - free)}, or give a path on another disk"
        )


def no_room(matrix: Matrix, error: OSError, least: int) -> str:
    """Explain a full disk: the path of C, how many bytes are missing (at least `least`), and the remedy."""
    path = str(matrix.describe()["path"]).removeprefix("file://")
    missing = getattr(matrix, "missing_bytes", None)
    wanted = max(least, missing() if missing is not None else 0)
    free = ""
    if error.errno == errno.ENOSPC:
        left = free_bytes(path)
        free, wanted = f", {format_size(left)} are free", max(least, wanted - left)
    return (
        f"{error.strerror}: C at {path} needs about {format_size(wanted)} more{free}. Make room, then "
        "--resume (resume=True) goes on"
    )


def raw_bytes(shape: tuple[int, int], chunks: tuple[int, int], itemsize: int) -> int:
    """Return the bytes that the raw chunks of an array take on disk. Chunks at its edges are stored whole."""
    count = -(-shape[0] // chunks[0]) * -(-shape[1] // chunks[1])
    return count * padded(chunks[0] * chunks[1] * itemsize)


def free_bytes(path: str) -> int:
    """Return the free bytes of the file system of a path, which need not exist."""
    place = Path(path).absolute()
    while not os.path.exists(place):
        place = place.parent
    return shutil.disk_usage(place).free
