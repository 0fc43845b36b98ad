"""Return the metadata of arrays that zarr opened, and choose the codec pipeline with which zarr reads."""

import importlib.util
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import zarr
from zarr.abc.store import Store
from zarr.storage import LocalStore, ObjectStore

from oocgemm.stores.zarr import bfloat16
from oocgemm.stores.zarr.chunks import Shards
from oocgemm.stores.zarr.codecs import Encoding, from_v2, from_v3
from oocgemm.stores.zarr.metadata import Metadata

bfloat16.register()
# The package whose codec pipeline decodes the arrays that zarr reads, if it is installed. zarr's own pipeline
# makes all copies in one thread.
FAST_PIPELINE = "zarrs"
# zarr's configuration is global: two runs that set and restore it concurrently could leave it changed.
_config_lock = Lock()


def local_folder(array: "zarr.Array[Any] | zarr.Group") -> Path | None:
    store: Store = array.store
    return Path(store.root) / array.path if isinstance(store, LocalStore) else None


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


def reader(array: "zarr.Array[Any]") -> tuple["zarr.Array[Any]", bool]:
    """Return the array object to read from, and whether the destination of a read must be contiguous.

    The array object determines the codec pipeline: the one that the user has configured, otherwise
    `FAST_PIPELINE` if it is installed and supports the array's codecs, otherwise zarr's own. zarr's own
    pipeline accepts any destination. All others are assumed to need a contiguous one.
    """
    with _config_lock:
        return _configured_reader(array)


def _configured_reader(array: "zarr.Array[Any]") -> tuple["zarr.Array[Any]", bool]:
    """Do the work of `reader`. The caller must hold `_config_lock`, since zarr's configuration is changed."""
    pipeline = "codec_pipeline.path"
    if zarr.config.get(pipeline) != zarr.config.defaults[0]["codec_pipeline"]["path"]:
        return array, True
    # zarrs would open an object store again by its own settings, without our credentials and retries.
    if isinstance(array.store, ObjectStore):
        return array, False
    if array.dtype.kind == "V" or importlib.util.find_spec(FAST_PIPELINE) is None:
        return array, False
    # Let each call decode one chunk at a time, because each reader thread has memory for only one.
    settings = {pipeline: f"{FAST_PIPELINE}.ZarrsCodecPipeline", "codec_pipeline.strict": True}
    settings |= {"codec_pipeline.chunk_concurrent_maximum": 1}
    with suppress(Exception), zarr.config.set(settings):
        return zarr.Array(zarr.AsyncArray(array.metadata, array.store_path)), True
    return array, False


def _configurations(codecs: Any) -> list[dict[str, Any]]:
    """Return codecs as dicts, in the JSON form that the specification of zarr format 3 defines."""
    return [dict(codec if isinstance(codec, Mapping) else codec.to_dict()) for codec in codecs]
