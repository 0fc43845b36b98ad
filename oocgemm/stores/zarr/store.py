"""Open and create zarr arrays as operands and results. zarr is imported only for arrays that need it."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from oocgemm.errors import InputError
from oocgemm.planning import GemmProblem, Layout
from oocgemm.planning.setting import CHUNK_BYTES
from oocgemm.stores.base import Matrix, Store, is_path, package
from oocgemm.stores.durable import SIDECAR, found_locally
from oocgemm.stores.files import padded
from oocgemm.stores.formats import check_found, check_new, not_readable
from oocgemm.stores.space import check_room, raw_bytes
from oocgemm.stores.zarr.matrix import UNFINISHED, ZarrMatrix
from oocgemm.stores.zarr.metadata import Metadata, check_sizes, create, local_size, read_metadata

# The names of the compressors that a new array can have. "none" and None mean the same.
COMPRESSORS = ("none", "zstd", "blosc-lz4", "blosc-zstd", "gzip")


class ZarrArrays(Store):
    """Open operands that are zarr array objects, which the caller has opened with zarr."""

    kind = "zarr"

    def matches(self, operand: Any) -> bool:
        return package(operand) == "zarr"

    def open(self, name: str, operand: Any, *, writable: bool = False, journal: Path | None = None) -> Matrix:
        from oocgemm.stores.zarr.opening import wrap_zarr

        return wrap_zarr(name, operand, writable=writable)

    def prepare(self, operand: Any) -> None:
        from oocgemm.stores.zarr import opening  # noqa: F401

    def journal_folder(self, operand: Any) -> Path | None:
        from oocgemm.stores.zarr.through import local_folder

        folder = local_folder(operand)
        return None if folder is None else folder / SIDECAR

    def location(self, operand: Any) -> tuple[str, str | None]:
        return self.kind, str(operand.store_path).removeprefix("file://")


class ZarrPaths(Store):
    """Open and create zarr arrays at paths and URLs.

    This store matches every path, so it is tried after the stores of other file formats. For a path of an
    unsupported format, such as HDF5, `open` and `new_layout` raise an error that says how to convert it.
    """

    kind = "zarr"

    def matches(self, operand: Any) -> bool:
        return is_path(operand)

    def open(self, name: str, operand: Any, *, writable: bool = False, journal: Path | None = None) -> Matrix:
        check_found(name, operand)
        try:
            check_sizes(f"{name} at {operand}", partial(local_size, str(operand).removeprefix("file://")))
        except PermissionError as error:
            raise not_readable(name, error) from error
        if found := _without_zarr(operand):
            matrix = ZarrMatrix(name, found, unchanging=not writable)
            matrix.check_chunks()
            return matrix
        from oocgemm.stores.zarr.opening import open_zarr

        return open_zarr(name, operand, writable=writable)

    def prepare(self, operand: Any) -> None:
        """Import zarr. Do nothing if a local array can be used without zarr, or does not exist yet."""
        if _without_zarr(operand) is None and ("://" in operand or found_locally(operand)):
            from oocgemm.stores.zarr import opening  # noqa: F401

    def exists(self, path: str) -> bool:
        if "://" not in path:
            return found_locally(path)
        from oocgemm.stores.zarr.opening import remote_exists

        return remote_exists(path)

    def new_layout(
        self, path: str, problem: GemmProblem, chunks: tuple[int, int] | None, compressor: str | None
    ) -> Layout:
        """Return the layout (the chunks and the memory to write them) of a new array.

        If `chunks` is None, the planner chooses the shape of the chunks. Raises `InputError` for `chunks`
        that are not two positive integers.
        """
        check_new("C", path)
        return new_zarr_layout(problem, chunks, compressor)

    def create(
        self,
        name: str,
        path: str,
        shape: tuple[int, int],
        dtype: np.dtype[Any],
        chunks: tuple[int, int],
        compressor: str | None,
        *,
        journal: Path | None = None,
    ) -> Matrix:
        """Create an array. Check the free space of the disk only if the chunks are not compressed.

        The size of compressed chunks is not known before they are written.
        """
        if "://" not in path and compressor in (None, "none"):
            check_room(name, path, raw_bytes(shape, chunks, dtype.itemsize))
        if "://" not in path:
            try:
                created = create(path, shape, dtype, chunks, compressor, UNFINISHED)
            except OSError as error:
                raise InputError(f"{name}: cannot create a zarr array at {path}: {error}") from error
            if created is not None:
                return ZarrMatrix(name, created)
        from oocgemm.stores.zarr.opening import create_zarr

        return create_zarr(name, path, shape, dtype, chunks, compressor)

    def journal_folder(self, operand: Any) -> Path | None:
        if "://" in operand or os.path.isfile(operand):
            return None
        return Path(operand) / SIDECAR


def new_zarr_layout(
    problem: GemmProblem, chunks: tuple[int, int] | None, compressor: str | None, *, requests: int = 0
) -> Layout:
    """Return the layout of a new array. With `requests`, it is in an object store, written by so many PUTs.

    Raises `InputError` for `chunks` that are not two positive integers.
    """
    if chunks is not None and not (
        isinstance(chunks, tuple | list)
        and len(chunks) == 2
        and all(isinstance(extent, int | np.integer) and extent > 0 for extent in chunks)
    ):
        raise InputError(f"chunks = {chunks!r}: pass (rows, columns), both integers of at least 1")
    itemsize = problem.itemsizes["C"]
    size = min(2 * CHUNK_BYTES, problem.m * problem.n * itemsize)
    if chunks:
        size = chunks[0] * chunks[1] * itemsize
    encodes = compressor not in (None, "none")
    memory = (3 if encodes else 1) * padded(size)
    return Layout(
        write_chunk=(int(chunks[0]), int(chunks[1])) if chunks else (1, 1),
        free_chunks=chunks is None,
        encode_bytes=0 if requests else memory,
        encodes=encodes,
        itemsize=itemsize,
        requests=requests,
        request_bytes=memory + size if requests else 0,
    )


def _without_zarr(path: str) -> Metadata | None:
    """Return the metadata of an array that is read and written without zarr; None for any other."""
    return None if "://" in path else read_metadata(os.fspath(path))


def check_compressor(name: str) -> None:
    """Raise `InputError` for a name that is not in `COMPRESSORS`."""
    if name not in COMPRESSORS:
        raise InputError(f"unknown compressor {name!r}: choose one of {', '.join(COMPRESSORS)}")
