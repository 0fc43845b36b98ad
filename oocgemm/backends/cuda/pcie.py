"""Find the maximum rate of a device's PCI Express link in sysfs."""

import re
from pathlib import Path

DEVICES = Path("/sys/bus/pci/devices")
# A PCI Express link has at most this many lanes. A larger number in sysfs is wrong, and is not used.
MAX_LANES = 32


def link_limit(address: str, devices: Path = DEVICES) -> float | None:
    """Return the maximum rate of a device's PCI Express link in one direction, in bytes per second.

    This is an upper bound: the maximum transfer rate per PCIe lane, times the maximum number of lanes. The
    link's current speed is not used, because an idle link slows down.

    Args:
        address: PCI address of the device: domain, bus, device and function, such as 0000:1B:00.0.
        devices: the folder in which the system describes PCI devices.

    Returns:
        The rate; None if the system does not report the link, as in some virtual machines.
    """
    folder = devices / address.lower()
    try:
        speed = re.match(r"([\d.]+) GT/s", (folder / "max_link_speed").read_text(encoding="utf-8"))
        lanes = int((folder / "max_link_width").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if speed is None or not 0 < lanes <= MAX_LANES:
        return None
    return float(speed[1]) * 1e9 / 8 * lanes
