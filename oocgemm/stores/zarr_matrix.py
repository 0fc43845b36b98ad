"""Use zarr arrays (formats 2 and 3) as matrices: open and create them, and save arrays to a group.

zarr is imported only for arrays that need it.
"""

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from oocgemm.errors import ExecutionError, InputError
from oocgemm.planning import Chunked, Coding, GemmProblem, Layout, Remote, Writing
from oocgemm.planning.setting import CHUNK_BYTES
from oocgemm.planning.tiling import Range
from oocgemm.stores.base import (
    BATCH_BYTES,
    Array,
    Matrix,
    NewArray,
    Store,
    checked,
    described,
    file_identities,
    is_path,
    package,
    pieces,
    transient,
)
from oocgemm.stores.capabilities import (
    SIDECAR,
    check_new,
    check_room,
    found_locally,
    free_bytes,
    raw_bytes,
)
from oocgemm.stores.codecs import Fetched
from oocgemm.stores.declared import of_zarr
from oocgemm.stores.files import (
    CachedChunks,
    check_regular,
    fingerprint_of,
    padded,
    sync_files,
    worth_caching,
)
from oocgemm.stores.folding import Folding
from oocgemm.stores.formats import PARTS, check_found, check_new_format, format_of, not_readable
from oocgemm.stores.sparse import of_group
from oocgemm.stores.zarr_chunks import DirectChunks, cut
from oocgemm.stores.zarr_metadata import (
    METADATA,
    Metadata,
    check_chunks,
    check_sizes,
    create,
    files_in,
    local_size,
    read_group,
    read_metadata,
)
from oocgemm.values import dataclass

if TYPE_CHECKING:
    import zarr


# This attribute of a result says whether its run is incomplete, {"complete": False}, and which triangle of a
# Gram matrix is stored, {"uplo": "lower"}.
ATTRIBUTE = "oocgemm"
UNFINISHED = {ATTRIBUTE: {"complete": False}}
# The names of temporary files, of this package or of zarr, match this pattern. A killed process leaves such
# files behind.
PARTIAL = re.compile(r"\.[0-9a-f]{32}\.partial$")


def _batch_bytes(chunk: tuple[int, int], itemsize: int) -> int:
    """Return the maximum bytes, before compression, of the chunks that a call to zarr reads or writes."""
    size = chunk[0] * chunk[1] * itemsize
    return size if size >= BATCH_BYTES else BATCH_BYTES + size


