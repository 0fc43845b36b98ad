"""Objects: their URLs, the requests for them, the folder of a journal, and the store that opens zarr arrays.

Requests are made by the package obstore, which repeats a request that fails with HTTP status 5xx, 429 or 408,
or with a broken or timed-out connection, also amid a response. An error reaches this module only when obstore
has given up. obstore and zarr are imported only for operands at such URLs.
"""

import importlib
import os
import re
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from oocgemm.errors import ExecutionError, InputError, NotFoundError
from oocgemm.planning import GemmProblem, Layout
from oocgemm.stores.base import Array, ChangedError, Folder, Matrix, NewArray, Store, is_path
from oocgemm.stores.capabilities import SIDECAR
from oocgemm.stores.folding import Folding
from oocgemm.stores.formats import check_new_format
from oocgemm.stores.zarr_matrix import new_zarr_layout

if TYPE_CHECKING:
    from urllib.parse import SplitResult

    from oocgemm.stores.object_matrix import ObjectMatrix


# Requests in flight per operand, unless the user chooses another number.
REQUESTS = 64
WEB = ("http", "https")
SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl", *WEB, "memory")
_URL = re.compile(r"\b([a-z][a-z0-9]*)://([^\s'\"<>]*)")
# An error of obstore begins with a line that states the request and the status. Then come the response body
# as XML, and the error once more in another form. Messages show the first line and these elements of the XML.
_BODY = re.compile(r"<(Code|Message)>([^<]*)</")


def is_object_url(text: str) -> bool:
    """Return whether a path is a URL that the package obstore opens."""
    return text.partition("://")[0] in SCHEMES and "://" in text


def is_web(url: str) -> bool:
    """Return whether a URL is read by plain HTTP. Such a place is read-only, and cannot be listed."""
    return url.partition("://")[0] in WEB


