"""The folder of a journal in an object store: the objects below ``.oocgemm/`` in the result's zarr array."""

from collections.abc import Collection
from functools import cached_property

from oocgemm.stores.objects.bucket import Bucket


class ObjectFolder:
    """A folder of objects below a URL. No request is made before a method is called.

    Methods raise `StoreError`.
    """

    def __init__(self, url: str, path: str) -> None:
        """Name the folder `path` in the array at a URL."""
        self._url, self._path = url, path

    def __truediv__(self, name: str) -> "ObjectFolder":
        return ObjectFolder(self._url, f"{self._path}/{name}")

    def __str__(self) -> str:
        return f"{self.bucket.url}/{self._path}"

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self._path.rpartition("/")[2]

    @property
    def path(self) -> str:
        """The path below the URL of the array."""
        return self._path

    @cached_property
    def bucket(self) -> Bucket:
        """The objects of the array."""
        return Bucket(self._url)

    def get(self, name: str) -> tuple[bytes, dict[str, str]] | None:
        """Return the content and the version of an object in this folder; None if there is none."""
        found = self.bucket.get(f"{self._path}/{name}")
        return None if found is None else (found[0].tobytes(), found[1])

    def replace(self, name: str, content: bytes, version: dict[str, str] | None) -> dict[str, str]:
        """Replace a version of an object in this folder, or with None create it (`Bucket.replace`)."""
        return self.bucket.replace(f"{self._path}/{name}", content, version)

    def exists(self) -> bool:
        """Return whether the folder contains any object."""
        return bool(self.bucket.listing(self._path, limit=1))

    def array_exists(self) -> bool:
        """Return whether the array has any object outside this folder."""
        # A page of the listing may contain only objects of the journal, which are few.
        return any(not key.startswith(f"{self._path}/") for key in self.bucket.listing(limit=1000))

    def clear(self, keep: Collection[str] = (), *, array: bool) -> None:
        """Delete the objects in this folder, except those in `keep`, and with `array` those of the array.

        The journal itself is deleted last: an interrupted call can then be repeated.
        """
        kept, inside = tuple(f"{self._path}/{name}" for name in keep), f"{self._path}/"
        found = [
            key
            for key in self.bucket.listing("" if array else self._path)
            if not (kept and key.startswith(kept))
        ]
        self.bucket.delete([key for key in found if not key.startswith(inside)])
        self.bucket.delete([key for key in found if key.startswith(inside)])
