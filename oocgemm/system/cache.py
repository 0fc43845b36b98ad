"""Save calibrations (measured transfer and compute rates of this machine), and load them in later runs.

There is one JSON file per device. This module needs no GPU library.
"""

import functools
import hashlib
import json
import os
import platform
import re
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic

from oocgemm.errors import InputError
from oocgemm.planning.cost.machine import Calibration

# Files are read again after at most this many seconds: a file that is edited in place does not change the
# modification time of its folder.
RECENT = 0.5


def folder() -> Path:
    """Return the folder for calibrations: $OOCGEMM_CACHE, or `oocgemm` in the user's cache directory.

    That directory is $XDG_CACHE_HOME, or `~/.cache`. Raises `InputError` for a user without a home directory.
    """
    return _folder(*map(os.environ.get, ("OOCGEMM_CACHE", "XDG_CACHE_HOME", "HOME")))


@functools.lru_cache(maxsize=4)
def _folder(own: str | None, shared: str | None, home: str | None) -> Path:
    if own:
        return Path(own)
    try:
        base = Path(shared) if shared and os.path.isabs(shared) else Path("~/.cache").expanduser()
    except RuntimeError as error:
        raise InputError(
            "there is no home directory for calibrations: set OOCGEMM_CACHE to a writable folder"
        ) from error
    return base / "oocgemm"


def version(within: Callable[[], Path] = folder) -> tuple[Path | None, int, int]:
    """Return a value that changes when a file is saved in a folder or deleted, and every `RECENT` seconds.

    Data that was read from the folder is valid as long as the value is the same. `within` returns the folder,
    or raises `InputError`.
    """
    found, changed = None, 0
    with suppress(OSError, InputError):
        found = within()
        changed = os.stat(found).st_mtime_ns
    return found, changed, int(monotonic() / RECENT)


@functools.cache
def processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def machine_key() -> str:
    """Return a digest of the host name, the processor, and the number of cores that this process may use.

    A calibration applies only to the machine with its key. Several machines may share a cache folder.
    """
    parts = platform.node(), processor(), len(os.sched_getaffinity(0))
    return hashlib.sha256("|".join(map(str, parts)).encode()).hexdigest()[:12]


def file_system(path: str | os.PathLike[str]) -> str:
    """Return the id of the file system that a path is on. The path need not exist."""
    place = Path(path).absolute()
    while not os.path.exists(place):
        place = place.parent
    return device_id(os.stat(place).st_dev)


def device_id(number: int) -> str:
    """Return the id of a file system, "major:minor", from `st_dev`, its device number in stat(2)."""
    return f"{os.major(number)}:{os.minor(number)}"


def path_of(calibration: Calibration) -> Path:
    """Return the path of a calibration. Each machine, backend and device has one path."""
    return folder() / file_name(calibration.machine, calibration.backend, calibration.device)


def file_name(machine: str, backend: str, device: str) -> str:
    return f"{machine}-{backend}-{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


def save(calibration: Calibration) -> Path:
    """Save a calibration, and return its path.

    The new file replaces the previous calibration of the device, but keeps its rates of file systems that
    were not measured again. Raises `InputError` if the file cannot be written.
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
    """Write a file atomically: other processes see the old contents or the new. Create missing folders."""
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
    """Return the calibration of a device of this machine, and a note. Never raises.

    If `device` is None, return the calibration of the device that was calibrated last. If none is found,
    return None and a note that names unreadable and invalid files. Otherwise the note is "".
    """
    key, notes = machine_key(), []
    for path, written in newest(folder, f"{key}-{backend}-"):
        try:
            found = _read(path, written)
            if (found.machine, found.backend) != (key, backend):
                raise ValueError("the calibration belongs to another machine")
        except (OSError, ValueError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
            notes.append(f"{path} is ignored: {reason}")
            continue
        if device in (None, found.device):
            return found, ""
    return None, "; ".join(notes)


@functools.lru_cache(maxsize=16)
def _read(path: str, written: tuple[int, int]) -> Calibration:
    """Read a calibration file. The result is cached until the file's `written` (time and size) changes."""
    return Calibration.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))


def newest(within: Callable[[], Path], prefix: str) -> list[tuple[str, tuple[int, int]]]:
    """Return the JSON files in a folder whose names begin with a prefix, newest first.

    `within` returns the folder, or raises `InputError`. A file is returned as its path, and the modification
    time in nanoseconds with the size in bytes.
    """
    with suppress(OSError, InputError), os.scandir(within()) as entries:
        found = [entry for entry in entries if entry.name.startswith(prefix) and entry.name.endswith(".json")]
        aged = [(entry.path, (entry.stat().st_mtime_ns, entry.stat().st_size)) for entry in found]
        return sorted(aged, key=lambda file: file[1], reverse=True)
    return []
