"""Unpin host memory, also after a device has failed."""

from typing import Any

from cupy.cuda import runtime

from oocgemm.backends.base import Array

# Memory that could not be unpinned. It is never freed: CUDA refuses to pin other memory at its addresses.
_still_pinned: list[Array] = []


def unpin(device: Any, memory: Array) -> None:
    """Unpin memory that a device has pinned as a whole. If that raises, as after a failed launch, keep it."""
    try:
        with device:
            runtime.hostUnregister(memory.ctypes.data)
    except Exception:
        _still_pinned.append(memory)
