"""Fakes of the kernels that compress chunks of C: `assemble` does all, by numcodecs."""

from typing import Any

import numpy as np
from numcodecs import Blosc, Zstd

from tests.support.fake_cuda.memory import Block, Memory
from tests.support.fake_cuda.work import Macros, Work

PAGE, CHECKSUM = 4096, 4
KINDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


def assemble(memory: Memory, _macros: Macros, pointers: list[int]) -> Work:
    """Prepare kernels/encoding/assemble.cu, and what the kernels before it do.

    The strip and the index of the batch count as accessed, and so does the first page of the frames.
    """
    given = _batch(pointers)
    strip = Block(given.strip, given.rows * given.cols * given.item)
    compressor = {0: Zstd(1), 1: Blosc("lz4", 3), 4: Blosc("zstd", 1)}[given.compressor]

    def run() -> None:
        x = memory.bytes_of(strip).reshape(given.rows, given.cols, given.item)
        end = memory.matrix(given.end, np.uint64, 1, 1, 1)
        at = int(end[0, 0]) if given.first else given.frames
        for number in range(given.first, given.first + given.count):
            top, left = number // given.across * given.height, number % given.across * given.width
            part = x[top : top + given.height, left : left + given.width]
            chunk = np.zeros((given.height, given.width, given.item), np.uint8)
            chunk[: part.shape[0], : part.shape[1]] = part
            frame = np.frombuffer(compressor.encode(chunk.reshape(-1).view(KINDS[given.item])), np.uint8)
            memory.matrix(given.host + 16 * number, np.uint64, 1, 2, 2)[0] = at, frame.size
            memory.bytes_of(Block(given.host + at, frame.size))[...] = frame
            at = (at + frame.size + CHECKSUM + PAGE - 1) // PAGE * PAGE
        end[0, 0] = at

    index = Block(given.host + 16 * given.first, 16 * given.count)
    return Work(run, [strip], [index, Block(given.host + given.frames, PAGE), Block(given.end, 8)])


def _batch(pointers: list[int]) -> Any:
    from oocgemm.kernels.launches import EncodingBatch

    return EncodingBatch.from_buffer_copy(EncodingBatch.from_address(pointers[0]))


def nothing(_memory: Memory, _macros: Macros, pointers: list[int]) -> Work:
    """Prepare one of the kernels whose work `assemble` does."""
    assert _batch(pointers).count
    return Work(lambda: None, [], [])
