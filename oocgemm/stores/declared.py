"""What the attributes of an array declare about its elements: packed numbers, and codes of missing elements.

The attributes are those of netCDF's conventions (CF): `scale_factor`, `add_offset`, `_Unsigned`,
`_FillValue` and `missing_value`. They mean the same in every store: in HDF5 datasets, in zarr arrays, also as
xarray writes them, and in the objects of other packages that have attributes.
"""

import base64
import binascii
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from oocgemm.errors import ExecutionError, InputError
from oocgemm.planning.tiling import Range
from oocgemm.stores.base import Array, Matrix, View, package
from oocgemm.values import dataclass

# Attributes whose values stand for missing elements.
MISSING = ("_FillValue", "missing_value")
# netCDF's default fill value of floating-point elements, which were never written.
DEFAULT_FILL = 9.969209968386869e36
# xarray names the dimensions of arrays of zarr format 2 by this attribute. Their fill value is then a code.
DIMENSIONS = "_ARRAY_DIMENSIONS"
# Layers of a dask array that move elements without changing them, by the first words of their names.
_MOVES = (
    *("astype", "block", "broadcast_to", "concatenate", "getitem", "overlap", "rechunk", "repeat", "reshape"),
    *("squeeze", "stack", "swapaxes", "tile", "transpose", "trim"),
)
# The last part of messages. It says how to use the stored numbers as they are.
AS_STORED = "pass decode=False (--no-decode) to take the numbers as they are stored"
# A block is searched for missing elements part by part. A part has about this many elements.
_SEARCHED = 64 << 10


@dataclass(frozen=True)
class Declared:
    """What an array declares about its elements.

    Attributes:
        scale, offset: an element stands for ``stored * scale + offset``. Each is a number, or the value of
            the attribute if this value is not a single number.
        unsigned: whether stored integers are unsigned, although their dtype is signed.
        missing: stored numbers that stand for missing elements, in the array's dtype. NaN is left out, since
            it propagates.
        partly: whether elements of several arrays, or computed ones, are beside packed ones.
    """

    scale: Any = 1
    offset: Any = 0
    unsigned: bool = False
    missing: tuple[Any, ...] = ()
    partly: bool = False

    @property
    def packs(self) -> bool:
        """Whether elements are not the numbers that are stored."""
        return self.scale != 1 or self.offset != 0 or self.unsigned

    def joined(self, other: "Declared") -> "Declared":
        """Return the declaration of an array whose elements come from two arrays, this one and `other`."""
        return Declared(
            other.scale if self.scale == 1 else self.scale,
            other.offset if self.offset == 0 else self.offset,
            unsigned=self.unsigned or other.unsigned,
            missing=tuple(dict.fromkeys(self.missing + other.missing)),
        )


NOTHING = Declared()


def of_attributes(attributes: Mapping[str, Any], dtype: np.dtype[Any], *codes: Any) -> Declared:
    """Return what attributes declare about elements of `dtype`. `codes` also stand for missing elements."""
    stated = {
        name: _value(attributes, name) for name in ("scale_factor", "add_offset", "_Unsigned", *MISSING)
    }
    if not codes and all(value is None for value in stated.values()):
        return NOTHING
    unsigned = _text(stated["_Unsigned"]).lower() == "true"
    missing = dict.fromkeys(code for name in MISSING for code in _codes(stated[name], dtype))
    missing |= dict.fromkeys(code for each in codes for code in _codes(each, dtype))
    return Declared(
        scale=_unless(1, stated["scale_factor"]),
        offset=_unless(0, stated["add_offset"]),
        unsigned=unsigned and dtype.kind == "i",
        missing=tuple(missing),
    )


def of_zarr(zarr_format: int, attributes: Mapping[str, Any], fill: Any, dtype: np.dtype[Any]) -> Declared:
    """Return what a zarr array declares. `fill` is its fill value; None if its metadata has none."""
    is_code = zarr_format == 2 and fill is not None and DIMENSIONS in attributes
    return of_attributes(attributes, dtype, *([fill] if is_code else []))


def of_hdf5(dataset: Any) -> Declared:
    """Return what an HDF5 dataset declares. A netCDF file also has a default code of missing elements."""
    dtype = dataset.dtype.newbyteorder("=")
    is_netcdf = dtype.kind == "f" and "_NCProperties" in dataset.file.attrs
    return of_attributes(dataset.attrs, dtype, *([DEFAULT_FILL] if is_netcdf else []))


