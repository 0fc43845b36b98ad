"""Use a zarr array in an object store as a matrix."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from oocgemm.errors import ExecutionError
from oocgemm.planning import Layout
from oocgemm.planning.tiling import Range
from oocgemm.stores.base import Array
from oocgemm.stores.durable import MAX_FINGERPRINTED, SIDECAR
from oocgemm.stores.objects.address import REQUESTS, is_web, scrubbed
from oocgemm.stores.objects.bucket import Bucket, DeniedError
from oocgemm.stores.objects.chunks import ObjectChunks
from oocgemm.stores.objects.folder import ObjectFolder
from oocgemm.stores.zarr_matrix import ZarrMatrix
from oocgemm.stores.zarr_metadata import METADATA, Metadata, keys_of_first

if TYPE_CHECKING:
    import zarr


class ObjectMatrix(ZarrMatrix):
    """A matrix in a zarr array of format 2 or 3 in an object store.

    Chunks whose encoding the module `oocgemm.stores.zarr_codecs` supports are read and written by this
    package, each in a request of its own. zarr writes sharded arrays, and reads and writes all others.

    A PUT replaces an object atomically, and is durable when it returns. So nothing needs to be flushed.

    `guard` is called before each write. It raises an error if this run may no longer write.
    """

    def __init__(
        self, name: str, bucket: Bucket, array: "zarr.Array[Any]", *, unchanging: bool = False
    ) -> None:
        """Wrap an array that zarr opened in `bucket`. `name` is its name in messages."""
        super().__init__(name, array, unchanging=unchanging)
        self._bucket = bucket
        self._chunks = _chunks(bucket, self._metadata)
        self._redo = ""
        self._tags: dict[str, str] = {}
        self._listed = False
        self.guard: Callable[[], None] = lambda: None
        self.layout = self._remote_layout()

    def _keys_found(self) -> Iterator[str]:
        with suppress(DeniedError):  # to list objects needs a permission of its own
            if not is_web(self._bucket.url):
                yield from self._bucket.keys()
                return
        yield from keys_of_first(self._metadata.key, self._bucket.exists)

    def _remote_layout(self) -> Layout:
        through, chunks = self.layout, self._chunks
        if chunks is None:
            # zarr's event loop makes the requests, and copies all chunks in one thread.
            size = max(through.decode_bytes, through.encode_bytes)
            return Layout(
                read_chunk=through.read_chunk,
                write_chunk=through.write_chunk,
                partial_reads=False,
                itemsize=through.itemsize,
                encodes=True,
                requests=REQUESTS,
                request_bytes=size,
            )
        encoding, sharded = chunks.encoding, chunks.shards is not None
        return Layout(
            read_chunk=through.read_chunk,
            write_chunk=through.write_chunk,
            partial_reads=encoding.raw,
            contiguous=0 if encoding.raw and encoding.order == "F" else 1,
            itemsize=through.itemsize,
            encodes=sharded or not encoding.raw,
            requests=REQUESTS,
            request_bytes=max(chunks.request_bytes, through.encode_bytes if sharded else 0),
            request_chunk=(chunks.group[0] * chunks.chunk[0], chunks.group[1] * chunks.chunk[1]),
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
            self._chunks = self._chunks.below(self._redo)

    def sync_blocks(self, blocks: Sequence[tuple[Range, Range]]) -> None:
        """Do nothing: a PUT is durable when it returns."""

    def apply_redo(self, rows: Range, cols: Range) -> None:
        """Copy the new content of a block from its redo objects to the matrix, within the store.

        After a crash the call can be repeated. The redo objects stay until all tiles are done.
        """
        self.guard()
        for key in self._names(rows, cols):
            with suppress(FileNotFoundError):  # an earlier process copied it, and deleted it after that
                self._bucket.copy(self._redo + key, key)
            self._tags[key] = self._bucket.tag(key)

    def set_finished(self, finished: bool) -> None:
        """Mark the array in its metadata.

        With `finished`, first check that the objects are those written here. Raises `ExecutionError` if
        another process has overwritten some.
        """
        if finished:
            self._check_untouched()
        self.guard()
        with self._bucket.errors(""):
            super().set_finished(finished)

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
        """Return the URL, and digests of the metadata and of the ETags. A web server gives no ETags."""
        stated = json.dumps(self._metadata.stated, sort_keys=True, default=str)
        content = "" if is_web(self._bucket.url) else _digest(self._listing(MAX_FINGERPRINTED))
        digest = hashlib.sha256(stated.encode()).hexdigest()[:32]
        return {"path": self._bucket.url, "metadata": digest, "content": content, "changes": ""}

    def describe(self) -> dict[str, object]:
        facts = {"path": self._bucket.url, "direct": self._chunks is not None}
        return super().describe() | facts

    def identities(self) -> set[object]:
        return {("objects", self._bucket.url.replace("s3a://", "s3://"))}

    def _listing(self, limit: int | None = None) -> dict[str, str]:
        """Return the ETags of the chunks or shards, by key: of all, or of about `limit`."""
        found = self._bucket.listing(limit=limit)
        apart = (f"{SIDECAR}/", *METADATA)
        return {key: tag for key, (_, tag) in found.items() if not key.startswith(apart)}


def _digest(tags: dict[str, str]) -> str:
    text = "\n".join(f"{key} {tag}" for key, tag in sorted(tags.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _chunks(bucket: Bucket, found: Metadata) -> ObjectChunks | None:
    """Return an object that reads and writes chunks; None if zarr must do so."""
    if 0 in found.shape or found.encoding is None:
        return None
    return ObjectChunks(
        bucket=bucket,
        key=found.key,
        chunk=(int(found.chunks[0]), int(found.chunks[1])),
        encoding=found.encoding,
        fill=found.fill,
        shards=found.shard_format,
    )
