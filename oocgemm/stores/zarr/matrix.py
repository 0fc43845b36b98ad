"""zarr arrays (formats 2 and 3) as matrices."""

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
from oocgemm.planning.tiling import Span
from oocgemm.stores.base import BATCH_BYTES, Array, checked, pieces, transient
from oocgemm.stores.durable import spread, stamp, stamps, sync_files, sync_names
from oocgemm.stores.files import padded, scratch, worth_caching
from oocgemm.stores.lines import SCRATCH_BYTES
from oocgemm.stores.space import check_room, free_bytes, raw_bytes
from oocgemm.stores.zarr import bfloat16
from oocgemm.stores.zarr.chunks import DirectChunks, Shards
from oocgemm.stores.zarr.codecs import from_v2, from_v3

bfloat16.register()
# The attribute by which an array says that it is the result of a run that has not ended.
ATTRIBUTE = "oocgemm"
# What a process that was killed leaves of a file that it was writing, here or in zarr.
PARTIAL = re.compile(r"\.[0-9a-f]{32}\.partial$")
# What decodes what we do not, in place of zarr's own pipeline, whose copies are made in one thread; where it is installed.
FASTER = "zarrs"
# zarr's configuration is the process's: two runs that set and restore it by turns would leave the one's behind.
_config_lock = Lock()
# Files of an array's metadata, in either format.
METADATA = ("zarr.json", ".zarray", ".zattrs")


def _at_a_time(chunk: tuple[int, int], itemsize: int) -> int:
    """Bytes of the chunks that one call of zarr works on: one chunk, or a batch of small ones and one more."""
    size = chunk[0] * chunk[1] * itemsize
    return size if size >= BATCH_BYTES else BATCH_BYTES + size


