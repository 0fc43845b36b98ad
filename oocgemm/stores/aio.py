"""Submit many reads of one file in one system call: Linux's asynchronous I/O (io_submit).

Reads of a buffered file remain synchronous. The gain is that the GIL is released once for all of them. On 16
cores beside an H100, eight threads read segments of 8 KiB from the page cache at 18 GB/s, and at 0.9 GB/s
with one preadv per segment. Where the system refuses these calls, each read is one preadv.
"""

import ctypes
import errno
import os
import platform
from collections.abc import Callable
from typing import Any

import numpy as np

from oocgemm.stores.base import Array

_CAPACITY = 512  # reads in flight per context
MAX_READS = _CAPACITY  # per call
# System call numbers of io_setup, io_getevents and io_submit: the C library does not wrap them.
_CALLS = {"x86_64": (206, 208, 209), "aarch64": (0, 4, 2)}
# struct iocb and struct io_event of linux/aio_abi.h. The operation 0 is a read.
_REQUEST = np.dtype("u8, u4, i4, u2, i2, u4, u8, u8, i8, u8, u4, u4")
_REQUEST.names = (
    *("number", "key", "flags", "operation", "priority", "descriptor"),
    *("address", "size", "offset", "reserved", "more_flags", "notify"),
)
_EVENT = np.dtype("u8, u8, i8, i8")
_EVENT.names = ("number", "request", "result", "more")
_system = ctypes.CDLL(None, use_errno=True).syscall
_system.restype = ctypes.c_long
# Contexts that no thread uses. A forked child cannot use them.
_contexts: list[int] = []
os.register_at_fork(after_in_child=_contexts.clear)


def start_reads(
    memory: Array, places: Array, size: int, descriptor: int, offsets: Array, flags: int = 0
) -> Callable[[], Array]:
    """Start to read `size` bytes from each of up to `MAX_READS` offsets of a file.

    Arguments:
        memory: one row of contiguous bytes that receives the data
        places: for each read, its index in `memory`
        descriptor: the open file
        offsets: for each read, its offset in the file
        flags: as for preadv

    Returns a function that waits for the reads. It must be called once, before `memory` is used for anything
    else. It returns the number of bytes of each read, negative for a failed read.
    """
    count = len(places)
    results = np.full(count, -1, np.int64)
    try:
        context = _free_context()
    except OSError:
        for number, (place, offset) in enumerate(zip(places.tolist(), offsets.tolist(), strict=True)):
            results[number] = _read(descriptor, memory[place : place + size], offset, flags)
        return lambda: results
    requests, events = np.zeros(count, _REQUEST), np.zeros(count, _EVENT)
    requests["number"] = np.arange(count)
    requests["flags"], requests["descriptor"], requests["size"] = flags, descriptor, size
    requests["address"] = memory.ctypes.data + places
    requests["offset"] = offsets
    addresses = requests.ctypes.data + _REQUEST.itemsize * np.arange(count)
    _, get, submit = _CALLS[platform.machine()]
    submitted = 0
    try:
        while submitted < count:
            submitted += _call(submit, context, count - submitted, addresses.ctypes.data + 8 * submitted)
    except OSError:  # for example, the file system does not support the flags
        pass

    def wait() -> Array:
        completed = 0
        while completed < submitted:
            left = submitted - completed
            completed += _call(get, context, left, left, events.ctypes.data + completed * _EVENT.itemsize, 0)
        _contexts.append(context)
        results[events["number"][:completed].astype(np.int64)] = events["result"][:completed]
        return results

    return wait


def read_rows(descriptor: int, rows: Array, numbers: Array, offsets: Array, flags: int = 0) -> Array:
    """Read into rows of an array of bytes, each from its own offset of a file, with the flags of preadv.

    Returns the number of bytes of each read, negative for a failed read.
    """
    height, size = rows.shape
    stride = rows.strides[0]
    memory = np.lib.stride_tricks.as_strided(rows, ((height - 1) * stride + size,), (1,))
    results = np.empty(len(numbers), np.int64)
    for first in range(0, len(numbers), MAX_READS):
        part = slice(first, first + MAX_READS)
        results[part] = start_reads(memory, stride * numbers[part], size, descriptor, offsets[part], flags)()
    return results


def _read(descriptor: int, row: Any, offset: int, flags: int) -> int:
    try:
        return os.preadv(descriptor, [row], offset, flags)
    except OSError:
        return -1


def _free_context() -> int:
    """Take a context that no other thread uses. Raises `OSError` where the system provides none."""
    try:
        return _contexts.pop()
    except IndexError:
        return _new_context()


def _new_context() -> int:
    context = ctypes.c_ulong(0)
    if platform.system() != "Linux" or platform.machine() not in _CALLS:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    _call(_CALLS[platform.machine()][0], _CAPACITY, ctypes.addressof(context))
    return context.value


def _call(number: int, *arguments: int) -> int:
    """Make a system call, and repeat it when a signal interrupts it. Raises `OSError`."""
    while (result := int(_system(number, *map(ctypes.c_long, arguments)))) < 0:
        if ctypes.get_errno() != errno.EINTR:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
