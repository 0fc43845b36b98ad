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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chrome-headless-shell", "chromium", "chromium-browser", "google-chrome")
# Why tests are skipped if there is none.
MISSING = "no Chromium is on the PATH"
DEADLINE = 60
# Frames that run in another process than their page have sessions of their own.
ATTACH = {"autoAttach": True, "waitForDebuggerOnStart": True, "flatten": True}


# JavaScript that finds texts outside their box, overlapping texts and sections, and pages wider than the
# browser window.
FAULTS = """(() => {
  const found = [], texts = [], wide = document.documentElement.scrollWidth;
  if (wide > innerWidth) found.push(`the page is ${wide} wide`);
  const clipped = (e) => e && (getComputedStyle(e).clipPath !== "none" || clipped(e.parentElement));
  const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode()); ) {
    if (!node.data.trim() || clipped(node.parentElement)) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const holders = "td, th, dd, dt, figcaption, .card, .figures > div, .tools, .legend, header";
    const holder = node.parentElement.closest(holders) ?? document.querySelector("main");
    const box = holder.getBoundingClientRect();
    for (const r of range.getClientRects()) {
      if (!r.width) continue;
      const inside = r.left >= box.left - 1 && r.right <= box.right + 1;
      if (!inside || r.top < box.top - 2 || r.bottom > box.bottom + 2)
        found.push(`"${node.data.trim().slice(0, 40)}" leaves its ${holder.tagName}`);
      texts.push([r, node.data.trim().slice(0, 40)]);
    }
  }
  texts.forEach(([a, one], i) => texts.slice(i + 1).forEach(([b, other]) => {
    const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (across > 1 && down > 3) found.push(`"${one}" lies on "${other}"`);
  }));
  const cards = [...document.querySelectorAll("main > *")].map((e) => e.getBoundingClientRect());
  cards.forEach((a, i) => cards.slice(i + 1).forEach((b) => {
    const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    if (across > 1 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1)
      found.push("sections lie on one another");
  }));
  return found;
})()"""

# JavaScript that finds texts whose contrast with what is behind them is below that of WCAG 2.2 AA: 4.5, or 3
# for large texts. Disabled controls are exempt.
CONTRAST = """(() => {
  const parsed = (text) => (text.match(/[\\d.]+/g) ?? [0, 0, 0, 0]).map(Number);
  const over = ([r, g, b, a = 1], below) => [r, g, b].map((c, i) => a * c + (1 - a) * below[i]);
  const light = (c) => {
    const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = c.map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) {
      const colour = parsed(getComputedStyle(e).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) layers.unshift(colour);
    }
    return layers.reduce((below, layer) => over(layer, below), [255, 255, 255]);
  };
  const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode()); ) {
    const element = node.parentElement, style = getComputedStyle(element);
    const shown = element.checkVisibility() && !element.closest(":disabled, .unseen, option");
    if (!node.data.trim() || !shown) continue;
    const back = behind(element), [a, b] = [light(over(parsed(style.color), back)), light(back)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    if (ratio < (large ? 3 : 4.5)) found.push(`"${node.data.trim().slice(0, 40)}" has ${ratio.toFixed(2)}`);
  }
  return found;
})()"""


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
        # Sessions of the frames that the browser runs in other processes than the page.
        self._frames: list[str] = []
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Target.setAutoAttach", **ATTACH)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result.

        Raises `RuntimeError` if the browser reports an error.
        """
        return self._call(self._session, method, **parameters)

    def _call(self, session: str | None, method: str, **parameters: Any) -> dict[str, Any]:
        number = self._send(session, method, **parameters)
        while (answer := self._next()).get("id") != number:
            self._receive(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _send(self, session: str | None, method: str, **parameters: Any) -> int:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        return self._number

    def _receive(self, event: dict[str, Any]) -> None:
        """Keep an event. A frame in another process waits until its events are asked for."""
        self.events.append(event)
        kind, values = event.get("method"), event.get("params", {})
        if kind == "Target.attachedToTarget" and values["targetInfo"]["type"] == "iframe":
            session = values["sessionId"]
            for method in ("Runtime.enable", "Log.enable", "Network.enable"):
                self._send(session, method)
            self._send(session, "Target.setAutoAttach", **ATTACH)
            self._send(session, "Runtime.runIfWaitingForDebugger")
            self._frames.append(session)
        elif kind == "Target.detachedFromTarget" and values["sessionId"] in self._frames:
            self._frames.remove(values["sessionId"])

    def in_frames(self, expression: str) -> list[Any]:
        """Return the value of an expression in each frame of the page, in whichever process it runs.

        Frames that are being loaded are left out.
        """
        found: list[Any] = []
        for frame in self.call("Page.getFrameTree")["frameTree"].get("childFrames", ()):
            with suppress(RuntimeError):
                world = self.call("Page.createIsolatedWorld", frameId=frame["frame"]["id"])
                context = world["executionContextId"]
                found.append(self._value(self._session, expression, contextId=context))
        for session in tuple(self._frames):
            with suppress(RuntimeError):
                found.append(self._value(session, expression))
        return found

    def _value(self, session: str | None, expression: str, **more: Any) -> Any:
        done = self._call(session, "Runtime.evaluate", expression=expression, returnByValue=True, **more)
        return done["result"].get("value")

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
        """Wait until an expression is true; return its value. Raises `AssertionError` after `DEADLINE`.

        The value of an element is an empty dictionary.
        """
        deadline = time.monotonic() + DEADLINE
        while (found := self.js(expression)) in (None, False, 0, ""):
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
def browser(program: str, *more: str) -> Iterator[Page]:
    """Start a browser with `more` options, yield its page, and end the browser after the block."""
    to_read, out = os.pipe()
    back, to_write = os.pipe()
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The browser reads commands from file descriptor 3 and writes answers to 4.
        shell = f'exec 3<&{to_read} 4>&{to_write}; exec "$0" "$@"'
        process = subprocess.Popen(
            ["bash", "-c", shell, program, *options, *more, f"--user-data-dir={profile}"],
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
