"""Pinned host memory: host slots, and the ring for blocks of pageable arrays.

While the driver pins pages (0.3 ms per 16 MiB), it blocks every thread that submits a copy or a kernel. Such
a thread keeps the GIL, so all of Python would stop. Therefore slots are pinned in parts, and pinning and
submitting take turns by a lock.
"""

import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import cupy
from cupy.cuda import runtime

from oocgemm.backends.base import Array, slot_offsets
from oocgemm.backends.cuda import calls as cuda_calls
from oocgemm.backends.cuda.frames import Decoder, Packer
from oocgemm.backends.cuda.launch import Kernels
from oocgemm.backends.cuda.pageable import Ring
from oocgemm.planning import Plan
from oocgemm.planning.cost.coding import decoding_shape
from oocgemm.planning.cost.footprint import COMPILED_LANES, HOST_ALIGNMENT, PAGE, PIECE, RingShape, ring_shape
from oocgemm.planning.tiling import round_up
from oocgemm.system.resources import allocate
from oocgemm.values import dataclass

# Maximum number of bytes of a host slot that one call of the driver pins.
PART = 16 << 20
# If all host slots together have at most this many bytes, they stay allocated and pinned for the next run of
# the process. To fault in and pin their pages takes 0.1 s per GiB, which is long for a small product. The
# ring, which has at most 416 MiB, is kept too.
MAX_KEPT = 128 << 20
# At least this many bytes are allocated, so that small runs of several sizes can use the same memory.
MIN_KEPT = 4 << 20
# CUDA's cudaHostRegisterPortable: the memory is pinned for all devices, not only for the current one.
PORTABLE = 1


@dataclass(slots=True)
class KeptMemory:
    """What is kept for the next run on a device: memory for host slots, and the ring."""

    arena: Array | None = None
    ring: Ring | None = None

    def free(self, device: Any) -> None:
        """Unpin and free the memory of a device, and join the threads."""
        if self.arena is not None:
            cuda_calls.unpin(device, self.arena)
            self.arena = None
        if self.ring is not None:
            ring, self.ring = self.ring, None
            ring.close()


# What is kept, by device number.
_kept: dict[int, KeptMemory] = {}


