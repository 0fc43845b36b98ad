"""Many reads from one file in one system call: Linux's asynchronous I/O (io_submit).

Reads from files that are opened as usual are synchronous all the same. The gain is that the GIL is released once for all
of them. On 16 cores beside an H100, eight threads read segments of 8 KiB from the page cache at 18 GB/s, and at 0.9 GB/s
with a preadv for each. A system that refuses these calls gets one preadv for each read.
"""

import ctypes
import errno
import os
import platform
from typing import Any

import numpy as np

from oocgemm.stores.base import Array

MAX_READS = 512  # in one call
# Numbers of io_setup, io_getevents and io_submit by processor: the C library has no functions for them.
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
# Contexts that no thread uses now. A child process cannot use them.
_contexts: list[int] = []
os.register_at_fork(after_in_child=_contexts.clear)


def read_rows(descriptor: int, rows: Array, numbers: Array, offsets: Array, flags: int = 0) -> Array:
    """Read into some rows of an array of bytes, each from its own offset of a file, as preadv would with these flags.

    Returns for each of them the number of bytes read, negative where that has failed.
    """
    try:
        context = _free_context()
    except OSError:
        pairs = zip(numbers.tolist(), offsets.tolist(), strict=True)
        return np.array(
            [_read(descriptor, rows[number], offset, flags) for number, offset in pairs], np.int64
        )
    results = np.empty(len(numbers), np.int64)
    for first in range(0, len(numbers), MAX_READS):
        part = slice(first, first + MAX_READS)
        results[part] = _submit(context, descriptor, rows, numbers[part], offsets[part], flags)
    _contexts.append(context)
    return results


def _submit(context: int, descriptor: int, rows: Array, numbers: Array, offsets: Array, flags: int) -> Array:
    count = len(numbers)
    requests, events = np.zeros(count, _REQUEST), np.zeros(count, _EVENT)
    requests["number"] = np.arange(count)
    requests["flags"], requests["descriptor"], requests["size"] = flags, descriptor, rows.shape[1]
    requests["address"] = rows.ctypes.data + rows.strides[0] * numbers
    requests["offset"] = offsets
    addresses = requests.ctypes.data + _REQUEST.itemsize * np.arange(count)
    _, get, submit = _CALLS[platform.machine()]
    begun = ended = 0
    try:
        while begun < count:
            begun += _call(submit, context, count - begun, addresses.ctypes.data + 8 * begun)
    except OSError:  # of the next request, such as flags that the file system does not know
        pass
    while ended < begun:
        left = begun - ended
        ended += _call(get, context, left, left, events.ctypes.data + ended * _EVENT.itemsize, 0)
    results = np.full(count, -1, np.int64)
    results[events["number"][:ended].astype(np.int64)] = events["result"][:ended]
    return results


def _read(descriptor: int, row: Any, offset: int, flags: int) -> int:
    try:
        return os.preadv(descriptor, [row], offset, flags)
    except OSError:
        return -1


def _free_context() -> int:
    """Take a context that no other thread uses. Raises `OSError` where the system gives none."""
    try:
        return _contexts.pop()
    except IndexError:
        return _new_context()


def _new_context() -> int:
    context = ctypes.c_ulong(0)
    if platform.system() != "Linux" or platform.machine() not in _CALLS:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    _call(_CALLS[platform.machine()][0], MAX_READS, ctypes.addressof(context))
    return context.value


def _call(number: int, *arguments: int) -> int:
    """Do a system call. Raises `OSError`."""
    while (result := int(_system(number, *map(ctypes.c_long, arguments)))) < 0:
        if ctypes.get_errno() != errno.EINTR:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
