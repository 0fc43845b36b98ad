"""Open and create zarr arrays through zarr, and add the data type bfloat16 to it.

If an array cannot be opened, the error says what is at the path and what to do.

zarr does not have bfloat16. ml_dtypes provides the dtype for NumPy. In format 3, the data type has the name
in the registry of zarr extensions. In format 2, it has the name that TensorStore writes.
"""

import importlib
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from copy import copy
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import zarr
import zarr.dtype
import zarr.errors
from zarr.abc.store import Store
from zarr.codecs._v2 import V2Codec
from zarr.core.codec_pipeline import BatchedCodecPipeline
from zarr.core.sync import sync
from zarr.dtype import Float16, data_type_registry
from zarr.storage import LocalStore

from oocgemm.errors import ExecutionError, InputError, missing_bfloat16
from oocgemm.stores.base import Matrix, NewArray, file_identities
from oocgemm.stores.boxes import BoxMatrix
from oocgemm.stores.codecs import Encoding, from_v2, from_v3
from oocgemm.stores.declared import of_zarr
from oocgemm.stores.folding import Fold, Folding
from oocgemm.stores.formats import is_sparse, missing_client, wrong_format
from oocgemm.stores.sparse import of_group
from oocgemm.stores.zarr_chunks import Shards
from oocgemm.stores.zarr_matrix import UNFINISHED, ZarrMatrix, reason
from oocgemm.stores.zarr_metadata import Metadata, check_chunks, compressor_codec, files_in, node_kind
from oocgemm.system.threads import refusal
from oocgemm.values import dataclass

NAME = "bfloat16"
BIG_ENDIAN = f"big-endian {NAME} is not supported: store it with endian = little"
# This exception class is in zarr.errors in newer versions of zarr, and in zarr.dtype in older ones.
DataTypeValidationError: type[ValueError] = (
    getattr(zarr.errors, "DataTypeValidationError", None) or zarr.dtype.DataTypeValidationError
)


@dataclass(frozen=True, kw_only=True)
class BFloat16(Float16):
    """The zarr data type for bfloat16. It behaves like zarr's float16, but its NumPy dtype is from ml_dtypes.

    Like float16, it has a byte order (`endianness`), by which zarr decides whether to swap bytes. Only
    little-endian elements are supported, because NumPy cannot swap the bytes of ml_dtypes elements.
    """

    _zarr_v3_name: ClassVar[Any] = NAME
    _zarr_v2_names: ClassVar[Any] = (NAME,)

    @classmethod
    def from_native_dtype(cls, dtype: np.dtype[Any]) -> Self:
        if dtype.name != NAME:
            raise DataTypeValidationError(f"{dtype} is not {NAME}")
        return cls()

    def to_native_dtype(self) -> Any:
        """Return the NumPy dtype. Raises `InputError` without ml_dtypes, and for big-endian elements."""
        if self.endianness != "little":
            raise InputError(BIG_ENDIAN)
        try:
            return np.dtype(importlib.import_module("ml_dtypes").bfloat16)
        except ImportError as error:
            raise missing_bfloat16() from error

    @classmethod
    def _from_json_v2(cls, data: Any) -> Self:
        if not cls._check_json_v2(data):
            raise DataTypeValidationError(f"{data!r} is not {NAME}")
        return cls()

    def to_json(self, zarr_format: Any) -> Any:
        return {"name": NAME, "object_codec_id": None} if zarr_format == 2 else NAME

    def cast_scalar(self, data: object) -> Any:
        return data if isinstance(data, self.to_native_dtype().type) else super().cast_scalar(data)

    def from_json_scalar(self, data: Any, *, zarr_format: Any) -> Any:
        if isinstance(data, str) and data.startswith("0x"):  # a fill value given as bits in hexadecimal
            return np.array(int(data, 16), np.uint16).view(self.to_native_dtype())[()]
        return super().from_json_scalar(data, zarr_format=zarr_format)


def register_bfloat16() -> None:
    """Register `BFloat16` with zarr, unless another package has registered a data type of this name."""
    try:
        data_type_registry.match_json(NAME, zarr_format=3)
    except ValueError:
        data_type_registry.register(NAME, BFloat16)


