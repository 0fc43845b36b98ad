"""Make the errors for files and dtypes that cannot be operands. They state the command that converts them."""

import errno
import json
import os
import shlex
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from oocgemm.errors import InputError, NotFoundError
from oocgemm.planning import OPERANDS
from oocgemm.stores.base import Matrix, dtype_name
from oocgemm.stores.declared import CompleteMatrix
from oocgemm.stores.hdf5.address import MARK

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
# For each URL scheme that zarr opens, the PyPI package that it needs. Other schemes need only fsspec. The
# schemes of `oocgemm.stores.objects` need obstore.
CLIENTS = {"gcs": "gcsfs"}


def format_of(path: str) -> str:
    """Return the format that the suffix of a path denotes, such as "an HDF5 file"; "" if it is not known."""
    return FORMATS.get(Path(path).suffix.lower(), "")


def check_new(name: str, path: str) -> None:
    """Raise `InputError` if a new result's suffix is that of a format that cannot be written, such as .h5."""
    if kind := format_of(path):
        stem = os.fspath(Path(path).with_suffix(""))
        raise InputError(
            f"{name} at {path} would be {kind}: a result is a zarr array or a .npy file, "
            f"give {stem}.zarr or {stem}.npy"
        )


def wrong_format(name: str, path: str, *, writable: bool = False) -> InputError | None:
    """Return the error for a file that is neither zarr nor .npy, with the remedy.

    For an operand, the remedy is a conversion. With `writable`, the path was given for a result, and the
    remedy is another path. Return None for a folder, a URL, and a path where nothing exists.
    """
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
    """Raise `NotFoundError` for a local path at which nothing exists.

    Raises `InputError` without the permission to look it up. For a symbolic link to nothing, the message says
    where the link leads.
    """
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
    """Return the error for an operand of which a file exists that may not be read."""
    why = error.strerror or "permission denied"
    if why == os.strerror(errno.EACCES):
        why = "permission denied: make it readable to this user, and the folders that lead to it searchable"
    return InputError(f"{name}: {error.filename} cannot be read: {why}")


def check_url_format(name: str, url: str) -> None:
    """Raise `InputError` if the suffix of a URL is that of a file format, which only local files may have."""
    kind = "a .npy file" if url.endswith(".npy") else format_of(url)
    if kind:
        raise InputError(
            f"{name} at {url} would be {kind}: only zarr arrays are read from URLs; copy the file to a local "
            "disk, or convert it to a zarr array"
        )


def missing_client(name: str, path: str, error: ImportError) -> InputError:
    """Return the error for a URL if the package that reads this kind of URL is not installed.

    `error` is the failed import.
    """
    kind = path.partition("://")[0]
    return InputError(
        f"{name} at {path}: {kind}:// needs a package that is not installed ({error}): "
        f"pip install {CLIENTS.get(kind, 'fsspec')}"
    )


def unsupported_dtype(
    name: str, dtype: np.dtype[Any], store: str, path: str | None, missing: tuple[Any, ...] = ()
) -> InputError:
    """Return the error for an operand of an unsupported dtype, with the command that converts it.

    `missing` are the codes of its missing elements.
    """
    problem = f"{name} is of dtype {dtype}, supported are {', '.join(OPERANDS)}"
    if dtype.name == "void16":  # the dtype that np.load returns for saved bfloat16 elements
        return InputError(f"{problem}: if it was bfloat16, restore that with .view(ml_dtypes.bfloat16)")
    if dtype.kind not in "biufc":
        return InputError(f"{problem}: its elements are not numbers")
    exact = dtype.kind in "biu" and dtype.itemsize <= 2
    wanted = "float32" if exact else "complex128" if dtype.kind == "c" else "float64"
    return InputError(f"{problem}: {conversion(name, store, path, wanted, missing)}")


def check_dtypes(a: Matrix, b: Matrix) -> None:
    """Raise `InputError` if A or B has an unsupported dtype, or if their dtypes differ.

    The message states the commands that convert them.
    """
    for operand in (a, b):
        if dtype_name(operand.dtype) not in OPERANDS:
            raise unsupported_dtype(operand.name, operand.dtype, *_store_and_path(operand), _missing(operand))
    if a.dtype == b.dtype:
        return
    try:
        common = np.result_type(a.dtype, b.dtype).name
    except TypeError:  # A and B have no common dtype in NumPy, such as bfloat16 and float16
        common = "float32"
    wanted = common if common != "bfloat16" else "float32"  # a .npy file cannot store bfloat16
    lines = (
        conversion(x.name, *_store_and_path(x), wanted, _missing(x)) for x in (a, b) if x.dtype.name != wanted
    )
    raise InputError(f"A is of dtype {a.dtype} and B of {b.dtype}: {'; '.join(lines)}")


def _store_and_path(matrix: Matrix) -> tuple[str, str | None]:
    """Return the kind of store of an operand, such as "npy", and its path or None."""
    header = matrix.describe()
    path = header["path"]
    return str(header["store"]).split()[0], None if path is None else str(path).removeprefix("file://")


def _missing(matrix: Matrix) -> tuple[Any, ...]:
    """Return the codes of missing elements of an operand."""
    return matrix.missing if isinstance(matrix, CompleteMatrix) else ()


def conversion(name: str, store: str, path: str | None, dtype: str, missing: tuple[Any, ...] = ()) -> str:
    """Return the remedy "convert X by ...", with a shell command for a path and Python code for an object.

    The codes of missing elements, `missing`, are kept in the attributes of a new zarr array. The command
    works for files that are larger than memory. For a zarr array it loads one chunk or shard at a time, for
    an HDF5 dataset one row of chunks, and for a .npy file it uses memory maps.
    """
    if path is None or path.startswith("memory:"):
        line = f'{name} = numpy.asarray({name}[:], "{dtype}")'
        if store in ("dask", "xarray"):
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
    return f"convert {name} by {_command(code)} and pass {new}"


def _conversion_from_hdf5(name: str, path: str, dtype: str, kept: str) -> str:
    """Return the remedy for an HDF5 dataset at an address: a command that copies it to a zarr array.

    `kept` are further arguments for the new array.
    """
    file, _, dataset = path.partition(MARK)
    new = f"{os.path.splitext(file)[0]}-{dtype}.zarr"
    code = (
        f'import h5py, zarr; a = h5py.File({json.dumps(file)}, "r")[{json.dumps(dataset)}]; '
        "c = a.chunks or (min(256, len(a)), a.shape[1]); "
        f'b = zarr.create_array({json.dumps(new)}, shape=a.shape, chunks=c, dtype="{dtype}"{kept}); '
        "any(b.__setitem__(slice(i, i + c[0]), a[i : i + c[0]]) for i in range(0, len(a), c[0]))"
    )
    return f"convert {name} by {_command(code)} and pass {new}"


def _remedy(path: str) -> str:
    """Return the remedy for a file in one of `FORMATS`: how to convert it."""
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
            return f"convert it by {_command(code)} and pass {stem}.npy"
        case _:
            return "store its array in one of these formats"
    return f"convert it by {_command(f'import numpy; numpy.save({new}, {load})')} and pass {stem}.npy"


def _first_array(path: str) -> str:
    """Return the name of the first array in a .npz archive.

    If the archive cannot be read, return "arr_0", the name that NumPy gives to a single array.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()[0].removesuffix(".npy")
    except (OSError, zipfile.BadZipFile, IndexError):
        return "arr_0"


def _command(code: str) -> str:
    """Return the shell command that runs a line of Python."""
    return f"python -c {shlex.quote(code)}"
