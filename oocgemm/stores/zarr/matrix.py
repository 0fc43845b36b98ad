"""Use zarr arrays (formats 2 and 3) as matrices."""

import hashlib
import importlib.util
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import zarr
from zarr.abc.store import Store
from zarr.core.buffer.cpu import NDBuffer
from zarr.storage import LocalStore

from oocgemm.errors import ExecutionError
from oocgemm.planning import Layout
from oocgemm.planning.tiling import Range
from oocgemm.stores.base import BATCH_BYTES, Array, checked, pieces, transient
from oocgemm.stores.durable import fingerprint_of, fingerprints, spread, sync_files, sync_names
from oocgemm.stores.files import padded, scratch, worth_caching
from oocgemm.stores.lines import SCRATCH_BYTES
from oocgemm.stores.space import check_room, free_bytes, raw_bytes
from oocgemm.stores.zarr import bfloat16
from oocgemm.stores.zarr.chunks import DirectChunks, Shards
from oocgemm.stores.zarr.codecs import from_v2, from_v3

bfloat16.register()
# A zarr array that has this attribute is the result of an incomplete run.
ATTRIBUTE = "oocgemm"
# Temporary files, of this package or of zarr, have such names. A killed process leaves them behind.
PARTIAL = re.compile(r"\.[0-9a-f]{32}\.partial$")
# If this package is installed, its codec pipeline reads the arrays whose codecs `codecs` does not know. It is
# faster than zarr's own pipeline, which makes all copies in one thread.
FAST_PIPELINE = "zarrs"
# Taken while zarr's configuration, which is global, is changed and restored. Without it, two runs that do
# this concurrently could leave it changed.
_config_lock = Lock()
# The names of the metadata files of an array in zarr formats 2 and 3.
METADATA = ("zarr.json", ".zarray", ".zattrs")


def _batch_bytes(chunk: tuple[int, int], itemsize: int) -> int:
    """Return the maximum bytes of all chunks that one call to zarr reads or writes.

    This is one large chunk, or for small chunks a batch of `BATCH_BYTES`, which may exceed that by a chunk.
    """
    size = chunk[0] * chunk[1] * itemsize
    return size if size >= BATCH_BYTES else BATCH_BYTES + size


