"""URLs of objects: which ones are opened here, and how they appear in messages, journals and reports."""

import re
from urllib.parse import SplitResult, urlsplit

from oocgemm.errors import InputError

# Requests in flight per operand, unless the user chooses another number.
REQUESTS = 64
WEB = ("http", "https")
SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl", *WEB, "memory")
_URL = re.compile(r"\b([a-z][a-z0-9]*)://([^\s'\"<>]*)")
# An error of obstore begins with a line that states the request and the status. Then comes the response body
# as XML, of which only these elements are worth showing, and the error once more in another form.
_BODY = re.compile(r"<(Code|Message)>([^<]*)</")


def is_object_url(text: str) -> bool:
    """Return whether a path is a URL that the package obstore opens."""
    return text.partition("://")[0] in SCHEMES and "://" in text


def is_web(url: str) -> bool:
    """Return whether a URL is read by plain HTTP. Such a place is read-only, and cannot be listed."""
    return url.partition("://")[0] in WEB


def check_url(name: str, url: str) -> None:
    """Raise `InputError` for a URL that contains credentials, or a query that its store would ignore.

    `name` is the name of the operand in the message.
    """
    parts = _parsed(url)
    if parts is None or not is_object_url(url):
        return
    if "@" in parts.netloc and parts.scheme not in ("abfs", "abfss", "adl", "azure"):
        raise InputError(
            f"{name}: {redacted(url)} contains a user name or password, which is not used: drop it, and set "
            "the environment variables of the store, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if parts.fragment or (parts.query and not is_web(url)):
        raise InputError(f"{name}: {redacted(url)} has a query or fragment, which is not used: drop it")


def redacted(url: str) -> str:
    """Return a URL without user name, password, query, fragment and trailing slashes. Others are unchanged.

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


def _parsed(url: str) -> SplitResult | None:
    try:
        return urlsplit(url)
    except ValueError:  # for example an invalid IPv6 address: the store refuses it
        return None
