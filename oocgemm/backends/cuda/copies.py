"""Builds the copies of a block between device memory, where its rows are contiguous, and pinned host
memory."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from oocgemm.backends.base import Array, InPlace
from oocgemm.backends.cuda import calls as cuda_calls
from oocgemm.backends.cuda.borders import cut


def block_copies(
    device: int, host: Sequence[Array], borders: Sequence[int], stream: Any, *, uploading: bool
) -> list[cuda_calls.Launch]:
    """Return the launches that copy a block. CUDA refuses a copy that crosses from one pinned range into
    another.

    Args:
        device: address of the block in device memory.
        host: its groups of columns in a host slot, or an `InPlace`.
        borders: addresses where one pinned range of the host memory ends and the next begins. For a host
            slot, the first and the last one are the ends of its pinned memory.
        stream: where the copies run.
        uploading: host to device if true, else device to host.
    """
    launches: list[cuda_calls.Launch] = []
    if len(host) == 1 and not isinstance(host, InPlace):
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
