"""The state of an operation during a run, which the operations that wait for it look at."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from oocgemm.backends.base import Token
from oocgemm.planning import Operation


def _acquired_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass(slots=True, eq=False)
class Completion:
    """The state of one operation: queued, submitted or cancelled.

    `posted` is False while the operation is queued. `token` is None unless it has been submitted.
    """

    number: int
    token: Token | None = None
    posted: bool = False
    _pending: threading.Lock = field(default_factory=_acquired_lock)

    def submitted(self) -> Token:
        """Wait until the operation has been submitted, and return its token.

        Raises `Cancelled` if the operation has been cancelled.
        """
        with self._pending:
            if self.token is None:
                raise Cancelled
            return self.token

    def post(self) -> None:
        """Wake the threads that wait in `submitted`. Called once."""
        self.posted = True
        self._pending.release()


class Cancelled(Exception):  # noqa: N818 - not an error itself: it follows from an error elsewhere
    """Raised in a thread that waits for an operation that will not run, because an earlier one has failed."""


Item = tuple[Operation, Sequence[Completion], Completion]


def is_ready(item: Item) -> bool:
    return all(wait.posted for wait in item[1])
