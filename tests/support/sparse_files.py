"""Sparse matrices in memory, and in files as AnnData writes them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import zarr

Array = Any
FORMS = "csr", "csc"
# Where the parts of a matrix are, for `stored`.
PLACES = "memory", "h5ad", "gzip.h5ad", "v2.zarr", "v3.zarr", "raw.zarr", "shards.zarr"


def parts_of(x: Array, form: str, index: Any = np.int32) -> dict[str, Array]:
    """Return data, indices and indptr of a dense matrix, in canonical form."""
    lines = x if form == "csr" else x.T
    at, indices = np.nonzero(lines)
    starts = np.append(0, np.cumsum(np.bincount(at, minlength=len(lines))))
    return {"data": lines[at, indices], "indices": indices.astype(index), "indptr": starts.astype(index)}


def in_memory(shape: tuple[int, int], form: str, parts: dict[str, Array]) -> Any:
    """Return an object with the attributes of scipy's sparse matrices."""
    return SimpleNamespace(format=form, shape=shape, dtype=parts["data"].dtype, **parts)


def write(path: Path, shape: tuple[int, int], form: str, parts: dict[str, Array], chunk: int = 50) -> str:
    """Write a matrix as a group X of a new file. Return its address."""
    attributes: dict[str, Any] = {"encoding-type": f"{form}_matrix", "encoding-version": "0.1.0"}
    if path.suffix == ".h5ad":
        how: dict[str, Any] = {"maxshape": (None,), "chunks": (chunk,)} if path.stem != "plain" else {}
        how |= {"compression": "gzip"} if path.name.endswith("gzip.h5ad") else {}
        with h5py.File(path, "w") as file:
            for name, part in parts.items():
                file.create_dataset(f"X/{name}", data=part, **how)
            file["X"].attrs.update(attributes | {"shape": shape})
        return f"{path}::/X"
    root = zarr.create_group(path, zarr_format=2 if path.name.endswith("v2.zarr") else 3)
    group = root.create_group("X", attributes=attributes | {"shape": list(shape)})
    options: dict[str, Any] = {"compressors": None} if path.name.endswith("raw.zarr") else {}
    options |= {"shards": (2 * chunk,)} if path.name.endswith("shards.zarr") else {}
    for name, part in parts.items():
        group.create_array(name, data=part, chunks=(chunk,), **options)
    return f"{path}/X"


def stored(folder: Path, place: str, x: Array, form: str) -> Any:
    """Return a sparse operand: an object in memory, or the address of a new file in a folder."""
    parts = parts_of(x, form)
    if place == "memory":
        return in_memory(x.shape, form, parts)
    return write(folder / f"{form}-{place}", x.shape, form, parts)
