"""A server that answers as Google Cloud Storage or Azure Blob Storage, for what obstore requests of them.

Objects are in memory. Signatures are not checked. It answers as the real stores do where these differ from
S3: Azure refuses ranges from the end, and both report a missing object that is deleted.
"""

import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

ACCOUNT, BUCKET = "devstoreaccount1", "bucket"
# The key of Azure's emulator, which is public.
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_DATE = "Thu, 01 Jan 2026 00:00:00 GMT"


@dataclass
class Cloud:
    """The objects of a server by their keys, each with its version, and all requests so far."""

    kind: str
    objects: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    _versions: Iterator[int] = field(default_factory=lambda: count(1))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, key: str, content: bytes) -> int:
        version = next(self._versions)
        self.objects[key] = content, version
        return version


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    cloud: Cloud

    def log_message(self, *arguments: object) -> None:
        pass

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = urlsplit(self.path)
        depth = 3 if self.cloud.kind == "azure" else 2
        key = unquote("/".join(parts.path.split("/")[depth:]))
        with self.cloud.lock:
            self.cloud.requests.append((self.command, key))
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            if self.command == "POST":
                self._delete_all(body.decode())
            elif not key:
                self._list(query.get("prefix", ""))
            else:
                {"GET": self._get, "HEAD": self._get, "PUT": self._put, "DELETE": self._delete}[self.command](
                    key, body
                )

    do_GET = do_HEAD = do_PUT = do_DELETE = do_POST = _answer  # noqa: N815

    def _get(self, key: str, _body: bytes) -> None:
        if key not in self.cloud.objects:
            self._send(404)
            return
        content, version = self.cloud.objects[key]
        size, status, headers = len(content), 200, _described(version)
        if found := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")):
            start, stop = found[1], found[2]
            assert start or self.cloud.kind == "google", "Azure does not support ranges from the end"
            first = int(start) if start else max(0, size - int(stop))
            last = min(size - 1, int(stop)) if start and stop else size - 1
            if first >= size:
                self._send(416)
                return
            content, status = content[first : last + 1], 206
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        self._send(status, headers, content)

    def _put(self, key: str, body: bytes) -> None:
        _, version = self.cloud.objects.get(key, (b"", 0))
        wanted = self.headers.get("x-goog-if-generation-match")
        if wanted is not None and int(wanted) != version:
            self._send(412)
        elif self.headers.get("If-None-Match") == "*" and version:
            self._send(409)
        elif self.headers.get("If-Match", f'"{version}"') != f'"{version}"':
            self._send(412)
        elif source := self.headers.get("x-goog-copy-source") or self.headers.get("x-ms-copy-source"):
            depth = 5 if self.cloud.kind == "azure" else 1
            found = self.cloud.objects.get(unquote("/".join(source.split("/")[depth:])))
            made = None if found is None else self.cloud.put(key, found[0])
            self._send(404) if made is None else self._send(202, _described(made))
        else:
            self._send(201, _described(self.cloud.put(key, body)))

    def _delete(self, key: str, _body: bytes) -> None:
        self._send(404 if self.cloud.objects.pop(key, None) is None else 204)

    def _delete_all(self, body: str) -> None:
        """Answer a batch of Azure, whose parts are requests."""
        parts = []
        for number, path in enumerate(re.findall(r"^DELETE (\S+) HTTP", body, re.MULTILINE)):
            key = unquote(urlsplit(path).path.split("/", 3)[3])
            status = "404 Not Found" if self.cloud.objects.pop(key, None) is None else "202 Accepted"
            head = f"Content-Type: application/http\r\nContent-ID: {number}\r\n\r\nHTTP/1.1 {status}"
            parts.append(f"--batch\r\n{head}\r\nx-ms-request-id: 0\r\n\r\n")
        headers = {"Content-Type": "multipart/mixed; boundary=batch"}
        self._send(202, headers, "".join([*parts, "--batch--\r\n"]).encode())

    def _list(self, prefix: str) -> None:
        found = {key: one for key, one in sorted(self.cloud.objects.items()) if key.startswith(prefix)}
        if self.cloud.kind == "google":
            each = "".join(
                f'<Contents><Key>{escape(key)}</Key><Size>{len(content)}</Size><ETag>"{version}"</ETag>'
                "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
                for key, (content, version) in found.items()
            )
            self._send(200, {}, f"<ListBucketResult>{each}</ListBucketResult>".encode())
            return
        each = "".join(
            f"<Blob><Name>{escape(key)}</Name><Properties><Last-Modified>{_DATE}</Last-Modified>"
            f'<Etag>"{version}"</Etag><Content-Length>{len(content)}</Content-Length>'
            "<Content-Type>x/x</Content-Type></Properties></Blob>"
            for key, (content, version) in found.items()
        )
        text = f"<EnumerationResults><Blobs>{each}</Blobs><NextMarker/></EnumerationResults>"
        self._send(200, {}, text.encode())

    def _send(self, status: int, headers: Mapping[str, str] | None = None, content: bytes = b"") -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _described(version: int) -> dict[str, str]:
    return {"ETag": f'"{version}"', "Last-Modified": _DATE, "x-goog-generation": str(version)}


@contextmanager
def cloud(kind: str) -> Iterator[tuple[Cloud, dict[str, str]]]:
    """Run a server of the kind "google" or "azure". Yield it, and the variables of its clients."""
    objects = Cloud(kind)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"cloud": objects}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    google = {"gcs_base_url": url, "disable_oauth": True, "client_email": "", "private_key": ""}
    try:
        yield (
            objects,
            {
                "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(google | {"private_key_id": ""}),
                "GOOGLE_ALLOW_HTTP": "true",
            }
            if kind == "google"
            else {
                "AZURE_STORAGE_USE_EMULATOR": "true",
                "AZURITE_BLOB_STORAGE_URL": url,
                "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
                "AZURE_STORAGE_ACCOUNT_KEY": _KEY,
            },
        )
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
