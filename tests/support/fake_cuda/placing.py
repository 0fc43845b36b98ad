"""NumPy versions of the kernels `place` and `scatter`."""

import ctypes

import numpy as np

from tests.support.decoding import Array, ordered
from tests.support.fake_cuda.memory import Block, Memory
from tests.support.fake_cuda.work import Macros, Work

FIELDS = 14


def place(memory: Memory, macros: Macros, pointers: list[int]) -> Work:
    """Prepare kernels/decoding/place.cu, which composes chunks of their decoded streams.

    Which memory it accesses is in tables on the device, so that only the tables count as accessed.
    """
    streams, chunks, panel = (ctypes.c_void_p.from_address(pointers[i]).value or 0 for i in (0, 1, 3))
    pitch, item = ctypes.c_longlong.from_address(pointers[2]).value, int(macros["OOC_ITEM"])
    count = int(macros["grid y"])
    table = memory.matrix(chunks, np.int64, count, FIELDS, FIELDS)

    def stream(number: int, size: int) -> Array:
        return memory.bytes_of(Block(int(memory.matrix(streams + 8 * number, np.int64, 1, 1, 1)[0, 0]), size))

    def run() -> None:
        for first, split, order, block, size, width, row, col, rows, cols, target, *_ in table.tolist():
            if not rows:
                continue
            whole = []
            for number, at in enumerate(range(0, size, block)):
                content = min(block, size - at)
                parts = split if content == block else 1
                found = [stream(first + number * split + j, content // parts) for j in range(parts)]
                whole.append(ordered(np.concatenate([part.reshape(-1) for part in found]), order, item))
            elements = np.concatenate(whole).reshape(-1, width, item)[row : row + rows, col : col + cols]
            for i in range(rows):
                to = panel + (target + i * pitch) * item
                memory.bytes_of(Block(to, cols * item))[...] = elements[i].reshape(-1)

    return Work(run, [Block(chunks, 8 * FIELDS * count)], [])


def scatter(memory: Memory, macros: Macros, pointers: list[int]) -> Work:
    """Prepare kernels/decoding/scatter.cu, which composes lines of a sparse matrix from their entries."""
    at, from_indices, from_values, panel = (
        ctypes.c_void_p.from_address(pointers[i]).value or 0 for i in (0, 1, 2, 6)
    )
    left, width, pitch = (ctypes.c_longlong.from_address(pointers[i]).value for i in (3, 4, 5))
    lines, item = int(macros["grid x"]), int(macros["OOC_ITEM"])
    index = np.int32 if macros["OOC_INDEX"] == "int" else np.int64
    reads = [Block(at, 8 * (lines + 1))]
    writes = [Block(panel, width * item, lines, pitch * item)]

    def run() -> None:
        starts = memory.matrix(at, np.int64, 1, lines + 1, lines + 1)[0]
        entries = int(starts[-1])
        places = memory.matrix(from_indices, index, 1, entries, entries)[0] - left
        found = memory.matrix(from_values, np.uint8, entries, item, item)
        line = np.repeat(np.arange(lines), np.diff(starts))
        inside = (places >= 0) & (places < width)
        to = np.zeros((lines, width, item), np.uint8)
        to[line[inside], places[inside]] = found[inside]
        memory.bytes_of(writes[0])[...] = to.reshape(lines, width * item)

    return Work(run, reads, writes)
