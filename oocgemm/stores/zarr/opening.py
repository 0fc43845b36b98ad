"""Open and create zarr arrays. If that fails, the error says what is at the path and what to do."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from oocgemm.errors import ExecutionError, InputError
from oocgemm.stores.formats import dense_conversion, is_sparse, missing_client, wrong_format
from oocgemm.stores.zarr import bfloat16
from oocgemm.stores.zarr.matrix import UNFINISHED, ZarrMatrix, reason
from oocgemm.stores.zarr.metadata import node_kind
from oocgemm.stores.zarr.through import local_folder
from oocgemm.system.threads import refusal

# A message names at most this many arrays of a group, in at most so many groups within each other.
MAX_LISTED, _MAX_DEPTH = 8, 8


def open_zarr(name: str, path: str, *, writable: bool = False) -> ZarrMatrix:
    """Open the zarr array at a path or URL. `name` is its name in messages.

    Raises `InputError` if there is none, and `ExecutionError` if the system cannot start a thread for zarr.
    """
    try:
        found = zarr.open(path, mode="r+" if writable else "r")
    except MemoryError:
        raise
    except Exception as error:  # zarr and its stores raise exceptions of many types
        if refused := _refused(error):
            raise InputError(f"{name} at {path}: {refused}") from error
        _check_thread(name, path, error)
        raise _no_array(name, path, error, writable) from error
    return wrap_zarr(name, found, path, writable=writable)


def _refused(error: BaseException | None) -> InputError | None:
    """Return the `InputError` that caused an exception of zarr, if any.

    While zarr opens an array, `BFloat16` may raise an `InputError`. zarr catches every ValueError, of which
    `InputError` is a subclass, and raises another exception.
    """
    while error is not None and not isinstance(error, InputError):
        error = error.__cause__ or error.__context__
    return error


def _no_array(name: str, path: str, error: Exception, writable: bool) -> InputError:
    """Return the error for a path or URL at which zarr found no array. `error` is zarr's exception."""
    if isinstance(error, ImportError) and "://" in path:
        return missing_client(name, path, error)
    if found := wrong_format(name, path, writable=writable):
        return found
    why = "it contains no zarr metadata" if isinstance(error, FileNotFoundError) else reason(error)
    return InputError(f"{name}: no zarr array at {path}: {why}")


def _check_thread(name: str, path: str, error: Exception) -> None:
    """Raise `ExecutionError` if `error` means that zarr could not start a thread.

    The array may be valid then, so an `InputError` would blame the wrong object.
    """
    if isinstance(error, RuntimeError) and "new thread" in str(error):
        raise ExecutionError(
            f"{name} at {path}: the system cannot start a thread for zarr: {refusal(error)}"
        ) from error


def wrap_zarr(name: str, found: Any, path: str = "", *, writable: bool = False) -> ZarrMatrix:
    """Make a matrix of an open zarr array. `name` is its name in messages.

    Raises `InputError` for a group, for invalid metadata, for chunks whose keys do not match it, and with
    `writable` for a read-only array.
    """
    check_array(name, found, path, writable=writable)
    matrix = ZarrMatrix(name, found, unchanging=not writable)
    matrix.check_chunks()
    return matrix


def check_array(name: str, found: Any, path: str = "", *, writable: bool = False) -> None:
    """Raise the errors of `wrap_zarr`, except those for chunks."""
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
    """Raise `InputError` for big-endian bfloat16, since NumPy cannot swap the bytes of bfloat16."""
    codecs = list(getattr(array.metadata, "codecs", ()))
    for codec in codecs:
        codecs += getattr(codec, "codecs", ())  # the sharding codec contains the codecs of the chunks
        endian = getattr(codec, "endian", None)
        if array.dtype.kind == "V" and getattr(endian, "value", endian) == "big":
            raise InputError(f"{name}: {bfloat16.BIG_ENDIAN}")


def create_zarr(
    name: str,
    path: str,
    shape: tuple[int, int],
    dtype: np.dtype[Any],
    chunks: tuple[int, int],
    compressor: str | None,
) -> ZarrMatrix:
    """Create a zarr array, which is not compressed if `compressor` is None. `name` is its name in messages.

    Raises `InputError` if that fails.
    """
    try:
        array = new_array(path, shape, dtype, chunks, compressor)
    except Exception as error:
        _check_thread(name, path, error)
        raise InputError(f"{name}: cannot create a zarr array at {path}: {reason(error)}") from error
    return ZarrMatrix(name, array)


def new_array(
    store: Any, shape: tuple[int, int], dtype: np.dtype[Any], chunks: tuple[int, int], compressor: str | None
) -> "zarr.Array[Any]":
    """Create a zarr array that is marked as unfinished, in a store of zarr or at a path."""
    return zarr.create_array(
        store,
        shape=shape,
        dtype=dtype,
        chunks=chunks,
        compressors=_compressor(compressor),
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


def _compressor(name: str | None) -> Any:
    """Return the zarr codec for a name in `COMPRESSORS`; None for no compression."""
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


def _is_group(name: str, group: "zarr.Group", path: str) -> InputError:
    """Return the error for a group: how to convert a sparse matrix, or which arrays the group has."""
    place, folder = path or str(group.store_path), local_folder(group)
    if is_sparse(group):
        problem = f"{name}: {place} is a sparse matrix, and a product needs a dense one"
        if folder is None:
            return InputError(f"{problem}: make it dense, with scipy.sparse")
        where = os.fspath(folder) if not path else path.rstrip("/")
        above, inside, below = where.rpartition(".zarr/")
        stem = f"{above}-{below.replace('/', '-')}" if inside else where
        opened = f"zarr.open_group({json.dumps(where)}, mode='r')"
        return InputError(f"{problem}: {dense_conversion(name, group, opened, stem)}")
    return InputError(f"{name}: {place} is a zarr group, not an array{_members(folder)}")


def _members(folder: Path | None) -> str:
    """Return the last part of a message: the arrays in a local group and in its groups; "" if there are none.

    The arrays are found by their metadata files, without opening them.
    """
    names = [] if folder is None else list(islice(_arrays(folder, ""), MAX_LISTED + 1))
    more = ", and more" if len(names) > MAX_LISTED else ""
    return f"; give an array in it: {', '.join(names[:MAX_LISTED])}{more}" if names else ""


def _arrays(folder: Path, prefix: str) -> Iterator[str]:
    """Yield the names of the arrays in a local group, in the order of their names."""
    with suppress(OSError):
        for place in sorted(folder.iterdir()):
            kind = node_kind(place)
            if kind == "array":
                yield prefix + place.name
            elif kind == "group" and is_sparse({part.name for part in place.iterdir()}):
                yield f"{prefix}{place.name} (a sparse matrix)"
            elif kind == "group" and prefix.count("/") < _MAX_DEPTH:
                yield from _arrays(place, f"{prefix}{place.name}/")