class ZarrMatrix:
    """A matrix in a zarr array of format 2 or 3.

    If the array is local and `codecs` knows its encoding, this package reads and writes its chunk files
    directly (`DirectChunks`). Otherwise zarr does.
    """

    def __init__(self, name: str, array: "zarr.Array[Any]", *, unchanging: bool = False) -> None:
        """Wrap an open array. `name` is its name in messages.

        With `unchanging`, nobody may write to it during the run. Files of chunks that are deleted during the
        run are then detected.
        """
        self.shape, self.dtype = checked(name, array.shape, array.dtype)
        self.name = name
        self.array = array
        self.direct = _direct_chunks(array, unchanging)
        # If zarr reads the array: the array object to use, and whether it can read into contiguous memory
        # only.
        self._read, self._contiguous = (array, False) if self.direct else _reader(array)
        # `_writer` writes chunk files directly, and `_written` is the array if zarr writes. `_target` is the
        # folder to which both write. `redirect_writes` changes them.
        self._writer, self._written, self._target = self.direct, array, local_folder(array)
        self._writes_directly = self.direct is not None and self.direct.shards is None
        chunk = (max(1, int(array.chunks[0])), max(1, int(array.chunks[1])))
        shards = array.shards or chunk
        shard = (max(1, int(shards[0])), max(1, int(shards[1])))
        size = self.dtype.itemsize
        # A thread that reads through zarr has a chunk in memory as stored and as decoded. If zarr can read
        # into contiguous memory only, the chunk is in a contiguous buffer as well.
        decode_bytes = (3 if self._contiguous else 2) * _batch_bytes(chunk, size)
        # A thread that writes through zarr has the elements, their encoding, and the bytes of the file.
        encode_bytes = 3 * _batch_bytes(shard, size)
        if self.direct:
            decode_bytes = self.direct.encoding.decode_bytes(self.direct.chunk_bytes)
            if self._writes_directly:
                encode_bytes = self.direct.encoding.encode_bytes(self.direct.chunk_bytes)
        raw = self.direct.encoding if self.direct and self.direct.encoding.raw else None
        self.layout = Layout(
            read_chunk=chunk,
            write_chunk=shard,
            partial_reads=raw is not None,
            contiguous=0 if raw and raw.order == "F" else 1,
            itemsize=size,
            scratch_bytes=SCRATCH_BYTES if raw else 0,
            decode_bytes=decode_bytes,
            encode_bytes=encode_bytes,
            encodes=not self.raw,
        )

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
                f"chunk {key} in {self.array.store_path} cannot be read, it may be damaged: {reason(error)}"
            ) from error

    def _read_through(self, rows: Range, cols: Range, out: Array) -> None:
        """Read a block with zarr into `out`, or into scratch memory first if zarr needs contiguous memory."""
        into = out
        if self._contiguous and not out.flags.c_contiguous:
            into = scratch(out.nbytes).view(out.dtype).reshape(out.shape)
        target = NDBuffer(into)  # type: ignore[arg-type]  # its protocol is narrower than ndarray
        self._read.get_basic_selection((slice(*rows), slice(*cols)), out=target)
        if into is not out:
            np.copyto(out, into)

    def _failing(self, rows: Range, cols: Range, out: Array) -> str:
        """Find the first chunk of a block that cannot be read. Return the key of its file (chunk or shard).

        `out` is overwritten.
        """
        for r, c in pieces(rows, cols, self.layout.read_chunk, 1):
            number = r[0] // self.layout.write_chunk[0], c[0] // self.layout.write_chunk[1]
            try:
                self._read_through(r, c, out[: r[1] - r[0], : c[1] - c[0]])
            except Exception:
                break
        return self.array.metadata.encode_chunk_key(number)

    def write(self, rows: Range, cols: Range, data: Array) -> None:
        if not self._owns(rows, cols):
            raise ExecutionError(
                f"{self.name}[{rows[0]}:{rows[1]}, {cols[0]}:{cols[1]}] covers some chunks only in "
                "part, and other threads may write the rest at the same time: write whole chunks"
            )
        if self._writer is not None and self._writes_directly:
            self._writer.write(rows, cols, data)
        else:
            self._written.set_basic_selection((slice(*rows), slice(*cols)), data)

    def sync(self) -> None:
        """Do nothing: `sync_block` flushes each block of a local array after it is written."""

    def redirect_writes(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._target = folder
        if self._writer is not None and self._writes_directly:
            self._writer = replace(self._writer, root=folder)
            return
        for name in METADATA:
            if (self.folder / name).exists():
                shutil.copyfile(self.folder / name, folder / name)
        # By default zarr does not write a chunk that has only the fill value. Here it must: otherwise the
        # old chunk would stay in C.
        opened = zarr.open_array(folder, mode="r+")
        self._written = opened.with_config({"write_empty_chunks": True})

    def sync_block(self, rows: Range, cols: Range) -> None:
        assert self._target is not None
        sync_files(self._target, self._names(rows, cols))

    def apply_redo(self, rows: Range, cols: Range) -> None:
        assert self._target is not None
        names = self._names(rows, cols)
        for name in names:
            target = self.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # an earlier call, interrupted by a crash, has moved the file
                os.replace(self._target / name, target)
        sync_names(self.folder, names)  # `sync_block` has flushed the contents of the files

    def set_finished(self, finished: bool) -> None:
        if not finished:
            self.array.attrs[ATTRIBUTE] = {"complete": False}
        elif ATTRIBUTE in self.array.attrs:
            del self.array.attrs[ATTRIBUTE]
        folder = local_folder(self.array)
        if folder is not None:
            sync_files(folder, METADATA)

    def delete_partial_files(self) -> None:
        for folder, _, names in os.walk(self.folder):
            for name in names:
                if PARTIAL.search(name):
                    os.unlink(os.path.join(folder, name))

    def files_fingerprint(self) -> str:
        return fingerprints(self._spread())["content"]

    def block_fingerprint(self, rows: Range, cols: Range) -> str | None:
        return fingerprint_of(self.folder / name for name in self._names(rows, cols))

    def _spread(self) -> Iterator[str]:
        """Yield the paths of the chunk files to fingerprint: all, or evenly spread ones if there are many."""
        grid = (
            -(-extent // chunk) for extent, chunk in zip(self.shape, self.layout.write_chunk, strict=True)
        )
        folder, key = str(self.folder), self.array.metadata.encode_chunk_key
        return (f"{folder}/{key(number)}" for number in spread(*grid))

    def reserve(self) -> None:
        """Check that the disk has room for all chunks of a local, uncompressed array. Raises `InputError`.

        Nothing is checked for other arrays, since the size of their chunk files is not known before.
        """
        if self.raw and free_bytes(str(self.folder)) < raw_bytes(
            self.shape, self.layout.write_chunk, self.dtype.itemsize
        ):
            check_room(self.name, str(self.folder), self.missing_bytes())

    def missing_bytes(self) -> int:
        """Estimate the disk space of the chunks of a local array that are not stored yet, in bytes.

        Compressed chunks are assumed to take as much as the average of those that are stored. For
        uncompressed chunks the result is exact.
        """
        stored = []
        names = self._names((0, self.shape[0]), (0, self.shape[1]))
        for name in names:
            with suppress(FileNotFoundError):
                stored.append(padded((self.folder / name).stat().st_size))
        whole = raw_bytes(self.layout.write_chunk, self.layout.write_chunk, self.dtype.itemsize)
        each = sum(stored) / len(stored) if stored else whole
        return round((len(names) - len(stored)) * each)

    @property
    def raw(self) -> bool:
        """Whether the array is local and not sharded, and its chunk files are just the elements."""
        return self._writes_directly and self.direct is not None and self.direct.encoding.raw

    def fingerprint(self) -> dict[str, object]:
        metadata = dict(self.array.metadata.to_dict())
        metadata.pop("attributes", None)
        digest = hashlib.sha256(json.dumps(metadata, sort_keys=True, default=str).encode()).hexdigest()[:32]
        folder = local_folder(self.array)
        place = str(self.array.store_path) if folder is None else os.path.realpath(folder)
        found = {"content": "", "changes": ""} if folder is None else fingerprints(self._spread())
        return {"path": place, "metadata": digest, **found}

    @property
    def folder(self) -> Path:
        """The folder of the array, which must be local."""
        folder = local_folder(self.array)
        assert folder is not None
        return folder

    def _names(self, rows: Range, cols: Range) -> list[str]:
        """Return the names of the files (chunks or shards) of a block, relative to the array's folder."""
        numbers = (
            range(span[0] // chunk, -(-span[1] // chunk))
            for span, chunk in zip((rows, cols), self.layout.write_chunk, strict=True)
        )
        return [self.array.metadata.encode_chunk_key(number) for number in product(*numbers)]

    def _owns(self, rows: Range, cols: Range) -> bool:
        """Return whether a block has only whole chunks, except at the edges: no other writer shares them."""
        return all(
            start % chunk == 0 and (stop % chunk == 0 or stop == extent)
            for (start, stop), chunk, extent in zip(
                (rows, cols), self.layout.write_chunk, self.shape, strict=True
            )
        )

    def describe(self) -> dict[str, object]:
        metadata = self.array.metadata
        codecs = getattr(metadata, "codecs", None)
        if codecs is None:
            compressor = getattr(metadata, "compressor", None)
            codecs = (compressor,) if compressor else ()
        mark = self.array.attrs.get(ATTRIBUTE)
        return {
            "unfinished": isinstance(mark, Mapping) and mark.get("complete") is False,
            "store": f"zarr v{metadata.zarr_format}",
            "path": str(self.array.store_path),
            "shape": list(self.shape),
            "dtype": self.dtype.name,
            "chunks": list(self.array.chunks),
            "shards": list(self.array.shards) if self.array.shards else None,
            "codecs": [type(codec).__name__ for codec in codecs],
            "direct": self.direct is not None,
        }

    def identities(self) -> set[object]:
        folder = local_folder(self.array)
        if folder is None:
            return {("store", id(self.array.store), self.array.path), str(self.array.store_path)}
        return folder_identity(folder)


def folder_identity(folder: Path) -> set[object]:
    """Return the identity of a local array: a set of ("file", device, inode) of its folder."""
    status = os.stat(folder)
    return {("file", status.st_dev, status.st_ino)}


def reason(error: BaseException) -> str:
    """Return the first line of the message of an exception that zarr raised."""
    text = str(error).strip().splitlines()
    if isinstance(error, KeyError | TypeError | AttributeError):  # zarr raises these for invalid metadata
        return f"its metadata cannot be read ({': '.join([type(error).__name__, *text[:1]])})"
    return text[0] if text else type(error).__name__


def local_folder(array: "zarr.Array[Any] | zarr.Group") -> Path | None:
    """Return the folder of a zarr array or group on a local file system; None for other zarr stores."""
    store: Store = array.store
    return Path(store.root) / array.path if isinstance(store, LocalStore) else None


def _direct_chunks(array: "zarr.Array[Any]", unchanging: bool) -> DirectChunks | None:
    """Return access to the chunk files without zarr; None if they are not local or have unknown codecs."""
    folder = local_folder(array)
    if folder is None or 0 in array.shape:
        return None
    metadata = array.metadata
    stated = metadata.to_dict()
    dtype, shards = np.dtype(array.dtype), None
    if metadata.zarr_format == 2:
        encoding = from_v2(stated, dtype)
    else:
        codecs = _configurations(stated["codecs"])
        if [codec["name"] for codec in codecs] == ["sharding_indexed"]:
            shard = array.shards or array.chunks
            settings = codecs[0]["configuration"]
            codecs = _configurations(settings["codecs"])
            index = from_v3(_configurations(settings["index_codecs"]), np.dtype("u8"))
            if index is None or index.compressor is not None or index.order != "C":
                return None
            shards = Shards(
                chunks=(shard[0] // array.chunks[0], shard[1] // array.chunks[1]),
                at_end=settings["index_location"] == "end",
                dtype=index.dtype,
                checksum=index.checksum,
            )
        encoding = from_v3(codecs, dtype)
    if encoding is None:
        return None
    return DirectChunks(
        root=folder,
        key=metadata.encode_chunk_key,
        shape=(int(array.shape[0]), int(array.shape[1])),
        chunk=(int(array.chunks[0]), int(array.chunks[1])),
        encoding=encoding,
        fill=array.fill_value if array.fill_value is not None else 0,
        shards=shards,
        unchanging=unchanging,
        worth_caching=worth_caching(array.shape[0] * array.shape[1] * dtype.itemsize),
    )


def _reader(array: "zarr.Array[Any]") -> tuple["zarr.Array[Any]", bool]:
    """Choose how zarr reads an array. Return the array object to use, and whether `out` must be contiguous.

    zarr reads through a codec pipeline. If the user has configured one, it is used. Otherwise `FAST_PIPELINE`
    is used if it is installed and supports the array's codecs. Only zarr's own pipeline is known to read into
    an `out` that is not contiguous.
    """
    with _config_lock:
        return _configured_reader(array)


def _configured_reader(array: "zarr.Array[Any]") -> tuple["zarr.Array[Any]", bool]:
    """Do the work of `_reader`. The caller has taken `_config_lock`, since this changes zarr's settings."""
    pipeline = "codec_pipeline.path"
    if zarr.config.get(pipeline) != zarr.config.defaults[0]["codec_pipeline"]["path"]:
        return array, True
    if array.dtype.kind == "V" or importlib.util.find_spec(FAST_PIPELINE) is None:
        return array, False
    # The pipeline may decode one chunk at a time only. Every reader thread calls it, and the plan counts
    # memory for one chunk per thread.
    settings = {pipeline: f"{FAST_PIPELINE}.ZarrsCodecPipeline", "codec_pipeline.strict": True}
    settings |= {"codec_pipeline.chunk_concurrent_maximum": 1}
    with suppress(Exception), zarr.config.set(settings):
        return zarr.Array(zarr.AsyncArray(array.metadata, array.store_path)), True
    return array, False


def _configurations(codecs: Any) -> list[dict[str, Any]]:
    """Return zarr codecs as dictionaries, in the form of the JSON metadata."""
    return [dict(codec if isinstance(codec, Mapping) else codec.to_dict()) for codec in codecs]
