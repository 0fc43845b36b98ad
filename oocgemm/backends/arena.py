"""Where the slots of a tier are in the arena, one allocation for all of them."""

from collections.abc import Mapping
from functools import lru_cache

from oocgemm.planning import GemmProblem, Plan, Slot, Tier, TileShape
from oocgemm.planning.cost.coding import slot_frames
from oocgemm.planning.cost.footprint import DEVICE_ALIGNMENT, slot_bytes
from oocgemm.planning.schedule.operation import Slots
from oocgemm.planning.tiling import round_up

# Parts of the device's footprint that lie behind the slots, in this order.
AREAS = ("transform", "turned", "work", "decode", "encode")


def device_offsets(plan: Plan, device: int = 0) -> tuple[Mapping[Slot, int], int]:
    """Return the byte offset of each slot of a device in the arena (one allocation), and the arena's size."""
    return slot_offsets(plan, "device", DEVICE_ALIGNMENT, device)


def areas(plan: Plan, start: int) -> list[int]:
    """Return where each of `AREAS` ends in the memory of a device, if the first one begins at `start`."""
    return [start := start + plan.footprint.device[area] for area in AREAS]


def slot_offsets(plan: Plan, tier: str, alignment: int, device: int = 0) -> tuple[Mapping[Slot, int], int]:
    """Place the slots of a tier ("host" or "device") one after the other in one allocation, the arena.

    For the tier "device", they are the slots of one `device` of the run.

    Returns:
        The byte offset of each slot, a multiple of `alignment`, and the size of the arena in bytes.
    """
    frames = slot_frames(plan.setting, plan.tile, plan.slots.strip)
    given = plan.problem, plan.tile, plan.slots, frames, frozenset(plan.in_place), plan.devices
    return _slot_offsets(*given, tier, alignment, device)


@lru_cache(64)
def _slot_offsets(
    problem: GemmProblem,
    tile: TileShape,
    slots: Slots,
    frames: int,
    in_place: frozenset[str],
    devices: int,
    tier: str,
    alignment: int,
    device: int,
) -> tuple[Mapping[Slot, int], int]:
    sizes = slot_bytes(problem, tile, slots.strip, frames)
    # Slots of operands that are multiplied in place have no memory.
    sizes |= {("device", operand): 0 for operand in in_place}
    offsets: dict[Slot, int] = {}
    end = 0
    for operand in "CABDP" if tier == "device" else "ABC":
        # Devices share the host slots for panels. Each has host slots of its own for strips of C.
        owners = range(devices) if (tier, operand) == ("host", "C") else (device,)
        for owner in owners:
            for index in range(slots.count(Tier(tier), operand)):
                offsets[Slot(Tier(tier), operand, index, owner)] = end
                end = round_up(end + sizes[tier, operand], alignment)
    return offsets, end
