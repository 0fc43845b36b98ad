"""Blocks that go between an operand in host memory, or in a file, and the device without a host slot."""

from collections.abc import Callable
from functools import partial

import numpy as np

from oocgemm.backends.base import Found, Pageable, Pinned
from oocgemm.backends.compressed import Compressed
from oocgemm.engine.blocks import stored_block
from oocgemm.planning import Kind, Operation, Plan
from oocgemm.planning.tiling import Range
from oocgemm.stores import Array, Coded, Collecting, Matrix, in_memory, memory
from oocgemm.stores.capabilities import cached_chunks
from oocgemm.stores.compressors import Codec, Fetched
from oocgemm.stores.lines import CachedBlock

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
    if isinstance(matrix, Collecting) and plan.problem.sink.bounded:
        return Found(partial(matrix.put, operation.m, operation.n))
    (top, bottom), (left, right) = stored_block(plan, operation)
    if plan.is_direct(operation.operand):
        return Pinned(memory(matrix)[top:bottom, left:right])

    shape, dtype = (bottom - top, right - left), matrix.dtype
    if (whole := in_memory(matrix)) is not None:
        array = whole[top:bottom, left:right]
        uploading = operation.kind is Kind.UPLOAD

        def copy(rows: Range, cols: Range, part: Array) -> None:
            found = array[slice(*rows), slice(*cols)]
            np.copyto(*((part, found) if uploading else (found, part)), casting="equiv")

        contiguous = array.dtype == dtype and array.strides[1] == dtype.itemsize
        return Pageable(shape, dtype, copy, memory=array if contiguous else None)

    def move(rows: Range, cols: Range, part: Array) -> None:
        transfer(matrix, (top + rows[0], top + rows[1]), (left + cols[0], left + cols[1]), part)

    chunk = matrix.layout.read_chunk
    place = chunk, (top % chunk[0], left % chunk[1])
    coding = plan.layouts.coding(operation.operand)
    if coding is None:
        chunks = cached_chunks(matrix) if operation.kind is Kind.UPLOAD else None
        stored = None if chunks is None else CachedBlock(chunks, top, left)
        return Pageable(shape, dtype, move, *place, stored=stored)
    assert isinstance(matrix, Coded)

    def fetch(rows: Range, cols: Range, out: Array) -> list[Fetched]:
        block = (top + rows[0], top + rows[1]), (left + cols[0], left + cols[1])
        return [each.counted_from(top, left) for each in matrix.fetch(*block, out)]

    return Compressed(shape, dtype, move, *place, codec=Codec.of(coding.codec, dtype.itemsize), fetch=fetch)
