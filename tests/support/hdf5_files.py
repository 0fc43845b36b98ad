"""HDF5 files for tests: the filters that oocgemm decodes, in all combinations that users of h5py make."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
from numpy.typing import NDArray

from oocgemm.stores import Matrix, open_matrix

# Arguments of `create_dataset`: compressors, the filters before them, and which of both are decoded together.
COMPRESSORS: Mapping[str, dict[str, Any]] = {
    "none": {},
    "gzip": {"compression": "gzip"},
    "blosc-lz4": dict(hdf5plugin.Blosc(cname="lz4", shuffle=1)),
    "blosc-blosclz": dict(hdf5plugin.Blosc(cname="blosclz", shuffle=2)),
    "blosc-lz4hc": dict(hdf5plugin.Blosc(cname="lz4hc", shuffle=0)),
    "blosc-zlib": dict(hdf5plugin.Blosc(cname="zlib", shuffle=1)),
    "blosc-zstd": dict(hdf5plugin.Blosc(cname="zstd", shuffle=2)),
    "zstd": dict(hdf5plugin.Zstd()),
    "lz4": dict(hdf5plugin.LZ4()),
    "lz4, small blocks": dict(hdf5plugin.LZ4(nbytes=256)),
    "bitshuffle-lz4": dict(hdf5plugin.Bitshuffle(cname="lz4")),
    "bitshuffle-lz4, small blocks": dict(hdf5plugin.Bitshuffle(nelems=128, cname="lz4")),
    "bitshuffle-zstd": dict(hdf5plugin.Bitshuffle(cname="zstd")),
}
BEFORE: Mapping[str, dict[str, Any]] = {
    "": {},
    "shuffle": {"shuffle": True},
    "fletcher32": {"fletcher32": True},
    "both": {"shuffle": True, "fletcher32": True},
}
# Filters that h5py has to undo.
THROUGH_H5PY: Mapping[str, dict[str, Any]] = {
    "lzf": {"compression": "lzf"},
    "blosc2": dict(hdf5plugin.Blosc2()),
    "bitshuffle": dict(hdf5plugin.Bitshuffle(cname="none")),
    "scaleoffset": {"scaleoffset": 3},
}
DTYPES = ("<f4", ">f8", "<f8", "<f2", ">f2", "<c8", ">c16", "i1")


def write(path: Path, values: Any, name: str = "x", **options: Any) -> str:
    """Write a dataset to a new file, and return its address."""
    with h5py.File(path, "w") as file:
        file.create_dataset(name, data=values, **options)
    return f"{path}::/{name}"


def rewritten(path: Path, chunk: tuple[int, int], stored: bytes, mask: int = 0, name: str = "x") -> None:
    """Replace the stored bytes of one chunk, which begins at the element `chunk`."""
    with h5py.File(path, "r+") as file:
        file[name].id.write_direct_chunk(chunk, stored, mask)


def stored(path: Path, chunk: tuple[int, int] = (0, 0), name: str = "x") -> bytes:
    """Return the stored bytes of the chunk that begins at the element `chunk`."""
    with h5py.File(path) as file:
        return bytes(file[name].id.read_direct_chunk(chunk)[1])


def opened(address: str) -> Matrix:
    return open_matrix("A", address)


def whole(matrix: Matrix) -> NDArray[Any]:
    """Read a whole matrix."""
    out = np.full(matrix.shape, 99, matrix.dtype)
    matrix.read((0, matrix.shape[0]), (0, matrix.shape[1]), out)
    return out
