"""Fakes of the kernels that find and decode streams of zstd: `frames` does all, by numcodecs."""

from dataclasses import replace
from typing import Any

import numpy as np
from numcodecs import Zstd

from oocgemm.stores.frames import Codec, find_streams
from tests.decoding import Array
from tests.fake_cuda.memory import Block, Memory
from tests.fake_cuda.placing import FIELDS
from tests.fake_cuda.work import Macros, Work


def frames(memory: Memory, _macros: Macros, pointers: list[int]) -> Work:
    """Prepare kernels/decoding/frames.cu, and what decodes the streams that it finds.

    Which memory it accesses is in the table of the chunks, so that only this and the statuses count.
    """
    given = _batch(pointers)
    codec, count, chunk = Codec("zstd", bool(given.blosc), given.itemsize), given.count, given.chunk
    table = memory.matrix(given.chunks, np.int64, count, FIELDS, FIELDS)
    statuses = memory.matrix(given.statuses, np.int32, 1, count, count)[0]

    def run() -> None:
        assert not statuses.any()
        end = 0
        for i, row in enumerate(table):
            source, size = int(row[11]), int(row[12])
            stored = memory.bytes_of(Block(source, size)).reshape(-1) if size else np.zeros(1, np.uint8)
            found = find_streams(stored, np.array([0]), np.array([size]), chunk, codec)
            statuses[i] = found.refused[0]
            row[:4] = end, found.split[0], found.order[0], found.block[0]
            if found.refused[0]:
                row[8] = 0
                continue
            found = replace(
                found, source=found.source + source, target=found.target + i * chunk + given.content
            )
            for k in range(len(found.size)):
                at = int((found.source if found.raw[k] else found.target)[k])
                memory.matrix(given.pointers + 8 * (end + k), np.int64, 1, 1, 1)[0, 0] = at
                if not found.raw[k] and not decode(
                    int(found.source[k]), int(found.size[k]), at, int(found.length[k])
                ):
                    statuses[i] = 3
            end += len(found.size)
            assert end <= given.max_streams

    def decode(source: int, size: int, target: int, length: int) -> bool:
        try:
            content: Array = np.frombuffer(
                Zstd().decode(memory.bytes_of(Block(source, size)).tobytes()), np.uint8
            )
        except RuntimeError:
            return False
        memory.bytes_of(Block(target, length))[...] = content
        return True

    chunks, failed = Block(given.chunks, 8 * FIELDS * count), Block(given.statuses, 4 * count)
    return Work(run, [chunks], [chunks, failed])


def _batch(pointers: list[int]) -> Any:
    from oocgemm.backends.cuda.zstd import Batch  # needs cupy, which is fake by now

    return Batch.from_buffer_copy(Batch.from_address(pointers[0]))


def nothing(memory: Memory, _macros: Macros, pointers: list[int]) -> Work:
    """Prepare one of the kernels whose work `frames` does."""
    assert _batch(pointers).count
    return Work(lambda: None, [], [])
