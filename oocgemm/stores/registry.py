"""Find the store of an operand: the first one in an ordered list that matches it.

Stores of other packages come after .npy files, open zarr arrays and NumPy arrays, which they cannot take
over. They come before zarr paths and array-likes, which match everything else. A package adds a store by
naming a subclass of `oocgemm.stores.Store`, which takes no arguments, as an entry point in pyproject.toml::

    [project.entry-points."oocgemm.stores"]
    parquet = "my_package.stores:ParquetStore"
"""

import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

from oocgemm.stores.arrays import ArrayLikes, Arrays
from oocgemm.stores.base import Store
from oocgemm.stores.lazy import LazyArrays
from oocgemm.stores.npy import NpyFiles
from oocgemm.stores.zarr.store import ZarrArrays, ZarrPaths

GROUP = "oocgemm.stores"  # of entry points
ARRAYS = Arrays()
SPECIFIC: tuple[Store, ...] = (NpyFiles(), ZarrArrays(), ARRAYS)
GENERAL: tuple[Store, ...] = (ZarrPaths(), LazyArrays(), ArrayLikes())


def stores() -> Iterator[Store]:
    """Yield the stores in the order in which they are asked."""
    yield from SPECIFIC
    yield from installed()
    yield from GENERAL


def store_of(operand: Any) -> Store:
    """Return the store that opens or creates an operand. The last stores match any path and any object."""
    return next(store for store in stores() if store.matches(operand))


@cache
def installed() -> tuple[Store, ...]:
    """Load the stores of other packages, in the order of their names.

    The result is cached: a search of all installed packages can take a tenth of a second. A store that cannot
    be loaded is ignored with a warning.
    """
    from importlib.metadata import entry_points

    found: list[Store] = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            store = entry.load()()
            if not isinstance(store, Store):
                raise TypeError(f"{type(store).__name__} is not a subclass of oocgemm.stores.Store")
        except Exception as error:  # the package's own code may raise any exception
            warnings.warn(
                f"the store {entry.name} ({entry.value}) cannot be loaded and is ignored: {error}",
                stacklevel=2,
            )
        else:
            found.append(store)
    return tuple(found)
