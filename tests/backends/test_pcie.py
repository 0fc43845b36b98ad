"""The highest rate of a device's PCIe link, as files in /sys describe it."""

from pathlib import Path

import pytest

from oocgemm.backends.registry import pci_limit


def described(folder: Path, speed: str, lanes: str) -> Path:
    device = folder / "0000:1b:00.0"
    device.mkdir()
    (device / "max_link_speed").write_text(speed + "\n")
    (device / "max_link_width").write_text(lanes + "\n")
    return folder


@pytest.mark.parametrize(
    ("speed", "lanes", "limit"),
    [
        ("32.0 GT/s PCIe", "16", 64e9),
        ("16.0 GT/s PCIe", "8", 16e9),
        ("8 GT/s", "16", 16e9),
        ("2.5 GT/s PCIe", "1", 0.3125e9),
        ("Unknown", "16", None),
        ("Unknown speed", "0", None),
        ("32.0 GT/s PCIe", "0", None),
        ("32.0 GT/s PCIe", "255", None),
        ("", "", None),
    ],
)
def test_a_link_carries_what_its_generation_and_lanes_can(
    tmp_path: Path, speed: str, lanes: str, limit: float | None
) -> None:
    folder = described(tmp_path, speed, lanes)
    assert pci_limit("0000:1B:00.0", folder) == limit  # CUDA writes addresses in capitals, /sys does not


def test_a_device_unknown_to_the_system_has_no_pci_limit(tmp_path: Path) -> None:
    assert pci_limit("0000:1B:00.0", tmp_path) is None
