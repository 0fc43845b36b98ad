"""Use a zarr array in an object store as a matrix: open and create it, and read and write its chunks.

Chunks are read and written without zarr, one request each. Small chunks that are close to
each other in a shard are read by one request.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import field, replace
from functools import cached_property
from typing import Any, Literal, NoReturn

import numpy as np
import zarr
from zarr.storage import ObjectStore

from oocgemm.errors import ExecutionError, InputError, NotFoundError
from oocgemm.planning import Layout, Remote, Writing
from oocgemm.planning.tiling import Range
from oocgemm.stores.base import Array, Matrix, NewArray
from oocgemm.stores.capabilities import SIDECAR
from oocgemm.stores.codecs import CHECKSUM_BYTES
from oocgemm.stores.files import MAX_FINGERPRINTED
from oocgemm.stores.folding import Folding
from oocgemm.stores.formats import check_url_format
from oocgemm.stores.objects import (
    REQUESTS,
    STREAMED_BYTES,
    Bucket,
    DeniedError,
    ObjectFolder,
    StoreError,
    is_web,
    scrubbed,
)
from oocgemm.stores.zarr_chunks import MISSING, Block, StoredChunks, cut, inside, view
from oocgemm.stores.zarr_matrix import ZarrMatrix, reason
from oocgemm.stores.zarr_metadata import (
    METADATA,
    V2,
    V2_ATTRIBUTES,
    V2_GROUP,
    V3,
    Metadata,
    check_chunks,
    check_sizes,
    keys_of_first,
)
from oocgemm.stores.zarr_through import check_array, metadata_of, new_array, through_zarr
from oocgemm.values import dataclass

# A part of a sharded array that is read by one task has at most this many bytes before compression.
GROUP_BYTES = 2 << 20
# Chunks of a shard with at most this many bytes between them are read by one request. A request reads at most
# GROUP_BYTES, or one chunk.
MAX_GAP = 64 << 10
Place = tuple[int, int]
# Stored bytes of a chunk in a shard: the offsets where they begin and end, the row and column of the chunk in
# the grid of chunks, the block of the matrix that is needed of the chunk, and the destination of the block.
Span = tuple[int, int, Place, Block, Array]


@dataclass(frozen=True, kw_only=True)
class ObjectChunks(StoredChunks):
    """The chunks of a zarr array in an object store, and how to read and write them.

    - `bucket`: contains the objects of the array.
    - `prefix`: a text that is prepended to the key when a chunk is written.
    """

    bucket: Bucket
    prefix: str = ""
    # The indexes of shards, which do not change while an operand is read.
    _indexes: dict[Place, Array | None] = field(default_factory=dict, compare=False, repr=False)

    @property
    def request_bytes(self) -> int:
        """The bytes of host memory that reading or writing one chunk takes, besides its source or target."""
        size = self.chunk_bytes + CHECKSUM_BYTES
        stored = GROUP_BYTES if self.group != (1, 1) else size
        return max(2 * STREAMED_BYTES, stored + self.encoding.encode_bytes(size))

    @cached_property
    def group(self) -> tuple[int, int]:
        """How many rows and columns of chunks a task reads together: (1, 1) if there are no shards."""
        down, across, most = 1, 1, GROUP_BYTES // 2
        rows, columns = self.shards.chunks if self.shards else (1, 1)
        while down * across * self.chunk_bytes <= most and (2 * down <= rows or 2 * across <= columns):
            wider = 2 * across <= columns and (across <= down or 2 * down > rows)
            down, across = (down, 2 * across) if wider else (2 * down, across)
        return down, across

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        """Read a block. Raises `ExecutionError` for a damaged chunk, `StoreError` for a failed request."""
        if self.group != (1, 1):
            self._read_group((rows, cols), out)
            return
        for number, block in cut((rows, cols), self.chunk):
            target = view(out, (rows, cols), block)
            place = self._place(number)
            try:
                if place is None:
                    target[...] = self.fill
                elif self.encoding.raw:
                    self._read_raw(number, place, block, target)
                else:
                    self._read_encoded(number, place, block, target)
            except FileNotFoundError:
                target[...] = self.fill  # zarr need not store a chunk of fill values
            except EOFError as error:
                self._damaged(number, str(error), error)

    def _read_group(self, block: Block, out: Array) -> None:
        spans: dict[str, list[Span]] = {}
        for number, part in cut(block, self.chunk):
            target = view(out, block, part)
            place = self._place(number)
            if place is None:
                target[...] = self.fill
                continue
            key, offset, length = place
            lines = 0, length
            if self.encoding.raw:
                lines = self._lines(number, length, part)
            spans.setdefault(key, []).append((offset + lines[0], offset + lines[1], number, part, target))
        for key, found in spans.items():
            for run in runs(sorted(found, key=lambda span: span[:2])):
                first, number = run[0][0], run[0][2]
                try:
                    stored = self.bucket.get_part(key, first, max(span[1] for span in run) - first)
                except FileNotFoundError:
                    self._damaged(number, "the shard is missing")
                except EOFError as error:
                    self._damaged(number, str(error), error)
                for start, end, at, part, target in run:
                    self._decode(at, part, stored[start - first : end - first], target)

    def write(self, rows: Range, cols: Range, data: Array) -> dict[str, str]:
        """Write a block that consists of whole chunks. Return the ETags of the new objects by their keys."""
        tags = {}
        for number, block in cut((rows, cols), self.chunk):
            part = view(data, (rows, cols), block)
            stored, size = self.encoding.encode(part, self.chunk, self.fill)
            content = np.ascontiguousarray(stored).reshape(-1).view(np.uint8)[:size]
            tags[self.key(number)] = self.bucket.put(self.prefix + self.key(number), content)
        return tags

    def _place(self, number: Place) -> tuple[str, int, int] | None:
        """Return key, offset and size (-1 for a whole object) of a chunk; None if the chunk is not stored."""
        if self.shards is None:
            return self.key(number), 0, -1
        down, across = self.shards.chunks
        shard = number[0] // down, number[1] // across
        if shard not in self._indexes:
            self._indexes[shard] = self._index(shard)
        index = self._indexes[shard]
        if index is None:
            return None
        offset, length = map(int, index[number[0] % down, number[1] % across])
        return None if offset == length == MISSING else (self.key(shard), offset, length)

    def _index(self, shard: Place) -> Array | None:
        assert self.shards is not None
        size, start = self.shards.index_bytes, -1 if self.shards.at_end else 0
        try:
            return self.shards.parsed(self.bucket.get_part(self.key(shard), start, size))
        except FileNotFoundError:
            return None
        except (EOFError, ValueError) as error:
            raise ExecutionError(
                f"{self.bucket.url}/{self.key(shard)} is a shard whose index cannot be read ({error}): it is "
                "damaged or truncated"
            ) from error

    def _read_raw(self, number: Place, place: tuple[str, int, int], block: Block, out: Array) -> None:
        """Read a part of an uncompressed chunk: the lines that contain it, in one request."""
        key, offset, length = place
        start, end = (offset + at for at in self._lines(number, length, block))
        target = out if self.encoding.order == "C" else out.T
        whole = target.nbytes == end - start
        if whole and target.flags.c_contiguous and self.encoding.dtype.isnative:
            self.bucket.read_into(key, start, target.reshape(-1).view(np.uint8))
        else:
            self._decode(number, block, self.bucket.get_part(key, start, end - start), out)

    def _read_encoded(self, number: Place, place: tuple[str, int, int], block: Block, out: Array) -> None:
        key, offset, length = place
        if length < 0:
            found = self.bucket.get(key)
            if found is None:
                raise FileNotFoundError(key)
            stored = found[0]
        else:
            stored = self.bucket.get_part(key, offset, length)
        self._decode(number, block, stored, out)

    def _lines(self, number: Place, length: int, block: Block) -> tuple[int, int]:
        """Return the range of bytes, in an uncompressed chunk, of the lines that contain a block."""
        if length not in (-1, self.chunk_bytes):
            self._damaged(number, f"it has {length} bytes instead of {self.chunk_bytes}")
        return self.encoding.lines_of(self.chunk, inside(block, self.chunk))

    def _decode(self, number: Place, block: Block, stored: Array, out: Array) -> None:
        """Decode a chunk, or lines of an uncompressed one, from `stored`. Copy the part `block` to `out`."""
        wanted = inside(block, self.chunk)
        if self.encoding.raw:
            self.encoding.copy_lines(stored, self.chunk, wanted, out)
            return
        try:
            self.encoding.decode_part(stored, self.chunk, wanted, out)
        except ValueError as error:
            self._damaged(number, f"it {error}", error)

    def _damaged(self, number: Place, how: str, error: Exception | None = None) -> NoReturn:
        raise ExecutionError(
            f"chunk {number[0]}/{number[1]} in {self.bucket.url} is damaged or truncated: {how}"
        ) from error


def runs(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Yield runs of spans. Each run is read by one request. `spans` are in the order of their starts."""
    run: list[Span] = []
    end = 0
    for span in spans:
        if run and (span[0] > end + MAX_GAP or max(end, span[1]) > run[0][0] + GROUP_BYTES):
            yield run
            run = []
        end = max(end, span[1]) if run else span[1]
        run.append(span)
    if run:
        yield run


