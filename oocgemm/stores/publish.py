"""Create, replace and overwrite local files: by direct I/O where the memory and the file system allow it.

Direct I/O takes less processor time than writes to the page cache, and leaves the page cache to other data.
"""

import contextlib
import errno
import os
import stat
import uuid
from pathlib import Path

from oocgemm.stores.base import Array
from oocgemm.stores.files import O_DIRECT, rest_of, sector_aligned, segments


def publish(path: Path, data: Array, size: int, root: Path) -> None:
    """Create or replace the file at `path` with the first `size` bytes of the rows of `data`, atomically.

    The file is first written under a temporary name, and then renamed. It is written past the page cache if
    `data` is sector-aligned and padded to whole sectors. Missing folders between `root` and the file are
    created. Raises `FileNotFoundError` if `root` does not exist: who removed it does not want the file.
    """
    _make_folder(path.parent, root)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        _write(temporary, data, size)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def overwrite(path: Path, data: Array) -> bool:
    """Overwrite a file of the size of `data` in place, by direct I/O. Return whether that was possible.

    It keeps its blocks on the disk. To allocate others and free these can take as long as the write itself.
    It is not possible if `data` is not sector-aligned, or the file is not regular or has several names.
    """
    if not O_DIRECT or not sector_aligned(data):
        return False
    with contextlib.suppress(OSError):  # the caller's own way to write may raise it again
        # O_NONBLOCK: not to wait for the reader of a named pipe
        descriptor = os.open(path, os.O_WRONLY | O_DIRECT | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if status.st_size != data.nbytes or status.st_nlink != 1 or not stat.S_ISREG(status.st_mode):
                return False
            _put(descriptor, data)
            return True
        finally:
            os.close(descriptor)
    return False


def _make_folder(folder: Path, root: Path) -> None:
    """Create a folder and its parents below `root`. Raises `FileNotFoundError` if there is no `root`."""
    if folder == root:
        return
    try:
        folder.mkdir(exist_ok=True)
    except FileNotFoundError:
        if folder.parent == root:
            raise
        _make_folder(folder.parent, root)
        folder.mkdir(exist_ok=True)


def _write(path: Path, data: Array, size: int) -> None:
    """Write the first `size` bytes of the rows of `data` to a new file.

    Use direct I/O if `data` is sector-aligned and the file system supports it.
    """
    past_cache = O_DIRECT if sector_aligned(data) else 0
    for extra in (past_cache, 0) if past_cache else (0,):
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | extra, 0o666)
        except OSError as error:
            if extra and error.errno == errno.EINVAL:
                continue
            raise
        try:
            _put(descriptor, data)
            if size != data.nbytes:
                os.ftruncate(descriptor, size)
            return
        except OSError as error:
            if not (extra and error.errno == errno.EINVAL):
                raise
        finally:
            os.close(descriptor)


def _put(descriptor: int, data: Array) -> None:
    """Write the rows of an array to a file, from its first byte on."""
    rows, done = segments(data), 0
    while done < data.nbytes:
        done += os.pwritev(descriptor, rest_of(rows, done), done)
