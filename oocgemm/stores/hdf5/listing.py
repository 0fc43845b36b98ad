"""List the datasets of an HDF5 file that can be operands, for messages."""

from contextlib import suppress
from typing import Any

import h5py

from oocgemm.stores.hdf5.address import MARK

# A message names at most this many datasets.
MAX_LISTED = 8


def hint(file: "h5py.File", path: str) -> str:
    """Return the last part of a message: which datasets of two dimensions and of numbers a file has."""
    found: list[str] = []

    def look(name: str, thing: Any) -> bool | None:
        with suppress(Exception):  # a damaged dataset is not listed
            if isinstance(thing, h5py.Dataset) and len(thing.shape or ()) == 2 and thing.dtype.kind in "fciu":
                found.append(f"{path}{MARK}/{name} ({thing.shape[0]} x {thing.shape[1]} {thing.dtype})")
        return True if len(found) > MAX_LISTED else None

    with suppress(Exception):  # h5py raises exceptions of many types for damaged metadata
        file.visititems(look)
    if not found:
        return "it has no dataset of two dimensions with numbers"
    more = ", and more" if len(found) > MAX_LISTED else ""
    return f"pass one of {', '.join(found[:MAX_LISTED])}{more}"
