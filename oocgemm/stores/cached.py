"""Read blocks of uncompressed matrices from the page cache, by compiled code that does not hold the GIL.

One call reads a block of any number of chunks. It reads only what the page cache contains, of files that are
as large as they should be. Everything else is left to the caller.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from oocgemm.planning.tiling import Range
from oocgemm.stores.base import Array
from oocgemm.stores.files import OpenFile, many_cores
from oocgemm.system.installed import compiled

# At most about this many pages of a file are checked to estimate whether the page cache contains the file.
SAMPLES = 8
# Rows of a chunk of at least this many bytes, which are apart in memory, are read by one call for many.
# Shorter ones are read into a buffer first. In a virtual machine with an H100 and 16 cores, 12 threads read
# rows of 1 KiB at 55 GB/s without the buffer, and at 42 GB/s with it. A thread on two Zen 5 cores read them
# at 5 and 8 GB/s, and rows of 16 KiB at 7 and 8 GB/s.
MIN_SCATTERED_ON_MANY_CORES, MIN_SCATTERED = 512, 32 << 10
_Int = ctypes.c_int64


class _Chunks(ctypes.Structure):
    """`struct ooc_chunks` of `kernels/host/chunks.h`."""

    _fields_ = (
        *(("path", ctypes.c_char_p), ("separator", ctypes.c_char_p)),
        *((name, _Int) for name in ("height", "width", "bytes", "offset")),
        *(("offsets", ctypes.c_void_p), ("across", _Int), ("min_scattered", _Int)),
    )


class _Area(ctypes.Structure):
    """`struct ooc_area` of `kernels/host/chunks.h`."""

    _fields_ = (
        *((name, _Int) for name in ("top", "bottom", "left", "right")),
        *(("to", ctypes.c_void_p), ("pitch", _Int)),
    )


class CachedChunks:
    """The chunks of a matrix, row by row, whose stored bytes are those of their elements.

    Attributes:
        address: of the `struct ooc_chunks`, for compiled code that reads blocks itself.
        incomplete: whether that could not read a block, because of a missing chunk, for example. Further
            blocks are likely to have such chunks, too. So Python reads them, with `read`.
    """

    def __init__(
        self,
        path: str | Path,
        separator: str | None,
        chunk: tuple[int, int],
        itemsize: int,
        size: int,
        *,
        offset: int = 0,
        offsets: Array | None = None,
    ) -> None:
        """Describe where the chunks are.

        Args:
            path: of the file with all chunks. With `separator`, chunks have their own files, whose paths
                begin with `path` and end with the chunk's numbers in the grid.
            separator: between these numbers; None for one file.
            chunk: rows and columns of a chunk.
            itemsize: bytes of an element.
            size: bytes of a chunk's file, or the least bytes of the one file.
            offset: the first byte of a chunk in its file.
            offsets: the first bytes of all chunks in the one file, as an int64 array of the shape of the
                grid; negative for chunks that are not stored.
        """
        self._chunk, self.itemsize = chunk, itemsize
        across = 0 if offsets is None else offsets.shape[1]
        self._offsets = None if offsets is None else np.ascontiguousarray(offsets, np.int64)
        place = None if self._offsets is None else self._offsets.ctypes.data
        self._chunks = _Chunks(
            *(os.fsencode(path), None if separator is None else separator.encode()),
            *(chunk[0], chunk[1] * itemsize, size, offset, place, across),
            MIN_SCATTERED_ON_MANY_CORES if many_cores() else MIN_SCATTERED,
        )
        self.address = ctypes.addressof(self._chunks)
        self.incomplete = False

    def read(self, rows: Range, cols: Range, out: Array) -> list[int] | None:
        """Read a block into an array with contiguous rows.

        Returns the numbers of the chunks that were not read. The chunks of the block are counted row by row.
        Returns None if there is no compiled code.
        """
        library = compiled()
        if library is None:
            return None
        (top, bottom), (left, right), (height, width), size = rows, cols, self._chunk, self.itemsize
        area = _Area(top, bottom, left * size, right * size, out.ctypes.data, out.strides[0])
        count = (-(-bottom // height) - top // height) * (-(-right // width) - left // width)
        failed = (_Int * count)()
        found = library.ooc_read_chunks(ctypes.byref(self._chunks), ctypes.byref(area), failed)
        return failed[:found]


class Stored(NamedTuple):
    """A block that begins at a row and a column of a matrix, whose chunks the page cache seems to contain."""

    chunks: CachedChunks
    row: int
    column: int

    @property
    def left(self) -> int:
        """The first byte of the block in each of its rows."""
        return self.column * self.chunks.itemsize


def in_page_cache(path: str | Path, offsets: Sequence[int]) -> bool:
    """Return whether the page cache seems to contain a file, by the pages at some of these offsets.

    The offsets are in ascending order. A wrong answer costs time, not more.
    """
    chosen = offsets[:: max(1, len(offsets) // SAMPLES)]
    try:
        with OpenFile(path) as file:
            return file.cached(list(chosen))
    except (OSError, EOFError):
        return False  # a read of the file will say what is wrong


def chunk_files(
    root: Path, key: Callable[[tuple[int, int]], str], chunk: tuple[int, int], itemsize: int
) -> CachedChunks | None:
    """Return the chunks of a zarr array whose files have the names `key`; None for other kinds of names."""
    if (parts := name_parts(key)) is None:
        return None
    size = chunk[0] * chunk[1] * itemsize
    return CachedChunks(f"{root}/{parts[0]}", parts[1], chunk, itemsize, size)


def name_parts(key: Callable[[tuple[int, int]], str]) -> tuple[str, str] | None:
    """Return what is before and between the numbers of a chunk in the names `key`; None for other names."""
    before, _, rest = key((1, 2)).partition("1")
    separator, _, after = rest.partition("2")
    alike = not after and key((30, 456)) == f"{before}30{separator}456"
    return (before, separator) if alike else None
