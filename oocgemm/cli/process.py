"""What a process of the command line needs: safe streams, and a prompt end at signals.

The streams replace stdout and stderr, so that printing does not fail. A character that the encoding lacks is
replaced by similar ASCII. If the reader of stdout has exited (``oocgemm run ... | head -1``), output is
dropped, and the command continues. If stderr cannot be written, its output is dropped: a progress line must
not make a run fail.

A run stops at SIGINT and SIGTERM, even if the main thread is in a long library call.
"""

import codecs
import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TextIO

from oocgemm.errors import ExecutionError
from oocgemm.system.threads import start

ERRORS = "oocgemm-ascii"
# ASCII replacements of the shades and frame of the Gantt chart, of rich's bars, and of signs in messages.
ASCII = str.maketrans(
    dict(zip("▁▂▃▄▅▆▇█", ".:-=+*%#", strict=True)) | {"│": "|", "━": "-", "╸": "-", "╺": "-", "─": "-"}
    | {"…": "...", "×": "x", "·": "-", "−": "-", "–": "-", "µ": "u", "•": "*", "\u202f": " ", "\u00a0": " "}
)  # fmt: skip
# Environment variables that choose the character set. The first one that is set decides.
LOCALE = ("LC_ALL", "LC_CTYPE", "LANG")

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Seconds that a run has to stop after a signal, before the process exits at once.
PATIENCE = 1.2


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


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM has arrived. `code` is the exit code for that signal."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.code = 128 + number


@contextmanager
def stopping(farewell: Callable[[], None]) -> Iterator[None]:
    """Raise `Interrupted` in the main thread at the first signal, so that the run stops as after any failure.

    If stopping takes longer than `PATIENCE`, or a second signal arrives, the process calls `farewell` and
    exits at once. That is safe, since the journal allows a run to be killed at any time. Only the main thread
    of a program may use this.
    """
    ended = threading.Event()
    seen = 0

    def leave(number: int) -> None:
        if sys.stderr.isatty():
            sys.stderr.write("\x1b[?25h")  # show the cursor, which a progress display hides
        farewell()
        sys.stderr.flush()
        os._exit(128 + number)

    def watch() -> None:
        # Python calls `interrupt` only when the main thread returns from a library call, maybe too late. But
        # a signal writes its number to the pipe at once, so this thread can end the process in time.
        if (arrived := os.read(reading, 1)) and not ended.wait(PATIENCE):
            leave(arrived[0])

    def interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal seen
        seen += 1
        if seen > 1:
            leave(signum)
        raise Interrupted(signum)

    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    watcher = threading.Thread(target=watch, name="oocgemm-signals", daemon=True)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    old = -1
    try:
        start(watcher)
        old = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, interrupt)
        yield
    finally:
        ended.set()
        signal.set_wakeup_fd(old)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(writing)  # makes `os.read` in `watch` return
        if watcher.is_alive():
            watcher.join()
        os.close(reading)