register_bfloat16()


def local_folder(array: "zarr.Array[Any] | zarr.Group") -> Path | None:
    store: Store = array.store
    return Path(store.root) / array.path if isinstance(store, LocalStore) else None


def keys_in(array: "zarr.Array[Any]") -> Iterator[str]:
    """Yield the stored keys of an array, relative to it; nothing if the zarr store cannot list keys."""
    store: Store = array.store
    if not store.supports_listing:
        return
    prefix, listed = f"{array.path}/" if array.path else "", store.list_prefix(array.path)
    while (key := sync(_next(listed))) is not None:
        yield key.removeprefix(prefix)


async def _next(listed: AsyncIterator[str]) -> str | None:
    return await anext(listed, None)


def metadata_of(array: "zarr.Array[Any]") -> Metadata:
    metadata = array.metadata
    stated = dict(metadata.to_dict())
    attributes: Any = stated.pop("attributes", {})
    codecs = getattr(metadata, "codecs", None)
    if codecs is None:
        compressor = getattr(metadata, "compressor", None)
        codecs = (compressor,) if compressor else ()
    encoding, shard_format = _encoding(array, stated)
    return Metadata(
        zarr_format=metadata.zarr_format,
        place=str(array.store_path),
        folder=local_folder(array),
        shape=array.shape,
        dtype=np.dtype(array.dtype),
        chunks=array.chunks,
        shards=array.shards,
        shard_format=shard_format,
        fill=array.fill_value if array.fill_value is not None else 0,
        key=metadata.encode_chunk_key,
        codecs=tuple(type(codec).__name__ for codec in codecs),
        encoding=encoding,
        stated=stated,
        attributes=attributes,
    )


