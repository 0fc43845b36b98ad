"""Make the errors for files and dtypes that cannot be operands. They state the command that converts them."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from oocgemm.errors import InputError, NotFoundError
from oocgemm.planning import MULTIPLIED
from oocgemm.stores.base import Matrix, dtype_name
from oocgemm.stores.declared import CompleteMatrix
from oocgemm.values import dataclass

# File formats that this package can neither read nor write, by the suffix of the file name. Error messages
# say how to convert such files.
FORMATS = {
    ".h5": "an HDF5 file",
    ".hdf5": "an HDF5 file",
    ".h5ad": "an HDF5 file",
    ".nc": "a netCDF file",
    ".nc4": "a netCDF file",
    ".npz": "an archive of NumPy arrays",
    ".csv": "a text file",
    ".tsv": "a text file",
    ".txt": "a text file",
    ".parquet": "a Parquet file",
    ".feather": "a Feather file",
    ".mat": "a MATLAB file",
    ".pt": "a PyTorch file",
    ".zip": "a zip archive",
}
PARTS = ("data", "indices", "indptr")  # the arrays of a sparse matrix in a group
MARK = "::"  # between the path of an HDF5 file and the name of a dataset in it
# For each URL scheme that zarr opens, the PyPI package that it needs. Other schemes need only fsspec. The
# schemes of `oocgemm.stores.objects` need obstore.
CLIENTS = {"gcs": "gcsfs"}


def format_of(path: str) -> str:
    """Return the format that the suffix of a path denotes, such as "an HDF5 file"; "" if it is not known."""
    return FORMATS.get(Path(path).suffix.lower(), "")


def check_new_format(name: str, path: str) -> None:
    """Raise `InputError` if a new result has the suffix of a format that cannot be written, such as .h5."""
    if kind := format_of(path):
        stem = os.fspath(Path(path).with_suffix(""))
        raise InputError(
            f"{name} at {path} would be {kind}: a result is a zarr array or a .npy file, "
            f"give {stem}.zarr or {stem}.npy"
        )


def wrong_format(name: str, path: str, *, writable: bool = False) -> InputError | None:
    """Return the error, with a remedy, for a file that is neither zarr nor .npy; None if there is no file."""
    if "://" in path or not os.path.isfile(path):
        return None
    kind = format_of(path)
    if not kind:
        return InputError(
            f"{name}: no zarr array at {path}: it is a file, but zarr arrays are folders; a .npy file must "
            "have that ending"
        )
    remedy = _remedy(path)
    if writable:
        remedy = "give another path: a result is a zarr array or a .npy file"
    return InputError(f"{name}: {path} is {kind}, not a zarr array or a .npy file: {remedy}")


def check_found(name: str, path: str) -> None:
    """Raise `NotFoundError` if nothing is at a local path, `InputError` if access to the path is denied."""
    try:
        if "://" in path or os.stat(path):
            return
    except PermissionError as error:
        raise not_readable(name, error) from error
    except (OSError, ValueError):
        pass
    problem = f"{name}: there is nothing at {path}"
    if os.path.islink(path):
        problem += (
            f": it is a symbolic link to {os.path.realpath(path)}, which does not exist; "
            "remove the link, or give another path"
        )
    raise NotFoundError(problem)


def not_readable(name: str, error: OSError) -> InputError:
    """Return the error for an operand that has a file which this process may not read."""
    why = error.strerror or "permission denied"
    if why == os.strerror(errno.EACCES):
        why = "permission denied: make it readable to this user, and the folders that lead to it searchable"
    return InputError(f"{name}: {error.filename} cannot be read: {why}")


def check_url_format(name: str, url: str) -> None:
    """Raise `InputError` if the suffix of a URL denotes a format that is only read from local files."""
    kind = "a .npy file" if url.endswith(".npy") else format_of(url)
    if kind:
        raise InputError(
            f"{name} at {url} would be {kind}: only zarr arrays are read from URLs; copy the file to a local "
            "disk, or convert it to a zarr array"
        )


def missing_client(name: str, path: str, error: ImportError) -> InputError:
    """Return the error for a URL whose client package is not installed."""
    kind = path.partition("://")[0]
    return InputError(
        f"{name} at {path}: {kind}:// needs a package that is not installed ({error}): "
        f"pip install {CLIENTS.get(kind, 'fsspec')}"
    )


class UnsupportedError(InputError):
    """Raised for operands whose dtypes cannot be multiplied. The message has commands that convert them.

    Attributes:
        stored: the operands.
    """

    def __init__(self, *stored: "OperandFacts") -> None:
        first = next((x for x in stored if not x.is_numeric), None)
        wanted = common_dtype(*(x.dtype for x in stored))
        said = [f"{x.name} {'is of dtype' if x is stored[0] else 'of'} {x.dtype}" for x in stored]
        problem = " and ".join(said)
        if not all(x.is_supported for x in stored):
            problem += f", supported are {', '.join(MULTIPLIED)}"
        remedies = [x.converted(wanted) for x in stored if not x.is_supported]
        if first is not None:
            problem = f"{first.name} is of dtype {first.dtype}, supported are {', '.join(MULTIPLIED)}"
            remedies = [first.not_numeric]
        super().__init__(f"{problem}: {'; '.join(remedies)}")
        self.stored = stored


@dataclass(frozen=True)
class OperandFacts:
    """An operand for messages: its name, dtype, kind of store and path, and the codes of missing elements."""

    name: str
    dtype: np.dtype[Any]
    store: str
    path: str | None
    missing: tuple[Any, ...] = ()

    @classmethod
    def of(cls, matrix: Matrix) -> "OperandFacts":
        header = matrix.describe()
        path = None if header["path"] is None else str(header["path"]).removeprefix("file://")
        missing = matrix.missing if isinstance(matrix, CompleteMatrix) else ()
        return cls(matrix.name, matrix.dtype, str(header["store"]).split()[0], path, missing)

    @property
    def is_supported(self) -> bool:
        return dtype_name(self.dtype) in MULTIPLIED

    @property
    def is_numeric(self) -> bool:
        return self.is_supported or self.dtype.kind in "biufc"

    @property
    def not_numeric(self) -> str:
        if self.dtype.name == "void16":  # the dtype that np.load returns for saved bfloat16 elements
            return "if it was bfloat16, restore that with .view(ml_dtypes.bfloat16)"
        return "its elements are not numbers"

    def converted(self, dtype: str) -> str:
        return conversion(self.name, self.store, self.path, dtype, self.missing)


def common_dtype(*dtypes: np.dtype[Any]) -> str:
    """Return the name of the dtype to which operands are converted, so that they can be multiplied.

    >>> common_dtype(np.dtype("u8")), common_dtype(np.dtype("u8"), np.dtype("c8"))
    ('float64', 'complex128')
    """
    try:
        common = np.result_type(*dtypes)
    except TypeError:  # they have no common dtype in NumPy, such as bfloat16 and float16
        return "float32"
    return common.name if common.name in MULTIPLIED else "complex128" if common.kind == "c" else "float64"


def check_dtypes(*matrices: Matrix) -> None:
    """Raise `UnsupportedError` if a matrix has a dtype that is not multiplied."""
    stored = [OperandFacts.of(matrix) for matrix in dict.fromkeys(matrices)]
    if not all(x.is_supported for x in stored):
        raise UnsupportedError(*stored)


def conversion(name: str, store: str, path: str | None, dtype: str, missing: tuple[Any, ...] = ()) -> str:
    """Return the remedy "convert X by ...", with a shell command for a path, or Python code for an object."""
    if path is None or path.startswith("memory:"):
        line = f'{name} = numpy.asarray({name}[:], "{dtype}")'
        if store in ("dask", "xarray", "csr", "csc"):
            line = f'{name} = {name}.astype("{dtype}")'
        elif store == "tensorstore":
            line = f'{name} = tensorstore.cast({name}, "{dtype}")'
        elif store not in ("memory", "zarr"):
            line = f'{name} = dask.array.from_array({name}).astype("{dtype}")'
        codes = [code.item() for code in missing]
        then = f", and pass Transform(missing={codes[0]}) for its missing elements" if codes else ""
        return f"convert {name} by {line}{then}"
    if store == "bed":
        return f"cast {path} to {dtype} on load, by a transform with cast={dtype}"
    if store not in ("npy", "zarr", "hdf5") or "://" in path:
        return f"convert {path} to {dtype}"
    path = path.rstrip("/")
    codes = [code.item() for code in missing]
    kept = f', attributes={{"missing_value": {codes}}}' if codes else ""
    if store == "hdf5":
        return _conversion_from_hdf5(name, path, dtype, kept)
    new = os.path.splitext(path)[0] + f"-{dtype}" + os.path.splitext(path)[1]
    old, made = json.dumps(path), json.dumps(new)
    if store == "npy":
        code = (
            f'import numpy; a = numpy.load({old}, mmap_mode="r"); '
            f'numpy.lib.format.open_memmap({made}, "w+", "{dtype}", a.shape)[...] = a'
        )
    else:
        code = (
            f'import numpy, zarr; a = zarr.open_array({old}, mode="r"); '
            f"b = zarr.create_array({made}, shape=a.shape, chunks=a.shards or a.chunks, "
            f'dtype="{dtype}"{kept}); '
            "any(b.blocks.__setitem__(i, a.blocks[i]) for i in numpy.ndindex(b.cdata_shape))"
        )
    return f"convert {name} by {python_command(code)} and pass {new}"


def _conversion_from_hdf5(name: str, path: str, dtype: str, kept: str) -> str:
    """Return the remedy for an HDF5 dataset: a command that copies it to a zarr array."""
    file, _, dataset = path.partition(MARK)
    new = f"{os.path.splitext(file)[0]}-{dtype}.zarr"
    code = (
        f'import h5py, zarr; a = h5py.File({json.dumps(file)}, "r")[{json.dumps(dataset)}]; '
        "c = a.chunks or (min(256, len(a)), a.shape[1]); "
        f'b = zarr.create_array({json.dumps(new)}, shape=a.shape, chunks=c, dtype="{dtype}"{kept}); '
        "any(b.__setitem__(slice(i, i + c[0]), a[i : i + c[0]]) for i in range(0, len(a), c[0]))"
    )
    return f"convert {name} by {python_command(code)} and pass {new}"


def is_sparse(group: Any) -> bool:
    """Return whether a group, or the set of its names, contains the arrays of a sparse matrix."""
    return all(name in group for name in PARTS)


def _remedy(path: str) -> str:
    suffix, stem = Path(path).suffix.lower(), os.fspath(Path(path).with_suffix(""))
    old, new = json.dumps(path), json.dumps(stem + ".npy")
    match suffix:
        case ".npz":
            load = f"numpy.load({old})[{json.dumps(_first_array(path))}]"
        case ".csv":
            load = f'numpy.loadtxt({old}, delimiter=",", ndmin=2)'
        case ".tsv" | ".txt":
            load = f"numpy.loadtxt({old}, ndmin=2)"
        case ".parquet" | ".feather":
            code = f"import numpy, pandas; numpy.save({new}, pandas.read_{suffix[1:]}({old}).to_numpy())"
            return f"convert it by {python_command(code)} and pass {stem}.npy"
        case _:
            return "store its array in one of these formats"
    return f"convert it by {python_command(f'import numpy; numpy.save({new}, {load})')} and pass {stem}.npy"


def _first_array(path: str) -> str:
    """Return the name of the first array in a .npz archive; NumPy's default "arr_0" if it is unreadable."""
    import zipfile

    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()[0].removesuffix(".npy")
    except (OSError, zipfile.BadZipFile, IndexError):
        return "arr_0"


def python_command(code: str) -> str:
    import shlex

    return f"python -c {shlex.quote(code)}"
