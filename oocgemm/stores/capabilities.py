"""What a matrix may be able to do beyond `Matrix`, and how written blocks become durable.

A caller asks for a capability, never for a class.

A capability is a protocol. A matrix has the capability if its class has the methods of the protocol. The
class need not name the protocol. Most of these protocols consist of methods only.

*Durable results.* An interrupted run can be resumed.

A resumed run must complete C to the same bits as an uninterrupted run, even after a power failure. The
journal (`oocgemm.jobs.journal`) records the finished tiles of C, and a resumed run does not compute these
again. A tile is therefore recorded only when all its bytes are durable.

*beta = 0: the run only writes C.* It writes a tile's blocks to C, flushes them with `sync_blocks`, and then
records the tile. After a crash before the record, the resumed run writes the whole tile again. New chunk
files are renamed into place. Files of uncompressed chunks that exist are overwritten in place: their old
content is lost with or without that, and C is marked as unfinished.

*beta != 0: the run also reads C.* If it overwrote a tile in place, a resumed run could not compute that tile
again. So `redirect_writes` makes all writes go to redo files in another folder. Each tile then takes three
steps:

1. `sync_blocks` flushes the tile's redo files.
2. The journal records the tile. This commits the tile.
3. `apply_redo` moves the content of the redo files to C.

A crash before the commit leaves C unchanged, and the redo files are discarded. After a later crash, the new
content of each block is durable in C or in a redo file. The resumed run repeats `apply_redo` for every
committed tile before it reads C.

*New results.* A new .npy file is written in the journal's folder, and renamed to its final path when it is
complete and durable. A new zarr array has an attribute that marks it as incomplete. `set_finished` renames
the file or removes the attribute.

A crash can leave temporary files of interrupted writes. `delete_partial_files` removes them.

Other programs may change C or an operand between a run and its resumption. Files are therefore fingerprinted
by size and modification time, and the resumed run compares these fingerprints with those in the journal.

*Room.* Before a result is created, the free space of its disk is checked. A run whose disk becomes full can
be resumed: `no_room` says how many bytes are missing.
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, _ProtocolMeta, runtime_checkable

import numpy as np

from oocgemm.errors import InputError, warn_of_data
from oocgemm.planning import Coding
from oocgemm.planning.tiling import Range
from oocgemm.planning.units import format_size
from oocgemm.stores.base import Array, Matrix
from oocgemm.stores.codecs import Fetched
from oocgemm.stores.files import CachedChunks, padded

# The element that stands for a missing genotype.
MISSING = -1

# Whether the matrices of a class have a capability, by (capability, class).
_known: dict[tuple[type, type], bool] = {}


class _Capability(_ProtocolMeta):
    """Remember which classes have a capability: Python takes up to 10 us to look all methods up again."""

    def __instancecheck__(cls, instance: Any) -> bool:  # noqa: N805 - a class of classes
        key = cls, type(instance)
        if key not in _known:
            _known[key] = super().__instancecheck__(instance)
        return _known[key]


@runtime_checkable
class Durable(Protocol, metaclass=_Capability):
    """A result that outlives the process: it can be flushed, and marked as complete."""

    def sync(self) -> None:
        """Flush all written data to stable storage. Raises `OSError`."""

    def set_finished(self, finished: bool, uplo: str | None = None) -> None:
        """Mark the matrix, durably, as the complete (`finished`) or incomplete result of a run.

        `uplo` is the triangle of a Gram matrix that it stores, "lower", "upper" or "full", or "" for other
        products; None keeps the recorded value. Stores that have no place for these marks do nothing.
        """


@runtime_checkable
class Resumable(Durable, Protocol):
    """A result whose blocks can be flushed, so that an interrupted run can be resumed.

    `Store.journal_folder` returns the folder for the journal. The steps are described above.
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

        The effect is the same as that of a `write` of their content. If `redirect_writes` was called, the
        files become redo files of this matrix, else they become part of the matrix. A chunk without a redo
        file stays as it is: the caller has compared `redo_fingerprint`. Raises `OSError`.
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
class Coded(Protocol, metaclass=_Capability):
    """A matrix of compressed chunks (frames) that a device can decode or encode."""

    def coding(self) -> Coding | None:
        """Return how chunks are compressed; None if a device could not decode them."""

    def fetch(self, rows: Range, cols: Range, out: Array) -> list[Fetched]:
        """Read the stored bytes of the chunks of a block, one after another, into `out`."""

    def codec(self) -> str:
        """Return how a device could compress new chunks, such as "blosc-zstd"; "" if it could not."""

    def write_frame(self, number: tuple[int, int], frame: Array, size: int) -> None:
        """Write a compressed chunk: the first `size` bytes of `frame`.

        `number` is the row and the column of the chunk in the grid of chunks. Behind these bytes, `frame` has
        room for bytes that the store adds.
        """


