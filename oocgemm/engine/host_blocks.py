"""The blocks of operands that operations move, in host memory: their ranges, their parts, and where they are.

A *block* is what one Read or Write moves: a panel of A or B, or a strip of C. A host slot, the buffer in host
memory, stores a block as one or more contiguous arrays, each of some columns (`column_groups`). Threads read,
write and decode it in *parts*. A block of an operand in memory, or in a file that a device copies from, needs
no host slot (`host_block`).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from oocgemm.backends.base import Compressed, Found, Pageable, Pinned
from oocgemm.planning import Kind, Layout, Operation, Plan
from oocgemm.planning.cost.footprint import MIRRORED_BYTES
from oocgemm.planning.tiling import Range, length
from oocgemm.stores import BATCH_BYTES, Array, Coded, Collecting, Matrix, in_memory, memory, pieces
from oocgemm.stores.capabilities import cached_chunks
from oocgemm.stores.codecs import Codec, Fetched
from oocgemm.stores.files import CachedBlock

# Maximum and minimum size, in bytes, of the parts into which a block is cut, for stores that can transfer
# parts of chunks. Within these limits, there is one part per thread. Smaller parts would be slower: passing a
# part to a thread takes the GIL for tens of microseconds.
MAX_PIECE_BYTES = 16 << 20
MIN_PIECE_BYTES = 4 << 20


def column_groups(plan: Plan, operation: Operation) -> list[Range]:
    """Return the ranges of columns that a host slot stores as one contiguous array each.

    Columns are counted from the first column of the operation's block. Usually one range contains all
    columns. If a chunk has at least `BATCH_BYTES` bytes, there is one range per chunk in two cases:

    - for A and B, if the store only reads whole chunks: a codec can then decode a chunk in place;
    - for C: direct I/O writes a contiguous chunk up to twice as fast as one row by row.
    """
    _, (first, last) = operation.stored
    problem, layouts = plan.problem, plan.layouts
    match operation.operand:
        case "C":
            whole, (height, width) = True, plan.chunks
        case operand:
            is_a = operand == "A"
            layout = layouts.a if is_a else layouts.b
            whole = not layout.partial_reads
            height, width = layout.oriented(problem.trans_a if is_a else problem.trans_b).read_chunk
    if whole and height * width * problem.itemsizes[operation.operand] >= BATCH_BYTES:
        cuts = pieces((0, 1), (first, last), (1, width), 1)
        return [(c0 - first, c1 - first) for _, (c0, c1) in cuts]
    return [(0, last - first)]


def slot_views(plan: Plan, operation: Operation, memory: Array, dtype: np.dtype[Any]) -> list[Array]:
    """Return an operation's block in a host slot, as one contiguous array per range of `column_groups`.

    `memory` has the bytes of the slot. The arrays are views of it. The first array begins at the start of the
    slot, and the arrays follow each other without gaps.
    """
    height, width = map(length, operation.stored)
    data = memory[: height * width * dtype.itemsize].view(dtype)
    return [
        data[height * c0 : height * c1].reshape(height, c1 - c0) for c0, c1 in column_groups(plan, operation)
    ]


def located(
    plan: Plan, operation: Operation, columns: Sequence[Array]
) -> Iterator[tuple[Range, Range, Array]]:
    """Yield (rows, columns, array) for each array of a block in a host slot.

    Rows and columns are the ranges of the stored operand that the array contains. The argument `columns` is
    what `slot_views` returned for the operation.
    """
    rows, (left, _) = operation.stored
    for group in columns:
        yield rows, (left, left := left + group.shape[1]), group


def parts(
    matrix: Matrix, rows: Range, cols: Range, threads: int, *, reading: bool, copied: bool = False
) -> Iterator[tuple[Range, Range]]:
    """Cut a block of the stored matrix into parts, for `threads` threads that take one part at a time.

    If the store only transfers whole chunks, a part is one chunk, or several chunks that have about
    `BATCH_BYTES` bytes together. With other stores, a part has about `MIN_PIECE_BYTES` to `MAX_PIECE_BYTES`
    bytes. A larger chunk is read in several parts, but written as one. Parts that are `copied` before they
    are written have at most `MIRRORED_BYTES`, or are a chunk.
    """
    layout, itemsize = matrix.layout, matrix.dtype.itemsize
    if layout.requests:
        return _requests(layout, itemsize, rows, cols, reading=reading)
    height, width = layout.read_chunk if reading else layout.writing.chunk
    if not layout.partial_reads if reading else layout.writing.encode_bytes:
        batch = BATCH_BYTES if height * width * itemsize < BATCH_BYTES else 1
        return pieces(rows, cols, (height, width), -(-batch // itemsize))
    size = (rows[1] - rows[0]) * (cols[1] - cols[0]) * itemsize
    # Chunks are joined until they have at least this size, and so less than the double of it.
    piece = MIRRORED_BYTES // 2 if copied else max(MIN_PIECE_BYTES, min(MAX_PIECE_BYTES, size // threads))
    wanted = piece // itemsize
    if (height, width) == (1, 1):
        # A matrix without chunks is cut into whole rows or whole columns, whichever are contiguous.
        if layout.contiguous:
            height, width = max(1, wanted // (cols[1] - cols[0])), cols[1]
        else:
            height, width = rows[1], max(1, wanted // (rows[1] - rows[0]))
    elif reading:
        # A large chunk is cut into whole rows or whole columns of the chunk, whichever are contiguous.
        count = max(1, height * width // wanted)
        if layout.contiguous:
            height = _divisor(height, -(-height // count))
        else:
            width = _divisor(width, -(-width // count))
    return pieces(rows, cols, (height, width), wanted)


def _requests(
    layout: Layout, itemsize: int, rows: Range, cols: Range, *, reading: bool
) -> Iterator[tuple[Range, Range]]:
    """Cut a block of a matrix in an object store into parts that each take one request.

    A part is a chunk, or several small chunks of a shard. A large chunk of which parts can be read is cut
    into bands of whole lines, of at most about `MAX_PIECE_BYTES`.
    """
    height, width = layout.read_chunk if reading else layout.writing.chunk
    count = height * width * itemsize // MAX_PIECE_BYTES
    if reading and layout.partial_reads and count > 1:
        if layout.contiguous:
            height = _divisor(height, -(-height // count))
        else:
            width = _divisor(width, -(-width // count))
    elif reading:
        height, width = max(height, layout.request_chunk[0]), max(width, layout.request_chunk[1])
    return pieces(rows, cols, (height, width), 1)


def _divisor(extent: int, minimum: int) -> int:
    """Return the smallest number that divides `extent` and is not below `minimum`."""
    return next(part for part in range(minimum, extent + 1) if extent % part == 0)


# Reads or writes a part of a matrix: its rows, its columns, and the array with its elements.
Transfer = Callable[[Matrix, Range, Range, Array], None]


def is_pageable(plan: Plan, operation: Operation) -> bool:
    """Return whether an operation copies a block from or to pageable memory, or from a file.

    The thread that submits it is busy until the copies of the block have been issued.
    """
    operand = operation.operand
    copies = operation.kind in (Kind.UPLOAD, Kind.DOWNLOAD) and not operation.peer
    return copies and plan.slots.streams(operand) and not plan.is_direct(operand)


def host_block(
    plan: Plan, matrix: Matrix, operation: Operation, transfer: Transfer
) -> Pinned | Pageable | Found:
    """Return the block of an Upload or a Download in the memory of `matrix`, or in its file.

    `transfer` copies parts of a pageable block from or to the matrix. Of a sparse C, the result takes the
    elements that the device has found.
    """
    if plan.problem.sink.bounded and isinstance(matrix, Collecting):
        return Found(partial(matrix.put, operation.m, operation.n))
    (top, bottom), (left, right) = operation.stored
    if plan.is_direct(operation.operand):
        return Pinned(memory(matrix)[top:bottom, left:right])

    coding = plan.layouts.coding(operation.operand)
    rows, cols, uploading = (top, bottom), (left, right), operation.kind is Kind.UPLOAD
    if coding is None or in_memory(matrix) is not None:
        return pageable(matrix, rows, cols, transfer, uploading=uploading)
    assert isinstance(matrix, Coded)

    def fetch(rows: Range, cols: Range, out: Array) -> list[Fetched]:
        block = (top + rows[0], top + rows[1]), (left + cols[0], left + cols[1])
        return [each.counted_from(top, left) for each in matrix.fetch(*block, out)]

    plain, codec = (
        _in_chunks(matrix, rows, cols, transfer, None),
        Codec.of(coding.codec, matrix.dtype.itemsize),
    )
    return Compressed(
        plain.shape, plain.dtype, plain.move, plain.chunk, plain.origin, codec=codec, fetch=fetch
    )


def pageable(matrix: Matrix, rows: Range, cols: Range, transfer: Transfer, *, uploading: bool) -> Pageable:
    """Return a block of a matrix in pageable memory, or in files. `transfer` is as for `host_block`."""
    whole = in_memory(matrix)
    if whole is None:
        chunks = cached_chunks(matrix) if uploading else None
        stored = None if chunks is None else CachedBlock(chunks, rows[0], cols[0])
        return _in_chunks(matrix, rows, cols, transfer, stored)
    array = whole[slice(*rows), slice(*cols)]

    def copy(rows: Range, cols: Range, part: Array) -> None:
        found = array[slice(*rows), slice(*cols)]
        np.copyto(*((part, found) if uploading else (found, part)), casting="equiv")

    contiguous = array.dtype == matrix.dtype and array.strides[1] == array.itemsize
    return Pageable(array.shape, matrix.dtype, copy, memory=array if contiguous else None)


def _in_chunks(
    matrix: Matrix, rows: Range, cols: Range, transfer: Transfer, stored: CachedBlock | None
) -> Pageable:
    (top, bottom), (left, right) = rows, cols

    def move(rows: Range, cols: Range, part: Array) -> None:
        transfer(matrix, (top + rows[0], top + rows[1]), (left + cols[0], left + cols[1]), part)

    chunk = matrix.layout.read_chunk
    place = chunk, (top % chunk[0], left % chunk[1])
    return Pageable((bottom - top, right - left), matrix.dtype, move, *place, stored=stored)
