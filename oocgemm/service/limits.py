"""What a service may use: folders below named roots, devices, memory and space on disks.

A path below a root is written ``data:dir/A.zarr``.

A child process opens the devices: ``python -m oocgemm.service.limits BACKEND``. If the server opened them
itself, it would occupy memory of each GPU as long as it runs.
"""

import ctypes
import errno
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from oocgemm.errors import BackendError, InputError, OocGemmError
from oocgemm.planning.units import format_size, parse_size
from oocgemm.service.backfill import Limits
from oocgemm.values import dataclass

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_MODES = {"ro": False, "rw": True}

# Files of a zarr array or group beside its chunks, of zarr formats 3 and 2.
METADATA = ("zarr.json", ".zarray", ".zattrs", ".zgroup", ".zmetadata")

# openat2(2): its number is the same on all architectures. glibc has no wrapper.
_OPENAT2 = 437
_NO_MAGICLINKS, _BENEATH = 0x02, 0x08
# The kernel gives up with EAGAIN if a folder is renamed while it resolves a path.
_TRIES = 100
_REASONS = {
    errno.ENOENT: "there is nothing at this path",
    errno.ENOTDIR: "a part of it is no folder",
    errno.EXDEV: "a symbolic link leaves the root",
    errno.ELOOP: "it has too many symbolic links, or one of /proc",
    errno.EACCES: "the service has no permission to open it",
    errno.ENAMETOOLONG: "it is too long",
    errno.EAGAIN: "its folders are being renamed: try again",
    errno.ENOSYS: "the service needs Linux 5.6 or later, for openat2",
}


class PathError(InputError):
    """Raised for a path that is not below a root, or that the mode of its root forbids."""


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


@dataclass(frozen=True)
class Root:
    """A folder in which jobs may read arrays and, if it is writable, write them. Users name it."""

    name: str
    folder: Path
    writable: bool

    @classmethod
    def parse(cls, text: str) -> "Root":
        """Parse a root such as ``data=/srv/data:ro``. The mode is ``ro`` or ``rw``. Raises `InputError`."""
        name, equals, rest = text.partition("=")
        folder, colon, mode = rest.rpartition(":")
        if not equals or not colon or not folder or mode not in _MODES:
            raise InputError(
                f"cannot read {text!r} as a root: write NAME=FOLDER:MODE with the mode ro or rw, such as "
                "data=/srv:ro"
            )
        if not _NAME.fullmatch(name):
            raise InputError(
                f"{name!r} cannot be the name of a root: use at most 64 ASCII letters, digits, '_', '.', '-'"
            )
        try:
            found = Path(folder).expanduser().resolve(strict=True)
        except (OSError, RuntimeError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(
                f"root {name}: {folder} cannot be used ({reason}): create the folder, or pass another one"
            ) from error
        if not found.is_dir():
            raise InputError(f"root {name}: {folder} is no folder: pass a folder")
        return cls(name, found, _MODES[mode])


def allowed_folders(roots: Iterable[Root]) -> dict[str, list[str]]:
    """Return the folders that a job may only read ("read"), and those that it may also write ("write")."""
    found: dict[str, list[str]] = {"read": [], "write": []}
    for root in roots:
        found["write" if root.writable else "read"].append(str(root.folder))
    return found


def resolve(roots: Mapping[str, Root], text: str, *, write: bool) -> Path:
    """Return the absolute path of an array that a user has named. Symbolic links in it are resolved.

    In the address of an HDF5 dataset, such as ``data:dir/a.h5::/x``, the name of the dataset is unchanged.
    Nothing in a path is decoded: ``%2e`` is three characters. An array to `write` need not exist.

    Raises `PathError` if the path is malformed, not below its root, of the wrong kind, or missing; and for an
    array to write if the root is read-only.
    """
    # This import loads NumPy, which starts threads. A process must confine itself before that.
    from oocgemm.stores.opening import split_address, store_of

    root, parts = _parsed(roots, text)
    dataset = split_address(f"{root.folder}/{text.partition(':')[2]}")[1]
    if dataset:
        if write:
            raise PathError(f"{text}: HDF5 datasets are read-only: give a path that ends in .zarr or .npy")
        root, parts = _parsed(roots, text.removesuffix(dataset))
    if write and not root.writable:
        others = ", ".join(name for name, each in roots.items() if each.writable) or "none"
        raise PathError(f"{text}: root {root.name} is read-only: use a writable root ({others})")
    try:
        found = _found(root.folder, parts, write=write)
        str(found).encode()
        for name in METADATA:  # the server, which is not confined, reads these files when it plans
            if os.path.lexists(found / name):
                _found(root.folder, [*parts, name], write=False)
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, error.strerror)
        raise PathError(f"{text}: cannot be used in root {root.name}: {reason}") from error
    except UnicodeEncodeError:
        raise PathError(f"{text}: it links to a name that is not UTF-8: rename that") from None
    if root.folder not in found.parents:
        raise PathError(f"{text}: it is not below root {root.name}, which may have been moved")
    for place in store_of(str(found)).companions(str(found)):  # the server reads these files, too
        try:
            if os.path.lexists(place):
                _found(root.folder, list(place.relative_to(root.folder).parts), write=False)
        except OSError as error:
            reason = _REASONS.get(error.errno or 0, error.strerror)
            raise PathError(f"{text}: {place.name} beside it cannot be used: {reason}") from error
    return Path(f"{found}{dataset}")