def check_url(name: str, url: str) -> None:
    """Raise `InputError` for a URL with credentials, or with a query that its store would ignore."""
    parts = _parsed(url) if is_object_url(url) else None
    if parts is None:
        return
    if "@" in parts.netloc and parts.scheme not in ("abfs", "abfss", "adl", "azure"):
        raise InputError(
            f"{name}: {redacted(url)} contains a user name or password, which is not used: drop it, and set "
            "the environment variables of the store, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if parts.fragment or (parts.query and not is_web(url)):
        raise InputError(f"{name}: {redacted(url)} has a query or fragment, which is not used: drop it")


def redacted(url: str) -> str:
    """Return a URL without user name, password, query, fragment and trailing slashes; other texts unchanged.

    >>> redacted("https://me:secret@host/a.zarr/?sig=secret")
    'https://host/a.zarr'
    >>> redacted("abfss://container@account.dfs.core.windows.net/x"), redacted("dir/a.zarr")
    ('abfss://container@account.dfs.core.windows.net/x', 'dir/a.zarr')
    """
    if "://" not in url:
        return url
    scheme, _, rest = url.partition("://")
    place = re.split(r"[?#]", rest, maxsplit=1)[0]
    host, slash, path = place.partition("/")
    user, at, server = host.rpartition("@")
    # In Azure's addresses, the part before "@" is the container. A colon there begins a password.
    host = host if at and scheme in ("abfs", "abfss", "adl", "azure") and ":" not in user else server
    return f"{scheme}://{host}{slash}{path}".rstrip("/")


def scrubbed(text: str) -> str:
    """Return the message of an error without credentials: its first line, with all URLs redacted.

    >>> scrubbed("GET http://h/a?sig=x in 3ms - 403 Forbidden: <E><Code>No</Code></E>")
    'GET http://h/a in 3ms - 403 Forbidden: No'
    """
    text = text.partition("\n\nDebug source:")[0]
    start, bracket, body = text.partition("<")
    start = _URL.sub(lambda found: redacted(found[0]), " ".join(start.split()))
    found = [value for _, value in _BODY.findall(bracket + body)]
    return " ".join([start, *found]).strip().rstrip(":")


def _parsed(url: str) -> "SplitResult | None":
    from urllib.parse import urlsplit

    try:
        return urlsplit(url)
    except ValueError:  # for example an invalid IPv6 address: the store refuses it
        return None


# How long obstore repeats a failed request: at most RETRIES times, and at most for RETRY_SECONDS. Before the
# first retry it waits for FIRST_WAIT seconds, before each further one twice as long, up to LONGEST_WAIT, all
# with jitter.
RETRIES, RETRY_SECONDS = 10, 180.0
FIRST_WAIT, LONGEST_WAIT = 0.1, 15.0
# A body is copied to its destination in parts of at least this many bytes, while the rest is in transit.
STREAMED_BYTES = 1 << 20

# The arrays at memory:// URLs, which live as long as the process.
_in_memory: dict[str, Any] = {}
_creating = threading.Lock()


class StoreError(ExecutionError, OSError):
    """Raised for a request to an object store that failed although it was repeated."""


class DeniedError(StoreError):
    """Raised for a request that the object store does not allow."""


class Bucket:
    """The objects whose keys begin with the path of a URL. Keys are relative to that path.

    Methods raise `StoreError`, whose message names the URL and contains no credentials.
    """

    def __init__(self, url: str) -> None:
        """Open a URL, without a request. Raises `InputError` for an invalid URL."""
        self.url = redacted(url)
        try:
            self.store = _opened(url)
        except ImportError as error:
            raise InputError(
                f"{self.url} needs a package that is not installed ({error}): pip install 'oocgemm[objects]'"
            ) from error
        except Exception as error:  # obstore raises exceptions of many types
            raise InputError(f"{self.url} cannot be opened: {scrubbed(str(error))}") from error
        self._api = import_module("obstore")

    def get(self, key: str) -> tuple[Array, dict[str, str]] | None:
        """Return an object as an array of bytes, and its version for `replace`; None if there is none."""
        try:
            with self.errors(key):
                found = self._api.get(self.store, key)
                content = np.frombuffer(found.bytes(), np.uint8)
        except FileNotFoundError:
            return None
        return content, _version(found.meta)

    def size(self, key: str) -> int | None:
        """Return the size of an object in bytes; None if there is none.

        This is a GET whose body is not read: some web servers answer no HEAD.
        """
        try:
            with self.errors(key):
                return int(self._api.get(self.store, key).meta["size"])
        except FileNotFoundError:
            return None

    def get_part(self, key: str, start: int, size: int) -> Array:
        """Return `size` bytes from `start` on, or if `start` is -1 the last `size` bytes of the object.

        Raises `FileNotFoundError` if there is no object, and `EOFError` if it is too short.
        """
        with self.errors(key):
            if start < 0 and type(self.store).__name__ == "AzureStore":  # which has no ranges from the end
                start = max(0, self._api.head(self.store, key)["size"] - size)
            span = {"suffix": size} if start < 0 else (start, start + size)
            found = self._api.get(self.store, key, options={"range": span})
            content = np.frombuffer(found.bytes(), np.uint8)
        self._check_size(key, content.nbytes, size)
        return content

    def read_into(self, key: str, start: int, out: Array) -> None:
        """Fill `out` from byte `start` on. Raises `FileNotFoundError`, or `EOFError` for a short object."""
        filled = 0
        with self.errors(key):
            found = self._api.get(self.store, key, options={"range": (start, start + out.nbytes)})
            for part in found.stream(min_chunk_size=STREAMED_BYTES):
                out[filled : filled + len(part)] = np.frombuffer(part, np.uint8)
                filled += len(part)
        self._check_size(key, filled, out.nbytes)

    def put(self, key: str, content: Array) -> str:
        """Create or replace an object atomically and durably. Return its ETag."""
        return _tag(self._put(key, content, None))

    def replace(self, key: str, content: bytes, version: dict[str, str] | None) -> dict[str, str]:
        """Replace the given version of an object, or with None create it. Return the new version.

        If obstore repeats a PUT that had succeeded, the condition of the PUT no longer holds. This method
        then reads the object: if it has this `content`, which must be unique, the PUT had succeeded. Raises
        `ChangedError` if another process has changed the object.
        """
        data = np.frombuffer(content, np.uint8)
        try:
            done = self._put(key, data, "create" if version is None else version)
        except FileNotFoundError:
            raise ChangedError(f"{self.url}/{key} was deleted by another process") from None
        except ChangedError:
            found = self.get(key)
            if found is None or found[0].tobytes() != content:
                raise
            return found[1]
        return _version(done)

    def listing(self, below: str = "", limit: int | None = None) -> dict[str, tuple[int, str]]:
        """Return size and ETag, by key, of all objects in the folder `below`, or of about `limit` of them."""
        found: dict[str, tuple[int, str]] = {}
        with self.errors(below):
            for page in self._api.list(self.store, prefix=below or None, chunk_size=1000):
                found.update((one["path"], (one["size"], _tag(one))) for one in page)
                if limit is not None and len(found) >= limit:
                    break
        return found

    def keys(self) -> Iterator[str]:
        """Yield the keys of all objects."""
        with self.errors(""):
            for page in self._api.list(self.store, chunk_size=1000):
                yield from (one["path"] for one in page)

    def exists(self, key: str) -> bool:
        """Return whether an object exists. Return False if the request fails: a web server may refuse it."""
        with suppress(FileNotFoundError, StoreError):
            self.tag(key)
            return True
        return False

    def tag(self, key: str) -> str:
        """Return the ETag of an object. Raises `FileNotFoundError`."""
        with self.errors(key):
            return _tag(self._api.head(self.store, key))

    def copy(self, source: str, target: str) -> None:
        """Copy an object within the store. Raises `FileNotFoundError`."""
        with self.errors(source):
            self._api.copy(self.store, source, target)

    def delete(self, keys: list[str]) -> None:
        """Delete objects. A missing object is no error."""
        try:
            with self.errors(""):
                if keys:
                    self._api.delete(self.store, keys)
        except FileNotFoundError:  # Google or Azure raise this, and may not have deleted the other objects
            for key in keys if len(keys) > 1 else ():
                self.delete([key])

    def _put(self, key: str, content: Array, mode: Any) -> Any:
        with self.errors(key):
            # One PUT, since the parts of an interrupted multipart upload would stay in the store, invisibly.
            return self._api.put(self.store, key, content, mode=mode, use_multipart=False)

    def _check_size(self, key: str, found: int, wanted: int) -> None:
        if found != wanted:
            raise EOFError(f"{self.url}/{key} ended after {found} of {wanted} bytes: it is truncated")

    @contextmanager
    def errors(self, key: str) -> Iterator[None]:
        """Turn exceptions of obstore into `StoreError`. A missing object stays a `FileNotFoundError`."""
        try:
            yield
        except (EOFError, MemoryError, ExecutionError):
            raise
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise StoreError(
                    f"{self.url}: there is no such bucket: create it, or correct the URL"
                ) from None
            raise FileNotFoundError(f"there is no object at {self.url}/{key}") from None
        except Exception as error:  # obstore raises exceptions of many types
            raise self._failure(f"{self.url}/{key}".rstrip("/"), error) from None

    def _failure(self, where: str, error: Exception) -> StoreError | ChangedError:
        kind, text = type(error).__name__, scrubbed(str(error))
        if kind in ("AlreadyExistsError", "PreconditionError"):
            return ChangedError(f"{where} was changed by another process")
        denied = kind in ("PermissionDeniedError", "UnauthenticatedError") or isinstance(
            error, PermissionError
        )
        if denied or re.search(r"status code: 40[13]\b", text):  # obstore reports a refused listing so
            return DeniedError(
                f"{where}: access is denied ({text}): check the credentials, which come from the environment"
            )
        if re.search(r"after (\d+) retries", text):
            return StoreError(f"{where}: the server did not answer a request: {text}")
        return StoreError(f"{where}: {text}")


def _opened(url: str) -> Any:
    check_url("the operand", url)
    stores = import_module("obstore.store")
    if url.startswith("memory://"):
        with _creating:
            return _in_memory.setdefault(redacted(url), stores.MemoryStore())
    address, _, query = url.partition("?")
    address = address.rstrip("/") + (f"?{query}" if query else "")
    waits = {
        "init_backoff": timedelta(seconds=FIRST_WAIT),
        "max_backoff": timedelta(seconds=LONGEST_WAIT),
        "base": 2,
    }
    retries = {"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_SECONDS), "backoff": waits}
    given: dict[str, Any] = {"retry_config": retries}
    if is_web(url):
        given["client_options"] = {"allow_http": True}
    account = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
    if account and url.startswith("az") and "@" not in url:
        # obstore finds the account by itself, but then cannot print the store, which zarr does in messages.
        given["config"] = {"account_name": account}
    return stores.from_url(address, **given)


def _version(meta: Any) -> dict[str, str]:
    """Return the version of an object, in the form that a conditional PUT takes."""
    return {name: meta[name] for name in ("e_tag", "version") if meta.get(name)}


def _tag(meta: Any) -> str:
    return str(meta.get("e_tag") or meta.get("version") or "")


class ObjectFolder:
    """A folder of objects below a URL. No request is made before a method is called.

    Methods raise `StoreError`.
    """

    def __init__(self, url: str, path: str) -> None:
        self._url, self.path = url, path

    def __truediv__(self, name: str) -> "ObjectFolder":
        return ObjectFolder(self._url, f"{self.path}/{name}")

    def __str__(self) -> str:
        return f"{self.bucket.url}/{self.path}"

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @cached_property
    def bucket(self) -> Bucket:
        return Bucket(self._url)

    def get(self, name: str) -> tuple[bytes, dict[str, str]] | None:
        found = self.bucket.get(f"{self.path}/{name}")
        return None if found is None else (found[0].tobytes(), found[1])

    def replace(self, name: str, content: bytes, version: dict[str, str] | None) -> dict[str, str]:
        return self.bucket.replace(f"{self.path}/{name}", content, version)

    def exists(self) -> bool:
        return bool(self.bucket.listing(self.path, limit=1))

    def array_exists(self) -> bool:
        """Return whether the array has any object outside this folder."""
        # A page of the listing may contain only objects of the journal, which are few.
        return any(not key.startswith(f"{self.path}/") for key in self.bucket.listing(limit=1000))

    def clear(self, keep: Collection[str] = (), *, array: bool) -> None:
        """Delete the objects in this folder, and with `array` all of the array, except those in `keep`.

        The journal itself is deleted last: an interrupted call can then be repeated.
        """
        kept, inside = tuple(f"{self.path}/{name}" for name in keep), f"{self.path}/"
        found = [
            key
            for key in self.bucket.listing("" if array else self.path)
            if not (kept and key.startswith(kept))
        ]
        self.bucket.delete([key for key in found if not key.startswith(inside)])
        self.bucket.delete([key for key in found if key.startswith(inside)])


class ObjectStores(Store):
    """Open and create zarr arrays at URLs of S3, Google Cloud Storage and Azure, or read them by HTTP.

    Arrays at memory:// URLs live in this process, for tests.
    """

    kind = "an object store"
    has_own_rates = True

    def matches(self, operand: Any) -> bool:
        return is_path(operand) and is_object_url(str(operand))

    def open(self, name: str, operand: Any, *, writable: bool = False, journal: Path | None = None) -> Matrix:
        if writable and is_web(operand):
            raise self._read_only(redacted(operand))
        return self._opened(name, operand, writable=writable)

    def fold(self, name: str, operand: Any, folding: Folding) -> Matrix:
        bucket = Bucket(operand)
        from oocgemm.stores.object_matrix import fold_array

        return fold_array(name, bucket, folding)

    def _opened(self, name: str, url: str, *, writable: bool) -> "ObjectMatrix":
        bucket = Bucket(url)
        from oocgemm.stores.object_matrix import open_array

        return open_array(name, bucket, writable=writable)

    def prepare(self, operand: Any) -> None:
        for package in ("obstore", "oocgemm.stores.object_matrix"):
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
        check_new_format("C", redacted(path))
        return new_zarr_layout(problem, chunks, compressor, requests=REQUESTS)

    def create(self, new: NewArray, journal: Path | None = None) -> Matrix:
        bucket = Bucket(new.path)
        from oocgemm.stores.object_matrix import create_array

        return create_array(bucket, new)

    def journal_folder(self, operand: Any) -> Folder | None:
        return None if is_web(operand) else ObjectFolder(operand, SIDECAR)

    def location(self, operand: Any) -> tuple[str, str | None]:
        return self.kind, redacted(operand)

    def _read_only(self, path: str) -> InputError:
        return InputError(
            f"C at {path}: a web server is read-only; give a URL of an object store, such as "
            "s3://bucket/C.zarr, or a local path"
        )
