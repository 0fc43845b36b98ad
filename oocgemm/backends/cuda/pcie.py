"""Find the maximum rate of a device's PCI Express link in sysfs."""

import re
from pathlib import Path

DEVICES = Path("/sys/bus/pci/devices")
MAX_LANES = 32


def link_limit(address: str, devices: Path = DEVICES) -> float | None:
    """Return an upper bound on the rate of a device's link in one direction, in bytes per second.

    It is the transfer rate of the link's generation times its number of lanes, without the encoding overhead.
    The link's current speed is not used, since an idle link slows down.

    Args:
        address: domain, bus, device and function, such as 0000:1B:00.0.
        devices: the folder where the system describes devices.

    Returns:
        None where the system does not report the link, as in some virtual machines.
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
