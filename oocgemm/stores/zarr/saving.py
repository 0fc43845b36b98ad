"""Save arrays in memory to a new zarr group."""

import os
import shutil
from collections.abc import Mapping

from oocgemm.errors import InputError
from oocgemm.stores.base import Array

# Target size of the chunks, in bytes.
CHUNK_BYTES = 8 << 20


def check_free(path: str) -> None:
    """Raise `InputError` if something exists at the path of a new group, or if it is a URL."""
    if "://" in path:
        raise InputError(f"{path} is a URL, but results of this kind are written to local paths only")
    if os.path.lexists(path):
        raise InputError(f"something exists at {path}: give another path, or remove it")


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
