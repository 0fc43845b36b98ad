"""Keep calibrations of this machine between runs, one file per device.

Nothing here touches a device or imports its libraries, so a plan for a GPU can be made without it.
"""

import hashlib
import json
import os
import platform
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from oocgemm.errors import InputError
from oocgemm.planning.cost.calibration import Calibration


def folder() -> Path:
    """Return the folder of calibrations: $OOCGEMM_CACHE, or `oocgemm` in the user's cache directory.

    Raises `InputError` for a user without a home directory.
    """
    own, shared = os.environ.get("OOCGEMM_CACHE"), os.environ.get("XDG_CACHE_HOME", "")
    if own:
        return Path(own)
    try:
        base = Path(shared) if os.path.isabs(shared) else Path("~/.cache").expanduser()
    except RuntimeError as error:
        raise InputError(
            "there is no home directory for calibrations: set OOCGEMM_CACHE to a writable folder"
        ) from error
    return base / "oocgemm"


def processor() -> str:
    """Return the processor's name."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def machine_key() -> str:
    """Return a digest of this host, its processor, and the number of cores that this process may use.

    Machines may share a home directory, and rates depend on the cores.
    """
    parts = platform.node(), processor(), len(os.sched_getaffinity(0))
    return hashlib.sha256("|".join(map(str, parts)).encode()).hexdigest()[:12]


def file_system(path: str | os.PathLike[str]) -> str:
    """Return the id of the file system of a path, which need not exist."""
    place = Path(path).absolute()
    while not os.path.exists(place):
        place = place.parent
    return device_id(os.stat(place).st_dev)


def device_id(number: int) -> str:
    """Return the id of a file system, given the device number in the status of its files."""
    return f"{os.major(number)}:{os.minor(number)}"


def path_of(calibration: Calibration) -> Path:
    """Return the file of a calibration. Calibrations of the same machine, backend and device share it."""
    device = re.sub(r"[^a-z0-9]+", "-", calibration.device.lower()).strip("-")
    return folder() / f"{calibration.machine}-{calibration.backend}-{device}.json"


def save(calibration: Calibration) -> Path:
    """Save a calibration over the previous one, and return its path.

    Raises `InputError` if it cannot be written.

    Rates of file systems that were not measured again are kept.
    """
    path = path_of(calibration)
    old = None
    with suppress(OSError, ValueError, RecursionError):
        old = Calibration.from_dict(json.loads(path.read_text(encoding="utf-8")))
    if old is not None:
        kept = {system: rates for system, rates in old.stores.items() if system not in calibration.stores}
        calibration = replace(calibration, stores=kept | dict(calibration.stores))
    try:
        write_whole(path, json.dumps(calibration.to_dict(), indent=1).encode())
    except OSError as error:
        raise InputError(
            f"the calibration cannot be saved at {path}: {error.strerror}; "
            "set OOCGEMM_CACHE to a writable folder"
        ) from error
    return path


def write_whole(path: Path, contents: bytes) -> None:
    """Write a file atomically, and create its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("wb", dir=path.parent, delete=False) as file:
        try:
            file.write(contents)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def load(backend: str, device: str | None) -> tuple[Calibration | None, str]:
    """Return the calibration of a device of this machine, and a note on files that were ignored.

    Never raises.

    With None for the device, return the one that was calibrated last.
    """
    key, notes = machine_key(), []
    for path in _newest(f"{key}-{backend}-*.json"):
        try:
            found = Calibration.from_dict(json.loads(path.read_text(encoding="utf-8")))
            if (found.machine, found.backend) != (key, backend):
                raise ValueError("it belongs to another machine")
        except (OSError, ValueError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
            notes.append(f"{path} is ignored: {reason}")
            continue
        if device in (None, found.device):
            return found, ""
    return None, "; ".join(notes)


def _newest(pattern: str) -> Iterator[Path]:
    """Yield files in the cache, the last written first."""
    with suppress(OSError, InputError):
        aged = [(path.stat().st_mtime_ns, path) for path in folder().glob(pattern)]
        yield from (path for _, path in sorted(aged, reverse=True))
