"""Makes cuBLAS load its kernels in a thread, while the first blocks of A and B are read.

Otherwise the first product of the run would load them, and keep the GIL for tens of milliseconds.
"""

import threading
from collections.abc import Callable
from contextlib import suppress

from oocgemm.system.threads import start

# The kinds of products for which cuBLAS has loaded its kernels in this process. A kind consists of device,
# kernel name, dtype, op() of A, op() of B, and precision.
_loaded: set[tuple[object, ...]] = set()


class Loading:
    """A product that is computed once before the run. Its result is not used."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def begin(self, kind: tuple[object, ...], multiply: Callable[[], None]) -> None:
        """Call `multiply` in a thread, unless it was called for an earlier run of this kind.

        Errors of `multiply` are ignored. The first product of the run fails in the same way, and raises them.
        """

        def load() -> None:
            with suppress(Exception):
                multiply()

        if kind not in _loaded:
            thread = threading.Thread(target=load, name="oocgemm-load")
            start(thread)
            self._thread = thread
            _loaded.add(kind)

    def wait(self) -> None:
        """Wait until `multiply` has ended. It writes to slots, so all operations must wait for it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
