"""Return the metadata of arrays that zarr opened, and make zarr use its own codec pipeline for them."""

from collections.abc import AsyncIterator, Iterator, Mapping
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.abc.store import Store
from zarr.codecs._v2 import V2Codec
from zarr.core.codec_pipeline import BatchedCodecPipeline
from zarr.core.sync import sync
from zarr.storage import LocalStore

from oocgemm.stores.zarr import bfloat16
from oocgemm.stores.zarr.chunks import Shards
from oocgemm.stores.zarr.codecs import Encoding, from_v2, from_v3
from oocgemm.stores.zarr.metadata import Metadata

bfloat16.register()


def local_folder(array: "zarr.Array[Any] | zarr.Group") -> Path | None:
    store: Store = array.store
    return Path(store.root) / array.path if isinstance(store, LocalStore) else None


def keys_in(array: "zarr.Array[Any]") -> Iterator[str]:
    """Yield the keys of what a store of zarr has of an array, relative to it; nothing if it cannot list."""
    store: Store = array.store
    if not store.supports_listing:
        return
    prefix, listed = f"{array.path}/" if array.path else "", store.list_prefix(array.path)
    while (key := sync(_next(listed))) is not None:
        yield key.removeprefix(prefix)


async def _next(listed: AsyncIterator[str]) -> str | None:
    return await anext(listed, None)


def metadata_of(array: "zarr.Array[Any]") -> Metadata:
    """Return the metadata of an array that zarr opened."""
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
    """Return the encoding of the chunks, or None if unknown, and the shard format, or None if unsharded."""
    dtype = np.dtype(array.dtype)
    if len(array.shape) != 2:
        return None, None
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
    shards = Shards(
        chunks=(shard[0] // array.chunks[0], shard[1] // array.chunks[1]),
        at_end=settings["index_location"] == "end",
        dtype=index.dtype,
        checksum=index.checksum,
    )
    return from_v3(_configurations(settings["codecs"]), dtype), shards


def with_own_pipeline(array: "zarr.Array[Any]") -> "zarr.Array[Any]":
    """Return the array with zarr's own codec pipeline, whichever one the user has configured.

    Other pipelines decode some chains of codecs to other elements. zarrs 0.2 does so for several filters and
    for big-endian elements, without an error.
    """
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
    """Return codecs as dicts, in the JSON form that the specification of zarr format 3 defines."""
    return [dict(codec if isinstance(codec, Mapping) else codec.to_dict()) for codec in codecs]
