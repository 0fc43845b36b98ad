"""Run the compiled threads that copy blocks between the host and a device (`kernels/host/host.h`)."""

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oocgemm.errors import ExecutionError
from oocgemm.system.installed import compiled
from oocgemm.system.threads import refusal

_INT, _SIZE, _AT = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
# The functions of the CUDA driver that the threads call, in the order of struct ooc_driver.
DRIVER = (
    "cuCtxSetCurrent",
    "cuMemcpyAsync",
    "cuMemcpy2DAsync_v2",
    "cuStreamWriteValue32_v2",
    "cuStreamQuery",
    "cuEventRecord",
    "cuStreamWaitEvent",
)
# An array with one row per piece of a block: the first row of the piece in the block, its number of rows, its
# first byte in each of these rows, and its bytes per row.
Pieces = NDArray[np.uintp]


class _MemoryBlock(ctypes.Structure):
    """struct ooc_memory."""

    _fields_ = (("address", _AT), ("pitch", ctypes.c_ssize_t), ("size", _SIZE))


class _Stored(ctypes.Structure):
    """struct ooc_stored."""

    _fields_ = (("chunks", _AT), ("top", ctypes.c_int64), ("left", ctypes.c_int64))


class CopiedBlock(ctypes.Structure):
    """struct ooc_block: a block that is copied. The caller keeps the block until it is finished.

    Attributes:
        error: a status of the driver if positive, an errno if negative, 0 if nothing has failed.
        started_at: when the first piece to upload was moved, or the first copy to download was issued, in
            nanoseconds of `perf_counter_ns`.
    """

    _fields_ = (
        *(("move", _AT), ("place", _AT), ("pieces", _AT), ("bytes", _SIZE)),
        *(("device", ctypes.c_uint64), ("row_bytes", _SIZE), ("waits", _AT), ("wait_count", _SIZE)),
        *(("start", _AT), ("end", _AT), ("error", _INT), ("issued", _INT), ("started_at", ctypes.c_int64)),
        *(("cut", _SIZE), ("taken", _SIZE), ("inside", _SIZE), ("unfinished", _SIZE), ("next", _AT)),
    )
    error: int
    started_at: int
    owned: tuple[object, ...]  # the objects to which the addresses in this block point


def available() -> bool:
    """Return whether there is compiled code for the threads."""
    return compiled() is not None


def memory_block(array: NDArray[Any], device: int, *, uploads: bool) -> CopiedBlock:
    """Return the block for an array with contiguous rows. `device` is its address on the device."""
    row = array.shape[1] * array.itemsize
    place = _MemoryBlock(array.ctypes.data, array.strides[0] if len(array) > 1 else row, row)
    found = CopiedBlock(
        move=_library().from_memory if uploads else _library().to_memory,
        place=ctypes.addressof(place),
        bytes=array.nbytes,
        device=device,
        row_bytes=row,
    )
    found.owned = place, array
    return found


def stored_block(
    chunks: int, corner: tuple[int, int], pieces: Pieces, device: int, row_bytes: int
) -> CopiedBlock:
    """Return a block of a matrix in files. The caller keeps the struct ooc_chunks at the address `chunks`.

    `corner` is the first row of the block, and the first byte of the block in each row. `row_bytes` is the
    number of bytes of a row of the block.
    """
    place = _Stored(chunks, *corner)
    found = CopiedBlock(
        move=_library().from_chunks,
        place=ctypes.addressof(place),
        pieces=pieces.ctypes.data,
        bytes=int((pieces[:, 1] * pieces[:, 3]).sum()),
        device=device,
        row_bytes=row_bytes,
    )
    found.owned = place, pieces
    return found


class CopyLane(ctypes.Structure):
    """struct ooc_lane: the addresses of a thread's pinned memory, mark, stream and event."""

    _fields_ = (("memory", _AT), ("size", _SIZE), ("mark", _AT), ("stream", _AT), ("event", _AT))


