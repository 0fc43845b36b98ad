"""Save the rates that runs observed, and load them in later runs. There is one JSON file per device.

Nothing here raises: rates that cannot be stored are not stored, and the run does not notice. Concurrent
processes replace the file atomically. If two of them add a run at the same time, one run is lost.

If the environment variable OOCGEMM_LEARN is 0, nothing is stored and nothing is loaded.
"""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from oocgemm.errors import InputError
from oocgemm.planning.cost.learned import Learned
from oocgemm.system import cache

_ERRORS = (OSError, InputError, ValueError, RecursionError)


def enabled() -> bool:
    """Return whether rates are learned, and used by plans."""
    return os.environ.get("OOCGEMM_LEARN", "1") != "0"


def version() -> object:
    """Return a value that changes when what `load` returns may have changed."""
    return cache.version(_folder) if enabled() else None


def load(backend: str, device: str | None) -> Learned | None:
    """Return the learned rates of a device of this machine; None if there are none.

    If `device` is None, return those of the device that ran last.
    """
    if not enabled():
        return None
    for path, written in _files(backend):
        with suppress(*_ERRORS):
            found = _read(path, written)
            if (found.machine, found.backend) == (cache.machine_key(), backend) and device in (
                None,
                found.device,
            ):
                return found
    return None


def update(backend: str, device: str, change: Callable[[Learned], Learned]) -> None:
    """Load the learned rates of a device, change them, and save them."""
    if not enabled():
        return
    old = load(backend, device) or Learned(cache.machine_key(), backend, device, {})
    new = change(old)
    if new.rates != old.rates:
        with suppress(*_ERRORS):
            path = _folder() / cache.file_name(old.machine, backend, device)
            cache.write_whole(path, json.dumps(new.to_dict()).encode())


def forget(backend: str | None = None) -> list[Path]:
    """Delete the learned rates of this machine, and return the deleted files.

    Raises `InputError` if a file cannot be deleted.
    """
    deleted = []
    for path in (Path(name) for name, _ in _files(backend or "*")):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise InputError(
                f"the learned rates at {path} cannot be deleted: {error.strerror}; delete the file, or set "
                "OOCGEMM_CACHE to another folder"
            ) from error
        deleted.append(path)
    return deleted


def _folder() -> Path:
    return cache.folder() / "learned"


def _files(backend: str) -> list[tuple[str, tuple[int, int]]]:
    return cache.newest(_folder, cache.machine_key() + ("-" if backend == "*" else f"-{backend}-"))


@lru_cache(maxsize=16)
def _read(path: str, written: tuple[int, int]) -> Learned:
    """Read learned rates. The result is cached until the file's `written` (time and size) changes."""
    return Learned.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