class ObjectMatrix(ZarrMatrix):
    """A matrix in a zarr array of format 2 or 3 in an object store.

    zarr writes sharded arrays. zarr also reads and writes arrays with codecs that this package does not
    support. A PUT replaces an object atomically, and is durable when it returns. So no flush is needed.
    `guard` is called before each write. It raises an error if this run may no longer write.
    """

    def __init__(
        self, name: str, bucket: Bucket, array: "zarr.Array[Any] | Metadata", *, unchanging: bool = False
    ) -> None:
        super().__init__(name, array, unchanging=unchanging)
        self._bucket = bucket
        fields = self._metadata.stored_chunks()
        self._chunks = None if fields is None else ObjectChunks(bucket=bucket, **fields)
        self._redo = ""
        self._tags: dict[str, str] = {}
        self._listed = False
        self.guard: Callable[[], None] = lambda: None
        self.layout = self._remote_layout()

    def _keys_found(self) -> Iterator[str]:
        return _keys(self._bucket, self._metadata)

    def _remote_layout(self) -> Layout:
        through, chunks = self.layout, self._chunks
        if chunks is None:
            # zarr's event loop makes the requests, and copies all chunks in one thread.
            size = max(through.decode_bytes, through.writing.encode_bytes)
            return Remote(
                requests=REQUESTS,
                request_bytes=size,
                read_chunk=through.read_chunk,
                partial_reads=False,
                itemsize=through.itemsize,
                writing=Writing(through.writing.chunk, encodes=True),
            )
        encoding, sharded = chunks.encoding, chunks.shards is not None
        return Remote(
            requests=REQUESTS,
            request_bytes=max(chunks.request_bytes, through.writing.encode_bytes if sharded else 0),
            request_chunk=(chunks.group[0] * chunks.chunk[0], chunks.group[1] * chunks.chunk[1]),
            read_chunk=through.read_chunk,
            partial_reads=encoding.raw,
            contiguous=0 if encoding.raw and encoding.order == "F" else 1,
            itemsize=through.itemsize,
            writing=Writing(through.writing.chunk, encodes=sharded or not encoding.raw),
        )

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        if self._chunks is None:
            self._read_by_zarr(rows, cols, out)
            return
        if out.dtype != self.dtype:
            raise ExecutionError(f"{self.name} has dtype {self.dtype}, but the buffer for it has {out.dtype}")
        self._chunks.read(rows, cols, out)

    def _read_by_zarr(self, rows: Range, cols: Range, out: Array) -> None:
        try:
            super().read(rows, cols, out)
        except ExecutionError as error:
            raise ExecutionError(scrubbed(str(error))) from None

    def write(self, rows: Range, cols: Range, data: Array) -> None:
        self.guard()
        if self._chunks is not None and self._chunks.shards is None and self._owns(rows, cols):
            tags = self._chunks.write(rows, cols, data)
        elif self._redo:
            raise ExecutionError(
                f"{self.name} at {self._bucket.url} is sharded, or has codecs that only zarr knows: "
                "with beta != 0 it cannot be written in an object store; store it in plain chunks"
            )
        else:
            with self._bucket.errors(""):
                super().write(rows, cols, data)
            tags = {}
            for key in self._names(rows, cols):
                with suppress(FileNotFoundError):  # zarr does not store a chunk of fill values
                    tags[key] = self._bucket.tag(key)
        self._tags.update(tags)

    def redirect_writes(self, folder: Any) -> None:
        assert isinstance(folder, ObjectFolder)
        self._redo = f"{folder.path}/"
        if self._chunks is not None:
            self._chunks = replace(self._chunks, prefix=self._redo)

    def sync_blocks(self, blocks: Sequence[tuple[Range, Range]]) -> None:
        """Do nothing: a PUT is durable when it returns."""

    def apply_redo(self, rows: Range, cols: Range) -> None:
        self.guard()
        for key in self._names(rows, cols):
            with suppress(FileNotFoundError):  # an earlier process copied the redo object and then deleted it
                self._bucket.copy(self._redo + key, key)
            self._tags[key] = self._bucket.tag(key)

    def set_finished(self, finished: bool, uplo: str | None = None) -> None:
        """Mark the array. With `finished`, first check that no other process has replaced its objects."""
        if finished:
            self._check_untouched()
        self.guard()
        with self._bucket.errors(""):
            super().set_finished(finished, uplo)

    def _check_untouched(self) -> None:
        present = self._listing()
        wrong = [key for key, tag in self._tags.items() if present.get(key) != tag]
        if wrong:
            raise ExecutionError(
                f"{len(wrong)} objects of C at {self._bucket.url} were changed by another process during the "
                f"run, for example {wrong[0]}: C is not complete; run again with --overwrite, and write C "
                "by one process"
            )

    def delete_partial_files(self) -> None:
        """Do nothing: a PUT leaves either the old object or the new one."""

    def files_fingerprint(self) -> str:
        return _digest(self._listing())

    def block_fingerprint(self, rows: Range, cols: Range) -> str | None:
        names = self._names(rows, cols)
        if not self._listed and not all(name in self._tags for name in names):
            self._tags, self._listed = self._listing() | self._tags, True
        return _digest({name: self._tags.get(name, "") for name in names})

    def reserve(self) -> None:
        """Do nothing: an object store has no limit that could be checked."""

    def missing_bytes(self) -> int:
        return 0

    def fingerprint(self) -> dict[str, object]:
        return _fingerprint(self._bucket, self._metadata)

    def describe(self) -> dict[str, object]:
        facts = {"path": self._bucket.url, "direct": self._chunks is not None}
        return super().describe() | facts

    def identities(self) -> set[object]:
        return _identities(self._bucket)

    def _listing(self, limit: int | None = None) -> dict[str, str]:
        return _listing(self._bucket, limit)


