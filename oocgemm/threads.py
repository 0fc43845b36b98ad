"""Threads: starting them where the system may refuse, and having them take turns at the cores."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from oocgemm.errors import ExecutionError


def start(thread: threading.Thread) -> None:
    """Start a thread. Raises `ExecutionError` where the system has no room for it."""
    try:
        thread.start()
    except RuntimeError as error:
        raise ExecutionError(f"the system refuses the thread {thread.name}: {error}") from error


class Turns:
    """Copying and multiplying in turn, where both are done by the same cores.

    A BLAS deals a product out to its threads beforehand. One whose core is taken by a copy holds up all others, which wait for it
    spinning: beside a multiplication a copy costs its time on every core, in turn with it that time over the number of them. So
    multiplications wait for copies that have been asked for, and copies for the multiplication that has begun.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._asking = self._copying = self._multiplying = 0

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Within it no multiplication runs; other copies may."""
        with self._changed:
            self._asking += 1
            self._changed.wait_for(lambda: not self._multiplying)
            self._asking -= 1
            self._copying += 1
        try:
            yield
        finally:
            with self._changed:
                self._copying -= 1
                self._changed.notify_all()

    @contextmanager
    def multiplying(self) -> Iterator[None]:
        """Within it no copy runs, and before it those go that have asked."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._asking or self._copying))
            self._multiplying += 1
        try:
            yield
        finally:
            with self._changed:
                self._multiplying -= 1
                self._changed.notify_all()