class HostMemory:
    """The pinned host memory of one run on one device. Remembers which parts of host slots are pinned.

    If a run uses several devices, they share the host slots. The `HostMemory` of the first device pins them
    for all devices; the others get it as `first`. Each device has a ring of its own.
    """

    def __init__(self, device: Any, first: "HostMemory | None" = None) -> None:
        self._device = device
        self._first = first or self
        # Address of a host slot -> addresses where its pinned ranges begin, and where the last one ends.
        self._slots: dict[int, list[int]] = {}
        self._driver = threading.Lock()
        self._own = KeptMemory()
        self._spare = 0  # bytes of the host budget that neither the plan nor kept memory beyond it takes
        self.decoder: Decoder | None = None  # for a plan with compressed operands that the device decodes
        self.packer: Packer | None = None  # for a plan with a C that the device compresses

    @property
    def ring(self) -> Ring:
        """The ring, for a plan that has one."""
        assert self._own.ring is not None
        return self._own.ring

    def take(self, plan: Plan, kernels: Kernels, address: int) -> Array | None:
        """Take the memory and the ring that an earlier run has left, if they fit the plan; else free them.

        Kept memory that this run does not use would come on top of its budget. This method also opens the
        decoder and the packer, if the plan has them. They launch `kernels`, and their memory on the device
        begins at `address`.

        Returns pinned, resident memory for all host slots of the plan; None if it exceeds `MAX_KEPT`, or if
        this is not the first device.
        """
        first, size = self._first, 0
        if first is self:
            self._spare = max(0, plan.budgets.host - plan.footprint.host_total)
            size = slot_offsets(plan, "host", HOST_ALIGNMENT)[1]
        kept, shape = _kept.pop(self._device.id, KeptMemory()), ring_shape(plan.setting)
        unfit = KeptMemory()
        if kept.arena is not None:
            more = kept.arena.nbytes - size
            if 0 < size <= MAX_KEPT and 0 <= more <= self._spare:
                self._spare -= more
            else:
                unfit.arena, kept.arena = kept.arena, None
        if kept.ring is not None:
            beyond = _more_for(kept.ring.shape, plan, shape)
            if beyond is not None and beyond <= first._spare:
                first._spare -= beyond
            else:
                unfit.ring, kept.ring = kept.ring, None
        self._own = kept
        unfit.free(self._device)
        if kept.ring is None and shape is not None:
            kept.ring = Ring(self._device, shape)
        if (decoding := decoding_shape(plan.setting)) is not None:
            self.decoder = Decoder(self._device, decoding, address, kernels)
        used = plan.footprint.device
        if used["encode"]:
            self.packer = Packer(plan, kernels, (address + used["decode"], used["encode"]))
        if not 0 < size <= MAX_KEPT:
            return None
        if kept.arena is None:
            arena = allocate(min(max(MIN_KEPT, 1 << max(0, size - 1).bit_length()), size + self._spare))
            self._spare -= arena.nbytes - size
            arena[::PAGE] = 0  # faults in the pages
            self._register(arena.ctypes.data, arena.nbytes)
            kept.arena = arena
        return kept.arena[:size]

    def submitting(self) -> AbstractContextManager[object]:
        return self._first._driver

    def pin_slot(self, address: int, size: int) -> Sequence[int]:
        """Pin those parts of a host slot that are not pinned yet. Return the borders of its pinned ranges.

        Call it after the slot's pages have been faulted in: pinning is then ten times as fast. Submitting a
        copy calls it again, so that the memory is pinned in any case.
        """
        if self._first is not self:
            return self._first.pin_slot(address, size)
        end = round_up(address + size, HOST_ALIGNMENT)
        arena = self._own.arena
        if arena is not None and 0 <= address - arena.ctypes.data < arena.nbytes:
            return [address, end]  # the arena is one pinned range
        borders = self._slots.setdefault(address, [address])
        while borders[-1] < end:
            part = min(PART, end - borders[-1])
            self._register(borders[-1], part)
            borders.append(borders[-1] + part)
        return borders

    def _register(self, address: int, size: int) -> None:
        with self.submitting():
            cuda_calls.pin(self._device, address, size, PORTABLE)

    def close(self, *, keep: bool) -> None:
        """Keep the memory for the next run, or free it. Unpin all other slots. No copy may be in flight."""
        if self.decoder is not None:
            self.decoder.close()
        own, self._own = self._own, KeptMemory()
        if keep:
            other = _kept.setdefault(self._device.id, own)
            if other is not own:  # a concurrent run has left its memory
                keep = False
        if not keep:
            own.free(self._device)
        # After a failed launch, every CUDA call raises. Unpin the remaining ranges all the same.
        for borders in self._slots.values():
            for begin in borders[:-1]:
                with suppress(Exception):
                    runtime.hostUnregister(begin)
        self._slots = {}


def _more_for(kept: RingShape, plan: Plan, shape: RingShape | None) -> int | None:
    """Return how many bytes a kept ring takes beyond a ring of the shape `shape`, which a plan needs.

    Return None if the plan cannot use the kept ring: the kept ring is smaller, the plan has no ring, or the
    device transposes strips. A plan whose device transposes needs exactly `shape`, because the device has a
    buffer for each pinned buffer, at the same offset.
    """
    if kept == shape:
        return 0
    if shape is None or kept.lanes < shape.lanes or kept.piece < shape.piece or plan.setting.turns_on_device:
        return None
    # Each lane has a thread that reads files, with scratch memory of its own.
    scratch = max(plan.setting.routes[operand].lane_scratch for operand in "AB")
    return kept.bytes - shape.bytes + (kept.lanes - shape.lanes) * scratch


def take_ring(device: int, room: int) -> Ring | None:
    """Return a ring, for the caller to `keep_ring` afterwards; None if it has more than `room` bytes."""
    kept = _kept.get(device)
    if kept is not None and kept.ring is not None and kept.ring.shape.bytes <= room:
        ring, kept.ring = kept.ring, None
        return ring
    cores = len(os.sched_getaffinity(0))
    shape = RingShape(1 + min(COMPILED_LANES, cores), PIECE)
    return Ring(cupy.cuda.Device(device), shape) if shape.bytes <= room else None


def keep_ring(device: int, ring: Ring) -> None:
    """Keep a ring for the next run, if there is no other. No copy may be in flight."""
    kept = _kept.setdefault(device, KeptMemory())
    if kept.ring is None:
        kept.ring = ring
    else:  # a concurrent run has kept its ring
        ring.close()


def keeps(device: int) -> bool:
    """Return whether memory or a ring is kept for the next run on a device."""
    kept = _kept.get(device)
    return kept is not None and (kept.arena is not None or kept.ring is not None)


def release() -> None:
    """Unpin and free the memory that is kept for the next run."""
    while True:
        try:
            number, kept = _kept.popitem()
        except KeyError:  # nothing is left: a run in another thread may take something at any time
            return
        kept.free(cupy.cuda.Device(number))
