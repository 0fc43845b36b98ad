"""Starting threads where the system may refuse them."""

import threading

from oocgemm.errors import ExecutionError


def start(thread: threading.Thread) -> None:
    """Start a thread. Raises `ExecutionError` where the system has no room for it."""
    try:
        thread.start()
    except RuntimeError as error:
        raise ExecutionError(f"the system refuses the thread {thread.name}: {error}") from error
