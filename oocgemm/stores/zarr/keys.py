"""Check that the chunks of a zarr array have the keys that its metadata states.

A chunk that is not stored has the fill value. So an array whose metadata states other keys than its chunks
have, such as ``0.0`` for ``0/0``, would read as fill values.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from oocgemm.errors import InputError

Key = Callable[[tuple[int, ...]], str]
# The key of a chunk in any encoding of keys, also of arrays with other numbers of dimensions.
_CHUNK = re.compile(r"(c[./])?\d+([./]\d+)*", re.ASCII)
# The folders of chunks, and how many of them one key has.
_FOLDER, _DEPTH = re.compile(r"c|\d+", re.ASCII), 2
# The encodings of keys that zarr has, by their names and separators. Arrays of format 2 have the last two.
_ENCODINGS = (("default", "/"), ("default", "."), ("v2", "/"), ("v2", "."))


def encoded(encoding: tuple[str, str], number: tuple[int, ...]) -> str:
    """Return the key of a chunk.

    >>> encoded(("default", "/"), (3, 4)), encoded(("v2", "."), (3, 4))
    ('c/3/4', '3.4')
    """
    kind, separator = encoding
    return separator.join([*(["c"] if kind == "default" else []), *map(str, number)])


def check_keys(place: str, zarr_format: int, key: Key, grid: tuple[int, int], found: Iterable[str]) -> None:
    """Raise `InputError` if there are chunks, and none has a key that the metadata states.

    Args:
        place: the array, in messages.
        zarr_format: 2 or 3.
        key: returns the key of a chunk or shard by its numbers in the grid.
        grid: the numbers of rows and columns of chunks or shards.
        found: the keys that exist, relative to the array. They are taken until one is expected.
    """
    other = ""
    for name in found:
        if _is_key(name, key, grid):
            return
        if not other and _CHUNK.fullmatch(name):
            other = name
    if not other:
        return
    remedy = "correct the metadata, or copy the array again"
    for encoding in _ENCODINGS[2 * (zarr_format == 2) :]:
        if _is_key(other, partial(encoded, encoding), grid):
            remedy = f"if the chunks are right, set {_stated(encoding, zarr_format)}"
            break
    raise InputError(
        f"{place} has no chunk whose key matches its metadata, as {key((0, 0))} does, but it has "
        f"the chunk {other}: {remedy}"
    )


def _stated(encoding: tuple[str, str], zarr_format: int) -> str:
    """Return how the metadata states an encoding of keys, and where."""
    kind, separator = encoding
    if zarr_format == 2:
        return f'"dimension_separator": "{separator}" in .zarray'
    stated = json.dumps({"name": kind, "configuration": {"separator": separator}})
    return f'"chunk_key_encoding": {stated} in zarr.json'


def files_in(folder: str | Path, prefix: str = "") -> Iterator[str]:
    """Yield the names of the files of an array, relative to its folder, in any encoding of keys."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if prefix.count("/") < _DEPTH and _FOLDER.fullmatch(entry.name) and entry.is_dir():
                yield from files_in(entry.path, f"{prefix}{entry.name}/")
            else:
                yield prefix + entry.name


def keys_of_first(key: Key, exists: Callable[[str], bool]) -> Iterator[str]:
    """Yield the keys under which the first chunk exists, for a store that cannot list its objects."""
    for name in (key((0, 0)), *(encoded(each, (0, 0)) for each in _ENCODINGS)):
        if exists(name):
            yield name


def _is_key(name: str, key: Key, grid: tuple[int, int]) -> bool:
    """Return whether a name is the key of a chunk in a grid."""
    numbers = [int(digits) for digits in re.findall(r"\d+", name, re.ASCII)] if len(name) < 100 else []
    if len(numbers) != 2 or numbers[0] >= grid[0] or numbers[1] >= grid[1]:
        return False
    return key((numbers[0], numbers[1])) == name
