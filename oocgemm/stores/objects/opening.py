"""Open and create zarr arrays in object stores, by zarr."""

from typing import Any, Literal

import numpy as np
import zarr
from zarr.storage import ObjectStore

from oocgemm.errors import InputError, NotFoundError
from oocgemm.stores.formats import check_url_format
from oocgemm.stores.objects.address import scrubbed
from oocgemm.stores.objects.bucket import Bucket, StoreError
from oocgemm.stores.objects.matrix import ObjectMatrix
from oocgemm.stores.zarr_matrix import reason
from oocgemm.stores.zarr_metadata import V2, V2_ATTRIBUTES, V2_GROUP, V3, check_sizes
from oocgemm.stores.zarr_through import check_array, new_array


def open_array(name: str, bucket: Bucket, *, writable: bool = False) -> ObjectMatrix:
    """Open the zarr array in a bucket. `name` is its name in messages.

    Raises `InputError` if there is none, or if the store refuses access or does not answer.
    """
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
        found = zarr.open(store, mode="r+" if writable else "r", zarr_format=zarr_format)
    except MemoryError:
        raise
    except Exception as error:  # zarr raises exceptions of many types
        raise InputError(f"{name}: no zarr array at {bucket.url}: {scrubbed(reason(error))}") from None
    matrix = _matrix(name, bucket, found, writable=writable)
    try:
        matrix.check_chunks()
    except StoreError as error:
        raise InputError(f"{name}: {error}") from None
    return matrix


def _format(place: str, bucket: Bucket) -> Literal[2, 3] | None:
    """Return the format of the array in a bucket; None if there is none.

    Raises `InputError` for a group of format 2, and for metadata that is too large. zarr reads only the
    metadata of the returned format.
    """
    if check_sizes(place, bucket.size, [V3]):
        return 3
    if V2 in check_sizes(place, bucket.size, [V2, V2_ATTRIBUTES]):
        return 2
    if bucket.size(V2_GROUP) is not None:
        raise InputError(f"{place} is a zarr group, not an array")
    return None


def create_array(
    name: str,
    bucket: Bucket,
    shape: tuple[int, int],
    dtype: np.dtype[Any],
    chunks: tuple[int, int],
    compressor: str | None,
) -> ObjectMatrix:
    """Create a zarr array in a bucket. `name` is its name in messages. Raises `InputError` if that fails."""
    try:
        array = new_array(ObjectStore(bucket.store), shape, dtype, chunks, compressor)
    except Exception as error:  # zarr and obstore raise exceptions of many types
        text = scrubbed(reason(error))
        raise InputError(f"{name}: cannot create a zarr array at {bucket.url}: {text}") from None
    return _matrix(name, bucket, array, writable=True)


def _matrix(name: str, bucket: Bucket, found: Any, *, writable: bool) -> ObjectMatrix:
    check_array(name, found, bucket.url, writable=writable)
    return ObjectMatrix(name, bucket, found, unchanging=not writable)
