"""Files and dtypes that are no operands: what they are, and the line of code that makes an operand of them."""

import json
import os
import shlex
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from oocgemm.errors import InputError
from oocgemm.planning import OPERANDS
from oocgemm.stores.base import Matrix

FORMATS = {
    ".h5": "an HDF5 file",
    ".hdf5": "an HDF5 file",
    ".nc": "a netCDF file",
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
# What reads each kind of URL, from PyPI. Each brings fsspec; so does none for other kinds.
CLIENTS = {
    "s3": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "http": "fsspec requests aiohttp",
    "https": "fsspec requests aiohttp",
}


def named(path: str) -> str:
    """Return what a file with the ending of this path is, such as "an HDF5 file"; "" for other endings."""
    return FORMATS.get(Path(path).suffix.lower(), "")


def check_new(name: str, path: str) -> None:
    """Raise `InputError` for a new result whose path has the ending of a format that is not written."""
    if kind := named(path):
        stem = os.fspath(Path(path).with_suffix(""))
        raise InputError(
            f"{name} at {path} would be {kind}: a result is a zarr array or a .npy file, give {stem}.zarr or {stem}.npy"
        )


def explained(name: str, path: str, *, writable: bool = False) -> InputError | None:
    """Return the error for a file that is no operand, with the line that makes one of it; None for folders and URLs."""
    if "://" in path or not os.path.isfile(path):
        return None
    kind = named(path)
    if not kind:
        return InputError(
            f"{name}: no zarr array at {path}: it is a file, which must be .npy and have that ending"
        )
    remedy = _remedy(path)
    if writable:
        remedy = "give another place: a result is a zarr array or a .npy file"
    return InputError(f"{name}: {path} is {kind}, not a zarr array or a .npy file: {remedy}")


def missing_client(name: str, path: str, error: ImportError) -> InputError:
    """Return the error for a URL whose client is not installed."""
    kind = path.partition("://")[0]
    return InputError(
        f"{name} at {path}: {kind}:// needs a package that is not installed ({error}): "
        f"pip install {CLIENTS.get(kind, 'fsspec')}"
    )


def unsupported(name: str, dtype: np.dtype[Any], store: str, path: str | None) -> InputError:
    """Return the error for an operand of a dtype that cannot be multiplied, with the line that converts it."""
    said = f"{name} is of dtype {dtype}, supported are {', '.join(OPERANDS)}"
    if dtype.name == "void16":  # what np.save makes of it
        return InputError(f"{said}: bfloat16 that has lost its name is had back by .view(ml_dtypes.bfloat16)")
    if dtype.kind not in "biufc":
        return InputError(f"{said}: it holds no numbers that could be converted")
    exact = dtype.kind in "biu" and dtype.itemsize <= 2
    wanted = "float32" if exact else "complex128" if dtype.kind == "c" else "float64"
    return InputError(f"{said}: {conversion(name, store, path, wanted)}")


def check_dtypes(a: Matrix, b: Matrix) -> None:
    """Raise `InputError` for operands of a dtype that cannot be multiplied, or of two, with the lines that convert them."""
    for operand in (a, b):
        if operand.dtype.name not in OPERANDS:
            raise unsupported(operand.name, operand.dtype, *_place(operand))
    if a.dtype == b.dtype:
        return
    try:
        common = np.result_type(a.dtype, b.dtype).name
    except TypeError:  # of bfloat16 and float16, for one
        common = "float32"
    wanted = common if common != "bfloat16" else "float32"  # .npy files hold none
    lines = (conversion(x.name, *_place(x), wanted) for x in (a, b) if x.dtype.name != wanted)
    raise InputError(f"A is of dtype {a.dtype} and B of {b.dtype}: {'; '.join(lines)}")


def _place(matrix: Matrix) -> tuple[str, str | None]:
    """Return the kind of store that an operand is in, and its path."""
    said = matrix.describe()
    path = said["path"]
    return str(said["store"]).split()[0], None if path is None else str(path).removeprefix("file://")


def conversion(name: str, store: str, path: str | None, dtype: str) -> str:
    """Return how to convert an operand: a shell command for a path, a line of Python for an object.

    The command for a zarr array holds one chunk or shard at a time, that for a .npy file the page cache only.
    """
    if path is None or path.startswith("memory:"):
        line = f'{name} = numpy.asarray({name}[:], "{dtype}")'
        if store in ("dask", "xarray"):
            line = f'{name} = {name}.astype("{dtype}")'
        elif store == "tensorstore":
            line = f'{name} = tensorstore.cast({name}, "{dtype}")'
        elif store not in ("memory", "zarr"):
            line = f'{name} = dask.array.from_array({name}).astype("{dtype}")'
        return f"convert {name} by {line}"
    path = path.rstrip("/")
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
            f'b = zarr.create_array({made}, shape=a.shape, chunks=a.shards or a.chunks, dtype="{dtype}"); '
            "any(b.blocks.__setitem__(i, a.blocks[i]) for i in numpy.ndindex(b.cdata_shape))"
        )
    return f"convert {name} by {_command(code)} and pass {new}"


def _remedy(path: str) -> str:
    """Return what makes an operand of a file in one of `FORMATS`."""
    suffix, stem = Path(path).suffix.lower(), os.fspath(Path(path).with_suffix(""))
    old, new = json.dumps(path), json.dumps(stem + ".npy")
    match suffix:
        case ".h5" | ".hdf5":
            return f"in Python pass h5py.File({old})[NAME] to oocgemm.matmul, which reads it chunk by chunk"
        case ".nc":
            return f"in Python pass xarray.open_dataset({old})[NAME] to oocgemm.matmul, which reads it chunk by chunk"
        case ".npz":
            load = f"numpy.load({old})[{json.dumps(_first(path))}]"
        case ".csv":
            load = f'numpy.loadtxt({old}, delimiter=",", ndmin=2)'
        case ".tsv" | ".txt":
            load = f"numpy.loadtxt({old}, ndmin=2)"
        case ".parquet" | ".feather":
            code = f"import numpy, pandas; numpy.save({new}, pandas.read_{suffix[1:]}({old}).to_numpy())"
            return f"convert it by {_command(code)} and pass {stem}.npy"
        case _:
            return "store its array as one of these"
    return f"convert it by {_command(f'import numpy; numpy.save({new}, {load})')} and pass {stem}.npy"


def _first(path: str) -> str:
    """Return the name of the first array in an archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()[0].removesuffix(".npy")
    except (OSError, zipfile.BadZipFile, IndexError):
        return "arr_0"


def _command(code: str) -> str:
    return f"python -c {shlex.quote(code)}"
