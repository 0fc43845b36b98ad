"""Open an HDF5 dataset with h5py, check that it can be read, and choose the code that reads it.

h5py reads only metadata, and the file is closed again. Then oocgemm reads the elements by their offsets in
the file: like a .npy file if they are contiguous, else chunk by chunk. h5py, under its global lock, reads
datasets with filters that oocgemm does not know, and datasets whose stored elements must be converted or are
inside the metadata.
"""

import errno
import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from oocgemm.errors import ExecutionError, InputError, NotFoundError
from oocgemm.stores import declared
from oocgemm.stores.base import Matrix, checked
from oocgemm.stores.boxes import BoxMatrix
from oocgemm.stores.files import RefusedFileError, check_regular, open_regular, worth_caching
from oocgemm.stores.folding import Fold, Folding, Rectangles, rectangles
from oocgemm.stores.formats import MARK, is_sparse
from oocgemm.stores.hdf5 import has_signature
from oocgemm.stores.hdf5_chunks import Fill, HDF5Chunks, HDF5Matrix, Index, Reader, listed
from oocgemm.stores.hdf5_filters import Pipeline, pipeline
from oocgemm.stores.lazy import LazyMatrix, axis_names
from oocgemm.stores.npy import NpyMatrix, fold_lines
from oocgemm.stores.sparse import of_group

with suppress(ImportError):  # registers filters with h5py, which reads datasets that have them
    import hdf5plugin  # noqa: F401

# Maximum number of links and groups in the name of a dataset.
_MAX_STEPS = 100
# Texts of the warning that h5py reads a dataset: the reason, and the remedy.
_FORMAT = "its elements are stored in a format that NumPy does not have: convert them to a dtype of NumPy"
_BOXES = "its chunks are no rows and columns of the matrix: make the last of the folded axes whole in a chunk"
_COMPACT = "its elements are stored inside the metadata: copy it into a contiguous dataset"
_OTHERWISE = "store it without filters, or with gzip, blosc, zstd, lz4 or bitshuffle"
# At most this many chunks at the edges are compared with those that h5py reads.
_EDGES = 8
# The first bytes of a file in netCDF's classic formats.
_CLASSIC = b"CDF"


def open_dataset(name: str, path: str, dataset: str, folding: Folding | None = None) -> Matrix:
    """Open a dataset of a local file, or a sparse matrix in a group. Raises `InputError`.

    With `folding`, a dataset may have any number of dimensions. Warns if h5py has to read the elements.
    """
    file = _opened(name, path)
    why = ""
    try:
        _check_writers(name, file, path)
        matrix, why = _matrix(name, file, path, dataset, folding)
    except InputError:
        raise
    except Exception as error:  # h5py raises exceptions of many types
        raise InputError(
            f"{name}: {path}{MARK}{dataset} cannot be opened, its metadata may be damaged: "
            f"{_first_line(error)}"
        ) from error
    finally:
        if not why:
            file.close()
    if why:
        warnings.warn(
            f"{name} at {path}{MARK}{dataset} is read by h5py, in one thread at a time, since {why}",
            stacklevel=2,
        )
    return matrix


def _matrix(
    name: str, file: "h5py.File", path: str, dataset: str, folding: Folding | None
) -> tuple[Matrix, str]:
    """Return a dataset or sparse matrix, and the reason why h5py reads it, or "" if it does not."""
    found = _dataset(name, file, path, dataset)
    if isinstance(found, h5py.Dataset):
        return _of_dataset(name, found, path, dataset, folding)
    if folding is not None:
        raise InputError(
            f"{name}: {path}{MARK}{dataset} is a sparse matrix: drop rows, cols and isel (--rows, ...)"
        )
    whys = list[str]()

    def part(member: str) -> Matrix:
        matrix, why = _of_dataset(name, _DatasetRow(found[member]), path, f"{dataset}/{member}")
        whys.append(why)
        return matrix

    matrix = of_group(name, f"{path}{MARK}{dataset}", found, part)
    return matrix, next(filter(None, whys), "")


def _of_dataset(
    name: str,
    found: "h5py.Dataset | _DatasetRow",
    path: str,
    dataset: str,
    folding: Folding | None = None,
) -> tuple[HDF5Matrix, str]:
    place = f"{name}: {path}{MARK}{dataset}"
    _check_here(place, found)
    if found.shape is None:
        raise InputError(f"{place} is empty: it has no elements and no shape")
    facts = declared.of_hdf5(found)
    fold = None if folding is None else folding.fold(place, found.shape, axis_names(found))
    extents = found.shape if fold is None else fold.shape
    shape, dtype = checked(name, extents, found.dtype, facts, axis_names(found))
    reader, why = _reader(name, found, path, shape) if fold is None else _folded(name, found, path, fold)
    described: dict[str, object] = {"direct": not why, "chunks": list(found.chunks or ())}
    if isinstance(reader, HDF5Chunks):
        described["codecs"] = [each.name for each in reader.pipeline.filters]
    if why:
        described["through"] = "h5py"
    stored = f"{shape} {found.dtype.str} in chunks {found.chunks}"
    if fold is not None:
        stored += f" of {found.shape} folded {fold.stated}"
    matrix = HDF5Matrix(
        *(name, path, dataset, shape, dtype, reader),
        stored=stored,
        declared=facts,
        described=described,
    )
    return matrix, why


