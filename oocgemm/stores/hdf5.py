"""Open addresses of HDF5 datasets, such as ``file.h5::/group/x``. h5py is imported only for these."""

import importlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from oocgemm.errors import InputError
from oocgemm.planning import GemmProblem, Layout
from oocgemm.stores.base import Matrix, Store, is_path
from oocgemm.stores.capabilities import found_locally
from oocgemm.stores.files import open_regular
from oocgemm.stores.folding import Folding
from oocgemm.stores.formats import MARK, check_found, check_new_format

# Files with these suffixes are HDF5 files. A file with another suffix can be one too.
SUFFIXES = (".h5", ".hdf5", ".he5", ".h5ad", ".loom", ".nc", ".nc4", ".mat", ".nxs")
# The first bytes of an HDF5 file. A user block of 512 bytes, or a power of two above that, may precede them.
SIGNATURE = b"\x89HDF\r\n\x1a\n"
MAX_USER_BLOCK = 1 << 20


def split(path: str) -> tuple[str, str] | None:
    """Split an address into the path of the file and the name of the dataset; None if it is no address.

    The path of the file ends at the first ``::``. It must have a suffix of an HDF5 file, or lead to a file.

    >>> split("dir/a.h5::/x"), split("a.h5::layers/raw"), split("a.h5"), split("gzip::s3://bucket/x.zarr")
    (('dir/a.h5', '/x'), ('a.h5', 'layers/raw'), None, None)
    """
    file, mark, dataset = path.partition(MARK)
    if mark and (file.lower().endswith(SUFFIXES) or os.path.isfile(file)):
        return file, dataset
    return None


def leads_to_file(path: str) -> bool:
    """Return whether a local path leads to an HDF5 file, by its suffix or signature. Never raises."""
    return os.path.isfile(path) and (path.lower().endswith(SUFFIXES) or has_signature(path))


def has_signature(path: str) -> bool:
    """Return whether a file has the signature of HDF5. Never raises."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            offset = 0
            while offset <= MAX_USER_BLOCK:
                file.seek(offset)
                if file.read(len(SIGNATURE)) == SIGNATURE:
                    return True
                offset = 2 * offset or 512
    except (OSError, ValueError):
        pass
    return False


class HDF5Files(Store):
    """Open HDF5 datasets, read-only. The files of h5ad, netCDF4 and MATLAB 7.3 are HDF5 files, too.

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
        return self._opened(name, operand, None)

    def fold(self, name: str, operand: Any, folding: Folding) -> Matrix:
        return self._opened(name, operand, folding)

    def _opened(self, name: str, operand: Any, folding: Folding | None) -> Matrix:
        file, dataset = split(operand) or (operand, "")
        if "://" in file:
            raise InputError(
                f"{name}: {file} is a URL, and HDF5 files are read from local disks: copy the file to one"
            )
        check_found(name, file)
        try:
            from oocgemm.stores.hdf5_opening import open_dataset
        except ImportError as error:
            raise InputError(
                f"{name} at {operand}: HDF5 files need a package that is not installed ({error}): "
                "pip install 'oocgemm[hdf5]'"
            ) from error
        return open_dataset(name, file, dataset, folding)

    def prepare(self, operand: Any) -> None:
        """Import h5py, if it is installed, and hdf5plugin, which registers more filters with h5py."""
        for package in ("oocgemm.stores.hdf5_opening", "numcodecs"):
            with suppress(ImportError):
                importlib.import_module(package)

    def split(self, path: str) -> tuple[str, str] | None:
        found = split(path)
        return None if found is None else (found[0], f"{MARK}{found[1]}")

    def exists(self, path: str) -> bool:
        file, _ = split(path) or (path, "")
        return found_locally(file)

    def new_layout(
        self, path: str, problem: GemmProblem, chunks: tuple[int, int] | None, compressor: str | None
    ) -> Layout:
        """Raise `InputError`: no result is an HDF5 file."""
        check_new_format("C", (split(path) or (path, ""))[0])
        raise self._read_only(path)
