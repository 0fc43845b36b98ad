"""Rates of single operations: reads of panels (blocks of A and B) and writes of blocks of rows of C."""

from oocgemm.planning.cost.machine import DIGEST_SECONDS_PER_BYTE, INSTANT
from oocgemm.planning.setting import Setting
from oocgemm.planning.tiling import Layout, Shape


def panel_rate(setting: Setting, layout: Layout, shape: Shape, panel: Shape) -> float:
    """Return the bytes per second at which an operand of shape `shape` is read in panels of shape `panel`.

    Only bytes of the panel count, but the time to read the other bytes of its chunks is included. So is the
    time in which the host computes the panel's digest, if the device computes checksums.
    """
    if setting.streams(layout):
        return INSTANT
    rate = setting.machine.store_rate(layout, panel) / layout.read_amplification(shape, panel)
    return 1 / (1 / rate + DIGEST_SECONDS_PER_BYTE) if setting.problem.checked == "device" else rate


def strip_rate(setting: Setting, strip: Shape) -> float:
    """Return the bytes per second at which blocks of rows of C of shape `strip` are written to storage."""
    machine, layout = setting.machine, setting.layouts.c
    if layout.line:
        return 1 / (1 / machine.write + machine.segment / layout.segment_bytes(strip))
    if not layout.in_memory:
        return machine.write
    return INSTANT if setting.streams_c or layout.in_place else machine.memory