class ZarrMatrix:
    """A matrix in a zarr array of format 2 or 3.

    If the array is local and `oocgemm.stores.codecs` supports its encoding, this package reads and writes its
    chunk files directly (`DirectChunks`). Otherwise zarr reads and writes them.
    """

    def __init__(self, name: str, array: "zarr.Array[Any] | Metadata", *, unchanging: bool = False) -> None:
        """Wrap an array that zarr opened, or the metadata of one. For `unchanging` see `DirectChunks`."""
        if array.dtype.kind not in "biufc":  # refuse text before zarr warns about its metadata
            checked(name, array.shape, array.dtype)
        # `_array` is the array as zarr opened it, None until it is needed. From `_read`, zarr reads blocks.
        self._array: Any = None
        self._read: Any = None
        if isinstance(array, Metadata):
            self._metadata = array
        else:
            from oocgemm.stores.zarr_through import metadata_of, with_own_pipeline

            self._array, self._read, self._metadata = array, with_own_pipeline(array), metadata_of(array)
        found = self._metadata
        fill = None if found.stated.get("fill_value") is None else found.fill
        dtype = found.dtype.newbyteorder("=")
        self.declared = of_zarr(found.zarr_format, found.attributes, fill, dtype)
        self.shape, self.dtype = checked(name, array.shape, array.dtype, self.declared, found.names)
        self.name = name
        self._unchanging = unchanging
        self.direct = _direct_chunks(found, unchanging)
        # `_writer` writes chunk files. If it is None, zarr writes to the array `_written`. Both write to the
        # folder `_target`, which is None for a remote array.
        self._writer = self.direct if self.direct and self.direct.shards is None else None
        self._written, self._target = self._read, found.folder
        chunk = (max(1, int(found.chunks[0])), max(1, int(found.chunks[1])))
        shards = found.shards or chunk
        shard = (max(1, int(shards[0])), max(1, int(shards[1])))
        size = self.dtype.itemsize
        # A call that reads through zarr holds its chunks in memory as stored and as decoded.
        decode_bytes = 2 * _batch_bytes(chunk, size)
        # A call that writes through zarr needs memory for three copies of the chunks: the elements, the
        # codecs' output, and the content of the file.
        encode_bytes = 3 * _batch_bytes(shard, size)
        if self.direct:
            decode_bytes = self.direct.encoding.decode_bytes(self.direct.chunk_bytes)
            decode_bytes += self.direct.stored_bytes * bool(decode_bytes)
            if self._writer:
                encode_bytes = self.direct.encoding.encode_bytes(self.direct.chunk_bytes)
        raw = self.direct if self.direct and self.direct.encoding.raw else None
        self.layout: Layout = Chunked(
            read_chunk=chunk,
            partial_reads=raw is not None,
            contiguous=0 if raw and raw.encoding.order == "F" else 1,
            page_cached=self.direct is not None and self.direct.cached,
            itemsize=size,
            scratch_bytes=raw.scratch_bytes if raw else 0,
            decode_bytes=decode_bytes,
            writing=Writing(shard, encodes=not self.raw, encode_bytes=encode_bytes),
        )

    def check_chunks(self) -> None:
        """Raise `InputError` unless chunks can be decoded, and have the keys that the metadata states."""
        place = str(self.describe()["path"]).removeprefix("file://")
        check_chunks(f"{self.name} at {place}", self._metadata, self._keys_found())

    def _keys_found(self) -> Iterator[str]:
        """Yield the keys, relative to the array, of its stored objects; nothing if these keys are unknown."""
        if self._metadata.folder is not None:
            return files_in(self._metadata.folder)
        from oocgemm.stores.zarr_through import keys_in

        return keys_in(self.array)

    @property
    def array(self) -> Any:
        if self._array is None:
            import zarr

            self._array = zarr.open_array(self.folder, mode="r" if self._unchanging else "r+")
        return self._array

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        if out.dtype != self.dtype:
            raise ExecutionError(f"{self.name} has dtype {self.dtype}, but the buffer for it has {out.dtype}")
        if self.direct:
            self.direct.read(rows, cols, out)
            return
        try:
            self._read_through(rows, cols, out)
        except Exception as error:  # codecs raise exceptions of many types
            if transient(error) or isinstance(error, MemoryError):
                raise
            key = self._failing(rows, cols, out)
            raise ExecutionError(
                f"chunk {key} in {self._metadata.place} cannot be read, it may be damaged: {reason(error)}"
            ) from error

    def _read_through(self, rows: Range, cols: Range, out: Array) -> None:
        from zarr.core.buffer.cpu import NDBuffer

        if self._metadata.folder is not None:
            for name in self._names(rows, cols):
                check_regular(self.folder / name)
        target = NDBuffer(out)  # type: ignore[arg-type]  # its protocol is narrower than ndarray
        self._read.get_basic_selection((slice(*rows), slice(*cols)), out=target)

    def _failing(self, rows: Range, cols: Range, out: Array) -> str:
        """Return the key of the first chunk of a block that cannot be read. `out` is overwritten."""
        for r, c in pieces(rows, cols, self.layout.read_chunk, 1):
            number = r[0] // self.layout.writing.chunk[0], c[0] // self.layout.writing.chunk[1]
            try:
                self._read_through(r, c, out[: r[1] - r[0], : c[1] - c[0]])
            except Exception:
                break
        return self._metadata.key(number)

    def fetch(self, rows: Range, cols: Range, out: Array) -> list[Fetched]:
        assert self.direct is not None
        return self.direct.fetch(rows, cols, out)

    def memory(self) -> None:
        """Return None: the elements are in files."""

    def is_mapped(self) -> bool:
        return False

    def cached_chunks(self) -> CachedChunks | None:
        return self.direct.cached_files if self.direct else None

    def coding(self) -> Coding | None:
        return None if self.direct is None else self.direct.coding

    def write(self, rows: Range, cols: Range, data: Array) -> None:
        if not self._owns(rows, cols):
            raise ExecutionError(
                f"{self.name}[{rows[0]}:{rows[1]}, {cols[0]}:{cols[1]}] covers some chunks only in "
                "part, and other threads may write the rest at the same time: write whole chunks"
            )
        if self._writer is not None:
            self._writer.write(rows, cols, data)
        else:
            self._written.set_basic_selection((slice(*rows), slice(*cols)), data)

    def codec(self) -> str:
        return self._writer.codec if self._writer is not None else ""

    def write_frame(self, number: tuple[int, int], frame: Array, size: int) -> None:
        assert self._writer is not None
        self._writer.write_frame(number, frame, size)

    def sync(self) -> None:
        """Do nothing: `sync_blocks` flushes the blocks of a local array after they are written."""

    def redirect_writes(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._target = folder
        if self._writer is not None:
            self._writer = replace(self._writer, root=folder)
            return
        for name in METADATA:
            if (self.folder / name).exists():
                shutil.copyfile(self.folder / name, folder / name)
        import zarr

        from oocgemm.stores.zarr_through import with_own_pipeline

        # Let zarr also write a file for a chunk that has only the fill value. Without this redo file,
        # `apply_redo` would leave the old chunk in C.
        opened = zarr.open_array(folder, mode="r+").with_config({"write_empty_chunks": True})
        self._written = with_own_pipeline(opened)

    def sync_blocks(self, blocks: Sequence[tuple[Range, Range]]) -> None:
        assert self._target is not None
        sync_files(self._target, [name for block in blocks for name in self._names(*block)])

    def apply_redo(self, rows: Range, cols: Range) -> None:
        assert self._target is not None
        names = self._names(rows, cols)
        _move(names, self._target, self.folder)
        sync_files(self.folder, names, contents=False)  # `sync_blocks` has flushed the contents already

    def redo_fingerprint(self, folder: Path, rows: Range, cols: Range) -> str:
        return fingerprint_of(folder / name for name in self._names(rows, cols))

    def adopt(self, folder: Path, rows: Range, cols: Range) -> None:
        assert self._target is not None
        _move(self._names(rows, cols), folder, self._target)

    def set_finished(self, finished: bool, uplo: str | None = None) -> None:
        uplo = self._mark.get("uplo") if uplo is None else uplo
        mark = ({} if finished else UNFINISHED[ATTRIBUTE]) | ({"uplo": uplo} if uplo else {}) or None
        if self._array is None:
            self._metadata = self._metadata.with_attribute(ATTRIBUTE, mark)
        elif mark:
            self.array.attrs[ATTRIBUTE] = mark
        elif ATTRIBUTE in self.array.attrs:
            del self.array.attrs[ATTRIBUTE]
        if self._metadata.folder is not None:
            sync_files(self._metadata.folder, METADATA)

    def delete_partial_files(self) -> None:
        for folder, _, names in os.walk(self.folder):
            for name in names:
                if PARTIAL.search(name):
                    os.unlink(os.path.join(folder, name))

    def files_fingerprint(self) -> str:
        return self._metadata.changes()["content"]

    def block_fingerprint(self, rows: Range, cols: Range) -> str | None:
        return fingerprint_of(self.folder / name for name in self._names(rows, cols))

    def reserve(self) -> None:
        """Raise `InputError` if the disk has too little room for all chunks, unless these are compressed."""
        if self.raw and free_bytes(str(self.folder)) < raw_bytes(
            self.shape, self.layout.writing.chunk, self.dtype.itemsize
        ):
            check_room(self.name, str(self.folder), self.missing_bytes())

    def missing_bytes(self) -> int:
        """Estimate the disk space of missing chunks, given the mean size of the stored chunks."""
        stored, chunk = [], self.layout.writing.chunk
        names = self._names((0, self.shape[0]), (0, self.shape[1]))
        for name in names:
            with suppress(FileNotFoundError):
                stored.append(padded((self.folder / name).stat().st_size))
        whole = raw_bytes(chunk, chunk, self.dtype.itemsize)
        each = sum(stored) / len(stored) if stored else whole
        return round((len(names) - len(stored)) * each)

    @property
    def raw(self) -> bool:
        """Whether the array is local and not sharded, and its chunk files contain only the elements."""
        return self._writer is not None and self._writer.encoding.raw

    def fingerprint(self) -> dict[str, object]:
        return self._metadata.fingerprint()

    @property
    def folder(self) -> Path:
        assert self._metadata.folder is not None
        return self._metadata.folder

    def _names(self, rows: Range, cols: Range) -> list[str]:
        blocks = cut((rows, cols), self.layout.writing.chunk)
        return [self._metadata.key(number) for number, _ in blocks]

    def _owns(self, rows: Range, cols: Range) -> bool:
        """Return whether a block consists of whole chunks or shards, which the array's edge may cut."""
        return all(
            start % chunk == 0 and (stop % chunk == 0 or stop == extent)
            for (start, stop), chunk, extent in zip(
                (rows, cols), self.layout.writing.chunk, self.shape, strict=True
            )
        )

    @property
    def _mark(self) -> Mapping[str, Any]:
        """The value of `ATTRIBUTE` of the array; empty if it has none."""
        attributes = self._metadata.attributes if self._array is None else self.array.attrs
        mark = attributes.get(ATTRIBUTE)
        return mark if isinstance(mark, Mapping) else {}

    def describe(self) -> dict[str, object]:
        found = self._metadata
        return {
            "unfinished": self._mark.get("complete") is False,
            "uplo": self._mark.get("uplo"),
            **described(self, f"zarr v{found.zarr_format}", found.place),
            "chunks": list(found.chunks),
            "shards": list(found.shards) if found.shards else None,
            "codecs": list(found.codecs),
            "direct": self.direct is not None,
        }

    def identities(self) -> set[object]:
        if self._metadata.folder is None:
            return {("store", id(self.array.store), self.array.path), self._metadata.place}
        return file_identities(self._metadata.folder)


def _move(names: Sequence[str], source: Path, target: Path) -> None:
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        # A file is missing if a call before a crash moved it, or if its chunk is outside of the triangle.
        with suppress(FileNotFoundError):
            os.replace(source / name, target / name)


def reason(error: BaseException) -> str:
    """Return the first line of the message of an exception that zarr raised."""
    text = str(error).strip().splitlines()
    if isinstance(error, KeyError | TypeError | AttributeError):  # zarr raises these for invalid metadata
        return f"its metadata cannot be read ({': '.join([type(error).__name__, *text[:1]])})"
    return text[0] if text else type(error).__name__


def _direct_chunks(found: Metadata, unchanging: bool) -> DirectChunks | None:
    """Return the chunks, to use them without zarr; None for remote and empty arrays, and unknown codecs."""
    fields = found.stored_chunks()
    if found.folder is None or fields is None:
        return None
    cacheable = worth_caching(found.shape[0] * found.shape[1] * found.dtype.itemsize)
    chunks = DirectChunks(root=found.folder, unchanging=unchanging, worth_caching=cacheable, **fields)
    # Check the page cache only for operands. A result is read once, and its blocks pass through host slots.
    if chunks.unchanging and chunks.worth_caching and chunks.stored_as_is:
        return replace(chunks, cached=chunks.in_page_cache())
    return chunks


# The names of the compressors that a new array can have. "none" and None mean the same.
COMPRESSORS = ("none", "zstd", "blosc-lz4", "blosc-zstd", "gzip")


class ZarrArrays(Store):
    """Open operands that are zarr array objects, which the caller has opened with zarr."""

    kind = "zarr"

    def matches(self, operand: Any) -> bool:
        return package(operand) == "zarr"

    def open(self, name: str, operand: Any, *, writable: bool = False, journal: Path | None = None) -> Matrix:
        from oocgemm.stores.zarr_through import wrap_zarr

        return wrap_zarr(name, operand, writable=writable)

    def fold(self, name: str, operand: Any, folding: Folding) -> Matrix:
        from oocgemm.stores.zarr_through import fold_zarr

        return fold_zarr(name, operand, folding)

    def prepare(self, operand: Any) -> None:
        import oocgemm.stores.zarr_through  # noqa: F401

    def journal_folder(self, operand: Any) -> Path | None:
        from oocgemm.stores.zarr_through import local_folder

        folder = local_folder(operand)
        return None if folder is None else folder / SIDECAR

    def location(self, operand: Any) -> tuple[str, str | None]:
        return self.kind, str(operand.store_path).removeprefix("file://")


class ZarrPaths(Store):
    """Open and create zarr arrays at paths and URLs.

    This store matches every path, so it is tried after the stores of other file formats. For a path of an
    unsupported format, such as HDF5, `open` and `new_layout` raise an error that says how to convert it.
    """

    kind = "zarr"

    def matches(self, operand: Any) -> bool:
        return is_path(operand)

    def open(self, name: str, operand: Any, *, writable: bool = False, journal: Path | None = None) -> Matrix:
        _check_readable(name, operand)
        found = _without_zarr(operand)
        if found is not None and len(found.shape) == 2:
            matrix = ZarrMatrix(name, found, unchanging=not writable)
            matrix.check_chunks()
            return matrix
        if found is None and not writable and (group := _sparse_group(operand)) is not None:
            return of_group(name, operand, group, lambda member: row_of(name, group[member]))
        from oocgemm.stores.zarr_through import open_zarr

        return open_zarr(name, operand, writable=writable)

    def fold(self, name: str, operand: Any, folding: Folding) -> Matrix:
        _check_readable(name, operand)
        found = _without_zarr(operand)
        if found is not None:
            place = f"{name} at {operand}"
            fold = folding.fold(place, found.shape, found.names)
            folded = found.folded(fold)
            if folded is not None:
                check_chunks(place, found, files_in(operand, axes=len(fold.axes)))
                return ZarrMatrix(name, folded, unchanging=True)
        from oocgemm.stores.zarr_through import fold_zarr, opened

        return fold_zarr(name, opened(name, operand), folding, operand)

    def prepare(self, operand: Any) -> None:
        """Import zarr. Do nothing if a local array can be used without zarr, or does not exist yet."""
        if _without_zarr(operand) is not None or _sparse_group(operand) is not None:
            return
        if "://" in operand or found_locally(operand):
            import oocgemm.stores.zarr_through  # noqa: F401

    def exists(self, path: str) -> bool:
        if "://" not in path:
            return found_locally(path)
        from oocgemm.stores.zarr_through import remote_exists

        return remote_exists(path)

    def new_layout(
        self, path: str, problem: GemmProblem, chunks: tuple[int, int] | None, compressor: str | None
    ) -> Layout:
        check_new_format("C", path)
        return new_zarr_layout(problem, chunks, compressor)

    def create(self, new: NewArray, journal: Path | None = None) -> Matrix:
        """Create an array. Check the free space only without compression: compressed sizes are unknown."""
        if "://" not in new.path:
            if new.compressor in (None, "none"):
                check_room(new.name, new.path, raw_bytes(new.shape, new.chunks, new.dtype.itemsize))
            try:
                created = create(new, UNFINISHED)
            except OSError as error:
                raise InputError(f"{new.name}: cannot create a zarr array at {new.path}: {error}") from error
            if created is not None:
                return ZarrMatrix(new.name, created)
        from oocgemm.stores.zarr_through import create_zarr

        return create_zarr(new)

    def journal_folder(self, operand: Any) -> Path | None:
        if "://" in operand or os.path.isfile(operand):
            return None
        return Path(operand) / SIDECAR


def new_zarr_layout(
    problem: GemmProblem, chunks: tuple[int, int] | None, compressor: str | None, *, requests: int = 0
) -> Layout:
    """Return the layout of a new array. `requests`: PUTs in flight to an object store; 0 for files."""
    if chunks is not None and not (
        isinstance(chunks, tuple | list)
        and len(chunks) == 2
        and all(isinstance(extent, int | np.integer) and extent > 0 for extent in chunks)
    ):
        raise InputError(f"chunks = {chunks!r}: pass (rows, columns), both integers of at least 1")
    itemsize = problem.itemsizes["C"]
    size = min(2 * CHUNK_BYTES, problem.m * problem.n * itemsize)
    if chunks:
        size = chunks[0] * chunks[1] * itemsize
    encodes = compressor not in (None, "none")
    memory = (3 if encodes else 1) * padded(size)
    writing = Writing(
        chunk=(int(chunks[0]), int(chunks[1])) if chunks else (1, 1),
        free=chunks is None,
        encodes=encodes,
        encode_bytes=0 if requests else memory,
    )
    if requests:
        return Remote(requests, memory + size, itemsize=itemsize, writing=writing)
    return Chunked(itemsize=itemsize, writing=writing)


def _check_readable(name: str, path: str) -> None:
    """Raise `InputError` if nothing is at a path, or metadata that may not be read, or too much of it."""
    check_found(name, path)
    try:
        check_sizes(f"{name} at {path}", partial(local_size, str(path).removeprefix("file://")))
    except PermissionError as error:
        raise not_readable(name, error) from error


def _without_zarr(path: str) -> Metadata | None:
    return None if "://" in path else read_metadata(os.fspath(path))


@dataclass(frozen=True)
class _Group:
    """A group with a sparse matrix, like a group of zarr."""

    attrs: Mapping[str, Any]
    members: Mapping[str, Metadata]

    def __getitem__(self, member: str) -> Metadata:
        return self.members[member]

    def __contains__(self, member: str) -> bool:
        return member in self.members


def _sparse_group(path: str) -> _Group | None:
    """Return a local group with a sparse matrix; None if there is none, or if zarr must open it."""
    found = None if "://" in path else read_group(os.fspath(path), PARTS)
    return None if found is None else _Group(*found)


def row_of(name: str, found: Metadata) -> Matrix:
    """Return a local array of one dimension as a matrix of one row."""
    folded = found.folded(Folding(rows=()).fold(name, found.shape))
    assert folded is not None, "chunks of one dimension are rectangles"
    return ZarrMatrix(name, folded, unchanging=True)


def check_compressor(name: str) -> None:
    if name not in COMPRESSORS:
        raise InputError(f"unknown compressor {name!r}: choose one of {', '.join(COMPRESSORS)}")


def check_free(path: str, wanted: int = 0) -> None:
    """Raise `InputError` if no group can be created at a path, or if its disk lacks `wanted` free bytes."""
    if "://" in path:
        raise InputError(f"{path} is a URL, but results of this kind are written to local paths only")
    if kind := "a .npy file" if path.endswith(".npy") else format_of(path):
        raise InputError(
            f"{path} would be {kind}, but results of this kind are several arrays in a zarr group: give "
            f"{os.path.splitext(path)[0]}.zarr"
        )
    if os.path.lexists(path):
        raise InputError(f"something exists at {path}: give another path, or remove it")
    check_new("the result", path, wanted)


def save_arrays(
    path: str,
    arrays: Mapping[str, Array],
    attributes: Mapping[str, Any] | None = None,
    dtypes: Mapping[str, Any] | None = None,
) -> None:
    """Write arrays to a new zarr group, and rename it into place when complete. Raises `InputError`.

    `attributes` are those of the group. Arrays in `dtypes` are rounded to these dtypes.
    """
    import zarr

    check_free(path)
    unfinished = f"{path.rstrip('/')}.unfinished"
    try:
        # A killed run may have left such a group.
        group = zarr.create_group(unfinished, overwrite=True, attributes=dict(attributes or {}))
        for name, array in arrays.items():
            rows = max(1, CHUNK_BYTES * max(1, len(array)) // max(1, array.nbytes))
            chunks = (min(rows, max(1, len(array))), *(max(1, extent) for extent in array.shape[1:]))
            dtype = (dtypes or {}).get(name, array.dtype)
            made = group.create_array(name, shape=array.shape, dtype=dtype, chunks=chunks, compressors=None)
            for start in range(0, len(array), chunks[0]):
                part = slice(start, start + chunks[0])
                made[part] = array[part].astype(dtype, copy=False)
        os.rename(unfinished, path)
    except OSError as error:
        raise InputError(f"a zarr group cannot be written to {path}: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def save_sparse(
    path: str, shape: tuple[int, int], starts: Array, indices: Array, data: Array, dtype: Any = None
) -> None:
    """Write a matrix in CSR form to a new zarr group, as AnnData stores it. Raises `InputError`.

    `dtype` is that of the stored data, by default that of `data`.
    The format is that of https://anndata.readthedocs.io/en/latest/fileformat-prose.html#sparse-arrays.
    """
    attributes = {"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": list(shape)}
    arrays = {"data": data, "indices": indices, "indptr": starts}
    save_arrays(path, arrays, attributes, {"data": data.dtype if dtype is None else dtype})


def stored_arrays(path: str, *names: str) -> tuple[Any, ...]:
    """Return arrays of a zarr group at a local path."""
    import zarr

    group = zarr.open_group(path, mode="r")
    return tuple(group[name] for name in names)
