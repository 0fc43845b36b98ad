"""Copies of panels between the memories of several devices of one run."""

from collections.abc import Sequence

from cupy.cuda import Device, runtime

from oocgemm.planning import Slot

# CUDA's cudaErrorPeerAccessAlreadyEnabled.
_ENABLED = 704
# The addresses of the slots on all devices of a run. Its sessions share one such dict.
Places = dict[Slot, int]


def connected(device: int, others: Sequence[tuple[int, Places]]) -> Places:
    """Let a device and others access each other's memory, if the hardware can. Return their common `Places`.

    `others` are the numbers of the devices whose sessions have been opened, with their `Places`. If two
    devices cannot access each other's memory, the driver stages copies between them in host memory.
    """
    for other in {number for number, _ in others} - {device}:
        for reader, owner in ((device, other), (other, device)):
            if runtime.deviceCanAccessPeer(reader, owner):
                with Device(reader):
                    _enable(owner)
    return others[0][1] if others else {}


def _enable(owner: int) -> None:
    """Let the current device access the memory of another one. An earlier run may have done so."""
    try:
        runtime.deviceEnablePeerAccess(owner)
    except runtime.CUDARuntimeError as error:
        if error.status != _ENABLED:
            raise