def display(roots: Mapping[str, Root], path: str | Path) -> str:
    """Return an absolute path as ROOT:PATH, by the deepest root; the path itself if it is in no root."""
    inside = [root for root in roots.values() if root.folder in Path(path).parents]
    if not inside:
        return str(path)
    root = max(inside, key=lambda root: len(root.folder.parts))
    return f"{root.name}:{Path(path).relative_to(root.folder)}"


def display_all(roots: Mapping[str, Root], text: str) -> str:
    """Return a text in which all paths in roots are replaced by ROOT:PATH.

    >>> display_all({"data": Root("data", Path("/srv/data"), False)}, "/srv/data/A.zarr, /srv/database/B")
    'data:A.zarr, /srv/database/B'
    """
    for root in sorted(roots.values(), key=lambda root: len(root.folder.parts), reverse=True):
        text = replace_folder(text, root.folder, f"{root.name}:")
    return text


def replace_folder(text: str, folder: Path, name: str) -> str:
    """Replace a folder at the beginning of paths in a text."""
    if str(folder) not in text:
        return text
    begins = rf"(?:(?<=file://)|(?<![\w./~-])){re.escape(str(folder))}(?:/|(?![\w.-]))"
    return re.sub(begins, lambda _: name, text)


def _parsed(roots: Mapping[str, Root], text: str) -> tuple[Root, list[str]]:
    """Return the root and the components that a path names, without opening anything."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PathError(f"{text!r} is no path: it is not valid Unicode") from None
    if "\0" in text:
        raise PathError(f"{text!r} is no path: it contains a NUL character")
    name, colon, rest = text.partition(":")
    if not colon:
        raise PathError(f"{text!r} names no root: write ROOT:PATH, such as data:dir/A.zarr")
    if name not in roots and rest.startswith("//"):
        # The rest of a URL may contain credentials, which no message may show.
        raise PathError(
            f"{name}://...: there is no root {name!r}, and jobs take no URLs: copy the array into a root "
            f"({', '.join(sorted(roots))}), and name it as ROOT:PATH"
        )
    if name not in roots:
        raise PathError(f"{text}: there is no root {name!r}: use one of {', '.join(sorted(roots))}")
    if rest.startswith("/"):
        raise PathError(f"{text}: the path is absolute: write it relative to the root, as {name}:A.zarr")
    parts = [part for part in rest.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise PathError(f"{text}: the path contains '..': write it without")
    if not parts:
        raise PathError(f"{text}: this is the root itself: name an array in it, as {name}:A.zarr")
    return roots[name], parts


def _found(folder: Path, parts: list[str], *, write: bool) -> Path:
    """Return the real path of an array below a folder. With `write`, its last components need not exist."""
    with _opened(os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as top:
        for count in range(len(parts), -1, -1):
            try:
                descriptor = _open_beneath(top, "/".join(parts[:count]) or ".")
            except FileNotFoundError:
                if not write:
                    raise
                continue
            with _opened(descriptor):
                _check_kind(descriptor, parts[count:])
                return Path(os.readlink(f"/proc/self/fd/{descriptor}"), *parts[count:])
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))


def _check_kind(descriptor: int, missing: list[str]) -> None:
    """Check that an array can be at a path. Its components `missing` do not exist in the open folder."""
    mode = os.fstat(descriptor).st_mode
    if missing:
        if not stat.S_ISDIR(mode):
            raise NotADirectoryError(errno.ENOTDIR, "a part of it is no folder")
        if os.path.lexists(f"/proc/self/fd/{descriptor}/{missing[0]}"):
            raise OSError(0, "a symbolic link in it points to nothing")
    elif not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):  # a FIFO blocks whoever opens it
        raise OSError(0, "it is neither a file nor a folder")


def _open_beneath(folder: int, path: str) -> int:
    """Open a path below an open folder, without reading anything. Raise `OSError` if a link leaves it."""
    how = _How(os.O_PATH | os.O_CLOEXEC, 0, _BENEATH | _NO_MAGICLINKS)
    libc = ctypes.CDLL(None, use_errno=True)
    for _ in range(_TRIES):
        found = libc.syscall(
            ctypes.c_long(_OPENAT2),
            ctypes.c_int(folder),
            ctypes.c_char_p(os.fsencode(path)),
            ctypes.byref(how),
            ctypes.c_size_t(ctypes.sizeof(how)),
        )
        if found >= 0:
            return int(found)
        if ctypes.get_errno() != errno.EAGAIN:
            break
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@contextmanager
def _opened(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class DeviceInfo:
    """A device: number, name, and memory in bytes. The host backend has one device, with no memory."""

    number: int
    name: str
    memory: int


def find_devices(backend: str = "auto") -> tuple[str, list[DeviceInfo]]:
    """Return the backend of a name, and its devices. On a GPU, this takes seconds. Raises `BackendError`."""
    command = [sys.executable, "-m", "oocgemm.service.limits", backend]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
    try:
        found = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise BackendError(
            f"the process that opens the devices ended with status {done.returncode} and no answer: see its "
            "messages above"
        ) from None
    if "error" in found:
        raise BackendError(found["error"])
    return found["backend"], [DeviceInfo(**each) for each in found["devices"]]


def limits(
    devices: Sequence[DeviceInfo],
    roots: Iterable[Root],
    *,
    device_memory: str | int | None = None,
    host_memory: str | int | None = None,
    disk_quota: str | int | None = None,
    shared: bool = False,
) -> Limits:
    """Return what all running jobs together may occupy.

    The defaults are 90% of the memory of each GPU, since drivers and libraries need the rest; half of
    the host memory that this process may use; and the disk space that `free_space` returns. The host backend
    has no device memory: its jobs use host memory. Raises `InputError` if a limit exceeds what the machine
    has.
    """
    # This import loads NumPy, too.
    from oocgemm.system.resources import memory_limit

    installed = memory_limit()
    host = installed // 2 if host_memory is None else _at_most("host", host_memory, installed, "the machine")
    memory = {each.number: each.memory * 9 // 10 for each in devices}
    if device_memory is not None:
        for each in devices:
            if each.memory:
                memory[each.number] = _at_most("device", device_memory, each.memory, f"GPU {each.number}")
    disk = free_space(roots) if disk_quota is None else parse_size(disk_quota)
    return Limits(memory, host, disk, shared)


def free_space(roots: Iterable[Root]) -> int:
    """Return the least free disk space of the writable roots, in bytes; 0 without a writable root.

    The free space shrinks while jobs write C. In the schedule, the written bytes count twice, because the
    need of a job includes them, too. So a job may wait too long, but does not fill the disk.
    """
    return min((shutil.disk_usage(root.folder).free for root in roots if root.writable), default=0)


def _at_most(what: str, asked: str | int, available: int, where: str) -> int:
    size = parse_size(asked)
    if size > available:
        raise InputError(
            f"--{what}-memory is {format_size(size)}, but {where} has {format_size(available)}: pass a "
            "smaller size"
        )
    return size


def _answer(backend: str) -> dict[str, object]:
    """Open all devices of a backend; return what `find_devices` needs."""
    from oocgemm.backends import open_backend

    try:
        first = open_backend(backend)
        numbers = range(first.device_count())
        engines = [first, *(open_backend(first.name, number) for number in numbers[1:])]
    except OocGemmError as error:
        return {"error": str(error)}
    described = [engine.describe() for engine in engines]
    return {
        "backend": first.name,
        "devices": [
            asdict(DeviceInfo(number, each["device"], parse_size(each["memory"]) if "memory" in each else 0))
            for number, each in enumerate(described)
        ],
    }


if __name__ == "__main__":
    print(json.dumps(_answer(sys.argv[1])))
