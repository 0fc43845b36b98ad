"""Create the context of a CUDA device in a thread, while the main thread imports modules."""

import ctypes
import threading
from contextlib import suppress

_woken = set[int]()


def wake(device: int) -> bool:
    """Start to create the primary context of a device, which takes 0.2 s; False if that was done before.

    Errors are ignored here. Opening the backend fails in the same way later, and raises them.
    """
    if device in _woken:
        return False
    _woken.add(device)
    # If the system refuses a thread, the context is created later, when the backend is opened.
    with suppress(RuntimeError):
        threading.Thread(target=_create, args=(device,), name="oocgemm-wake", daemon=True).start()
    return True


def _create(device: int) -> None:
    with suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        number, context = ctypes.c_int(), ctypes.c_void_p()
        if not driver.cuInit(0) and not driver.cuDeviceGet(ctypes.byref(number), device):
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), number)
