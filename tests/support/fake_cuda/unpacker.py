"""Fakes of the kernels that find and decode streams: `frames` does all, by numcodecs."""

from typing import Any

import numpy as np

from oocgemm.stores.codecs import NUMBERS, Codec, Frame, checked_content, frame_of
from tests.support.decoding import Array, decompressed
from tests.support.fake_cuda.memory import Block, Memory
from tests.support.fake_cuda.placing import FIELDS
from tests.support.fake_cuda.work import Macros, Work


def frames(memory: Memory, _macros: Macros, pointers: list[int]) -> Work:
    """Prepare kernels/decoding/frames.cu, and what decodes the streams that it finds.

    Which memory it accesses is in the table of the chunks, so that only this and the statuses count.
    """
    given = _batch(pointers)
    names = {number: name for name, number in NUMBERS.items()}
    codec = Codec(names.get(given.compressor, "zstd"), given.compressor > 0, given.itemsize)
    table = memory.matrix(given.chunks, np.int64, given.count, FIELDS, FIELDS)
    statuses = memory.matrix(given.statuses, np.int32, 1, given.count, given.count)[0]

    def run() -> None:
        assert not statuses.any()
        first = 0
        for i, row in enumerate(table):
            source, size = int(row[11]), int(row[12])
            stored = (
                memory.bytes_of(Block(source, size + 4 * row[13])).reshape(-1)
                if size
                else np.zeros(0, np.uint8)
            )
            frame = (
                frame_of(stored[:size].tobytes(), given.chunk, codec) if checked(stored, row[13]) else None
            )
            if frame is None:
                statuses[i], row[8] = 1, 0
                continue
            row[:4] = first, frame.split, frame.order, frame.block
            statuses[i] = 3 * (not decode(frame, stored, source, given.content + i * given.chunk, first))
            first += len(frame.streams)
            assert first <= given.max_streams

    def decode(frame: Frame, stored: Array, source: int, target: int, first: int) -> bool:
        for number, stream in enumerate(frame.streams, first):
            at = source + stream.source if stream.raw else target
            memory.matrix(given.pointers + 8 * number, np.int64, 1, 1, 1)[0, 0] = at
            try:
                content = decompressed(codec, stored, stream)
            except RuntimeError:
                return False
            memory.bytes_of(Block(target, stream.length))[...] = content
            target += stream.length
        return True

    chunks, failed = Block(given.chunks, 8 * FIELDS * given.count), Block(given.statuses, 4 * given.count)
    return Work(run, [chunks], [chunks, failed])


def checked(stored: Array, checksum: int) -> bool:
    """Do what kernels/decoding/crc32c.cu does with a chunk."""
    try:
        return not checksum or checked_content(stored) is not None
    except ValueError:
        return False


def _batch(pointers: list[int]) -> Any:
    from oocgemm.backends.cuda.frames import Batch  # needs cupy, which is fake by now

    return Batch.from_buffer_copy(Batch.from_address(pointers[0]))


def nothing(_memory: Memory, _macros: Macros, pointers: list[int]) -> Work:
    """Prepare one of the kernels whose work `frames` does."""
    assert _batch(pointers).count
    return Work(lambda: None, [], [])