class Pool:
    """Threads that copy blocks in one direction, each through a lane of its own."""

    def __init__(
        self, driver: Sequence[int], context: int, ends: int, lanes: Sequence[CopyLane], *, uploads: bool
    ) -> None:
        """Start the threads, one per lane. Raises `ExecutionError` if the system cannot start them.

        - `driver`: addresses of the functions in `DRIVER`.
        - `context`: the CUDA context, which each thread passes to the first of these functions.
        - `ends`: the stream on which the ends of blocks are recorded.
        - `uploads`: whether the blocks are copied to the device.
        """
        functions = (_AT * len(DRIVER))(*driver)
        self._library = _library()
        given = (CopyLane * len(lanes))(*lanes)
        self._pool = self._library.open(functions, context, uploads, ends, len(lanes), given)
        if not self._pool:
            why = refusal(RuntimeError("can't start new thread"))
            raise ExecutionError(f"the system cannot start a thread that copies blocks: {why}")

    def begin(self, block: CopiedBlock, waits: Sequence[int], start: int, end: int) -> None:
        """Begin to copy a block once the events `waits` have completed.

        The event `start` is recorded before the first copy, and the event `end` after the last one. The
        caller keeps `block` and the events until all its copies have finished.
        """
        events = (_AT * len(waits))(*waits)
        block.waits, block.wait_count = ctypes.addressof(events), len(waits)
        block.start, block.end = start, end
        block.owned += (events,)
        self._library.begin(self._pool, ctypes.byref(block))

    def wait_issued(self, block: CopiedBlock) -> None:
        # The first call keeps the GIL. To get the GIL back may take longer than the wait.
        if not self._library.is_issued(self._pool, ctypes.byref(block), 0):
            self._library.wait_issued(self._pool, ctypes.byref(block), 1)

    def wait_finished(self, block: CopiedBlock) -> None:
        if not self.is_finished(block):
            self._library.wait_finished(self._pool, ctypes.byref(block), 1)

    def is_finished(self, block: CopiedBlock) -> bool:
        return bool(self._library.is_finished(self._pool, ctypes.byref(block), 0))

    def take(self, lane: int) -> None:
        """Take the buffers of a thread, which copies nothing until the calling thread has given them back.

        When this call returns, no copy from or to the buffers is in flight. None may be in flight when the
        calling thread gives them back.
        """
        self._library.take(self._pool, lane)

    def give(self, lane: int) -> None:
        self._library.give(self._pool, lane)

    def close(self) -> None:
        """End the threads. All blocks must be finished."""
        if self._pool:
            self._library.close(self._pool)
            self._pool = None


class _Library:
    """The functions of the compiled library, with the types of their arguments."""

    def __init__(self, library: ctypes.CDLL) -> None:
        def function(name: str, *types: Any, keep_gil: bool = False, result: Any = None) -> Any:
            kind = ctypes.PYFUNCTYPE if keep_gil else ctypes.CFUNCTYPE
            return kind(result, *types)((f"ooc_{name}", library))

        block = _AT, ctypes.POINTER(CopiedBlock)
        self.open = function("open", _AT, _AT, _INT, _AT, _SIZE, ctypes.POINTER(CopyLane), result=_AT)
        self.begin = function("begin", *block)
        self.wait_issued, self.wait_finished = (
            function(name, *block, _INT, result=_INT) for name in ("issued", "finished")
        )
        self.is_issued, self.is_finished = (
            function(name, *block, _INT, result=_INT, keep_gil=True) for name in ("issued", "finished")
        )
        self.take, self.give = (function(f"{name}_lane", _AT, _SIZE) for name in ("take", "give"))
        self.close = function("close", _AT)
        self.from_memory, self.to_memory = (
            ctypes.cast(getattr(library, f"ooc_{name}_memory"), _AT).value for name in ("from", "to")
        )
        self.from_chunks = ctypes.cast(library.ooc_from_chunks, _AT).value


@cache
def _library() -> _Library:
    library = compiled()
    assert library is not None
    return _Library(library)


def error_of(block: CopiedBlock) -> OSError | None:
    """Return the error of the system that has stopped the copies of a block; None if there is none."""
    return OSError(-block.error, os.strerror(-block.error)) if block.error < 0 else None
