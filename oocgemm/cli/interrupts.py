"""Stop a run promptly at SIGINT and SIGTERM, even if the main thread is in a long library call."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from oocgemm.system.threads import start

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Seconds that a run has to stop after a signal, before the process exits at once.
PATIENCE = 1.2


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
