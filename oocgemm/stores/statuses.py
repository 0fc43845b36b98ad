"""Fingerprint the chunk files of an array. To read the status of each takes Python longer than the system."""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

from oocgemm.stores.cached import name_parts
from oocgemm.stores.durable import digests, fingerprints, selection
from oocgemm.system.compiled import compiled

# `OOC_STATUS_BYTES` of `kernels/host/chunks.h`.
STATUS_BYTES = 48


def chunk_fingerprints(
    folder: Path, key: Callable[[tuple[int, int]], str], grid: tuple[int, int]
) -> dict[str, str]:
    """Return the `fingerprints` of the files of a grid of chunks, or of some of them if there are many.

    `key` returns the name of a file in `folder`, given the indices of its chunk.
    """
    library, parts, chosen = compiled(), name_parts(key), selection(*grid)
    if library is None or parts is None:
        return fingerprints(f"{folder}/{key(divmod(number, grid[1]))}" for number in chosen)
    content, changes = (ctypes.create_string_buffer(STATUS_BYTES * len(chosen) + 1) for _ in range(2))
    library.ooc_stat_chunks(
        *(os.fsencode(f"{folder}/{parts[0]}"), parts[1].encode()),
        *map(ctypes.c_int64, (chosen.stop, grid[1], chosen.step)),
        *(content, changes),
    )
    return digests(content.value, changes.value)
