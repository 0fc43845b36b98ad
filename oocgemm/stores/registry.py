"""Find the store (the class that opens one format) of an operand: the first in a list that matches it.

The stores for .npy files, files of genetics, HDF5 datasets, open zarr arrays and NumPy arrays come first,
so no other package can replace them. Then come the stores of other packages. The stores for zarr paths,
lazy arrays and array-likes come last: they match everything else. The store for URLs of object stores is the
first of these, so another package can replace it.

A package adds a store by an entry point in its pyproject.toml, which names a subclass of
`oocgemm.stores.Store` whose constructor takes no arguments::

    [project.entry-points."oocgemm.stores"]
    parquet = "my_package.stores:ParquetStore"
"""

import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

from oocgemm.stores.arrays import ArrayLikes, Arrays
from oocgemm.stores.base import Store
from oocgemm.stores.genetics.bed import BedFiles
from oocgemm.stores.genetics.grm import GrmFiles
from oocgemm.stores.hdf5.store import HDF5Files
from oocgemm.stores.lazy import LazyArrays
from oocgemm.stores.npy import NpyFiles
from oocgemm.stores.objects.store import ObjectStores
from oocgemm.stores.zarr_matrix import ZarrArrays, ZarrPaths
from oocgemm.system.version import any_entry_point

GROUP = "oocgemm.stores"  # the group of the entry points by which other packages add stores
ARRAYS = Arrays()
# These stores are tried before those of other packages.
SPECIFIC: tuple[Store, ...] = (NpyFiles(), BedFiles(), GrmFiles(), HDF5Files(), ZarrArrays(), ARRAYS)
# These stores are tried last. Together they match any path and any object.
GENERAL: tuple[Store, ...] = (ObjectStores(), ZarrPaths(), LazyArrays(), ArrayLikes())


def stores() -> Iterator[Store]:
    """Yield all stores in the order in which they are tried."""
    yield from SPECIFIC
    yield from installed()
    yield from GENERAL


def store_of(operand: Any) -> Store:
    """Return the store that opens an operand, or creates a result at a path. Every operand has one."""
    if ARRAYS.matches(operand):  # the other specific stores match no ndarray
        return ARRAYS
    return next(store for store in stores() if store.matches(operand))


@cache
def installed() -> tuple[Store, ...]:
    """Load the stores of other packages, in the alphabetical order of their entry points.

    The result is cached, because a search of all installed packages can take a tenth of a second. A store
    that cannot be loaded is ignored with a warning.
    """
    if not any_entry_point(GROUP):
        return ()
    from importlib.metadata import entry_points

    found: list[Store] = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            store = entry.load()()
            if not isinstance(store, Store):
                raise TypeError(f"{type(store).__name__} is not a subclass of oocgemm.stores.Store")
        except Exception as error:  # another package's code may raise any exception
            warnings.warn(
                f"the store {entry.name} ({entry.value}) cannot be loaded and is ignored: {error}",
                stacklevel=2,
            )
        else:
            found.append(store)
    return tuple(found)
