"""What tests of the service's page in a headless Chromium share."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.browser import Page, find_browser
from tests.support.real_server import RealServer, running_server

PROGRAM = find_browser()
TILES = {"tile": "16x16x16"}  # 16 tiles
# Whether a job's page shows a state.
STATE = "document.querySelector('.named .chip')?.dataset.state === '{}'"


@contextmanager
def page_server(folder: Path) -> Iterator[RealServer]:
    """Run a server for the page. It has the same port after a restart, so that the page finds it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # A warm worker computes these products before a test can stop it. A new process imports NumPy first.
    options = "--listen", f"127.0.0.1:{port}", "--keep-warm", "0"
    with running_server(folder, *options) as found:
        yield found


def sign_in(page: Page, server: RealServer, token: str) -> None:
    page.call("Network.clearBrowserCookies")
    page.call("Network.setCookie", name="oocgemm", value=token, url=server.url)
    page.open("about:blank")
    page.events.clear()


def complaints(page: Page, server: RealServer, *, refused: bool = False) -> list[object]:
    """Return errors and dialogs of the page, and its requests to other origins, since it was opened.

    The browser logs each answer with an error. They are left out if `refused` is set.
    """
    page.js("1")  # receives earlier events
    found: list[object] = []
    for event in page.events:
        kind, values = event.get("method"), event.get("params", {})
        if kind in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Page.javascriptDialogOpening"):
            found.append(event)
        elif kind == "Log.entryAdded" and not (refused and values["entry"]["source"] == "network"):
            found.append(values["entry"])
        elif kind == "Network.requestWillBeSent":
            url = values["request"]["url"]
            if not url.startswith((f"{server.url}/", "about:", "data:")):
                found.append(url)
    return found


def text(page: Page, selector: str) -> str:
    found: str = page.js(f"document.querySelector({selector!r})?.textContent ?? ''")
    return found


def squares(page: Page) -> list[int]:
    """Return which tiles of the grid are finished, counted row by row."""
    done = "[...document.querySelectorAll('.tiles .done')].map((e) => Number(e.style.opacity))"
    return [place for place, share in enumerate(page.js(done)) if share == 1]