def _encoding(array: "zarr.Array[Any]", stated: Mapping[str, Any]) -> tuple[Encoding | None, Shards | None]:
    dtype = np.dtype(array.dtype)
    if array.metadata.zarr_format == 2:
        return from_v2(stated, dtype), None
    codecs = _configurations(stated["codecs"])
    if [codec["name"] for codec in codecs] != ["sharding_indexed"]:
        return from_v3(codecs, dtype), None
    shard = array.shards or array.chunks
    settings = codecs[0]["configuration"]
    index = from_v3(_configurations(settings["index_codecs"]), np.dtype("u8"))
    if index is None or index.compressor is not None or index.order != "C":
        return None, None
    across = [whole // part for whole, part in zip(shard, array.chunks, strict=True)]
    shards = Shards(
        chunks=(across[0], prod(across[1:])),
        at_end=settings["index_location"] == "end",
        dtype=index.dtype,
        checksum=index.checksum,
    )
    return from_v3(_configurations(settings["codecs"]), dtype), shards


def with_own_pipeline(array: "zarr.Array[Any]") -> "zarr.Array[Any]":
    """Return the array with zarr's own codec pipeline, even if the user has configured another one."""
    # Other pipelines decode some chains of codecs to wrong elements. zarrs 0.2 does this, without an error,
    # for several filters and for big-endian elements.
    opened = array.async_array
    if isinstance(opened.codec_pipeline, BatchedCodecPipeline):
        return array
    metadata = opened.metadata
    codecs: Any = getattr(metadata, "codecs", None)
    if codecs is None:
        codecs = [V2Codec(filters=metadata.filters, compressor=metadata.compressor)]
    opened = copy(opened)  # a frozen dataclass
    object.__setattr__(opened, "codec_pipeline", BatchedCodecPipeline.from_codecs(codecs))
    return zarr.Array(opened)


def _configurations(codecs: Any) -> list[dict[str, Any]]:
    return [dict(codec if isinstance(codec, Mapping) else codec.to_dict()) for codec in codecs]


# Limits of a message about a group: the number of arrays that it names, and how deep groups are nested.
MAX_LISTED, _MAX_DEPTH = 8, 8


def open_zarr(name: str, path: str, *, writable: bool = False) -> Matrix:
    """Open an array, or a sparse matrix in a group, at a path or URL.

    Raises `InputError`; `ExecutionError` if zarr cannot start a thread.
    """
    return wrap_zarr(name, opened(name, path, writable=writable), path, writable=writable)


def opened(name: str, path: str, *, writable: bool = False) -> Any:
    """Return what zarr finds at a path or URL: an array or a group. Raises as `open_zarr`."""
    try:
        return zarr.open(path, mode="r+" if writable else "r")
    except MemoryError:
        raise
    except Exception as error:  # zarr and its stores raise exceptions of many types
        if refused := _refused(error):
            raise InputError(f"{name} at {path}: {refused}") from error
        _check_thread(name, path, error)
        raise _no_array(name, path, error, writable) from error


def _refused(error: BaseException | None) -> InputError | None:
    """Return the `InputError` that zarr caught and replaced by `error`; None if there is no such error."""
    while error is not None and not isinstance(error, InputError):
        error = error.__cause__ or error.__context__
    return error


def _no_array(name: str, path: str, error: Exception, writable: bool) -> InputError:
    if isinstance(error, ImportError) and "://" in path:
        return missing_client(name, path, error)
    if found := wrong_format(name, path, writable=writable):
        return found
    why = "it contains no zarr metadata" if isinstance(error, FileNotFoundError) else reason(error)
    return InputError(f"{name}: no zarr array at {path}: {why}")


def _check_thread(name: str, path: str, error: Exception) -> None:
    """Raise `ExecutionError` if zarr could not start a thread: the array may be valid then."""
    if isinstance(error, RuntimeError) and "new thread" in str(error):
        raise ExecutionError(
            f"{name} at {path}: the system cannot start a thread for zarr: {refusal(error)}"
        ) from error


def wrap_zarr(name: str, found: Any, path: str = "", *, writable: bool = False) -> Matrix:
    """Return the matrix of an open zarr array, or the sparse matrix in a group.

    Raises `InputError` for another group, and for an unusable array.
    """
    if isinstance(found, zarr.Group) and not writable and is_sparse(found):
        place = path or str(found.store_path).removeprefix("file://")
        return of_group(name, place, found, lambda member: _row(name, found[member]))
    check_array(name, found, path, writable=writable)
    matrix = ZarrMatrix(name, found, unchanging=not writable)
    matrix.check_chunks()
    return matrix


def _row(name: str, array: Any) -> Matrix:
    """Return an array of one dimension as a matrix of one row."""
    metadata = metadata_of(array)
    return _folded(name, Folding(rows=()).fold(name, metadata.shape), array, metadata)


def fold_zarr(name: str, found: Any, folding: Folding, path: str = "") -> Matrix:
    """Return the matrix that is folded from an open zarr array. Raises as `wrap_zarr`."""
    check_array(name, found, path)
    metadata = metadata_of(found)
    folder, place = metadata.folder, f"{name} at {path or metadata.place.removeprefix('file://')}"
    fold = folding.fold(place, metadata.shape, metadata.names)
    check_chunks(place, metadata, keys_in(found) if folder is None else files_in(folder, axes=len(fold.axes)))
    return _folded(name, fold, found, metadata)


def _folded(name: str, fold: Fold, array: "zarr.Array[Any]", metadata: Metadata) -> Matrix:
    folder = metadata.folder
    folded = None if folder is None else metadata.folded(fold)
    if folded is not None:
        return ZarrMatrix(name, folded, unchanging=True)
    ids = {("store", id(array.store), array.path), metadata.place} if folder is None else None
    return through_zarr(
        *(name, fold, array, metadata),
        fingerprint=metadata.fingerprint,
        identities=lambda: file_identities(str(folder)) if ids is None else ids,
    )


def through_zarr(
    name: str, fold: Fold, array: "zarr.Array[Any]", metadata: Metadata, **facts: Any
) -> BoxMatrix:
    """Return the matrix that is folded from an array whose boxes zarr reads. `facts` are for `BoxMatrix`."""
    fill = None if metadata.stated.get("fill_value") is None else metadata.fill
    return BoxMatrix(
        *(name, fold, with_own_pipeline(array)),
        chunk=metadata.chunks,
        declared=of_zarr(metadata.zarr_format, metadata.attributes, fill, metadata.dtype.newbyteorder("=")),
        store=f"zarr v{metadata.zarr_format}",
        path=metadata.place,
        **facts,
    )


def check_array(name: str, found: Any, path: str = "", *, writable: bool = False) -> None:
    """Raise an error for an array that cannot be used, like `wrap_zarr`, but do not check chunks."""
    if isinstance(found, zarr.Group):
        raise _is_group(name, found, path)
    if writable and found.read_only:
        raise InputError(f"{name} is read-only: open it with mode='r+'")
    if not isinstance(found.metadata.attributes, Mapping):
        raise InputError(
            f"{name}: no zarr array at {path}: its metadata cannot be read (attributes are not an object)"
        )
    for what, extents in (("chunks", found.chunks), ("shards", found.shards or ())):
        if 0 in extents and 0 not in found.shape:
            raise InputError(
                f"{name}: no zarr array at {path or found.store_path}: by its metadata, it has {what} of "
                f"{' x '.join(map(str, extents))} elements: repair the metadata, or copy the array again"
            )
    _check_endian(name, found)


def _check_endian(name: str, array: "zarr.Array[Any]") -> None:
    codecs = list(getattr(array.metadata, "codecs", ()))
    for codec in codecs:
        codecs += getattr(codec, "codecs", ())  # the sharding codec contains the codecs of the chunks
        endian = getattr(codec, "endian", None)
        if array.dtype.kind == "V" and getattr(endian, "value", endian) == "big":
            raise InputError(f"{name}: {BIG_ENDIAN}")


def create_zarr(new: NewArray) -> ZarrMatrix:
    try:
        array = new_array(new.path, new)
    except Exception as error:
        _check_thread(new.name, new.path, error)
        raise InputError(f"{new.name}: cannot create a zarr array at {new.path}: {reason(error)}") from error
    return ZarrMatrix(new.name, array)


def new_array(store: Any, new: NewArray) -> "zarr.Array[Any]":
    """Create a zarr array that is marked as unfinished, in a store of zarr or at a path."""
    return zarr.create_array(
        store,
        shape=new.shape,
        dtype=new.dtype,
        chunks=new.chunks,
        compressors=compressor_codec(new),
        filters=None,
        fill_value=0,
        attributes=dict(UNFINISHED),
    )


def remote_exists(url: str) -> bool:
    """Return whether there is a zarr array or group at a URL. Raises `InputError` if zarr cannot tell."""
    try:
        zarr.open(url, mode="r")
    except (FileNotFoundError, KeyError):
        return False
    except ImportError as error:
        raise missing_client("C", url, error) from error
    except Exception as error:
        raise InputError(f"cannot open {url}: {reason(error)}") from error
    return True


def _is_group(name: str, group: "zarr.Group", path: str) -> InputError:
    """Return the error for a group. It says which arrays the group has."""
    place, folder = path or str(group.store_path), local_folder(group)
    if is_sparse(group):
        return InputError(
            f"{name}: {place} is a sparse matrix, and these are read from local disks: copy it to one"
        )
    return InputError(f"{name}: {place} is a zarr group, not an array{_members(folder)}")


def _members(folder: Path | None) -> str:
    """Return the last part of a message, which names arrays in a local group, found by their metadata."""
    names = [] if folder is None else list(islice(_arrays(folder, ""), MAX_LISTED + 1))
    more = ", and more" if len(names) > MAX_LISTED else ""
    return f"; give an array in it: {', '.join(names[:MAX_LISTED])}{more}" if names else ""


def _arrays(folder: Path, prefix: str) -> Iterator[str]:
    with suppress(OSError):
        for place in sorted(folder.iterdir()):
            kind = node_kind(place)
            if kind == "array":
                yield prefix + place.name
            elif kind == "group" and is_sparse({part.name for part in place.iterdir()}):
                yield f"{prefix}{place.name} (a sparse matrix)"
            elif kind == "group" and prefix.count("/") < _MAX_DEPTH:
                yield from _arrays(place, f"{prefix}{place.name}/")
