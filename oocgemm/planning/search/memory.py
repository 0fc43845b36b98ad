"""The memory that the slots (buffers) of a tile shape leave of the budgets, on the device and on the host."""

from math import ceil

from oocgemm.planning.check_blocks import panel_checksum_bytes
from oocgemm.planning.cost.encoding import slot_frames
from oocgemm.planning.cost.footprint import Candidate, footprint, slot_bytes
from oocgemm.planning.schedule.slots import Slots
from oocgemm.planning.setting import Setting
from oocgemm.planning.tiling import TileShape


class Memory:
    """The free memory for a tile shape and a number of I/O threads. It computes each part of it once."""

    def __init__(self, setting: Setting, tile: TileShape, io_threads: int) -> None:
        self.setting, self.tile, self._io_threads = setting, tile, io_threads
        self._sizes: dict[int, dict[tuple[str, str], int]] = {}
        self._without_slots: dict[int, tuple[int, int]] = {}

    def sizes(self, strip: int) -> dict[tuple[str, str], int]:
        """Return the bytes of one buffer by (tier, operand), as `slot_bytes` does."""
        if strip not in self._sizes:
            frames = slot_frames(self.setting, self.tile, strip)
            self._sizes[strip] = slot_bytes(self.setting.problem, self.tile, strip, frames)
        return self._sizes[strip]

    def free(self, slots: Slots) -> tuple[int, int]:
        """Return the bytes of the budgets that are left on the device and on the host.

        If the host computes checksums, it stores those of every panel on the device. Then only as many device
        bytes are returned as the host has memory for their checksums. That memory is not part of the returned
        host bytes.
        """
        if self.setting.problem.checked == "host":
            return self._with_checksums(slots)
        # Besides slots, only the memory for checksums and for old elements of C depends on the strip.
        depends = self.setting.problem.checked or self.setting.restores_outside
        strip = slots.strip if depends else 0
        if strip not in self._without_slots:
            self._without_slots[strip] = self._left(Slots(0, 0, 0, 0, 0, 0, 0, slots.strip))
        device, host = self._without_slots[strip]
        size, in_place = self.sizes(slots.strip), self.setting.layouts.in_place
        for operand, count in (
            *(("A", slots.a), ("B", slots.b), ("C", slots.c)),
            *(("D", slots.finish), ("P", slots.planes)),
        ):
            if operand not in in_place:
                device -= count * size["device", operand]
        strips = self.setting.devices * slots.host_c
        for operand, count in (("A", slots.host_a), ("B", slots.host_b), ("C", strips)):
            host -= count * size["host", operand]
        return device, host

    def _left(self, slots: Slots) -> tuple[int, int]:
        used = footprint(self.setting, Candidate(self.tile, slots, io_threads=self._io_threads))
        budgets = self.setting.budgets
        return budgets.device - used.device_total, budgets.host - used.host_total

    def _with_checksums(self, slots: Slots) -> tuple[int, int]:
        (device, host), size = self._left(slots), self.sizes(slots.strip)
        checks = panel_checksum_bytes(self.setting.problem, self.tile, slots.strip)
        share = max(check / max(1, size["device", x]) for x, check in zip("AB", checks, strict=True))
        if share and min(device, host) > 0:
            device = min(device, int(host / share))
            host -= ceil(device * share)
        return device, host
