"""Prepares copies of a block of a matrix between device memory and pinned host memory.

In device memory, the rows of a block follow each other without gaps.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import cupy
import numpy as np

from oocgemm.backends.base import Array
from oocgemm.backends.cuda import calls as cuda_calls
from oocgemm.backends.cuda.borders import cut


def array_copy(device: int, array: Array, stream: Any, *, uploading: bool) -> cuda_calls.Launch:
    """Prepare the copy of a block that is a view of a pinned array, whose rows are contiguous."""
    height, width = array.shape[0], array.shape[1] * array.itemsize
    pitch = max(width, array.strides[0])
    if pitch == width or height == 1:
        to, source = (device, array.ctypes.data)[:: 1 if uploading else -1]
        return cuda_calls.copy(to, source, height * width, stream)
    onto, origin = ((device, width), (array.ctypes.data, pitch))[:: 1 if uploading else -1]
    return cuda_calls.copy_rows(onto, origin, width, height, stream)


def slot_copies(
    device: int, host: Sequence[Array], borders: Sequence[int], stream: Any, *, uploading: bool
) -> list[cuda_calls.Launch]:
    """Prepare the copies of a block in a host slot: CUDA refuses copies that cross borders of pinned ranges.

    Args:
        device: address of the block in device memory.
        host: the contiguous arrays in the slot, each of some columns of the block.
        borders: the start of the slot's first pinned range, the borders between ranges, and the end of the
            last one.
        stream: the stream of the copies.
        uploading: copy from host to device if true, from device to host if false.
    """
    launches: list[cuda_calls.Launch] = []
    if len(host) == 1:
        start, size = host[0].ctypes.data, host[0].nbytes
        for begin, end in pairwise(borders):
            part = min(end, start + size) - begin
            if part > 0:
                to, source = (device + begin - start, begin)[:: 1 if uploading else -1]
                launches.append(cuda_calls.copy(to, source, part, stream))
        return launches
    row = sum(group.shape[1] * group.itemsize for group in host)
    for group in host:
        for rows in cut(group, borders):
            width = rows.shape[1] * rows.itemsize
            top, left = divmod(rows.ctypes.data - group.ctypes.data, group.strides[0])
            ends = (device + top * row + left, row), (rows.ctypes.data, max(width, rows.strides[0]))
            onto, origin = ends[:: 1 if uploading else -1]
            launches.append(cuda_calls.copy_rows(onto, origin, width, len(rows), stream))
        device += group.shape[1] * group.itemsize
    return launches


def upload(address: int, array: Array, stream: Any) -> None:
    """Copy an array to the device; return when it is there."""
    pinned = cupy.cuda.alloc_pinned_memory(max(1, array.nbytes))
    np.frombuffer(pinned, array.dtype, array.size).reshape(array.shape)[...] = array
    cuda_calls.make(cuda_calls.copy(address, pinned.ptr, array.nbytes, stream))
    stream.synchronize()
