"""Open addresses of HDF5 datasets, such as ``file.h5::/group/x``. h5py is imported only for these."""

import importlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from oocgemm.errors import InputError
from oocgemm.planning import GemmProblem, Layout
from oocgemm.stores.base import Matrix, Store, is_path
from oocgemm.stores.durable import found_locally
from oocgemm.stores.formats import check_found, check_new
from oocgemm.stores.hdf5.address import leads_to_file, split


class HDF5Files(Store):
    """Open HDF5 datasets, read-only: those of h5ad, netCDF4 and MATLAB 7.3 files too.

    A path belongs to this store if it is an address or leads to an HDF5 file. In the second case `open`
    raises an error that lists the datasets of the file.
    """

    kind = "hdf5"

    def matches(self, operand: Any) -> bool:
        if not is_path(operand):
            return False
        path = os.fspath(operand)
        return split(path) is not None or leads_to_file(path)

    def open(self, name: str, operand: Any, *, writable: bool = False, journal: Path | None = None) -> Matrix:
        if writable:
            raise InputError(f"{name} at {operand} is read-only: give a path that ends in .zarr or .npy")
        file, dataset = split(operand) or (operand, "")
        if "://" in file:
            raise InputError(
                f"{name}: {file} is a URL, and HDF5 files are read from local disks: copy the file to one"
            )
        check_found(name, file)
        try:
            from oocgemm.stores.hdf5.opening import open_dataset
        except ImportError as error:
            raise InputError(
                f"{name} at {operand}: HDF5 files need a package that is not installed ({error}): "
                "pip install 'oocgemm[hdf5]'"
            ) from error
        return open_dataset(name, file, dataset)

    def prepare(self, operand: Any) -> None:
        """Import h5py, if it is installed, and hdf5plugin, which registers more filters with h5py."""
        for package in ("oocgemm.stores.hdf5.opening", "numcodecs"):
            with suppress(ImportError):
                importlib.import_module(package)

    def exists(self, path: str) -> bool:
        file, _ = split(path) or (path, "")
        return found_locally(file)

    def new_layout(
        self, path: str, problem: GemmProblem, chunks: tuple[int, int] | None, compressor: str | None
    ) -> Layout:
        """Raise `InputError`: no result is an HDF5 file."""
        check_new("C", (split(path) or (path, ""))[0])
        raise self._read_only(path)