class Piece(NamedTuple):
    """Some entries (stored elements) of a sparse matrix.

    - `rows`, `cols`: ranges that contain their rows and columns.
    - `read`: returns their rows, their columns and their values, which the caller must not change. Many
      threads call it.
    """

    rows: Range
    cols: Range
    read: Callable[[], tuple[Array, Array, Array]]


@runtime_checkable
class Listed(Protocol, metaclass=_Capability):
    """A matrix whose stored elements can be listed. All other elements are 0."""

    def entries(self, count: int) -> Iterator[Piece] | None:
        """Yield all entries, `count` at a time; None if they cannot be listed, each place once."""


@runtime_checkable
class Selectable(Protocol, metaclass=_Capability):
    """A matrix that has views of its own of some of its rows or columns."""

    def selected(self, axis: int, lines: Array) -> Matrix:
        """Return the rows (`axis` 0) or columns (1) with these numbers, in this order."""


@runtime_checkable
class Addressed(Protocol, metaclass=_Capability):
    """A matrix whose elements have addresses from which a device, or compiled code, copies them."""

    def memory(self) -> Array | None:
        """Return the elements as an array, which may be a memory map; None if they have no addresses."""

    def is_mapped(self) -> bool:
        """Return whether this array is a memory map, whose pages may have to be read from a file first."""

    def cached_chunks(self) -> CachedChunks | None:
        """Return the chunk files for compiled code; None if it could not read blocks from the page cache."""


@runtime_checkable
class Collecting(Protocol, metaclass=_Capability):
    """A result that keeps some elements of C and drops the others. It cannot be read."""

    def put(self, rows: Range, cols: Range, segments: Array, elements: Array) -> None:
        """Keep the elements of a block that a device has found (`oocgemm.backends.base.SEGMENTS`)."""

    def state(self) -> Sequence[Any]:
        """Return the kept elements, for `merge` in another process."""

    def merge(self, state: Sequence[Any]) -> None:
        """Add the elements that another process has kept. That process must have written other tiles."""

    def csr(self) -> tuple[Array, Array, Array]:
        """Return all elements row by row, in ascending order of columns: row starts, columns, and scores."""

    def settle(self, at: Array, scores: Array, kept: Array) -> None:
        """Replace the scores of the elements number `at` in `csr`. Drop those for which `kept` is false."""


@runtime_checkable
class Merging(Protocol, metaclass=_Capability):
    """A result to which several devices write elements of the same rows. The result cannot be read."""

    def merged(self) -> Matrix:
        """Return the merged result as a matrix. Call this method after the last write of all devices."""


@runtime_checkable
class Genotypes(Matrix, Protocol):
    """Genotypes 0, 1, 2 and `MISSING`, which are stored in two bits each, as in a PLINK .bed file."""

    @property
    def variant_axis(self) -> int:
        """The axis that numbers the variants."""

    def packed(self) -> Matrix | None:
        """Return the stored bytes, with four genotypes each, as a matrix with a row per variant.

        Return None if the matrix has only some of the individuals in these bytes.
        """

    def transposed(self) -> "Genotypes":
        """Return the transpose."""

    def individuals(self) -> Sequence[tuple[str, str]]:
        """Return the family ID and the individual ID of each individual. Raises `InputError`."""

    def chromosomes(self) -> Sequence[str]:
        """Return the name of the chromosome of each variant. Raises `InputError`."""

    def variant_ids(self) -> Sequence[str]:
        """Return the ID of each variant. Raises `InputError`."""

    def positions(self) -> Sequence[tuple[float, float]]:
        """Return the positions of each variant, in centimorgans and in base pairs. Raises `InputError`."""


def memory(matrix: Matrix) -> Array:
    """Return the elements of a matrix as an array. The matrix must have `Addressed.memory`."""
    found = matrix.memory() if isinstance(matrix, Addressed) else None
    assert found is not None
    return found


