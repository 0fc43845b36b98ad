"""Show texts from elsewhere on a terminal: see `oocgemm.system.text`."""

import io
import logging
import sys
import traceback
from collections.abc import Iterable

from rich import markup
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from oocgemm.system.text import LINES, plain


class PlainConsole(Console):
    """A console that prints no control characters but its own."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render an object."""
        for part in super().render(renderable, options):
            yield part if part.control else Segment(plain(part.text, keep="\n"), part.style)


def escape(text: str) -> str:
    """Return a text on one line, without control characters, in which rich sees no markup."""
    return markup.escape(plain(text))


def print_traceback() -> None:
    """Print the traceback of the present exception on stderr."""
    print(plain(traceback.format_exc(), keep=LINES), end="", file=sys.stderr)


class _Stream(io.TextIOBase):
    """Writes to a stream without control characters."""

    def __init__(self, stream: io.TextIOBase) -> None:
        self._stream = stream

    def write(self, text: str, /) -> int:
        """Write a text."""
        self._stream.write(plain(text, keep=LINES))
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()


class _Formatter(logging.Formatter):
    """Formats a message on one line. The lines of a traceback follow."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - a method of logging
        return plain(super().formatMessage(record))


def use_plain_log() -> None:
    """Let this process, which prints what others send, print no control characters on stderr."""
    handler = logging.StreamHandler(_Stream(sys.stderr))  # type: ignore[arg-type]
    handler.setFormatter(_Formatter())
    handler.setLevel(logging.WARNING)
    logging.getLogger("uvicorn").addHandler(handler)
    logging.getLogger("asyncio").addHandler(handler)
