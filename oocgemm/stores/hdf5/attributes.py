"""Respect the attributes by which netCDF gives elements another meaning than their numbers."""

from contextlib import suppress
from typing import Any

import numpy as np

from oocgemm.errors import InputError
from oocgemm.stores.base import Array

# Attributes with a value that stands for missing elements.
MISSING = ("_FillValue", "missing_value")
# netCDF's default fill value of floating-point elements, which were never written.
DEFAULT_FILL = 9.969209968386869e36


def check(place: str, found: Any) -> None:
    """Raise `InputError` if the values of a dataset are not the stored numbers: packed, or unsigned."""
    for attribute, neutral in (("scale_factor", 1), ("add_offset", 0)):
        value = _value(found, attribute)
        if value is not None and not np.all(value == neutral):
            raise InputError(
                f"{place} has the attribute {attribute} = {value}, so its numbers are packed: "
                "unpack it, with xarray or NumPy, and store the values"
            )
    unsigned = _value(found, "_Unsigned")
    if found.dtype.kind == "i" and unsigned is not None and str(unsigned).lower().strip("b'") == "true":
        raise InputError(
            f"{place} has the attribute _Unsigned, so its numbers are unsigned: convert it to a "
            "floating-point dtype"
        )


def missing(found: Any, dtype: np.dtype[Any]) -> Array:
    """Return the values of `dtype` that stand for missing elements. NaN is left out: it propagates."""
    values = [_value(found, attribute) for attribute in MISSING]
    if dtype.kind == "f" and "_NCProperties" in found.file.attrs:
        values.append(DEFAULT_FILL)
    known: list[Any] = []
    for value in values:
        if value is not None and np.asarray(value).dtype.kind in "fiuc":
            with np.errstate(all="ignore"):
                known += np.asarray(value).astype(dtype).ravel().tolist()
    found_values = np.asarray(known, dtype)
    return np.unique(found_values[~np.isnan(found_values)])


def _value(found: Any, attribute: str) -> Any:
    """Return the value of an attribute; None if the dataset does not have it, or it cannot be read."""
    with suppress(Exception):  # h5py raises exceptions of many types
        return found.attrs[attribute]
    return None
