"""Events, functions and cuBLAS handles, and the numbers by which the libraries refer to them."""

import weakref
from typing import Any, NamedTuple

from tests.support.fake_cuda.device import Device, Recording
from tests.support.fake_cuda.memory import INVALID_HANDLE, INVALID_VALUE, StatusError


class Event:
    """Stands for `cupy.cuda.Event`."""

    def __init__(self, objects: "Objects") -> None:
        self.ptr, self.device = objects.device.new_handle(), objects.device.number
        self.recording: Recording | None = None
        self._objects = objects
        objects.events[self.ptr] = self

    def record(self, stream: Any) -> None:
        self._objects.check_device(self.device, stream.ptr)
        self.recording = self._objects.device.record(stream.ptr)

    def synchronize(self) -> None:
        self._objects.synchronize("Event.synchronize", self.recording)


class Function(NamedTuple):
    """A loaded kernel: its handle, its name, and the macros that it was compiled with."""

    ptr: int
    entry: str
    macros: dict[str, str]
    device: int = 0


class Objects:
    """All events, functions and cuBLAS handles of one device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.events: weakref.WeakValueDictionary[int, Event] = weakref.WeakValueDictionary()
        self.functions: dict[int, Function] = {}
        self.cublas_streams: dict[int, int] = {}
        self.cublas_devices: dict[int, int] = {}

    def check_device(self, device: int, stream: int) -> None:
        """Raise `StatusError` if an object of a device is used on a stream of another device."""
        if self.device.device_of(stream) != device:
            raise StatusError(INVALID_HANDLE)

    def event(self, handle: int) -> Event:
        return self.events[handle]

    def function(self, handle: int) -> Function:
        return self.functions[handle]

    def elapsed(self, start: int, end: int) -> float:
        """Return the milliseconds between two events, which must be done."""
        first, last = (self.events[handle].recording for handle in (start, end))
        if first is None or last is None or not (first.done and last.done) or first.device != last.device:
            raise StatusError(INVALID_VALUE)
        return (last.time - first.time) / 1e6

    def synchronize(self, name: str, recording: Recording | None) -> None:
        self.device.enter(name)
        self.device.finish(recording)