class ZarrMatrix:
    """A zarr array. Local chunks of the usual kinds go past zarr, all else through it, always into the given memory."""

    def __init__(self, name: str, array: "zarr.Array[Any]", *, at_rest: bool = False) -> None:
        """With `at_rest` nobody may write to it meanwhile: chunks that vanish are noticed."""
        self.shape, self.dtype = checked(name, array.shape, array.dtype)
        self.name = name
        self.array = array
        self.direct = _direct_chunks(array, at_rest)
        # What is read through zarr, and whether into contiguous memory only.
        self._read, self._contiguous = (array, False) if self.direct else _through(array)
        # Through what it is written, and the folder that it goes to.
        self._writer, self._written, self._target = self.direct, array, local_folder(array)
        self._writes_directly = self.direct is not None and self.direct.shards is None
        chunk = (max(1, int(array.chunks[0])), max(1, int(array.chunks[1])))
        shards = array.shards or chunk
        shard = (max(1, int(shards[0])), max(1, int(shards[1])))
        size = self.dtype.itemsize
        # Through zarr a thread holds a chunk as stored and as decoded, and once more if it is copied to its place,
        decode_bytes = (3 if self._contiguous else 2) * _at_a_time(chunk, size)
        # and to write one, its elements, what they are encoded to, and the bytes that go out.
        encode_bytes = 3 * _at_a_time(shard, size)
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

    def read(self, rows: Span, cols: Span, out: Array) -> None:
        if out.dtype != self.dtype:
            raise ExecutionError(
                f"{self.name} is of dtype {self.dtype} and is read into a slot of {out.dtype}"
            )
        if self.direct:
            self.direct.read(rows, cols, out)
            return
        try:
            self._read_through(rows, cols, out)
        except Exception as error:  # codecs raise of every kind
            if transient(error) or isinstance(error, MemoryError):
                raise
            key = self._failing(rows, cols, out)
            raise ExecutionError(
                f"chunk {key} in {self.array.store_path} cannot be read, it may be damaged: {reason(error)}"
            ) from error

    def _read_through(self, rows: Span, cols: Span, out: Array) -> None:
        """Read a block through zarr."""
        into = out
        if self._contiguous and not out.flags.c_contiguous:
            into = scratch(out.nbytes).view(out.dtype).reshape(out.shape)
        target = NDBuffer(into)  # type: ignore[arg-type]  # its protocol is narrower than ndarray
        self._read.get_basic_selection((slice(*rows), slice(*cols)), out=target)
        if into is not out:
            np.copyto(out, into)

    def _failing(self, rows: Span, cols: Span, out: Array) -> str:
        """Return the key of the first chunk of a block that cannot be read; in shards, that of its shard."""
        for r, c in pieces(rows, cols, self.layout.read_chunk, 1):
            number = r[0] // self.layout.write_chunk[0], c[0] // self.layout.write_chunk[1]
            try:
                self._read_through(r, c, out[: r[1] - r[0], : c[1] - c[0]])
            except Exception:
                break
        return self.array.metadata.encode_chunk_key(number)

    def write(self, rows: Span, cols: Span, data: Array) -> None:
        if not self._owns(rows, cols):
            raise ExecutionError(
                f"{self.name}[{rows[0]}:{rows[1]}, {cols[0]}:{cols[1]}] shares chunks with other writers"
            )
        if self._writer is not None and self._writes_directly:
            self._writer.write(rows, cols, data)
        else:
            self._written.set_basic_selection((slice(*rows), slice(*cols)), data)

    def sync(self) -> None:
        """Nothing: a local array is synced block by block."""

    def redirect(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._target = folder
        if self._writer is not None and self._writes_directly:
            self._writer = replace(self._writer, root=folder)
            return
        for name in METADATA:
            if (self.folder / name).exists():
                shutil.copyfile(self.folder / name, folder / name)
        # All chunks: one left out would leave the old one in its place.
        opened = zarr.open_array(folder, mode="r+")
        self._written = opened.with_config({"write_empty_chunks": True})

    def sync_block(self, rows: Span, cols: Span) -> None:
        assert self._target is not None
        sync_files(self._target, self._names(rows, cols))

    def adopt(self, rows: Span, cols: Span) -> None:
        assert self._target is not None
        names = self._names(rows, cols)
        for name in names:
            target = self.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # it is there already
                os.replace(self._target / name, target)
        sync_names(self.folder, names)  # what the files hold was synced before

    def set_finished(self, finished: bool) -> None:
        if not finished:
            self.array.attrs[ATTRIBUTE] = {"complete": False}
        elif ATTRIBUTE in self.array.attrs:
            del self.array.attrs[ATTRIBUTE]
        folder = local_folder(self.array)
        if folder is not None:
            sync_files(folder, METADATA)

    def sweep(self) -> None:
        for folder, _, names in os.walk(self.folder):
            for name in names:
                if PARTIAL.search(name):
                    os.unlink(os.path.join(folder, name))

    def stamp(self) -> str:
        return stamps(self._spread())["content"]

    def block_stamp(self, rows: Span, cols: Span) -> str | None:
        return stamp(self.folder / name for name in self._names(rows, cols))

    def _spread(self) -> Iterator[str]:
        """Paths of all chunk files, or of some of them, evenly spread."""
        grid = (
            -(-extent // chunk) for extent, chunk in zip(self.shape, self.layout.write_chunk, strict=True)
        )
        folder, key = str(self.folder), self.array.metadata.encode_chunk_key
        return (f"{folder}/{key(number)}" for number in spread(*grid))

    def reserve(self) -> None:
        """Check that the disk has room for all raw chunks of a local array. Raises `InputError` if it has not."""
        if self.raw and free_bytes(str(self.folder)) < raw_bytes(
            self.shape, self.layout.write_chunk, self.dtype.itemsize
        ):
            check_room(self.name, str(self.folder), self.missing_bytes())

    def missing_bytes(self) -> int:
        """Return about how many bytes those chunks of a local array take that are not stored yet; exact for raw chunks."""
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
        """Whether every chunk of a local array takes the bytes of its elements."""
        return self._writes_directly and self.direct is not None and self.direct.encoding.raw

    def fingerprint(self) -> dict[str, object]:
        said = dict(self.array.metadata.to_dict())
        said.pop("attributes", None)
        digest = hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:32]
        folder = local_folder(self.array)
        place = str(self.array.store_path) if folder is None else os.path.realpath(folder)
        found = {"content": "", "changes": ""} if folder is None else stamps(self._spread())
        return {"path": place, "metadata": digest, **found}

    @property
    def folder(self) -> Path:
        """Where a local array is."""
        folder = local_folder(self.array)
        assert folder is not None
        return folder

    def _names(self, rows: Span, cols: Span) -> list[str]:
        """Files of the chunks, or shards, that a block of them consists of, below the array's folder."""
        numbers = (
            range(span[0] // chunk, -(-span[1] // chunk))
            for span, chunk in zip((rows, cols), self.layout.write_chunk, strict=True)
        )
        return [self.array.metadata.encode_chunk_key(number) for number in product(*numbers)]

    def _owns(self, rows: Span, cols: Span) -> bool:
        """Whether a block consists of whole write chunks (or what the matrix's edges leave of them)."""
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
        said = self.array.attrs.get(ATTRIBUTE)
        return {
            "unfinished": isinstance(said, Mapping) and said.get("complete") is False,
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
    """Identity of a local array: the folder it lives in, by whatever path."""
    status = os.stat(folder)
    return {("file", status.st_dev, status.st_ino)}


def reason(error: BaseException) -> str:
    """Return the first line of an error of zarr's."""
    text = str(error).strip().splitlines()
    if isinstance(error, KeyError | TypeError | AttributeError):  # metadata of a form zarr does not expect
        return f"its metadata cannot be read ({': '.join([type(error).__name__, *text[:1]])})"
    return text[0] if text else type(error).__name__


def local_folder(array: "zarr.Array[Any] | zarr.Group") -> Path | None:
    store: Store = array.store
    return Path(store.root) / array.path if isinstance(store, LocalStore) else None


def _direct_chunks(array: "zarr.Array[Any]", at_rest: bool) -> DirectChunks | None:
    """How to reach the chunks past zarr, if they are local and of a kind that is understood."""
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
        at_rest=at_rest,
        worth_caching=worth_caching(array.shape[0] * array.shape[1] * dtype.itemsize),
    )


def _through(array: "zarr.Array[Any]") -> tuple["zarr.Array[Any]", bool]:
    """An array to read through, and whether into contiguous memory only, as is to be thought of a pipeline other than zarr's own:
    the one that zarr was told to take, or `FASTER` where it is installed and knows these codecs."""
    with _config_lock:
        return _through_pipeline(array)


def _through_pipeline(array: "zarr.Array[Any]") -> tuple["zarr.Array[Any]", bool]:
    """The same, while no other thread sets zarr's configuration."""
    pipeline = "codec_pipeline.path"
    if zarr.config.get(pipeline) != zarr.config.defaults[0]["codec_pipeline"]["path"]:
        return array, True
    if array.dtype.kind == "V" or importlib.util.find_spec(FASTER) is None:
        return array, False
    # One chunk at a time: there are as many threads as are to decode, each with the memory for one.
    settings = {pipeline: f"{FASTER}.ZarrsCodecPipeline", "codec_pipeline.strict": True}
    settings |= {"codec_pipeline.chunk_concurrent_maximum": 1}
    with suppress(Exception), zarr.config.set(settings):
        return zarr.Array(zarr.AsyncArray(array.metadata, array.store_path)), True
    return array, False


def _configurations(codecs: Any) -> list[dict[str, Any]]:
    """Codecs as the specification writes them."""
    return [dict(codec if isinstance(codec, Mapping) else codec.to_dict()) for codec in codecs]
