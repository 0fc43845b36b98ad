"""Copies of panels between the memories of several devices of one run."""

from collections.abc import Sequence
from contextlib import suppress

from cupy.cuda import Device, runtime

from oocgemm.planning import Slot

# The addresses of the slots on all devices of a run. Its sessions share one such dict.
Places = dict[Slot, int]


def connected(device: int, others: Sequence[tuple[int, Places]]) -> Places:
    """Let a device and others access each other's memory, if the hardware can. Return their common `Places`.

    `others` are the numbers of the devices whose sessions have been opened, with their `Places`. If two
    devices cannot access each other's memory, the driver stages copies between them in host memory.
    """
    for other in {number for number, _ in others} - {device}:
        for reader, owner in ((device, other), (other, device)):
            # An error says that an earlier run has enabled the access, or that the system refuses it.
            with Device(reader), suppress(runtime.CUDARuntimeError):
                if runtime.deviceCanAccessPeer(reader, owner):
                    runtime.deviceEnablePeerAccess(owner)
    return others[0][1] if others else {}
