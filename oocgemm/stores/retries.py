"""Reads that are repeated after a transient error."""

from threading import Event

from oocgemm.errors import ExecutionError
from oocgemm.planning.tiling import Range
from oocgemm.stores.base import Array, Matrix, transient

# Seconds to wait before each retry of a read that failed with a transient error. If the last retry fails,
# after 12 s in all, the read fails.
RETRY_AFTER = (0.1, 0.3, 0.9, 2.7, 8.1)


class ReadError(ExecutionError):
    """Raised for a block that cannot be read. The message names the store and the range."""


class Retries:
    """Reads blocks of matrices. After a transient error, it waits and tries again.

    Attributes:
        made: the error message of each failed read that was tried again.
    """

    def __init__(self) -> None:
        self.made: list[str] = []
        self._stopped = Event()

    def read(self, matrix: Matrix, rows: Range, cols: Range, out: Array) -> None:
        """Read a block into `out`. Raises `ReadError` if that fails, and trying again does not help."""
        for delay in (*RETRY_AFTER, None):
            try:
                matrix.read(rows, cols, out)
                return
            except Exception as error:
                failed = failure("reading", matrix, rows, cols, error)
                if delay is None or not transient(error) or self._stopped.wait(delay):
                    raise ReadError(failed) from error
                self.made.append(failed)

    def stop(self) -> None:
        """Stop retrying. A read that waits for its next try fails at once."""
        self._stopped.set()


def failure(verb: str, matrix: Matrix, rows: Range, cols: Range, error: Exception) -> str:
    """Return the message of an error, preceded by the store and the range of the matrix."""
    what = str(error) if isinstance(error, ExecutionError) else f"{type(error).__name__}: {error}"
    return f"{verb} {matrix.name}[{rows[0]}:{rows[1]}, {cols[0]}:{cols[1]}]: {what}"
