"""Add the data type bfloat16 to zarr, which does not have it. ml_dtypes provides the dtype for NumPy.

The data type has the name that the registry of zarr extensions defines (format 3) and TensorStore writes
(format 2).
"""

import importlib
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import zarr.dtype
import zarr.errors
from zarr.dtype import Float16, data_type_registry

from oocgemm.errors import InputError, missing_bfloat16

NAME = "bfloat16"
BIG_ENDIAN = f"big-endian {NAME} is not supported: store it with endian = little"
# This exception class is in zarr.errors in newer versions of zarr, and in zarr.dtype in older ones.
DataTypeValidationError: type[ValueError] = (
    getattr(zarr.errors, "DataTypeValidationError", None) or zarr.dtype.DataTypeValidationError
)


@dataclass(frozen=True, kw_only=True)
class BFloat16(Float16):
    """The zarr data type for bfloat16. It behaves like zarr's float16, but its NumPy dtype is from ml_dtypes.

    Like float16, it has a byte order (`endianness`), by which zarr decides whether to swap bytes. Only
    little-endian elements are supported, because NumPy cannot swap the bytes of ml_dtypes elements.
    """

    _zarr_v3_name: ClassVar[Any] = NAME
    _zarr_v2_names: ClassVar[Any] = (NAME,)

    @classmethod
    def from_native_dtype(cls, dtype: np.dtype[Any]) -> Self:
        if dtype.name != NAME:
            raise DataTypeValidationError(f"{dtype} is not {NAME}")
        return cls()

    def to_native_dtype(self) -> Any:
        """Return the NumPy dtype. Raises `InputError` if ml_dtypes is missing, or for big-endian elements."""
        if self.endianness != "little":
            raise InputError(BIG_ENDIAN)
        try:
            return np.dtype(importlib.import_module("ml_dtypes").bfloat16)
        except ImportError as error:
            raise missing_bfloat16() from error

    @classmethod
    def _from_json_v2(cls, data: Any) -> Self:
        if not cls._check_json_v2(data):
            raise DataTypeValidationError(f"{data!r} is not {NAME}")
        return cls()

    def to_json(self, zarr_format: Any) -> Any:
        return {"name": NAME, "object_codec_id": None} if zarr_format == 2 else NAME

    def cast_scalar(self, data: object) -> Any:
        return data if isinstance(data, self.to_native_dtype().type) else super().cast_scalar(data)

    def from_json_scalar(self, data: Any, *, zarr_format: Any) -> Any:
        if isinstance(data, str) and data.startswith("0x"):  # a fill value given as bits in hexadecimal
            return np.array(int(data, 16), np.uint16).view(self.to_native_dtype())[()]
        return super().from_json_scalar(data, zarr_format=zarr_format)


def register() -> None:
    """Register `BFloat16` with zarr, unless another package has registered a data type of this name."""
    try:
        data_type_registry.match_json(NAME, zarr_format=3)
    except ValueError:
        data_type_registry.register(NAME, BFloat16)
