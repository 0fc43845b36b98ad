"""Fingerprint the chunk files of an array. To read the status of each takes Python longer than the system."""

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from oocgemm.stores.cached import name_parts
from oocgemm.stores.durable import digests, fingerprints, selection
from oocgemm.system.compiled import compiled

# `OOC_STATUS_BYTES` of `kernels/host/chunks.h`.
STATUS_BYTES = 48
# A thread reads the statuses of at least this many files, which takes 1 to 2 ms.
MIN_FILES = 512


def chunk_fingerprints(
    folder: Path, key: Callable[[tuple[int, int]], str], grid: tuple[int, int]
) -> dict[str, str]:
    """Return the `fingerprints` of the files of a grid of chunks, or of some of them if there are many.

    `key` returns the name of a file in `folder`, given the indices of its chunk.
    """
    library, parts, chosen = compiled(), name_parts(key), selection(*grid)
    if library is None or parts is None:
        return fingerprints(f"{folder}/{key(divmod(number, grid[1]))}" for number in chosen)
    path, separator = os.fsencode(f"{folder}/{parts[0]}"), parts[1].encode()

    def statuses(some: range) -> tuple[bytes, bytes]:
        content, changes = (ctypes.create_string_buffer(STATUS_BYTES * len(some) + 1) for _ in range(2))
        numbers = map(ctypes.c_int64, (some.start, some.stop, some.step, grid[1]))
        library.ooc_stat_chunks(path, separator, *numbers, content, changes)
        return content.value, changes.value

    threads = min(len(os.sched_getaffinity(0)), len(chosen) // MIN_FILES)
    if threads > 1:
        each = -(-len(chosen) // threads)
        # If no thread can be started, this one does all.
        with suppress(RuntimeError), ThreadPoolExecutor(threads) as pool:
            found = pool.map(statuses, (chosen[at : at + each] for at in range(0, len(chosen), each)))
            content, changes = (b"".join(texts) for texts in zip(*found, strict=True))
            return digests(content, changes)
    return digests(*statuses(chosen))