def of_object(source: Any, dtype: np.dtype[Any]) -> Declared:  # noqa: PLR0911 - one per package
    kind = package(source)
    if kind == "dask":
        return _of_dask(source, dtype)
    if kind == "h5py" and hasattr(source, "file"):
        return of_hdf5(source)
    if kind == "h5py" and hasattr(source, "_dset"):  # a view that casts a dataset
        return _cast(source._dset, dtype)
    if kind == "zarr":
        found = source.metadata
        return of_zarr(found.zarr_format, source.attrs, found.fill_value, dtype)
    if kind == "tensorstore":
        return _of_tensorstore(source, dtype)
    if kind == "xarray" and not hasattr(source, "attrs"):
        return _of_xarray(source, dtype)
    attributes = getattr(source, "attrs", None)
    if hasattr(source, "ncattrs"):  # a variable of netCDF4
        attributes = {name: source.getncattr(name) for name in source.ncattrs()}
    return of_attributes(attributes, dtype) if isinstance(attributes, Mapping) else NOTHING


def _of_xarray(source: Any, dtype: np.dtype[Any]) -> Declared:
    """Return the declaration of the array that xarray wraps; none if xarray decodes the elements (`func`)."""
    while package(source) == "xarray" and not hasattr(source, "func"):
        inner = source.get_array() if hasattr(source, "get_array") else getattr(source, "array", None)
        if inner is None:
            return NOTHING
        source = inner
    return NOTHING if hasattr(source, "func") else of_object(source, dtype)


def _of_dask(source: Any, dtype: np.dtype[Any]) -> Declared:
    """Return what the sources of a dask array declare; nothing if dask computes other numbers from them."""
    found, left, seen, parts = NOTHING, [source.name], set[str](), 0
    graph = source.__dask_graph__()
    layers, needs = getattr(graph, "layers", {}), getattr(graph, "dependencies", {})
    while left:
        name = left.pop()
        if name in seen or name not in layers:
            continue
        seen.add(name)
        origin = f"original-{name}"
        if not needs[name] or needs[name] == {origin}:
            parts += 1
            for array in _origins(layers[origin] if needs[name] else layers[name]):
                found = found.joined(_cast(array, dtype))
        elif name.startswith(_MOVES):
            left.extend(needs[name])
        else:
            parts += 1
    return replace(found, partly=found.packs and parts > 1)


def _cast(source: Any, dtype: np.dtype[Any]) -> Declared:
    """Return what `source` declares after a cast to a dtype: the codes of missing elements are cast, too."""
    stored = getattr(source.dtype, "numpy_dtype", source.dtype)
    try:
        found = of_object(source, np.dtype(stored).newbyteorder("="))
    except TypeError:  # NumPy has no such dtype
        return of_object(source, dtype)
    with np.errstate(all="ignore"):
        codes = [np.asarray(code).astype(dtype)[()] for code in found.missing]
    return replace(found, missing=tuple(code for code in dict.fromkeys(codes) if not np.isnan(code)))


def _origins(layer: Any) -> Iterator[Any]:
    """Yield the arrays of other packages that a layer of a dask array reads."""
    operands = getattr(layer, "indices", None)
    found = [x for x, axes in operands or () if axes is None]
    if not operands and len(layer) == 1:
        found = list(layer.values())
    for each in found:
        array = getattr(each, "value", each)
        if hasattr(array, "shape") and not isinstance(array, np.ndarray):
            yield array


def _of_tensorstore(source: Any, dtype: np.dtype[Any]) -> Declared:
    with suppress(Exception):  # tensorstore raises exceptions of many types, for other drivers too
        stated = source.spec().to_json()
        metadata, fill = stated["metadata"], None
        attributes = metadata.get("attributes", {})
        if stated["driver"] == "zarr":
            attributes = json.loads(source.kvstore.read(".zattrs").result().value or "{}")
            fill = metadata["fill_value"] if metadata["fill_value"] is None else source.fill_value
        return of_zarr(metadata.get("zarr_format", 0), attributes, fill, dtype)
    return NOTHING


def check_unpacked(matrix: Matrix) -> None:
    """Raise `InputError` if a matrix is packed: its elements are not the numbers that it stores."""
    refuse_packed(place_of(matrix), getattr(matrix, "declared", NOTHING))


def refuse_packed(place: str, found: Declared) -> None:
    """Raise `InputError` if `found`, the attributes of the array at `place`, say that it is packed."""
    for attribute, value, neutral in (("scale_factor", found.scale, 1), ("add_offset", found.offset, 0)):
        if value != neutral:
            raise InputError(
                f"{place} has the attribute {attribute} = {value}, so its numbers are packed: unpack it, "
                f"with xarray or NumPy, and store the values; or {AS_STORED}"
            )
    if found.unsigned:
        raise InputError(
            f"{place} has the attribute _Unsigned, so its numbers are unsigned: pass them as "
            f"unsigned ones, by A.view() of an unsigned dtype; or {AS_STORED}"
        )


