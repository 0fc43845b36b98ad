"""What the PCI Express link of a device can carry, by what the system says of it."""

import re
from pathlib import Path

DEVICES = Path("/sys/bus/pci/devices")
MAX_LANES = 32


def link_limit(address: str, devices: Path = DEVICES) -> float | None:
    """Return the most bytes per second that the link of a device carries in one direction.

    It is that of its generation and of all its lanes, encoding left out: an upper bound. The link's current speed is none,
    since an idle link is slower.

    Args:
        address: domain, bus, device and function, such as 0000:1B:00.0.
        devices: the folder where the system describes devices.

    Returns:
        None where the system does not say, as in some virtual machines.
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
