"""bfloat16 for zarr, which has no such data type itself: the name that the registry of zarr extensions has for it, and
TensorStore in format 2, the elements being those of ml_dtypes."""

import importlib
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import zarr.dtype
import zarr.errors
from zarr.dtype import Float16, data_type_registry

from oocgemm.errors import InputError, missing_bfloat16

NAME = "bfloat16"
BIG_ENDIAN = f"{NAME} is read with its low byte first only: store it with endian = little"
# Where newer zarr has it, and where older.
DataTypeValidationError: type[ValueError] = (
    getattr(zarr.errors, "DataTypeValidationError", None) or zarr.dtype.DataTypeValidationError
)


# zarr tells by the order of bytes whether they must be swapped; NumPy knows the elements in the machine's order only.
@dataclass(frozen=True, kw_only=True)
class BFloat16(Float16):
    """The data type. Everything is as for float16, but the elements."""

    _zarr_v3_name: ClassVar[Any] = NAME
    _zarr_v2_names: ClassVar[Any] = (NAME,)

    @classmethod
    def from_native_dtype(cls, dtype: np.dtype[Any]) -> Self:
        if dtype.name != NAME:
            raise DataTypeValidationError(f"{dtype} is not {NAME}")
        return cls()

    def to_native_dtype(self) -> Any:
        """Raises `InputError` where ml_dtypes is missing, and for elements whose high byte comes first."""
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
        if isinstance(data, str) and data.startswith("0x"):  # its bits
            return np.array(int(data, 16), np.uint16).view(self.to_native_dtype())[()]
        return super().from_json_scalar(data, zarr_format=zarr_format)


def register() -> None:
    """Have zarr know the data type, unless something else has taught it to."""
    try:
        data_type_registry.match_json(NAME, zarr_format=3)
    except ValueError:
        data_type_registry.register(NAME, BFloat16)