def in_memory(matrix: Matrix) -> Array | None:
    """Return the elements of a matrix as an array in host memory; None if they are in a file, even mapped."""
    return matrix.memory() if isinstance(matrix, Addressed) and not matrix.is_mapped() else None


def cached_chunks(matrix: Matrix) -> CachedChunks | None:
    """Return the chunks of a matrix if compiled code can read whole blocks; None if Python must read them."""
    found = matrix.cached_chunks() if isinstance(matrix, Addressed) else None
    return None if found is None or found.incomplete else found


def span(matrix: Matrix) -> tuple[int, int]:
    """Return the address of a matrix in memory, and the number of bytes to the end of its last element."""
    array = memory(matrix)
    if array.flags.c_contiguous:  # the usual case: this takes a third of the time of the general one
        return array.ctypes.data, array.nbytes
    low, high = np.lib.array_utils.byte_bounds(array)
    return low, high - low


# The journal's folder has this name inside the folder of a zarr array. For a file x.npy the folder is
# x.npy.oocgemm.
SIDECAR = ".oocgemm"
# In the journal's folder, a new .npy file has this name until it is complete.
DATA = "data.npy"


def found_locally(path: str) -> bool:
    """Return whether a path leads to a file, or to a folder that has more in it than a journal."""
    try:
        if set(os.listdir(path)) <= {SIDECAR}:
            return False
    except OSError:
        pass
    return os.path.lexists(path) or os.path.lexists(os.path.realpath(path))


FULL = (errno.ENOSPC, errno.EDQUOT)  # the error numbers of a write for which the disk or quota is too small


def check_new(name: str, path: str, wanted: int = 0) -> None:
    """Raise `InputError` if nothing can be created at a path, or if its disk has not `wanted` free bytes.

    Call this before a long computation. Neither the path nor its folder need exist. `name` is the name of
    the result in messages.
    """
    place = Path(path).absolute().parent
    while not place.exists():
        place = place.parent
    try:
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        raise InputError(
            f"{name}: cannot create {path}: no file can be made in {place}: {error.strerror}"
        ) from error
    check_room(name, path, wanted)


def check_room(name: str, path: str, wanted: int) -> None:
    """Raise `InputError` unless the disk of a path has `wanted` free bytes. The path need not exist."""
    free = free_bytes(path)
    if free < wanted:
        raise InputError(
            f"{name} at {path} takes {format_size(wanted)} more, and its disk has {format_size(free)} free: "
            f"make room for {format_size(wanted - free)}, or give a path on another disk"
        )


def no_room(matrix: Matrix, error: OSError, min_bytes: int) -> str:
    """Return the message for a full disk: the path of C, about how many bytes are missing, and the remedy."""
    path = str(matrix.describe()["path"]).removeprefix("file://")
    wanted = max(min_bytes, matrix.missing_bytes() if isinstance(matrix, Resumable) else 0)
    free = ""
    if error.errno == errno.ENOSPC:
        left = free_bytes(path)
        free, wanted = f", {format_size(left)} are free", max(min_bytes, wanted - left)
    return (
        f"{error.strerror}: C at {path} needs about {format_size(wanted)} more{free}. Make room, then "
        "continue with --resume (resume=True)"
    )


def raw_bytes(shape: tuple[int, int], chunks: tuple[int, int], itemsize: int) -> int:
    """Return the bytes that an array takes on disk if its chunks are not compressed."""
    # zarr stores chunks at the edges of the array in full size, and each file takes whole pages.
    count = -(-shape[0] // chunks[0]) * -(-shape[1] // chunks[1])
    return count * padded(chunks[0] * chunks[1] * itemsize)


def warn_of_folders(name: str, path: str) -> None:
    """Issue a `DataWarning` if a folder will be created for a new array or group at a path."""
    missing = [above for above in Path(path).absolute().parents if not os.path.lexists(above)]
    if missing:
        warn_of_data(f"{name}: the folder {missing[-1]} does not exist, and is created: check its name")


def free_bytes(path: str) -> int:
    """Return the free bytes of the file system of a path. The path need not exist."""
    place = Path(path).absolute()
    while not os.path.exists(place):
        place = place.parent
    return shutil.disk_usage(place).free
