"""A web server of the files in a folder, in threads of this process. It answers HEAD and GET, with ranges."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote


@contextmanager
def web_server(folder: Path) -> Iterator[str]:
    """Serve the files below a folder. Yield the URL of the folder."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: Any) -> None:
            pass

        def do_HEAD(self) -> None:  # the name that the base class calls
            self.do_GET()

        def do_GET(self) -> None:
            path = folder / unquote(self.path.lstrip("/"))
            content = path.read_bytes() if path.is_file() else b""
            size, status, headers = len(content), 200 if path.is_file() else 404, dict[str, str]()
            asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
            if asked and size:
                first, last = asked[1], asked[2]
                start = int(first) if first else max(0, size - int(last))
                stop = min(size, int(last) + 1) if first and last else size
                content, status = content[start:stop], 206
                headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(content)), "ETag": f'"{size}"'}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