def place_of(matrix: Matrix) -> str:
    path = matrix.describe()["path"]
    return matrix.name if path is None else f"{matrix.name}: {str(path).removeprefix('file://')}"


class CompleteMatrix(View):
    """A read-only view of a matrix. Reading a missing element from the view raises an error."""

    def __init__(self, matrix: Matrix, missing: tuple[Any, ...]) -> None:
        """View a matrix. The numbers in `missing`, which have its dtype, stand for missing elements."""
        super().__init__(matrix)
        self.shape, self.layout, self.missing = matrix.shape, matrix.layout, missing

    def accepting(self, code: float) -> Matrix:
        """Return a view of the same matrix in which `code` does not stand for missing elements."""
        left = tuple(value for value in self.missing if value != code)
        return CompleteMatrix(self._matrix, left) if left else self._matrix

    def fingerprint(self) -> dict[str, object] | None:
        found = self._matrix.fingerprint()
        return found and found | {"complete": [str(value) for value in self.missing]}

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        self._matrix.read(rows, cols, out)
        height = max(1, _SEARCHED // max(1, out.shape[1]))
        for top in range(0, len(out), height):
            part = out[top : top + height]
            for value in self.missing:
                if (found := part == value).any():
                    i, j = (int(index) for index in np.argwhere(found)[0])
                    code = str(value)
                    raise ExecutionError(
                        f"the element at [{rows[0] + top + i}, {cols[0] + j}] of {place_of(self)} is {code}, "
                        "which stands for a missing element (_FillValue or missing_value): pass "
                        f"impute='mean' (--impute mean), in gemm and gram a Transform(missing={code}) "
                        f"(--transform missing={code}); or {AS_STORED}"
                    )


def _value(attributes: Mapping[str, Any], name: str) -> Any:
    with suppress(Exception):  # h5py raises exceptions of many types
        return attributes[name]
    return None


def _unless(neutral: int, stated: Any) -> Any:
    """Return the value of an attribute; `neutral` if it has none, or a number that equals `neutral`."""
    numbers = list(_numbers(stated))
    if stated is None or (numbers and all(number == neutral for number in numbers)):
        return neutral
    return numbers[0] if len(numbers) == 1 else tuple(numbers) or str(stated)


def _codes(stated: Any, dtype: np.dtype[Any]) -> Iterator[Any]:
    """Yield the values of an attribute, or a fill value, as elements of `dtype`. NaN is left out."""
    numbers = list(_numbers(stated))
    if dtype.kind == "c" and isinstance(stated, list | tuple) and len(numbers) == 2:
        numbers = [complex(*numbers)]  # as JSON states complex numbers
    for number in numbers:
        if np.isnan(number) or (dtype.kind != "c" and isinstance(number, complex)):
            continue
        if dtype.kind in "iu":
            limits = np.iinfo(dtype)
            if limits.min <= number <= limits.max and number == int(number):
                yield dtype.type(int(number))
        else:
            with np.errstate(all="ignore"):
                yield np.asarray(number).astype(dtype)[()]


def _numbers(stated: Any) -> Iterator[Any]:
    """Yield the numbers in the value of an attribute: a number, a text, or several of them."""
    if isinstance(stated, str | bytes):
        if (number := _from_text(_text(stated))) is not None:
            yield number
    elif isinstance(stated, list | tuple):
        for each in stated:
            yield from _numbers(each)
    elif stated is not None:
        array = np.asarray(stated)
        if array.dtype.kind in "fiuc" or array.dtype.name == "bfloat16":
            wide = array.astype(np.float64) if array.dtype.name == "bfloat16" else array
            yield from wide.ravel().tolist()
        elif array.dtype.kind in "SUO" and array.ndim:
            yield from _numbers(array.ravel().tolist())


def _from_text(text: str) -> float | None:
    """Return the number in a text: a decimal, or the base64 that xarray writes in zarr format 3."""
    with suppress(ValueError):
        return float(text)
    with suppress(ValueError, binascii.Error, struct.error):
        (number,) = struct.unpack("<d", base64.b64decode(text, validate=True))
        return float(number)
    return None


def _text(stated: Any) -> str:
    """Return the value of an attribute as text. The value may be bytes, or an array with one element."""
    if isinstance(stated, Iterable) and not isinstance(stated, str | bytes):
        stated = next(iter(np.asarray(stated).ravel().tolist()), "")
    return stated.decode("ascii", "replace") if isinstance(stated, bytes) else str(stated)
