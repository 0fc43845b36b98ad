"""Host slots: memory for C that threads prefault while the first panels are uploaded."""

import threading
from typing import Any

import numpy as np
import pytest

from oocgemm.engine import staging

SIZE = 4 * staging.FAULTED_BYTES


def test_a_refused_thread_does_not_clear_a_slot_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that was queued before the system refused a thread must not run later, when the slot holds C."""
    made = staging.HostSlots.__new__(staging.HostSlots)
    made.arena = np.zeros(2 * SIZE, np.uint8)
    made._pin = lambda columns: None
    vars(made)["_c_sizes"] = (SIZE, SIZE)
    right, started = threading.Thread.start, list[str]()

    def start(self: threading.Thread) -> Any:
        started.append(self.name)
        if len(started) == 1:
            raise RuntimeError("can't start new thread")
        return right(self)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        made._prefault(0)
        made.arena[:SIZE] = 7
        made._prefault(SIZE)
    assert len(started) > 1
    made._faulting.shutdown(wait=True)
    assert (made.arena[:SIZE] == 7).all()
