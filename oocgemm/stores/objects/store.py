"""Open and create zarr arrays at URLs of object stores. obstore and zarr are imported only for these."""

import importlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from oocgemm.errors import InputError, NotFoundError
from oocgemm.planning import GemmProblem, Layout
from oocgemm.stores.base import Folder, Matrix, Store, is_path
from oocgemm.stores.durable import SIDECAR
from oocgemm.stores.formats import check_new
from oocgemm.stores.objects.address import REQUESTS, is_object_url, is_web, redacted
from oocgemm.stores.objects.bucket import Bucket
from oocgemm.stores.objects.folder import ObjectFolder
from oocgemm.stores.zarr_matrix import new_zarr_layout

if TYPE_CHECKING:
    from oocgemm.stores.objects.matrix import ObjectMatrix


class ObjectStores(Store):
    """Open and create zarr arrays at URLs of S3, Google Cloud Storage and Azure, or read them by HTTP.

    Arrays at memory:// URLs live in this process, for tests.
    """

    kind = "an object store"

    def matches(self, operand: Any) -> bool:
        return is_path(operand) and is_object_url(str(operand))

    def open(self, name: str, operand: Any, *, writable: bool = False, journal: Path | None = None) -> Matrix:
        if writable and is_web(operand):
            raise self._read_only(redacted(operand))
        return self._opened(name, operand, writable=writable)

    def _opened(self, name: str, url: str, *, writable: bool) -> "ObjectMatrix":
        bucket = Bucket(url)
        from oocgemm.stores.objects.opening import open_array

        return open_array(name, bucket, writable=writable)

    def prepare(self, operand: Any) -> None:
        """Import obstore and zarr."""
        for package in ("obstore", "oocgemm.stores.objects.opening"):
            with suppress(ImportError):
                importlib.import_module(package)

    def exists(self, path: str) -> bool:
        if is_web(path):
            with suppress(NotFoundError):
                self._opened("C", path, writable=False)
                return True
            return False
        return ObjectFolder(path, SIDECAR).array_exists()

    def new_layout(
        self, path: str, problem: GemmProblem, chunks: tuple[int, int] | None, compressor: str | None
    ) -> Layout:
        if is_web(path):
            raise self._read_only(redacted(path))
        check_new("C", redacted(path))
        return new_zarr_layout(problem, chunks, compressor, requests=REQUESTS)

    def create(
        self,
        name: str,
        path: str,
        shape: tuple[int, int],
        dtype: np.dtype[Any],
        chunks: tuple[int, int],
        compressor: str | None,
        *,
        journal: Path | None = None,
    ) -> Matrix:
        bucket = Bucket(path)
        from oocgemm.stores.objects.opening import create_array

        return create_array(name, bucket, shape, dtype, chunks, compressor)

    def journal_folder(self, operand: Any) -> Folder | None:
        return None if is_web(operand) else ObjectFolder(operand, SIDECAR)

    def location(self, operand: Any) -> tuple[str, str | None]:
        return self.kind, redacted(operand)

    def _read_only(self, path: str) -> InputError:
        return InputError(
            f"C at {path}: a web server is read-only; give a URL of an object store, such as "
            "s3://bucket/C.zarr, or a local path"
        )