class _DatasetRow:
    """A dataset of one dimension as a dataset of one row, with those members of h5py's that are used here."""

    def __init__(self, dataset: "h5py.Dataset") -> None:
        self._dataset, self.shape = dataset, (1, int(dataset.shape[0]))
        self.chunks = dataset.chunks and (1, int(dataset.chunks[0]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def __getitem__(self, at: tuple[slice, slice]) -> Any:
        return self._dataset[at[1]][None]


class _FoldedDataset:
    """A dataset whose chunks are rectangles of a folded matrix, with the members that are used here."""

    def __init__(self, name: str, dataset: "h5py.Dataset", fold: Fold, found: Rectangles) -> None:
        self._dataset, self._found, self._stored = dataset, found, dataset.chunks
        self.shape, self.chunks = fold.shape, found.chunk
        self._boxes = BoxMatrix(name, fold, dataset, chunk=dataset.chunks)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def __getitem__(self, at: tuple[slice, slice]) -> Any:
        (top, end), (left, right) = (
            slice(x.start, x.stop).indices(n)[:2] for x, n in zip(at, self.shape, strict=True)
        )
        out = np.empty((end - top, right - left), self._boxes.dtype)
        self._boxes.read((top, end), (left, right), out)
        return out.astype(self._dataset.dtype)

    def number(self, offset: tuple[int, ...]) -> int:
        """Return the number of the chunk at an offset, of all of the dataset; -1 if there is none."""
        found = 0
        for at, size, extent in zip(offset, self._stored, self._dataset.shape, strict=True):
            if at % size or not 0 <= at < extent:
                return -1
            found = found * -(-extent // size) + at // size
        return found

    def place(self, offset: tuple[int, ...]) -> tuple[int, int] | None:
        """Return the first row and column of the chunk at an offset; None if it is not used."""
        found = self._found.place([at // size for at, size in zip(offset, self._stored, strict=True)])
        return found and (found[0] * self.chunks[0], found[1] * self.chunks[1])

    def corner(self, place: tuple[int, int]) -> tuple[int, ...]:
        """Return the offset in the dataset of a chunk of the matrix's grid."""
        numbers = zip(self._found.numbers, self._stored, strict=True)
        return tuple(number(place) * size for number, size in numbers)


def _opened(name: str, path: str) -> "h5py.File":
    try:
        check_regular(path)
        return h5py.File(path, "r")
    except Exception as error:  # h5py raises exceptions of many types
        reason = _first_line(error)
        if isinstance(error, RefusedFileError):
            problem = f"cannot be opened: {error.strerror}"
        elif isinstance(error, PermissionError):
            problem = "cannot be opened: permission denied"
        elif isinstance(error, OSError) and error.errno in (errno.EAGAIN, errno.EACCES):
            problem = "is open in a process that writes to it: close it there, and try again"
        elif "already open for write" in reason:
            problem = (
                "is marked as open for writing: close it in the process that writes to it, or if that was "
                f"killed, check the file and run h5clear --status {path}"
            )
        elif not has_signature(path):
            problem = "is not an HDF5 file"
            if path.lower().endswith(".mat"):
                problem += ": save it in MATLAB with the option -v7.3"
            with suppress(OSError), open(path, "rb", opener=open_regular) as file:
                if file.read(len(_CLASSIC)) == _CLASSIC:
                    stem = os.path.splitext(path)[0]
                    problem = (
                        "is in netCDF's classic format, not in netCDF4: convert it by "
                        f"nccopy -k nc4 {path} {stem}.nc4 and pass {stem}.nc4{MARK}NAME"
                    )
        else:
            problem = f"cannot be opened, it may be truncated or damaged: {reason}"
        raise InputError(f"{name}: {path} {problem}") from error


def _check_writers(name: str, file: "h5py.File", path: str) -> None:
    """Raise `InputError` if this process has the file open for writing: some data may not be in the file."""
    if file.mode != "r":
        raise InputError(f"{name}: {path} is open for writing in this process: close that h5py.File first")


def _dataset(name: str, file: "h5py.File", path: str, dataset: str) -> "h5py.Dataset | h5py.Group":
    """Return the named dataset, or a group that contains a sparse matrix.

    Raises `InputError`, which lists the file's datasets, if there is none.
    """
    if not dataset.strip("/"):
        raise InputError(f"{name}: {path} is an HDF5 file, which can contain many arrays: {hint(file, path)}")
    if ".." in dataset.split("/") or "\0" in dataset:
        raise InputError(f"{name}: {dataset!r} is not the name of a dataset: {hint(file, path)}")
    try:
        found = file[_resolved(name, file, path, dataset)]
    except KeyError as error:
        raise NotFoundError(f"{name}: there is no dataset {dataset} in {path}: {hint(file, path)}") from error
    if isinstance(found, h5py.Dataset):
        return found
    kind = "a group"
    if isinstance(found, h5py.Group) and is_sparse(found):
        return found
    if isinstance(found, h5py.Datatype):
        kind = "a type"
    raise InputError(f"{name}: {path}{MARK}{dataset} is {kind}, not a dataset: {hint(file, path)}")


def _resolved(name: str, file: "h5py.File", path: str, dataset: str) -> str:
    """Return the path of a dataset without soft links. Raises `InputError` for a link to another file."""
    found, left = "", [part for part in dataset.split("/") if part not in ("", ".")]
    for _ in range(_MAX_STEPS):
        if not left:
            return found
        step = f"{found}/{left.pop(0)}"
        link = file.get(step, getlink=True)
        if isinstance(link, h5py.ExternalLink):
            raise InputError(
                f"{name}: {path}{MARK}{dataset} is a link to another file: "
                f"pass {link.filename}{MARK}{link.path}, where the file is relative to that of the link"
            )
        if isinstance(link, h5py.SoftLink):
            left = [part for part in link.path.split("/") if part not in ("", ".")] + left
            found = "" if link.path.startswith("/") else found
        else:
            found = step
    raise InputError(f"{name}: {path}{MARK}{dataset} has too many links: pass the name that they lead to")


def _reader(name: str, found: Any, path: str, shape: tuple[int, int]) -> tuple[Reader, str]:
    """Return the reader of a dataset, and the reason why it is h5py, or "" for another reader."""
    place = f"{name}: {path}{MARK}{found.name}"
    plist = found.id.get_create_plist()
    layout = plist.get_layout()
    filters = [plist.get_filter(number) for number in range(plist.get_nfilters())]
    dtype, fill = found.dtype, _fill(found, plist)
    if found.id.get_type() != h5py.h5t.py_create(dtype):
        return LazyMatrix(name, found), _FORMAT
    if layout == h5py.h5d.COMPACT:
        return LazyMatrix(name, found), _COMPACT
    if layout == h5py.h5d.CONTIGUOUS:
        return _contiguous(place, name, found, path, fill), ""
    steps = pipeline([(number, values, text) for number, _, values, text in filters], _chunk_bytes(found))
    unavailable = [step for step in steps.filters if not h5py.h5z.filter_avail(step.number)]
    try:
        supported = steps.supported
    except ValueError as error:
        raise InputError(f"{place} cannot be read: {error}: the file is damaged") from error
    if not supported and unavailable:
        step = unavailable[0]
        raise InputError(
            f"{place} needs the filter {step.name} (number {step.number}), which is not installed: "
            "pip install hdf5plugin"
        )
    names = ", ".join(step.name for step in steps.filters)
    if not supported:
        return LazyMatrix(name, found), f"oocgemm does not decode its filters ({names}): {_OTHERWISE}"
    index, why = listed(found, path)
    if not why:
        reader = _chunked(place, found, path, shape, steps, index, fill)
        if not isinstance(reader, HDF5Chunks) or _edges_are_right(found, reader):
            return reader, ""
        why = f"chunks at its edges are stored without its filters ({names}): store all with them"
    return LazyMatrix(name, found), why


def _folded(name: str, found: "h5py.Dataset", path: str, fold: Fold) -> tuple[Reader, str]:
    """Return the reader of a matrix that is folded from a dataset, and the reason why it is h5py, or ""."""
    offset = found.id.get_offset()
    if found.id.get_type() == h5py.h5t.py_create(found.dtype) and offset is not None and found.size:
        end = offset + found.size * found.dtype.itemsize
        if end <= os.path.getsize(path):
            lines = fold_lines(name, Path(path), fold, found.shape, found.dtype, offset)
            if lines is not None:
                return lines, ""
    why, shapes = _BOXES, None if found.chunks is None else rectangles(fold, found.chunks)
    if shapes is not None and shapes.order == "C":
        reader, why = _reader(name, _FoldedDataset(name, found, fold, shapes), path, fold.shape)
        if not why:
            return reader, ""
    whole = found.shape if found.chunks is None else found.chunks
    return BoxMatrix(name, fold, found, chunk=whole), why


def _check_here(place: str, found: "h5py.Dataset") -> None:
    """Raise `InputError` if the elements of a dataset are in other files, or in other datasets."""
    plist = found.id.get_create_plist()
    is_virtual = plist.get_layout() == h5py.h5d.VIRTUAL
    if is_virtual or plist.get_external_count():
        where = "other datasets (it is virtual)" if is_virtual else "another file"
        raise InputError(f"{place} has its elements in {where}: copy it into a dataset of its own, with h5py")


def _contiguous(place: str, name: str, found: "h5py.Dataset", path: str, fill: Any) -> Reader:
    """Return the reader of a contiguous dataset, which reads the dataset like a .npy file."""
    offset = found.id.get_offset()
    # The offset of a dataset without storage is undefined: in a file with a user block, it is some number.
    if offset is None or not found.id.get_storage_size():
        return Fill(fill)
    size, end = os.path.getsize(path), offset + found.size * found.dtype.itemsize
    if end > size:
        raise InputError(f"{place} ends at byte {end}, and the file has {size} bytes: it is truncated")
    return NpyMatrix(name, Path(path), found.shape, found.dtype, offset)


def _chunked(
    place: str,
    found: "h5py.Dataset",
    path: str,
    shape: tuple[int, int],
    steps: Pipeline,
    index: Index,
    fill: Any,
) -> Reader:
    if not len(index.numbers):
        return Fill(fill)
    size = os.path.getsize(path)
    ends = index.offsets + index.sizes
    at = int(ends.argmax())
    if ends[at] > size:
        i, j = index.place(at)
        raise InputError(
            f"{place} is truncated: its chunk at [{i * found.chunks[0]}, {j * found.chunks[1]}] ends at byte "
            f"{ends[at]}, and the file has {size} bytes"
        )
    return HDF5Chunks(
        path=Path(path),
        shape=shape,
        chunk=(int(found.chunks[0]), int(found.chunks[1])),
        dtype=found.dtype,
        pipeline=steps,
        index=index,
        fill=fill,
        past_cache=not worth_caching(int(index.sizes.sum(dtype=np.int64))),
    )


def _edges_are_right(found: "h5py.Dataset", reader: HDF5Chunks) -> bool:
    """Return whether `reader` and h5py read equal elements from chunks that extend beyond the dataset."""
    index, (height, width) = reader.index, reader.chunk
    if not reader.pipeline.filters:
        return True
    i, j = np.divmod(index.numbers, index.grid[1])
    beyond = ((i + 1) * height > found.shape[0]) | ((j + 1) * width > found.shape[1])
    for at in np.flatnonzero(beyond & (index.sizes == reader.pipeline.size) & (index.masks == 0))[:_EDGES]:
        top, left = int(i[at]) * height, int(j[at]) * width
        expected = found[top : top + height, left : left + width]
        out = np.empty(expected.shape, expected.dtype.newbyteorder("="))
        try:
            reader.read((top, top + len(out)), (left, left + out.shape[1]), out)
        except ExecutionError:
            return False
        if out.tobytes() != expected.astype(out.dtype).tobytes():
            return False
    return True


def _chunk_bytes(found: "h5py.Dataset") -> int:
    return int(found.chunks[0]) * int(found.chunks[1]) * int(found.dtype.itemsize)


def _fill(found: "h5py.Dataset", plist: Any) -> Any:
    """Return the fill value of a dataset; None if it has none."""
    defined = plist.fill_value_defined() != h5py.h5d.FILL_VALUE_UNDEFINED
    return found.fillvalue if defined else None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# A message names at most this many datasets.
MAX_LISTED = 8


def hint(file: "h5py.File", path: str) -> str:
    """Return the last part of a message: which datasets of two dimensions and of numbers a file has."""
    found: list[str] = []

    def look(name: str, thing: Any) -> bool | None:
        with suppress(Exception):  # a damaged dataset is not listed
            if isinstance(thing, h5py.Dataset) and len(thing.shape or ()) == 2 and thing.dtype.kind in "fciu":
                found.append(f"{path}{MARK}/{name} ({thing.shape[0]} x {thing.shape[1]} {thing.dtype})")
        return True if len(found) > MAX_LISTED else None

    with suppress(Exception):  # h5py raises exceptions of many types for damaged metadata
        file.visititems(look)
    if not found:
        return "it has no dataset of two dimensions with numbers"
    more = ", and more" if len(found) > MAX_LISTED else ""
    return f"pass one of {', '.join(found[:MAX_LISTED])}{more}"
