"""Replace stdout and stderr by streams on which printing does not fail.

A character that the encoding lacks is replaced by similar ASCII. If the reader of stdout has exited
(``oocgemm run ... | head -1``), output is dropped, and the command continues. If stderr cannot be written,
its output is dropped: a progress line must not make a run fail.
"""

import codecs
import errno
import io
import os
import sys
from typing import Any, TextIO

from oocgemm.errors import ExecutionError

ERRORS = "oocgemm-ascii"
# ASCII replacements of the shades and frame of the Gantt chart, of rich's bars, and of signs in messages.
ASCII = str.maketrans(
    dict(zip("▁▂▃▄▅▆▇█", ".:-=+*%#", strict=True)) | {"│": "|", "━": "-", "╸": "-", "╺": "-", "─": "-"}
    | {"…": "...", "×": "x", "·": "-", "−": "-", "–": "-", "µ": "u", "•": "*", "\u202f": " ", "\u00a0": " "}
)  # fmt: skip
# Environment variables that choose the character set. The first one that is set decides.
LOCALE = ("LC_ALL", "LC_CTYPE", "LANG")


class _Descriptor(io.FileIO):
    """A raw output stream that drops all further output after its first error.

    This error is raised as `ExecutionError`, unless the stream is `lossy`, or is a pipe whose reader has
    exited.
    """

    def __init__(self, number: int, *, lossy: bool) -> None:
        super().__init__(number, "w", closefd=False)
        self._lossy = lossy

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            # Make the file descriptor refer to /dev/null. This also drops the output of child processes that
            # start later, since they inherit the descriptor.
            os.dup2(null, self.fileno())
            os.close(null)
            if not (self._lossy or error.errno == errno.EPIPE):
                raise ExecutionError(f"the output cannot be written: {error.strerror}") from error
        return memoryview(data).nbytes


def use_safe_streams() -> None:
    """Replace `sys.stdout` and `sys.stderr` by streams on which printing does not fail.

    Call this before anything is printed.
    """
    codecs.register_error(ERRORS, _replaced)
    sys.stdout = _safe(sys.stdout, lossy=False)
    sys.stderr = _safe(sys.stderr, lossy=True)


def _safe(stream: TextIO | None, *, lossy: bool) -> TextIO:
    if stream is None:  # the parent process has closed this stream
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
    """Return the `usual` encoding of a stream; ASCII if the environment chooses the C locale.

    In the C locale Python would encode as UTF-8, which a terminal of that locale may not show.
    """
    chosen = next(filter(None, (os.environ.get(name) for name in LOCALE)), "")
    explicit = "PYTHONIOENCODING" in os.environ or "PYTHONUTF8" in os.environ
    return "ascii" if chosen in ("C", "POSIX") and not explicit else usual


def _replaced(error: UnicodeError) -> tuple[str | bytes, int]:
    """Return ASCII for characters that the encoding lacks, as an error handler of `codecs`.

    Bytes of file names that Python could not decode are written unchanged.
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    part = error.object[error.start : error.end]
    if all("\udc80" <= character <= "\udcff" for character in part):
        return bytes(ord(character) & 0xFF for character in part), error.end
    known = part.translate(ASCII)
    return known.encode("ascii", "backslashreplace").decode("ascii"), error.end
