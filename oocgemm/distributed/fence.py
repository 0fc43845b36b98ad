"""The file by which the coordinator of a run shows its workers that it is alive.

The coordinator rewrites the file twice a second with another `beat`. It removes the file at its end. Each
coordinator has a random `epoch`. A child process works for one epoch. It ends if the file is missing or has
another epoch, or if the beat stays the same for `TTL` seconds. Clocks of different machines are not compared.
"""

import json
import os
import threading
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from time import monotonic
from uuid import uuid4

from oocgemm.stores.files import read_regular
from oocgemm.system.threads import start

# Seconds between two beats, and seconds after which a coordinator without a new beat counts as dead.
INTERVAL, TTL = 0.5, 30.0


@dataclass(frozen=True)
class Sign:
    """The content of the file.

    `pid` and `started` identify the coordinator's process on the machine `machine`. `over` has the names of
    the attempts that should end, for example because another attempt has computed the same tiles.
    """

    epoch: str
    machine: str
    pid: int
    started: int
    beat: int = 0
    over: tuple[str, ...] = ()


class Fence:
    """Keeps the file up to date in a thread, from its creation to `close`."""

    def __init__(self, path: Path) -> None:
        """Create or replace the file. Raises `OSError` if that is impossible."""
        self._path = path
        self._over: set[str] = set()
        self._closing = threading.Event()
        self._sign = Sign(uuid4().hex[:12], machine(), os.getpid(), started(os.getpid()) or 0)
        self.taken_over = False  # whether another coordinator has replaced the file
        self._write(0)
        self._thread = threading.Thread(target=self._work, name="oocgemm-fence")
        start(self._thread)

    @property
    def epoch(self) -> str:
        """The epoch of this coordinator."""
        return self._sign.epoch

    def end(self, attempts: Collection[str]) -> None:
        """Tell the child processes of these attempts to end."""
        self._over |= set(attempts)

    def close(self) -> None:
        """Remove the file, which tells all child processes to end. It may be called more than once."""
        self._closing.set()
        self._thread.join()
        if not self.taken_over:
            self._path.unlink(missing_ok=True)

    def _work(self) -> None:
        beat = 0
        while not self._closing.wait(INTERVAL):
            beat += 1
            with suppress(OSError):  # a full disk, say: the next beat may succeed
                found = read(self._path)
                self.taken_over = found is not None and found.epoch != self.epoch
                if self.taken_over:
                    return
                self._write(beat)

    def _write(self, beat: int) -> None:
        sign = asdict(self._sign) | {"beat": beat, "over": sorted(self._over)}
        temporary = self._path.with_name(f"{self._path.name}.{self.epoch}")
        temporary.write_text(json.dumps(sign))
        os.replace(temporary, self._path)


def read(path: Path) -> Sign | None:
    """Return the content of the file; None if it does not exist.

    Raises `OSError` if it is unknown whether the file exists, or if its content cannot be read.
    """
    try:
        found = json.loads(read_regular(path))
        return Sign(**(found | {"over": tuple(found["over"])}))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise OSError(f"{path} has no sign of a coordinator") from error


class Guard:
    """Tells a child process whether its coordinator still wants it to work."""

    def __init__(self, path: Path, epoch: str, attempt: str) -> None:
        self._path = path
        self._epoch = epoch
        self._attempt = attempt
        self._beat = -1
        self._seen = monotonic()

    def reason_to_end(self) -> str | None:
        """Return why the process should end; None if it should go on."""
        with suppress(OSError):
            sign = read(self._path)
            if sign is None:
                return "its coordinator has ended"
            if sign.epoch != self._epoch:
                return "another coordinator has taken over"
            if self._attempt in sign.over:
                return "its tiles are done"
            if sign.machine == machine() and started(sign.pid) != (sign.started or None):
                return "its coordinator has died"
            if sign.beat != self._beat:
                self._beat, self._seen = sign.beat, monotonic()
        if monotonic() - self._seen > TTL:
            return f"its coordinator was silent for {TTL:.0f} s"
        return None


@cache
def machine() -> str:
    """Return the id of the running system, and of the process ids that this process can see."""
    parts = []
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts) or os.uname().nodename


def started(pid: int) -> int | None:
    """Return when a process started, in clock ticks since the system did; None if there is no such process.

    Together with the id, it identifies a process: ids are used again. A process that has ended, but whose
    parent has not waited for it, does not count.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name of the program may contain spaces
    return None if fields[0] in "ZX" else int(fields[19])
