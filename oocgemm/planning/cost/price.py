"""Rates of single operations: reads of panels and writes of strips."""

from oocgemm.planning.cost.machine import DIGEST_SECONDS_PER_BYTE, INSTANT
from oocgemm.planning.setting import Setting
from oocgemm.planning.tiling import Layout, Shape


def panel_rate(setting: Setting, layout: Layout, shape: Shape, panel: Shape) -> float:
    """Bytes per second of reading an operand of that shape in such panels.

    The time includes bytes that are read but not needed, and digests if the device computes checksums.
    """
    rate = setting.machine.store_rate(layout, panel) / layout.read_amplification(shape, panel)
    return 1 / (1 / rate + DIGEST_SECONDS_PER_BYTE) if setting.problem.checked == "device" else rate


def strip_rate(setting: Setting, strip: Shape) -> float:
    """Bytes per second of writing strips of C of that shape from host slots to their store."""
    machine, layout = setting.machine, setting.layouts.c
    if layout.line:
        return 1 / (1 / machine.write + machine.segment / layout.segment_bytes(strip))
    if not layout.in_memory:
        return machine.write
    # Strips are checked in host slots, so that a checked C is never downloaded in place.
    return INSTANT if layout.is_direct(strip) and not setting.problem.checked else machine.memory
