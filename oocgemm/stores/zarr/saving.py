"""Save arrays in memory to a new zarr group."""

import os
import shutil
from collections.abc import Mapping

from oocgemm.errors import InputError
from oocgemm.stores.base import Array
from oocgemm.stores.formats import format_of
from oocgemm.stores.space import check_new

# Target size of the chunks, in bytes.
CHUNK_BYTES = 8 << 20


def check_free(path: str, wanted: int = 0) -> None:
    """Raise `InputError` if no new group can be at a path, or if its disk has not `wanted` free bytes.

    No group can be at a path that exists, is a URL, has a file's suffix, or where nothing can be created.
    """
    if "://" in path:
        raise InputError(f"{path} is a URL, but results of this kind are written to local paths only")
    if kind := "a .npy file" if path.endswith(".npy") else format_of(path):
        raise InputError(
            f"{path} would be {kind}, but results of this kind are several arrays in a zarr group: give "
            f"{os.path.splitext(path)[0]}.zarr"
        )
    if os.path.lexists(path):
        raise InputError(f"something exists at {path}: give another path, or remove it")
    check_new("the result", path, wanted)


def save_arrays(path: str, arrays: Mapping[str, Array]) -> None:
    """Write arrays to a new zarr group, by their names. The group appears at the path when it is complete.

    Raises:
        InputError: something exists at the path, or nothing can be written there.
    """
    import zarr

    check_free(path)
    unfinished = f"{path.rstrip('/')}.unfinished"
    try:
        group = zarr.create_group(unfinished, overwrite=True)  # a killed run may have left one
        for name, array in arrays.items():
            rows = max(1, CHUNK_BYTES * max(1, len(array)) // max(1, array.nbytes))
            chunks = (min(rows, max(1, len(array))), *(max(1, extent) for extent in array.shape[1:]))
            group.create_array(name, data=array, chunks=chunks, compressors=None)
        os.rename(unfinished, path)
    except OSError as error:
        raise InputError(f"a zarr group cannot be written to {path}: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
