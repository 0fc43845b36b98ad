"""zarr arrays (formats 2 and 3) as matrices. The only module that knows zarr."""

import hashlib
import importlib.util
import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.abc.store import Store
from zarr.core.buffer.cpu import NDBuffer
from zarr.storage import LocalStore

from oocgemm.errors import ExecutionError, InputError
from oocgemm.plan import Layout
from oocgemm.plan.tiling import Span
from oocgemm.stores import bfloat16
from oocgemm.stores.base import BATCH_BYTES, Array, checked
from oocgemm.stores.direct import DirectChunks, Shards
from oocgemm.stores.durable import spread, stamp, sync_files, sync_names
from oocgemm.stores.encoding import from_v2, from_v3
from oocgemm.stores.files import scratch, worth_caching
from oocgemm.stores.lines import SCRATCH_BYTES

bfloat16.register()
# The attribute by which an array says that it is the result of a run that has not ended.
ATTRIBUTE = "oocgemm"
# What a process that was killed leaves of a file that it was writing, here or in zarr.
PARTIAL = re.compile(r"\.[0-9a-f]{32}\.partial$")
# What decodes what we do not, in place of zarr's own pipeline, whose copies are made in one thread; where it is installed.
FASTER = "zarrs"
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
            encodes=not (self._writes_directly and self.direct and self.direct.encoding.raw),
        )

    def read(self, rows: Span, cols: Span, out: Array) -> None:
        if out.dtype != self.dtype:
            raise ExecutionError(
                f"{self.name} is of dtype {self.dtype} and is read into a slot of {out.dtype}"
            )
        if self.direct:
            self.direct.read(rows, cols, out)
            return
        selection = slice(*rows), slice(*cols)
        into = out
        if self._contiguous and not out.flags.c_contiguous:
            into = scratch(out.nbytes).view(out.dtype).reshape(out.shape)
        target = NDBuffer(into)  # type: ignore[arg-type]  # its protocol is narrower than ndarray
        self._read.get_basic_selection(selection, out=target)
        if into is not out:
            np.copyto(out, into)

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
        # All chunks: one left out would leave the old one in its place. (What is asked for as an array is opened goes
        # unheeded.)
        with zarr.config.set({"array.write_empty_chunks": True}):
            self._written = zarr.open_array(folder, mode="r+")

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
        grid = (
            -(-extent // chunk) for extent, chunk in zip(self.shape, self.layout.write_chunk, strict=True)
        )
        folder, key = str(self.folder), self.array.metadata.encode_chunk_key
        return stamp(f"{folder}/{key(number)}" for number in spread(*grid))

    def fingerprint(self) -> dict[str, object]:
        said = dict(self.array.metadata.to_dict())
        said.pop("attributes", None)
        digest = hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:32]
        folder = local_folder(self.array)
        place = str(self.array.store_path) if folder is None else os.path.realpath(folder)
        return {"path": place, "metadata": digest, "content": "" if folder is None else self.stamp()}

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


def open_zarr(name: str, path: str, *, writable: bool = False) -> ZarrMatrix:
    """The array at a path or URL. Raises `InputError` if there is none."""
    try:
        found = zarr.open(path, mode="r+" if writable else "r")
    except InputError as error:
        raise InputError(f"{name} at {path}: {error}") from error
    except FileNotFoundError as error:
        raise InputError(f"{name}: no zarr array at {path}: it holds no zarr metadata") from error
    except Exception as error:  # zarr and its stores raise of every kind
        raise InputError(f"{name}: no zarr array at {path}: {_reason(error)}") from error
    return wrap_zarr(name, found, path, writable=writable)


def wrap_zarr(name: str, found: Any, path: str = "", *, writable: bool = False) -> ZarrMatrix:
    """An open zarr array as a matrix. Raises `InputError` for a group, or if it was opened for reading only."""
    if isinstance(found, zarr.Group):
        raise InputError(
            f"{name}: {path or found.store_path} is a zarr group, not an array{_members(local_folder(found))}"
        )
    if writable and found.read_only:
        raise InputError(f"{name} was opened for reading only: open it with mode='r+'")
    if not isinstance(found.metadata.attributes, Mapping):
        raise InputError(
            f"{name}: no zarr array at {path}: its metadata cannot be read (attributes are no object)"
        )
    return ZarrMatrix(name, found, at_rest=not writable)


def is_zarr_array(value: object) -> bool:
    """Whether an object is a zarr array or group."""
    return isinstance(value, zarr.Array | zarr.Group)


def create_zarr(
    name: str,
    path: str,
    shape: tuple[int, int],
    dtype: np.dtype[Any],
    chunks: tuple[int, int],
    compressor: str | None,
) -> ZarrMatrix:
    """A new array, uncompressed unless a compressor is named. Raises `InputError` if it cannot be made."""
    try:
        array = zarr.create_array(
            path,
            shape=shape,
            dtype=dtype,
            chunks=chunks,
            compressors=_compressor(compressor),
            filters=None,
            fill_value=0,
            attributes={ATTRIBUTE: {"complete": False}},
        )
    except Exception as error:
        raise InputError(f"{name}: cannot create a zarr array at {path}: {_reason(error)}") from error
    return ZarrMatrix(name, array)


def remote_exists(url: str) -> bool:
    """Whether there is a zarr array or group at a URL."""
    try:
        zarr.open(url, mode="r")
    except (FileNotFoundError, KeyError):
        return False
    except Exception as error:
        raise InputError(f"cannot look at {url}: {_reason(error)}") from error
    return True


def _compressor(name: str | None) -> Any:
    from zarr.codecs import BloscCodec, GzipCodec, ZstdCodec

    match name:
        case None | "none":
            return None
        case "zstd":
            return ZstdCodec(level=1)
        case "gzip":
            return GzipCodec(level=1)
        case "blosc-lz4":
            return BloscCodec(cname="lz4", clevel=3, shuffle="shuffle")
        case _:
            return BloscCodec(cname="zstd", clevel=1, shuffle="shuffle")


def _reason(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    if isinstance(error, KeyError | TypeError | AttributeError):  # metadata of a form zarr does not expect
        return f"its metadata cannot be read ({': '.join([type(error).__name__, *text[:1]])})"
    return text[0] if text else type(error).__name__


def _members(folder: Path | None) -> str:
    """What there is in a local group, found without opening any of it."""
    if folder is None:
        return ""
    names = sorted(
        p.name for p in folder.iterdir() if any((p / m).exists() for m in ("zarr.json", ".zarray"))
    )
    return f"; give one of those in it: {', '.join(names)}" if names else ""


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
    pipeline = "codec_pipeline.path"
    if zarr.config.get(pipeline) != zarr.config.defaults[0]["codec_pipeline"]["path"]:
        return array, True
    if array.dtype.kind == "V" or importlib.util.find_spec(FASTER) is None:
        return array, False
    # One chunk at a time: there are as many threads as are to decode, each with the memory for one.
    settings = {pipeline: f"{FASTER}.ZarrsCodecPipeline", "codec_pipeline.strict": True}
    with suppress(Exception), zarr.config.set(settings | {"codec_pipeline.chunk_concurrent_maximum": 1}):
        return zarr.Array(zarr.AsyncArray(array.metadata, array.store_path)), True
    return array, False


def _configurations(codecs: Any) -> list[dict[str, Any]]:
    """Codecs as the specification writes them."""
    return [dict(codec if isinstance(codec, Mapping) else codec.to_dict()) for codec in codecs]