def _listing(bucket: Bucket, limit: int | None = None) -> dict[str, str]:
    """Return the ETags of all chunks or shards, or of about `limit` of them, by key."""
    found = bucket.listing(limit=limit)
    apart = (f"{SIDECAR}/", *METADATA)
    return {key: tag for key, (_, tag) in found.items() if not key.startswith(apart)}


def _fingerprint(bucket: Bucket, metadata: Metadata) -> dict[str, object]:
    content = "" if is_web(bucket.url) else _digest(_listing(bucket, MAX_FINGERPRINTED))
    return {"path": bucket.url, "metadata": metadata.stored_as(), "content": content, "changes": ""}


def _digest(tags: dict[str, str]) -> str:
    text = "\n".join(f"{key} {tag}" for key, tag in sorted(tags.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def open_array(name: str, bucket: Bucket, *, writable: bool = False) -> ObjectMatrix:
    """Open the zarr array in a bucket. Raises `InputError`, also if the object store does not answer."""
    matrix = _matrix(name, bucket, _opened(name, bucket, writable=writable), writable=writable)
    _check_chunks(name, matrix.check_chunks)
    return matrix


def fold_array(name: str, bucket: Bucket, folding: Folding) -> Matrix:
    """Return the matrix that is folded from the zarr array in a bucket. Raises as `open_array`."""
    found = _opened(name, bucket)
    check_array(name, found, bucket.url)
    metadata, place = metadata_of(found), f"{name} at {bucket.url}"
    fold = folding.fold(place, metadata.shape, metadata.names)
    keys = _keys(bucket, metadata, len(fold.axes))
    _check_chunks(name, lambda: check_chunks(place, metadata, keys))
    if (folded := metadata.folded(fold)) is not None:
        return ObjectMatrix(name, bucket, folded, unchanging=True)
    return through_zarr(
        *(name, fold, found, replace(metadata, place=bucket.url)),
        fingerprint=lambda: _fingerprint(bucket, metadata),
        identities=lambda: _identities(bucket),
    )


def _check_chunks(name: str, check: Callable[[], None]) -> None:
    try:
        check()
    except StoreError as error:
        raise InputError(f"{name}: {error}") from None


def _keys(bucket: Bucket, metadata: Metadata, axes: int = 2) -> Iterator[str]:
    """Yield the keys of objects of an array, or of its first chunk if they cannot be listed."""
    with suppress(DeniedError):  # to list objects needs a permission of its own
        if not is_web(bucket.url):
            yield from bucket.keys()
            return
    yield from keys_of_first(metadata.key, bucket.exists, axes)


def _identities(bucket: Bucket) -> set[object]:
    return {("objects", bucket.url.replace("s3a://", "s3://"))}


def _opened(name: str, bucket: Bucket, *, writable: bool = False) -> Any:
    try:
        # Requests of our own, because zarr hides the reason of a failure, and reads files of any size.
        zarr_format = _format(f"{name} at {bucket.url}", bucket)
    except StoreError as error:
        raise InputError(f"{name}: {error}") from None
    if not zarr_format:
        check_url_format(name, bucket.url)
        raise NotFoundError(f"{name}: there is no zarr array at {bucket.url}")
    try:
        store = ObjectStore(bucket.store, read_only=not writable)
        return zarr.open(store, mode="r+" if writable else "r", zarr_format=zarr_format)
    except MemoryError:
        raise
    except Exception as error:  # zarr raises exceptions of many types
        raise InputError(f"{name}: no zarr array at {bucket.url}: {scrubbed(reason(error))}") from None


def _format(place: str, bucket: Bucket) -> Literal[2, 3] | None:
    """Return the format of the array in a bucket; None if there is none. Raises `InputError` for a group."""
    if check_sizes(place, bucket.size, [V3]):
        return 3
    if V2 in check_sizes(place, bucket.size, [V2, V2_ATTRIBUTES]):
        return 2
    if bucket.size(V2_GROUP) is not None:
        raise InputError(f"{place} is a zarr group, not an array")
    return None


def create_array(bucket: Bucket, new: NewArray) -> ObjectMatrix:
    try:
        array = new_array(ObjectStore(bucket.store), new)
    except Exception as error:  # zarr and obstore raise exceptions of many types
        text = scrubbed(reason(error))
        raise InputError(f"{new.name}: cannot create a zarr array at {bucket.url}: {text}") from None
    return _matrix(new.name, bucket, array, writable=True)


def _matrix(name: str, bucket: Bucket, found: Any, *, writable: bool) -> ObjectMatrix:
    check_array(name, found, bucket.url, writable=writable)
    return ObjectMatrix(name, bucket, found, unchanging=not writable)
