"""A plain loop in C that copies arrays between pageable memory and the device (`staging.c`), run from Python.

It shows what a machine's memory and link allow: how fast an array can be copied that is not pinned.
"""

import ctypes
import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import cupy
import numpy as np

from oocgemm.backends.cuda import calls as cuda_calls

_SIZE, _AT = ctypes.c_size_t, ctypes.c_void_p
FLAGS = ("-std=c11", "-O3", "-shared", "-fPIC", "-pthread", "-D_GNU_SOURCE")
DRIVER = ("cuCtxSetCurrent", "cuMemcpyAsync", "cuEventRecord", "cuEventQuery")
MIB = 1 << 20


@dataclass(frozen=True)
class Way:
    """How a direction is copied: `threads`, each with `buffers` pinned buffers of `piece` bytes.

    With `streamed`, the stores of the threads bypass the caches.
    """

    threads: int
    buffers: int
    piece: int
    streamed: bool

    @property
    def nbytes(self) -> int:
        return self.threads * self.buffers * self.piece


# The fastest ways on the host of an H200, of some that differ in threads, buffers, pieces and stores.
UP, DOWN = Way(8, 2, 4 * MIB, False), Way(8, 3, 4 * MIB, True)
# The same for each direction while both copy.
BOTH_UP, BOTH_DOWN = Way(6, 2, 4 * MIB, False), Way(6, 2, 4 * MIB, True)


class _Direction(ctypes.Structure):
    """struct direction."""

    _fields_ = (
        *(("threads", _SIZE), ("buffers", _SIZE), ("piece", _SIZE), ("size", _SIZE)),
        *(("array", _AT), ("memory", _AT), ("device", ctypes.c_uint64), ("streams", _AT), ("events", _AT)),
        *(("uploads", ctypes.c_int), ("streamed", ctypes.c_int), ("error", ctypes.c_int)),
        *(("seconds", ctypes.c_double), ("next", _SIZE)),
    )


class Loop:
    """Copies a host array and a device array of the same bytes to each other, in one direction.

    The loop pins its buffers until `close`.
    """

    def __init__(self, array: Any, device: Any, way: Way, *, uploads: bool) -> None:
        self._arrays, self._device = (array, device), cupy.cuda.Device()
        self._memory = cuda_calls.pinned_memory(self._device, way.nbytes, way.threads)
        self._streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(way.threads)]
        count = way.threads * way.buffers
        self._events = [cupy.cuda.Event(disable_timing=True) for _ in range(count)]
        self._places = (
            np.array([stream.ptr for stream in self._streams], np.uintp),
            np.array([event.ptr for event in self._events], np.uintp),
        )
        self.size: int = array.nbytes
        self.direction = _Direction(
            *(way.threads, way.buffers, way.piece, array.nbytes, array.ctypes.data, self._memory.ctypes.data),
            *(device.data.ptr, *(place.ctypes.data for place in self._places), uploads, way.streamed),
        )

    def close(self) -> None:
        cuda_calls.unpin(self._device, self._memory)


def seconds(loops: Sequence[Loop]) -> list[float]:
    """Run loops at the same time, once. Return the seconds until the end of each."""
    directions = (_Direction * len(loops))(*(loop.direction for loop in loops))
    functions = (_AT * len(DRIVER))(*(cuda_calls.address(name) for name in DRIVER))
    if _library().staging_run(functions, _AT(cuda_calls.context()), directions, _SIZE(len(loops))):
        raise RuntimeError("the system cannot start the threads of the loop")
    for direction in directions:
        cupy.cuda.driver.check_status(direction.error)
    return [direction.seconds for direction in directions]


@cache
def _library() -> ctypes.CDLL:
    """Compile `staging.c` and load it."""
    source = Path(__file__).with_name("staging.c")
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "staging.so"
        compiler = shlex.split(os.environ.get("CC") or "cc")
        subprocess.run([*compiler, *FLAGS, str(source), "-o", str(made)], check=True)
        return ctypes.CDLL(str(made))
