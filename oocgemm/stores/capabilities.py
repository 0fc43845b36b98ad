"""What a matrix may be able to do beyond `Matrix`. A caller asks for a capability, never for a class.

A capability is a protocol. A matrix has it if its class has the methods, which need not be declared. Most of
these protocols consist of methods only, so that a class can be asked, too.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np

from oocgemm.planning import Coding
from oocgemm.planning.tiling import Range
from oocgemm.stores.base import Array, Matrix
from oocgemm.stores.compressors import Fetched
from oocgemm.stores.lines import CachedChunks

# The element that stands for a missing genotype.
MISSING = -1


@runtime_checkable
class Durable(Protocol):
    """A result that outlives the process: it can be flushed, and marked as complete."""

    def sync(self) -> None:
        """Flush all written data to stable storage. Raises `OSError`."""

    def set_finished(self, finished: bool, uplo: str | None = None) -> None:
        """Mark the matrix, durably, as the complete (`finished`) or incomplete result of a run.

        `uplo` is the triangle of a Gram matrix that it stores, "lower", "upper" or "full", or "" for other
        products; None keeps what is recorded. Stores that have no place for these marks do nothing.
        """


@runtime_checkable
class Resumable(Durable, Protocol):
    """A result whose blocks can be flushed, so that an interrupted run can be resumed.

    `Store.journal_folder` returns the folder for the journal. `oocgemm.stores.durable` describes the steps.
    """

    def redirect_writes(self, folder: Any) -> None:
        """Make later writes go to files in `folder` (redo files) and not to the matrix.

        The matrix keeps its content, which `read` returns, until `apply_redo` is called. `folder` must be on
        the file system of the matrix, because redo files may be renamed into place.
        For a matrix in an object store it is a `RemoteFolder`, and redo files are objects.
        """

    def sync_blocks(self, blocks: Sequence[tuple[Range, Range]]) -> None:
        """Flush the files that blocks were written to, and their directory entries. Raises `OSError`."""

    def apply_redo(self, rows: Range, cols: Range) -> None:
        """Move the new content of a block from its redo files to the matrix, and flush it. Raises `OSError`.

        Redo files are the files that `write` creates after `redirect_writes`. If a crash interrupts this
        call, the call can be repeated.
        """

    def redo_fingerprint(self, folder: Path, rows: Range, cols: Range) -> str:
        """Return the fingerprint of the redo files of a block in `folder`. It shows if files are missing."""

    def adopt(self, folder: Path, rows: Range, cols: Range) -> None:
        """Move a block's redo files, which another process wrote to `folder`, to where `write` writes.

        The effect is that of a `write` of their content. If `redirect_writes` was called, they become redo
        files of this matrix, else they become part of it. Raises `OSError`, also if a file is missing.
        """

    def delete_partial_files(self) -> None:
        """Delete the temporary files of writes that a killed process did not complete."""

    def files_fingerprint(self) -> str:
        """Return a digest of the sizes and modification times of the matrix's files.

        If the digest has changed since the run completed the matrix, another program changed the matrix.
        """

    def block_fingerprint(self, rows: Range, cols: Range) -> str | None:
        """Return the fingerprint of the files of a block; None if these files also contain other blocks.

        A matrix in one file may return a checksum of the elements of the block in place of it.

        The block must have been flushed before. Otherwise its files may still change.
        """

    def reserve(self) -> None:
        """Allocate the disk space for all of the matrix, or check that it is free. Raises `OSError`."""

    def missing_bytes(self) -> int:
        """Estimate how many bytes of the matrix are not stored yet, for the message of a full disk."""


class ResumableMatrix(Matrix, Resumable, Protocol):
    """The type of a matrix that is `Resumable`."""


@runtime_checkable
class Coded(Protocol):
    """A matrix of compressed chunks (frames) that a device can decode or encode."""

    def coding(self) -> Coding | None:
        """Return how chunks are compressed; None if a device could not decode them."""

    def fetch(self, rows: Range, cols: Range, out: Array) -> list[Fetched]:
        """Read the stored bytes of the chunks of a block, one after another, into `out`."""

    def codec(self) -> str:
        """Return how a device could compress new chunks, such as "blosc-zstd"; "" if it could not."""

    def write_frame(self, number: tuple[int, int], frame: Array, size: int) -> None:
        """Write a compressed chunk: the first `size` bytes of `frame`.

        `number` are its row and column in the grid of chunks. `frame` has room for what the store adds.
        """


@runtime_checkable
class Addressed(Protocol):
    """A matrix whose elements have addresses from which a device, or compiled code, copies them."""

    def memory(self) -> Array | None:
        """Return the elements as an array, which may be a memory map; None if they have no addresses."""

    def is_mapped(self) -> bool:
        """Return whether this array is a memory map, whose pages may have to be read from a file first."""

    def cached_chunks(self) -> CachedChunks | None:
        """Return the chunk files for compiled code; None if it could not read blocks from the page cache."""


@runtime_checkable
class Collecting(Protocol):
    """A result that keeps some elements of C and drops the others. It cannot be read."""

    def put(self, rows: Range, cols: Range, segments: Array, elements: Array) -> None:
        """Keep the elements of a block that a device has found (`oocgemm.backends.base.SEGMENTS`)."""

    def csr(self) -> tuple[Array, Array, Array]:
        """Return all elements row by row, in ascending order of columns: row starts, columns, and scores."""

    def settle(self, at: Array, scores: Array, kept: Array) -> None:
        """Replace the scores of the elements `at` these numbers, and drop those that are not `kept`."""


@runtime_checkable
class Merging(Protocol):
    """A result to which several devices write what they have found of the same rows. It cannot be read."""

    def merged(self) -> Matrix:
        """Return the result, when all devices have ended."""


@runtime_checkable
class Genotypes(Matrix, Protocol):
    """Genotypes 0, 1 and 2, and `MISSING` ones, in two bits each as in a PLINK .bed file."""

    @property
    def variant_axis(self) -> int:
        """The axis that numbers the variants."""

    def packed(self) -> Matrix:
        """Return the stored bytes, with four genotypes each, as a matrix with a row per variant."""


@cache
def _are_addressed(kind: type[Matrix]) -> bool:
    """Return whether matrices of a class are `Addressed`: `isinstance` takes 10 us where a call takes 300."""
    return issubclass(kind, Addressed)


def _addressed(matrix: Matrix) -> Addressed | None:
    return cast(Addressed, matrix) if _are_addressed(type(matrix)) else None


def memory(matrix: Matrix) -> Array:
    """Return the elements of a matrix that has addresses for them, as an array."""
    addressed = _addressed(matrix)
    found = None if addressed is None else addressed.memory()
    assert found is not None
    return found


def in_memory(matrix: Matrix) -> Array | None:
    """Return the elements of a matrix as an array in host memory; None if they are in a file, even mapped."""
    addressed = _addressed(matrix)
    return addressed.memory() if addressed is not None and not addressed.is_mapped() else None


def cached_chunks(matrix: Matrix) -> CachedChunks | None:
    """Return the chunks of a matrix if compiled code can read whole blocks; None if Python must read them."""
    addressed = _addressed(matrix)
    found = None if addressed is None else addressed.cached_chunks()
    return None if found is None or found.incomplete else found


def span(matrix: Matrix) -> tuple[int, int]:
    """Return the address of a matrix in memory, and the bytes from there to the end of the last element.

    This is the range of memory that must be pinned for direct copies.
    """
    array = memory(matrix)
    if array.flags.c_contiguous:  # the usual case, in a third of the time
        return array.ctypes.data, array.nbytes
    low, high = np.lib.array_utils.byte_bounds(array)
    return low, high - low
