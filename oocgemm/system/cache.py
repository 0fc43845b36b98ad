"""What is remembered of this machine between runs: its calibrations, one file a device.

Nothing here touches a device or imports a library of one, so that a plan for a GPU can be made without it.
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
    """Where calibrations are kept: $OOCGEMM_CACHE, or `oocgemm` in the user's cache directory. Raises `InputError` for a
    user without a home."""
    own, shared = os.environ.get("OOCGEMM_CACHE"), os.environ.get("XDG_CACHE_HOME", "")
    if own:
        return Path(own)
    try:
        base = Path(shared) if os.path.isabs(shared) else Path("~/.cache").expanduser()
    except RuntimeError as error:
        raise InputError("there is no home directory to keep calibrations in: set OOCGEMM_CACHE") from error
    return base / "oocgemm"


def processor() -> str:
    """The processor's name."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def machine_key() -> str:
    """Stands for this host, its processor, and the cores that this process may use: home directories are shared
    among machines, and rates follow the cores."""
    parts = platform.node(), processor(), len(os.sched_getaffinity(0))
    return hashlib.sha256("|".join(map(str, parts)).encode()).hexdigest()[:12]


def file_system(path: str | os.PathLike[str]) -> str:
    """An id of the file system that a path is on, or would be."""
    place = Path(path).absolute()
    while not os.path.exists(place):
        place = place.parent
    return device_id(os.stat(place).st_dev)


def device_id(number: int) -> str:
    """A file system as an id, by the device number in the status of its files."""
    return f"{os.major(number)}:{os.minor(number)}"


def path_of(calibration: Calibration) -> Path:
    """The file of a calibration; another of the same machine, backend and device has the same."""
    device = re.sub(r"[^a-z0-9]+", "-", calibration.device.lower()).strip("-")
    return folder() / f"{calibration.machine}-{calibration.backend}-{device}.json"


def save(calibration: Calibration) -> Path:
    """Keep a calibration in place of the last one, whose file systems are kept where they were not measured again.
    Returns its path. Raises `InputError` if it cannot be written."""
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
            f"the calibration cannot be kept at {path}: {error.strerror}; set OOCGEMM_CACHE to a folder that can be "
            "written to"
        ) from error
    return path


def write_whole(path: Path, contents: bytes) -> None:
    """Write a file, its folders too, so that who reads it finds all of it or none."""
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
    """The calibration of a device of this machine, of the one last calibrated if that is None; and a note on files
    that had to be ignored. Never raises."""
    key, notes = machine_key(), []
    for path in _newest(f"{key}-{backend}-*.json"):
        try:
            found = Calibration.from_dict(json.loads(path.read_text(encoding="utf-8")))
            if (found.machine, found.backend) != (key, backend):
                raise ValueError("it is of another machine")
        except (OSError, ValueError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
            notes.append(f"{path} is ignored: {reason}")
            continue
        if device in (None, found.device):
            return found, ""
    return None, "; ".join(notes)


def _newest(pattern: str) -> Iterator[Path]:
    """Files in the cache, the one last written first."""
    with suppress(OSError, InputError):
        aged = [(path.stat().st_mtime_ns, path) for path in folder().glob(pattern)]
        yield from (path for _, path in sorted(aged, reverse=True))
