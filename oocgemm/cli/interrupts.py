"""SIGINT and SIGTERM end a run in good time, whatever it is at: a long read, a long multiplication, a full disk."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from oocgemm.system.threads import start

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# How long a run may take to stop by itself, in seconds. The system then has to take its memory back, which takes time too.
PATIENCE = 1.2


class Interrupted(KeyboardInterrupt):
    """A signal to stop; `code` is the exit code that says so."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.code = 128 + number


@contextmanager
def stopping(farewell: Callable[[], None]) -> Iterator[None]:
    """Within, the first signal raises `Interrupted` in the main thread, to stop like any failure. If that takes longer
    than `PATIENCE`, or at a second signal, the process says `farewell` and ends at once: that is as good as a kill,
    which a journal is made for. For the main thread of a program."""
    ended = threading.Event()
    seen = 0

    def leave(number: int) -> None:
        if sys.stderr.isatty():
            sys.stderr.write("\x1b[?25h")  # a progress display hides the cursor
        farewell()
        sys.stderr.flush()
        os._exit(128 + number)

    def watch() -> None:
        # The system writes here at once, even while the main thread is held up in a library.
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
        os.close(writing)  # which ends the watcher's reading
        if watcher.is_alive():
            watcher.join()
        os.close(reading)
