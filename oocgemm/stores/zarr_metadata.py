"""Read and write the metadata of local zarr arrays without zarr, whose import takes half a second.

This module reads metadata only if it has exactly the form in which zarr writes it, and names only codecs that
`oocgemm.stores.codecs` supports. All other arrays are opened by zarr.

`check_keys` checks that chunks have the keys that the metadata states. A chunk that is not stored has the
fill value. So an array whose metadata states other keys than its chunks have, such as ``0.0`` for ``0/0``,
would read as fill values.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from math import prod
from operator import ge
from pathlib import Path
from typing import Any

import numpy as np

from oocgemm.errors import InputError
from oocgemm.planning.tiling import ceil_div
from oocgemm.planning.units import format_size
from oocgemm.stores.base import NewArray
from oocgemm.stores.codecs import Encoding, from_v2, from_v3, unavailable
from oocgemm.stores.declared import DIMENSIONS
from oocgemm.stores.files import chunk_fingerprints, open_regular, publish, read_regular
from oocgemm.stores.folding import Fold, rectangles
from oocgemm.stores.zarr_chunks import Shards
from oocgemm.values import dataclass

# Files of an array's metadata, in either format.
METADATA = V3, V2, V2_ATTRIBUTES = "zarr.json", ".zarray", ".zattrs"
# Files of a group of format 2. The second has the metadata of all its arrays.
V2_GROUP, CONSOLIDATED = ".zgroup", ".zmetadata"
# The maximum bytes of such files. The parsed files take several times as much memory, outside the budget.
MAX_METADATA, MAX_CONSOLIDATED = 1 << 20, 64 << 20
_LIMITS = dict.fromkeys((*METADATA, V2_GROUP), MAX_METADATA) | {CONSOLIDATED: MAX_CONSOLIDATED}
# The dtypes of arrays that are opened without zarr. bfloat16 needs the package ml_dtypes. Only the code that
# opens arrays by zarr reports that this package is missing.
_DTYPES = (
    *("float16", "float32", "float64", "complex64", "complex128"),
    *("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64"),
)
_NONFINITE = {"NaN": np.nan, "Infinity": np.inf, "-Infinity": -np.inf}
# For each supported codec of format 3, the settings that zarr writes, and the allowed values of each setting.
_SETTINGS: dict[str, dict[str, Container[Any]]] = {
    "bytes": {"endian": ("little", "big")},
    "transpose": {"order": ([0, 1], [1, 0])},
    "zstd": {"level": range(-7, 23), "checksum": (False, True)},
    "gzip": {"level": range(10)},
    "blosc": {
        "typesize": range(1, 256),
        "cname": ("blosclz", "lz4", "lz4hc", "snappy", "zlib", "zstd"),
        "clevel": range(10),
        "shuffle": ("noshuffle", "shuffle", "bitshuffle"),
        "blocksize": range(1 << 31),
    },
    "crc32c": {},
}
# The settings of the compressors of new arrays.
_COMPRESSORS: dict[str, dict[str, Any]] = {
    "zstd": {"level": 1, "checksum": False},
    "gzip": {"level": 1},
    "blosc-lz4": {"cname": "lz4", "clevel": 3},
    "blosc-zstd": {"cname": "zstd", "clevel": 1},
}
# A function that returns the key of a chunk, given the row and the column of the chunk in the grid.
Key = Callable[[tuple[int, ...]], str]
# zarr's encodings of keys, as (name, separator). Arrays of format 2 have only the last two encodings.
_ENCODINGS = (("default", "/"), ("default", "."), ("v2", "/"), ("v2", "."))


@dataclass(frozen=True)
class Metadata:
    """The metadata of a zarr array, read by this module or by zarr.

    - `dtype`: the dtype that zarr states. The stored byte order is that of `encoding.dtype`.
    - `folder`: the folder of the array; None if the array is not local.
    - `key`: returns the name of a chunk's or shard's file, relative to `folder`.
    - `encoding`: how the elements of a chunk are stored; None for unknown codecs.
    - `stated`: the metadata as JSON, without the attributes.
    """

    zarr_format: int
    place: str
    folder: Path | None
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: tuple[int, ...]
    fill: Any
    key: Key
    codecs: tuple[str, ...]
    encoding: Encoding | None
    stated: Mapping[str, Any]
    attributes: Mapping[str, Any]
    shards: tuple[int, ...] | None = None
    shard_format: Shards | None = None

    def stored_chunks(self) -> dict[str, Any] | None:
        """Return the fields of `StoredChunks`; None if only zarr can read and write the chunks."""
        if 0 in self.shape or self.encoding is None:
            return None
        return {
            "key": self.key,
            "shape": (int(self.shape[0]), int(self.shape[1])),
            "chunk": (int(self.chunks[0]), int(self.chunks[1])),
            "encoding": self.encoding,
            "fill": self.fill,
            "shards": self.shard_format,
        }

    @property
    def names(self) -> list[str | None] | None:
        """The names of the axes; None if the metadata names none."""
        found = self.stated.get("dimension_names") or self.attributes.get(DIMENSIONS)
        return list(found) if isinstance(found, list | tuple) else None

    @property
    def grid(self) -> tuple[int, ...]:
        """How many chunk files or shards there are along each axis."""
        each = zip(self.shape, self.shards or self.chunks, strict=True)
        return tuple(ceil_div(int(extent), max(1, int(size))) for extent, size in each)

    def stored_as(self) -> str:
        """Return a digest of all metadata but the attributes."""
        stated = json.dumps(self.stated, sort_keys=True, default=str)
        return hashlib.sha256(stated.encode()).hexdigest()[:32]

    def changes(self) -> dict[str, str]:
        """Return values that change when chunk files of a local array change (`chunk_fingerprints`)."""
        assert self.folder is not None
        grid = self.grid
        if len(grid) == 2:
            return chunk_fingerprints(self.folder, self.key, (grid[0], grid[1]))
        strides, across = [prod(grid[at + 1 :]) for at in range(len(grid))], prod(grid[1:])

        def key(place: tuple[int, ...]) -> str:
            number = place[0] * across + place[1]
            return self.key(tuple(number // s % n for s, n in zip(strides, grid, strict=True)))

        return chunk_fingerprints(self.folder, key, (grid[0] if grid else 1, across))

    def fingerprint(self) -> dict[str, object]:
        """Return the fingerprint (`Matrix.fingerprint`) of the array."""
        place = self.place if self.folder is None else os.path.realpath(self.folder)
        found = {"content": "", "changes": ""} if self.folder is None else self.changes()
        return {"path": place, "metadata": self.stored_as(), **found}

    def folded(self, fold: Fold) -> "Metadata | None":
        """Return the metadata of the matrix that is folded from the array; None if chunks are no rectangles.

        Chunks of a sharded array must be rectangles, and shards too.
        """
        encoding, chunks = self.encoding, self.chunks
        found = None if encoding is None else rectangles(fold, chunks, encoding.order)
        if found is None or encoding is None:
            return None
        files, shards = found, self.shard_format
        if shards is not None:
            assert self.shards is not None
            whole = rectangles(fold, self.shards, encoding.order)
            if whole is None or found.order == "F" or whole.order == "F" or encoding.order == "F":
                return None
            files = whole
            inside = whole.chunk[0] // found.chunk[0], whole.chunk[1] // found.chunk[1]
            shards = replace(shards, chunks=inside)
        return replace(
            self,
            shape=fold.shape,
            chunks=found.chunk,
            shards=None if shards is None else files.chunk,
            shard_format=shards,
            key=files.key(self.key),
            encoding=replace(encoding, order=found.order),
            stated={**self.stated, "folded": fold.stated},
        )

    def with_attribute(self, name: str, value: object) -> "Metadata":
        """Set an attribute of a local array, or delete it (None). Return new metadata. Raises `OSError`."""
        assert self.folder is not None
        path = self.folder / (V3 if self.zarr_format == 3 else V2_ATTRIBUTES)
        document: dict[str, Any] = json.loads(read_regular(path)) if path.exists() else {}
        attributes = document.setdefault("attributes", {}) if self.zarr_format == 3 else document
        attributes.pop(name, None)
        if value is not None:
            attributes[name] = value
        _write(path, document)
        return replace(self, attributes=attributes)


def check_sizes(
    place: str, size_of: Callable[[str], int | None], names: Iterable[str] = tuple(_LIMITS)
) -> set[str]:
    """Return the names of existing metadata files. Raises `InputError` if one is too large to be read."""
    present = set()
    for name in names:
        size, limit = size_of(name), _LIMITS[name]
        if size is None:
            continue
        if size > limit:
            raise InputError(
                f"{place}: its metadata {name} has {format_size(size)}, and at most {format_size(limit)} are "
                "read: move large attributes elsewhere, or give an array in it if it is a group"
            )
        present.add(name)
    return present


def local_size(folder: str, name: str) -> int | None:
    """Return the size of a file; None if it is missing. Raises `PermissionError` for a refused file."""
    path = os.path.join(folder, name)
    try:
        os.lstat(path)  # fails faster than `open_regular`, since most of these files are missing
        with open(path, "rb", opener=open_regular) as file:
            return os.fstat(file.fileno()).st_size
    except PermissionError:
        raise
    except (OSError, ValueError):
        return None  # the caller then opens the array by zarr, whose error says what is wrong


def node_kind(folder: Path) -> str:
    """Return whether a local folder is an "array" or a "group" of zarr; "" if it is neither."""
    with suppress(OSError, ValueError, RecursionError):
        if (folder / V2).is_file():
            return "array"
        if (folder / V2_GROUP).is_file():
            return "group"
        found = _document_at(folder / V3)
        kind = found.get("node_type") if isinstance(found, dict) else ""
        return kind if kind in ("array", "group") else ""
    return ""


def read_metadata(path: str) -> Metadata | None:
    """Return the metadata of the local array at a path; None if zarr must open the array."""
    folder = Path(path)
    try:
        present = {name for name in METADATA if os.path.exists(os.path.join(path, name))}
        if present == {V3}:
            return _read_v3(path, folder, _document_at(folder / V3))
        if V2 in present and V3 not in present:
            attributes = _document_at(folder / V2_ATTRIBUTES) if len(present) == 2 else {}
            return _read_v2(path, folder, _document_at(folder / V2), attributes)
    except (OSError, ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
        pass  # the caller then opens the array by zarr, whose error says what is wrong
    return None


def read_group(path: str, members: Iterable[str]) -> tuple[Any, dict[str, Metadata]] | None:
    """Return the attributes of a local group, and the metadata of arrays in it; None if zarr must open it."""
    folder = Path(path)
    try:
        if (folder / V3).exists():
            stated = _document_at(folder / V3)
            if stated["node_type"] != "group" or stated["zarr_format"] != 3:
                return None
            attributes = stated["attributes"]
        elif (folder / V2_GROUP).exists() and _document_at(folder / V2_GROUP) == {"zarr_format": 2}:
            attributes = _document_at(folder / V2_ATTRIBUTES)
        else:
            return None
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return None
    found = {member: read_metadata(os.path.join(path, member)) for member in members}
    arrays = {member: metadata for member, metadata in found.items() if metadata is not None}
    return (attributes, arrays) if isinstance(attributes, dict) and len(arrays) == len(found) else None


def _document_at(path: Path) -> Any:
    """Return the content of a metadata file. Raises `OSError`, and `ValueError` if it is too large."""
    with open(path, "rb", opener=open_regular) as file:
        content = file.read(MAX_METADATA + 1)
    if len(content) > MAX_METADATA:
        raise ValueError(f"{path} has more than {MAX_METADATA} bytes")
    return json.loads(content)


def create(new: NewArray, attributes: Mapping[str, Any]) -> Metadata | None:
    """Create a local array of format 3, filled with zeros, like `zarr.create_array`. Return its metadata.

    Returns None, and creates nothing, if the caller must create the array by zarr. Raises `OSError`.
    """
    folder, dtype = Path(new.path), new.dtype
    if dtype.name not in _DTYPES or 0 in new.shape:
        return None
    if any((folder / name).exists() for name in (*METADATA, V2_GROUP)):
        return None
    compressor = compressor_codec(new)
    codecs = [_bytes_codec(dtype), *([compressor] if compressor else [])]
    zero = 0 if dtype.kind == "i" else 0.0
    fill = [zero, zero] if dtype.kind == "c" else zero
    document = _document(new.shape, dtype, new.chunks, ("default", "/"), fill, codecs)
    document["attributes"] = dict(attributes)
    # write the keys in the order in which zarr writes them
    tail = {name: document.pop(name) for name in ("zarr_format", "node_type", "storage_transformers")}
    _write(folder / V3, document | tail)
    return read_metadata(new.path)


def compressor_codec(new: NewArray) -> dict[str, Any] | None:
    """Return the codec of format 3 that compresses the chunks of a new array, as JSON."""
    if new.compressor in (None, "none"):
        return None
    name, settings = str(new.compressor).partition("-")[0], _COMPRESSORS[str(new.compressor)]
    if name == "blosc":
        settings = {"typesize": new.dtype.itemsize, **settings, "shuffle": "shuffle", "blocksize": 0}
    return {"name": name, "configuration": settings}


def _read_v3(path: str, folder: Path, stated: dict[str, Any]) -> Metadata | None:
    attributes = stated.pop("attributes")
    shape, chunks = _extents(stated["shape"]), _extents(stated["chunk_grid"]["configuration"]["chunk_shape"])
    if stated["data_type"] not in _DTYPES:
        return None
    dtype = np.dtype(stated["data_type"])
    encoded = stated["chunk_key_encoding"]
    kind, separator = encoded["name"], encoded["configuration"]["separator"]
    codecs = stated["codecs"]
    names = stated.get("dimension_names", [""] * len(shape))
    encoding = from_v3(codecs, dtype)
    expected = _document(shape, dtype, chunks, (kind, separator), stated["fill_value"], codecs)
    if "dimension_names" in stated:
        expected["dimension_names"] = names
    if (
        stated != expected
        or encoding is None
        or not all(_known(codec, dtype) for codec in codecs)
        or not isinstance(attributes, dict)
        or (kind, separator) not in _ENCODINGS
        or len(names) != len(shape)
        or len(chunks) != len(shape)
        or not all(isinstance(name, str | None) for name in names)
    ):
        return None
    return Metadata(
        zarr_format=3,
        place=f"file://{folder.as_posix()}",
        folder=folder,
        shape=shape,
        dtype=dtype,
        chunks=chunks,
        fill=_fill(stated["fill_value"], dtype),
        key=key_of(kind, separator, len(shape)),
        codecs=tuple(f"{codec['name'].capitalize()}Codec" for codec in codecs),
        encoding=encoding,
        stated=stated,
        attributes=attributes,
    )


def _read_v2(path: str, folder: Path, stated: dict[str, Any], attributes: object) -> Metadata | None:
    shape, chunks = _extents(stated["shape"]), _extents(stated["chunks"])
    separator = stated["dimension_separator"]
    dtype = np.dtype(stated["dtype"])
    encoding = from_v2(stated, dtype)
    if (
        dtype.name not in _DTYPES
        or encoding is None
        or len(chunks) != len(shape)
        or not isinstance(attributes, dict)
        or separator not in ("/", ".")
        or stated
        != {
            "shape": list(shape),
            "chunks": list(chunks),
            "dtype": dtype.str,
            "fill_value": stated["fill_value"],
            "order": stated["order"],
            "filters": None,
            "dimension_separator": separator,
            "compressor": _v2_compressor(encoding),
            "zarr_format": 2,
        }
    ):
        return None
    fill = stated["fill_value"]
    return Metadata(
        zarr_format=2,
        place=f"file://{folder.as_posix()}",
        folder=folder,
        shape=shape,
        dtype=dtype,
        chunks=chunks,
        fill=0 if fill is None else _fill(fill, dtype),
        key=key_of("v2", separator, len(shape)),
        codecs=() if encoding.compressor is None else (type(encoding.compressor).__name__,),
        encoding=encoding,
        stated=stated,
        attributes=attributes,
    )


def _document(
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    chunks: tuple[int, ...],
    keys: tuple[str, str],
    fill: Any,
    codecs: list[dict[str, Any]],
) -> dict[str, Any]:
    return {
        "shape": list(shape),
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunks)}},
        "chunk_key_encoding": {"name": keys[0], "configuration": {"separator": keys[1]}},
        "fill_value": fill,
        "codecs": codecs,
        "zarr_format": 3,
        "node_type": "array",
        "storage_transformers": [],
    }


def _bytes_codec(dtype: np.dtype[Any]) -> dict[str, Any]:
    return (
        {"name": "bytes"} if dtype.itemsize == 1 else {"name": "bytes", "configuration": {"endian": "little"}}
    )


def _known(codec: Mapping[str, Any], dtype: np.dtype[Any]) -> bool:
    """Return whether a codec of format 3 has exactly the settings that zarr writes, with allowed values."""
    if codec["name"] == "bytes" and dtype.itemsize == 1:
        return codec == _bytes_codec(dtype)
    allowed, settings = _SETTINGS[codec["name"]], codec.get("configuration", {})
    form = {"name", "configuration"} if allowed else {"name"}
    return (
        set(codec) == form
        and set(settings) == set(allowed)
        and all(_allows(values, settings[name]) for name, values in allowed.items())
    )


def _allows(values: Container[Any], value: Any) -> bool:
    """Return whether `values` contains a value. To search a range for a float could take minutes."""
    return (type(value) is int or not isinstance(values, range)) and value in values


def _extents(stated: Any) -> tuple[int, ...]:
    """Return extents as a tuple. Raises `ValueError` unless `stated` is a list of positive integers."""
    if not stated or not all(type(extent) is int and extent > 0 for extent in stated):
        raise ValueError(f"shapes and chunk shapes must be positive integers, not {stated}")
    return tuple(stated)


def _fill(stated: Any, dtype: np.dtype[Any]) -> Any:
    """Convert a fill value from JSON to an element. Raises `ValueError` if zarr does not write this form."""
    if dtype.kind == "c":
        real, imaginary = (_fill(part, np.dtype(f"f{dtype.itemsize // 2}")) for part in stated)
        return dtype.type(complex(real, imaginary))
    if dtype.kind == "f" and isinstance(stated, str):
        return dtype.type(_NONFINITE[stated])
    fill = dtype.type(stated)
    if type(stated) is not (float if dtype.kind == "f" else int) or fill.item() != stated:
        raise ValueError(f"the fill value {stated!r} is not a value of dtype {dtype}")
    return fill


def _v2_compressor(encoding: Encoding) -> dict[str, Any] | None:
    if encoding.compressor is None:
        return None
    settings: dict[str, Any] = encoding.compressor.get_config()
    if settings["id"] == "zstd" and not settings.get("checksum"):
        settings.pop("checksum", None)
    return settings


def _write(path: Path, document: Mapping[str, Any]) -> None:
    data = np.frombuffer(json.dumps(document, indent=2).encode(), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    publish(path, data, data.nbytes, path.parent)


# The key of a chunk in any encoding of keys, also of arrays with other numbers of dimensions.
_CHUNK = re.compile(r"(c[./])?\d+([./]\d+)*", re.ASCII)
# The names of folders of chunks.
_FOLDER = re.compile(r"c|\d+", re.ASCII)


def key_of(kind: str, separator: str, axes: int = 2) -> Key:
    """Return the function that returns keys in an encoding, given its name and separator.

    >>> key_of("default", "/")((3, 4)), key_of("v2", ".", 3)((3, 4, 5))
    ('c/3/4', '3.4.5')
    """
    prefix = f"c{separator}" if kind == "default" else ""
    return f"{prefix}{separator.join(['%d'] * axes)}".__mod__


def check_chunks(place: str, found: Metadata, keys: Iterable[str]) -> None:
    """Raise `InputError` unless chunks can be decoded, and have the keys that the metadata states.

    `keys` are those of the stored objects of the array.
    """
    coding = [found.stated.get(name) for name in ("codecs", "compressor", "filters")]
    if compressor := unavailable(coding):
        raise InputError(
            f"{place} is compressed by blosc with {compressor}, which the installed numcodecs lacks: pass it "
            "opened by tensorstore, or copy it with tensorstore to another compressor, such as zstd"
        )
    check_keys(place, found.zarr_format, found.key, found.grid, keys)


def check_keys(place: str, zarr_format: int, key: Key, grid: tuple[int, ...], found: Iterable[str]) -> None:
    """Raise `InputError` if chunks are found, but none of them under a key that the metadata states."""
    other = ""
    for name in found:
        if _is_key(name, key, grid):
            return
        if not other and _CHUNK.fullmatch(name):
            other = name
    if not other:
        return
    remedy = "correct the metadata, or copy the array again"
    for encoding in _ENCODINGS[2 * (zarr_format == 2) :]:
        if _is_key(other, key_of(*encoding, len(grid)), grid):
            remedy = f"if the chunks are right, set {_stated(encoding, zarr_format)}"
            break
    raise InputError(
        f"{place} has no chunk whose key matches its metadata, as {key((0,) * len(grid))} does, but it has "
        f"the chunk {other}: {remedy}"
    )


def _stated(encoding: tuple[str, str], zarr_format: int) -> str:
    """Return how the metadata states an encoding of keys, and where."""
    kind, separator = encoding
    if zarr_format == 2:
        return f'"dimension_separator": "{separator}" in .zarray'
    stated = json.dumps({"name": kind, "configuration": {"separator": separator}})
    return f'"chunk_key_encoding": {stated} in zarr.json'


def files_in(folder: str | Path, prefix: str = "", axes: int = 2) -> Iterator[str]:
    """Yield the names of the files of an array, relative to its folder, in any encoding of keys."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if prefix.count("/") < axes and _FOLDER.fullmatch(entry.name) and entry.is_dir():
                yield from files_in(entry.path, f"{prefix}{entry.name}/", axes)
            else:
                yield prefix + entry.name


def keys_of_first(key: Key, exists: Callable[[str], bool], axes: int = 2) -> Iterator[str]:
    """Yield the keys under which the first chunk exists, for a store that cannot list its objects."""
    first = (0,) * axes
    for name in (key(first), *(key_of(*each, axes)(first) for each in _ENCODINGS)):
        if exists(name):
            yield name


def _is_key(name: str, key: Key, grid: tuple[int, ...]) -> bool:
    numbers = [int(digits) for digits in re.findall(r"\d+", name, re.ASCII)] if len(name) < 100 else []
    if len(numbers) != len(grid) or any(map(ge, numbers, grid)):
        return False
    return key(tuple(numbers)) == name
