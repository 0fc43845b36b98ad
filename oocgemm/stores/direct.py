"""Uncompressed chunks of local zarr arrays, read and written as the plain files they are.

zarr reads a chunk into fresh memory and copies it from there, all copies of a process in one thread. A chunk
that is stored as it lies in memory can be mapped and copied straight into the slot, from as many threads as
there are. Files are unmapped chunk by chunk, so that mapped pages do not pile up.
"""

import contextlib
import errno
import mmap
import os
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from oocgemm.errors import ExecutionError
from oocgemm.plan.tiling import Span
from oocgemm.stores.base import Array


@dataclass(frozen=True)
class RawChunks:
    """A regular grid of raw chunk files. `dtype` carries the stored byte order."""

    root: Path
    key: Callable[[tuple[int, int]], str]
    shape: tuple[int, int]
    chunk: tuple[int, int]
    dtype: np.dtype[Any]
    order: Literal["C", "F"]
    fill: Any

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk file; chunks at the edges are stored whole."""
        return self.chunk[0] * self.chunk[1] * self.dtype.itemsize

    def read(self, rows: Span, cols: Span, out: Array) -> None:
        """Copy a block into `out`."""
        for i, (r0, r1) in _chunks(rows, self.chunk[0]):
            for j, (c0, c1) in _chunks(cols, self.chunk[1]):
                target = out[r0 - rows[0] : r1 - rows[0], c0 - cols[0] : c1 - cols[0]]
                top, left = i * self.chunk[0], j * self.chunk[1]
                self._read_chunk((i, j), slice(r0 - top, r1 - top), slice(c0 - left, c1 - left), target)

    def write(self, rows: Span, cols: Span, data: Array) -> None:
        """Write a block that covers whole chunks (but for those cut by the matrix's own edges), each file
        written beside its place and renamed into it."""
        for i, (r0, r1) in _chunks(rows, self.chunk[0]):
            for j, (c0, c1) in _chunks(cols, self.chunk[1]):
                part = data[r0 - rows[0] : r1 - rows[0], c0 - cols[0] : c1 - cols[0]]
                self._write_chunk((i, j), part)

    def takes(self, dtype: np.dtype[Any]) -> bool:
        """Whether elements are stored as they lie in memory, so that they can be written as they are."""
        return (self.dtype, self.order) == (dtype, "C")

    def _read_chunk(self, index: tuple[int, int], rows: slice, cols: slice, out: Array) -> None:
        path = self.root / self.key(index)
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            out[...] = self.fill  # zarr's meaning of a chunk that is not there
            return
        try:
            size = os.fstat(descriptor).st_size
            if size != self.chunk_bytes:
                raise ExecutionError(
                    f"chunk {self.key(index)} in {self.root} has {size} bytes instead of {self.chunk_bytes}: "
                    "it is damaged or cut short"
                )
            with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as mapped:
                chunk = np.frombuffer(mapped, self.dtype).reshape(self.chunk, order=self.order)
                np.copyto(out, chunk[rows, cols], casting="equiv")
                del chunk  # the map cannot be closed while it is looked at
        finally:
            os.close(descriptor)

    def _write_chunk(self, index: tuple[int, int], part: Array) -> None:
        path = self.root / self.key(index)
        path.parent.mkdir(parents=True, exist_ok=True)
        buffer = _bounce_buffer(self.chunk_bytes)
        whole = np.frombuffer(buffer, self.dtype, self.chunk[0] * self.chunk[1]).reshape(self.chunk)
        if part.shape != self.chunk:
            whole[...] = self.fill
        whole[: part.shape[0], : part.shape[1]] = part
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
        try:
            _write_file(temporary, buffer, self.chunk_bytes)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


# Addresses and lengths of direct I/O are multiples of this.
_SECTOR = 4096
_bounce = threading.local()


def _bounce_buffer(size: int) -> mmap.mmap:
    """An aligned buffer of the calling thread, of at least `size` bytes, used again for its next chunk."""
    rounded = -(-size // _SECTOR) * _SECTOR
    buffer: mmap.mmap | None = getattr(_bounce, "buffer", None)
    if buffer is None or len(buffer) < rounded:
        buffer = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        _bounce.buffer = buffer
    return buffer


def _write_file(path: Path, buffer: mmap.mmap, size: int) -> None:
    """A new file of the buffer's first `size` bytes, past the page cache where the file system can: that leaves
    the processor to those who compute, and memory to those who read."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for direct in (getattr(os, "O_DIRECT", 0), 0):
        try:
            descriptor = os.open(path, flags | direct, 0o666)
        except OSError as error:
            if direct and error.errno == errno.EINVAL:
                continue
            raise
        try:
            length = -(-size // _SECTOR) * _SECTOR if direct else size
            done = 0
            with memoryview(buffer) as view:
                while done < length:
                    with view[done:length] as rest:
                        done += os.write(descriptor, rest)
            os.ftruncate(descriptor, size)
            return
        except OSError as error:
            if not (direct and error.errno == errno.EINVAL):
                raise
        finally:
            os.close(descriptor)


def _chunks(span: Span, chunk: int) -> list[tuple[int, Span]]:
    """Chunk numbers that a span touches, with the part of the span in each."""
    start, stop = span
    return [
        (i, (max(start, i * chunk), min(stop, (i + 1) * chunk)))
        for i in range(start // chunk, -(-stop // chunk))
    ]
