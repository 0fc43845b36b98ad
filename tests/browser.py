"""Control a headless Chromium with its DevTools protocol over a pair of pipes.

Needs no package other than the browser.
"""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chrome-headless-shell", "chromium", "chromium-browser", "google-chrome")
DEADLINE = 60


def find_browser() -> str | None:
    """Return the path of a Chromium: `$OOCGEMM_BROWSER`, or one of the usual names on the PATH."""
    given = os.environ.get("OOCGEMM_BROWSER")
    return given or next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One page of a running browser."""

    def __init__(self, out: int, back: int) -> None:
        self._out, self._back = out, back
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result.

        Raises `RuntimeError` if the browser reports an error.
        """
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._back, 1 << 20)
            if not part:
                raise RuntimeError("the browser has ended")
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def open(self, path: Path | str, *, width: int = 1440, height: int = 900, theme: str = "light") -> None:
        """Open a file or a URL, and wait until the browser has painted it."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.prefer(theme)
        self.call("Page.navigate", url=path if isinstance(path, str) else path.resolve().as_uri())
        self.until("document.readyState === 'complete'")
        self.painted()

    def until(self, expression: str) -> Any:
        """Wait until an expression is true, and return its value. Raises `AssertionError` after `DEADLINE`."""
        deadline = time.monotonic() + DEADLINE
        while not (found := self.js(expression)):
            if time.monotonic() > deadline:
                text = self.js("document.body.innerText")
                raise AssertionError(f"{expression} has not become true. The page says:\n{text}")
            time.sleep(0.02)
        return found

    def prefer(self, theme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.call("Emulation.setEmulatedMedia", media="", features=features)

    def js(self, expression: str) -> Any:
        """Evaluate an expression, wait if it is a promise, and return its value.

        Raises `RuntimeError` if the expression throws.
        """
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise RuntimeError(str(done["exceptionDetails"].get("exception", {}).get("description", done)))
        return done["result"].get("value")

    def painted(self) -> None:
        self.js("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        self.mouse("mousePressed", *start, button="left", buttons=1, clickCount=1)
        for part in (0.5, 1.0):
            at = (a + (b - a) * part for a, b in zip(start, end, strict=True))
            self.mouse("mouseMoved", *at, button="left", buttons=1)
        self.mouse("mouseReleased", *end, button="left", clickCount=1)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key by its name, such as "Tab" or "Enter"."""
        code = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32}[key]
        text = {"Enter": "\r", " ": " "}.get(key, "")
        more = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", **more)

    def type(self, text: str) -> None:
        """Type a text into the element that has the focus."""
        self.call("Input.insertText", text=text)

    def screenshot(self, path: Path) -> None:
        """Save a picture of the whole page as PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def pdf(self) -> bytes:
        """Return the page as the PDF that is printed."""
        printed = self.call("Page.printToPDF", printBackground=True, preferCSSPageSize=True)
        return base64.b64decode(printed["data"])


@contextmanager
def browser(program: str) -> Iterator[Page]:
    """Start a browser, yield its page, and end the browser after the block."""
    to_read, out = os.pipe()
    back, to_write = os.pipe()
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The browser reads commands from file descriptor 3 and writes answers to 4.
        shell = f'exec 3<&{to_read} 4>&{to_write}; exec "$0" "$@"'
        process = subprocess.Popen(
            ["bash", "-c", shell, program, *options, f"--user-data-dir={profile}"],
            pass_fds=(to_read, to_write),
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        try:
            yield Page(out, back)
        finally:
            process.terminate()
            process.wait(DEADLINE)
            os.close(out)
            os.close(back)
