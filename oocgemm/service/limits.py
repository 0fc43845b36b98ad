"""Find the devices of this machine, and what jobs may occupy on it.

A child process opens the devices: ``python -m oocgemm.service.limits BACKEND``. A server that did it itself
would occupy memory of each GPU as long as it runs.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from oocgemm.errors import BackendError, InputError, OocGemmError
from oocgemm.planning.units import format_size, parse_size
from oocgemm.service.backfill import Limits
from oocgemm.service.roots import Root
from oocgemm.system.resources import memory_limit


@dataclass(frozen=True)
class DeviceInfo:
    """A device: its number, its name, and its memory in bytes. The host backend has one with no memory."""

    number: int
    name: str
    memory: int


def find_devices(backend: str = "auto") -> tuple[str, list[DeviceInfo]]:
    """Return the backend that a name stands for, and its devices. On a GPU, this takes seconds.

    Raises:
        BackendError: the backend, or one of its devices, cannot be opened.
    """
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

    Args:
        devices: as `find_devices` returns them.
        roots: the roots of the service. C is stored in the writable ones.
        device_memory: memory per GPU, in bytes or as "8GiB". Default: 90% of that of each GPU, since drivers
            and libraries need the rest. The host backend has no such limit: its jobs use host memory.
        host_memory: memory of the host. Default: half of what this process may use.
        disk_quota: bytes of the results of running jobs. Default: the result of `free_space`.
        shared: let several jobs run on one device.

    Raises:
        InputError: a limit exceeds what the machine has.
    """
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
    """Return the least free disk space of the writable roots, in bytes; 0 if there is none.

    It shrinks while jobs write C. Bytes that a running job has written count twice in the schedule, as
    occupied disk and as part of what the job needs. A job then waits too long, but does not fill the disk.
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
