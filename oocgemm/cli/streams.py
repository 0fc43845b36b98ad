"""Standard streams of the command line on which printing does not fail.

A character that the encoding lacks is replaced by ASCII that looks like it. A stdout whose reader has gone away
(``oocgemm run ... | head -1``) takes no more output, and the command goes on to its end and to its own exit code. What
stderr cannot take is dropped: progress lines are no reason for a run to fail.
"""

import codecs
import errno
import io
import os
import sys
from typing import Any, TextIO

from oocgemm.errors import ExecutionError

ERRORS = "oocgemm-ascii"
# Shades of the Gantt chart, its frame, what rich draws bars and cuts with, and the signs in our texts.
ASCII = str.maketrans(
    dict(zip("▁▂▃▄▅▆▇█", ".:-=+*%#", strict=True)) | {"│": "|", "━": "-", "╸": "-", "╺": "-", "─": "-"}
    | {"…": "...", "×": "x", "·": "-", "−": "-", "–": "-", "µ": "u", "•": "*", "\u202f": " ", "\u00a0": " "}
)  # fmt: skip
# Variables that choose the character set, the first that is set.
LOCALE = ("LC_ALL", "LC_CTYPE", "LANG")


class _Descriptor(io.FileIO):
    """A file descriptor that drops what is written once its reader has gone away. Other errors are raised once, as
    `ExecutionError`; if `lossy` they are dropped too."""

    def __init__(self, number: int, *, lossy: bool) -> None:
        super().__init__(number, "w", closefd=False)
        self._lossy = lossy

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())  # for child processes too, and for what is still buffered
            os.close(null)
            if not (self._lossy or error.errno == errno.EPIPE):
                raise ExecutionError(f"the output cannot be written: {error.strerror}") from error
        return memoryview(data).nbytes


def use_safe_streams() -> None:
    """Replace `sys.stdout` and `sys.stderr` by streams on which printing does not fail. For the main thread of a program,
    before anything is printed."""
    codecs.register_error(ERRORS, _replaced)
    sys.stdout = _safe(sys.stdout, lossy=False)
    sys.stderr = _safe(sys.stderr, lossy=True)


def _safe(stream: TextIO | None, *, lossy: bool) -> TextIO:
    if stream is None:  # closed by whoever started the program
        return open(os.devnull, "w", encoding="utf-8")
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.flush()
    descriptor = _Descriptor(stream.fileno(), lossy=lossy)
    return io.TextIOWrapper(
        io.BufferedWriter(descriptor),
        encoding=_encoding(stream.encoding),
        errors=ERRORS,
        line_buffering=lossy or stream.isatty(),
    )


def _encoding(usual: str) -> str:
    """The encoding of a stream: Python's, or ASCII where the locale asks for it. Python takes UTF-8 in the C locale."""
    chosen = next(filter(None, (os.environ.get(name) for name in LOCALE)), "")
    explicit = "PYTHONIOENCODING" in os.environ or "PYTHONUTF8" in os.environ
    return "ascii" if chosen in ("C", "POSIX") and not explicit else usual


def _replaced(error: UnicodeError) -> tuple[str | bytes, int]:
    """What is written in place of characters that the encoding lacks: bytes of file names as they are."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    part = error.object[error.start : error.end]
    if all("\udc80" <= character <= "\udcff" for character in part):
        return bytes(ord(character) & 0xFF for character in part), error.end
    known = part.translate(ASCII)
    return known.encode("ascii", "backslashreplace").decode("ascii"), error.end
