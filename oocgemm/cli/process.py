"""What a process of the command line needs: JSON, errors, exit codes, safe streams, and a stop at signals.

The streams replace stdout and stderr, so that printing does not fail. A character that the encoding lacks is
replaced by similar ASCII. If the reader of stdout has exited (``oocgemm run ... | head -1``), output is
dropped, and the command continues. If stderr cannot be written, its output is dropped: a progress line must
not make a run fail.

A run stops at SIGINT and SIGTERM, even if the main thread is in a long library call.
"""

import codecs
import errno
import io
import json
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TextIO, TypeVar

import click

from oocgemm.errors import BudgetError, DataWarning, ExecutionError, InputError
from oocgemm.system.text import plain
from oocgemm.system.threads import start

F = TypeVar("F", bound=Callable[..., Any])

EXIT_FAILED, EXIT_USAGE, EXIT_BUDGET, EXIT_INTERRUPTED = 1, 2, 3, 130

JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")


def taking(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Return a decorator that adds options to a command. The help text lists them in the given order."""

    def apply(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return apply


def print_json(value: object) -> None:
    """Print a value as JSON with keys in snake_case."""
    click.echo(json.dumps(snake_keys(value), indent=2).replace("\x7f", "\\u007f"))  # dumps escapes the rest


def snake_keys(value: Any) -> Any:
    """Return plain data without spaces in keys. The names of some rates, for example, contain spaces.

    >>> snake_keys({"emulated float64": [{"multiplied by": "blas"}], "A": 1})
    {'emulated_float64': [{'multiplied_by': 'blas'}], 'A': 1}
    """
    if isinstance(value, dict):
        keys = (key.replace(" ", "_").lower() if " " in str(key) else key for key in value)
        return dict(zip(keys, map(snake_keys, value.values()), strict=True))
    return [snake_keys(one) for one in value] if isinstance(value, list | tuple) else value


def print_note(message: str) -> None:
    """Print a note on stderr."""
    click.echo(f"Note: {plain(message)}", err=True)


def print_warning(message: str) -> None:
    """Print a warning about the data on one line of stderr, even if the message has several lines."""
    click.echo(f"Warning: {plain(message)}", err=True)


def print_error(message: str) -> None:
    """Print an error on one line of stderr, even if the message has several lines."""
    click.echo(f"Error: {plain(message)}", err=True)


def print_interrupted(note: str) -> None:
    """Print that the command was interrupted, and a note, such as how to resume it."""
    click.echo(plain(" ".join(filter(None, ("Interrupted.", note)))), err=True)


def exit_code(error: Exception) -> int:
    """Return the exit code for an error: 2 for wrong input, 3 for too small a budget, 1 for other errors."""
    if isinstance(error, BudgetError):
        return EXIT_BUDGET
    return EXIT_USAGE if isinstance(error, InputError) else EXIT_FAILED


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print_note(record.getMessage())


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Print warnings of this package as notes on stderr, both Python warnings and records of its logger."""
    handler, logger = _Notes(logging.WARNING), logging.getLogger("oocgemm")
    with warnings.catch_warnings():
        before = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, DataWarning):
                print_warning(str(message))
            elif category is UserWarning:
                print_note(str(message))
            else:
                before(message, category, *where, **more)

        warnings.showwarning = show
        warnings.simplefilter("always", DataWarning)
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)


def silence_warnings() -> None:
    """Suppress notes until the command ends, but not warnings, which change what a result means."""
    warnings.simplefilter("ignore", UserWarning)
    warnings.simplefilter("default", DataWarning)
    for handler in logging.getLogger("oocgemm").handlers:
        if isinstance(handler, _Notes):
            handler.setLevel(logging.CRITICAL)


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

    The error is raised, unless the stream is `lossy`, or is a pipe whose reader has exited.
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
    """Replace stdout and stderr by streams on which printing does not fail, before anything is printed."""
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
    """Return "ascii" in the C locale, whose terminals may not show UTF-8; else `usual`."""
    chosen = next(filter(None, (os.environ.get(name) for name in LOCALE)), "")
    explicit = "PYTHONIOENCODING" in os.environ or "PYTHONUTF8" in os.environ
    return "ascii" if chosen in ("C", "POSIX") and not explicit else usual


def _replaced(error: UnicodeError) -> tuple[str | bytes, int]:
    """Return ASCII for characters that the encoding lacks, and the bytes of undecoded file names."""
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
