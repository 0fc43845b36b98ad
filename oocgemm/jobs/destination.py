"""The destination of C: a new ndarray, an array of the caller, a .npy file, a local zarr array, or a URL."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from math import isqrt, prod
from typing import Any

from oocgemm import stores
from oocgemm.errors import InputError, warn_of_data
from oocgemm.planning import GemmProblem, Layout
from oocgemm.planning.tiling import Shape
from oocgemm.planning.units import format_size
from oocgemm.stores import Matrix
from oocgemm.stores.base import Folder
from oocgemm.stores.gcta import SUFFIX as GRM
from oocgemm.stores.objects import is_object_url
from oocgemm.system import cache

# A new C of at least this many chunks gets a warning if each has fewer bytes than SMALL_CHUNK.
MANY_FILES, SMALL_CHUNK = 2000, 64 << 10


class Kind(StrEnum):
    """The kind of place where C is stored."""

    NEW = "new"  # an ndarray that the run allocates
    ARRAY = "array"  # an array that the caller passed
    NPY = "npy"  # or a .grm.bin file
    ZARR = "zarr"
    REMOTE = "remote"


@dataclass(frozen=True)
class Destination:
    """Where the result C is stored, parsed from what the caller passed as C.

    `path` is a path or a URL. `array` is set if the caller passed an array instead.
    """

    kind: Kind
    path: str = ""
    array: Any = None

    @classmethod
    def parse(cls, given: Any) -> "Destination":
        """Classify what a caller passed as C. Raises `InputError` for a string that cannot be a path."""
        given = stores.located("C", given)
        if given is None:
            return cls(Kind.NEW)
        if not stores.is_path(given):
            return cls(Kind.ARRAY, array=given)
        if "://" in given:
            return cls(Kind.REMOTE, given)
        return cls(Kind.NPY if given.endswith((".npy", GRM)) else Kind.ZARR, given)

    @property
    def source(self) -> Any:
        """The path, URL or array; None for a new ndarray."""
        return self.path or self.array

    @property
    def journal_folder(self) -> Folder | None:
        """The folder for the journal of a run that writes C here; None if C can have no journal."""
        return stores.sidecar(self.source)

    def exists(self) -> bool:
        """Tell whether the caller passed an array, or anything exists at the path."""
        return self.kind is Kind.ARRAY or (bool(self.path) and stores.exists(self.path))

    def is_path_in_use(self) -> bool:
        """Tell whether anything exists at the path. An array that the caller passed has no path."""
        return self.kind is not Kind.ARRAY and self.exists()

    def check_new(self, problem: GemmProblem) -> None:
        """Raise `InputError` if C would be created in a format that cannot store its dtype."""
        if self.kind is Kind.NPY and problem.c_dtype == "bfloat16":
            raise InputError(
                f"C at {self.path} would have dtype bfloat16, which .npy files cannot store: pass "
                "out_dtype='float32' (--out-dtype float32), or the path of a zarr array"
            )

    def check_place(self, wanted: Callable[[], int]) -> None:
        """Raise `InputError` if a new local C cannot be created, or if its disk has too few free bytes.

        `wanted` returns how many it needs at least.
        Call this before operands are read. Whether an existing C can be written is found when it is opened.
        """
        if self.kind in (Kind.NPY, Kind.ZARR) and not self.exists():
            stores.check_new("C", self.path, wanted())

    def check_apart(self, operand: Matrix) -> None:
        """Raise `InputError` if a new C would be created inside an operand."""
        if self.path:
            stores.check_apart("C", self.path, operand)

    def layout(self, problem: GemmProblem, chunks: tuple[int, int] | None, compressor: str | None) -> Layout:
        """Return the layout of a new C in storage. If `chunks` is None, the planner chooses them."""
        return stores.new_layout(self.path or None, problem, chunks, compressor)

    def warn_of_new(self, shape: Shape, itemsize: int, chunks: Shape | None) -> None:
        """Issue a `DataWarning` if creating C makes folders, or very many files because of the `chunks`.

        `shape` is that of C, and `chunks` are those that the caller has chosen.
        """
        if self.kind not in (Kind.NPY, Kind.ZARR):
            return
        stores.warn_of_folders("C", self.path)
        if chunks is not None:
            files = prod(-(-extent // chunk) for extent, chunk in zip(shape, chunks, strict=True))
            size = prod(chunks) * itemsize
            if files >= MANY_FILES and size < SMALL_CHUNK:
                side = isqrt(SMALL_CHUNK // itemsize)
                warn_of_data(
                    f"C: chunks of {chunks[0]} x {chunks[1]} make {files} files of {format_size(size)}, "
                    f"which are slow to write and to read: pass larger chunks, such as {side}x{side}, or "
                    "drop chunks (--chunks)"
                )

    def file_systems(self) -> set[str]:
        """Return a set with the id of the file system that stores a new C.

        For a URL of zarr, the id is "elsewhere". The set is empty if C is in memory or in an object store,
        which has rates of its own.
        """
        if not self.path:
            return set()
        if self.kind is Kind.REMOTE:
            return set() if is_object_url(self.path) else {"elsewhere"}
        return {cache.file_system(self.path)}

    def is_same_path(self, path: str) -> bool:
        """Tell whether a local path is that of C, after symbolic links are resolved."""
        return bool(self.path) and os.path.realpath(path) == os.path.realpath(self.path)

    def __str__(self) -> str:
        return self.path or "memory"
