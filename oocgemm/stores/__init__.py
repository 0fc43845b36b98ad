"""Open and create the matrices of a product: files, NumPy arrays, lazy arrays, and what plugins add."""

from oocgemm.stores.arrays import ArrayMatrix, by_rows, is_mapped, is_plain, memory, span
from oocgemm.stores.base import BATCH_BYTES, Array, Matrix, Store, is_path, pieces, transient
from oocgemm.stores.durable import FULL, check_new, no_room, warn_of_folders
from oocgemm.stores.formats import check_dtypes
from oocgemm.stores.opening import (
    create_output,
    load,
    load_without_cupy,
    new_layout,
    open_matrix,
    open_pair,
    record_uplo,
    reserve,
)
from oocgemm.stores.places import (
    c_exists,
    check_apart,
    clear,
    exists,
    located,
    overlap,
    place,
    remove,
    same_place,
    sidecar,
)
from oocgemm.stores.zarr_matrix import COMPRESSORS, check_compressor

__all__ = [
    "BATCH_BYTES",
    "COMPRESSORS",
    "FULL",
    "Array",
    "ArrayMatrix",
    "Matrix",
    "Store",
    "by_rows",
    "c_exists",
    "check_apart",
    "check_compressor",
    "check_dtypes",
    "check_new",
    "clear",
    "create_output",
    "exists",
    "is_mapped",
    "is_path",
    "is_plain",
    "load",
    "load_without_cupy",
    "located",
    "memory",
    "new_layout",
    "no_room",
    "open_matrix",
    "open_pair",
    "overlap",
    "pieces",
    "place",
    "record_uplo",
    "remove",
    "reserve",
    "same_place",
    "sidecar",
    "span",
    "transient",
    "warn_of_folders",
]
