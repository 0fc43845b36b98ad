"""The workers that have no job: they wait for the next one, or they end.

At most one per device waits, so that the next job on the device starts at once. What it keeps is `KEPT`,
beside the CUDA context. It ends after `KEEP` seconds, and at once if a job elsewhere needs that memory. A
worker that waits has no state of a job: it may die at any time, and no job is affected.
"""

import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from oocgemm.service import launch
from oocgemm.service.job import LOG
from oocgemm.service.schedule import Limits, Need, Running

# Seconds for which a worker waits for a job.
KEEP = 300.0
# What a worker on a GPU keeps between jobs, at most: `oocgemm.release` describes it. It keeps a sixteenth of
# the device memory, and no GPU has more than 192 GiB.
KEPT = Need(device=12 << 30, host=(128 + 416) << 20)


class Workers:
    """The idle workers of a server, and those that end."""

    def __init__(
        self,
        folder: Path,
        confine: launch.Confinement | None = None,
        keep: float = KEEP,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Remove what workers of earlier servers have left.

        Args:
            folder: in which each worker has a folder. It is created if it does not exist.
            confine: the folders that jobs may use; None if jobs are not confined.
            keep: seconds for which a worker waits for a job; 0 if each job gets a new worker.
            clock: returns the time in seconds.
        """
        self._folder, self._confine, self._keep, self._clock = folder, confine, keep, clock
        self._idle: dict[int, tuple[launch.Process, Need, float]] = {}  # by device: what it keeps, since when
        self._ending: list[tuple[launch.Process, int, Need]] = []
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        launch.remove_folders(folder)

    @property
    def warm(self) -> frozenset[int]:
        """The devices whose worker waits for a job."""
        return frozenset(self._idle)

    def processes(self) -> list[launch.Process]:
        """Return all workers without a job."""
        return [each[0] for each in (*self._idle.values(), *self._ending)]

    def start(self, folder: Path, attempt: int, spec: dict[str, Any], device: int) -> launch.Process:
        """Start an attempt of a job in the idle worker of a device, or in a new one. See `launch.hand`.

        If the new worker has died before it got its order, it is returned: the attempt has ended.
        """
        if device in self._idle:
            process, kept, _ = self._idle.pop(device)
            try:
                launch.hand(process, folder, attempt, spec, device, self._confine)
                return process
            except OSError:  # it has died
                self._end(process, device, kept)
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        process = launch.spawn(self._folder, folder / LOG)
        try:
            with suppress(ConnectionError):  # it has died
                launch.hand(process, folder, attempt, spec, device, self._confine)
        except OSError:
            self._end(process, device, Need())
            raise
        return process

    def rest(self, process: launch.Process, device: int, spec: dict[str, Any], *, reuse: bool) -> None:
        """Take back a worker whose job has ended. It waits for the next job if `reuse`, or it ends."""
        kept = KEPT if spec["options"]["backend"] == "cuda" else Need()
        if process.idle and process.started:
            launch.clear(process)
        if reuse and process.idle and self._keep > 0 and device not in self._idle:
            self._idle[device] = process, kept, self._clock()
        else:
            self._end(process, device, kept)

    def make_room(self, need: Need, device: int, running: Iterable[Running], limits: Limits) -> bool:
        """Return whether a job that fits beside `running` also fits beside the workers without a job.

        If it does not, they are killed, except the one of its device, which the job gets.
        """
        others = [(each, kept) for each, (_, kept, _) in self._idle.items() if each != device]
        others += [(each, kept) for _, each, kept in self._ending]
        if not others:
            return True
        host = need.host + sum(kept.host for _, kept in others)
        memory = need.device + sum(kept.device for each, kept in others if each == device)
        for one in running:
            host += one.need.host
            memory += one.need.device if one.device == device else 0
        if host <= limits.host and memory <= limits.devices.get(device, 0):
            return True
        for each in [each for each in self._idle if each != device]:
            self._end_idle(each)
        return False

    def check(self) -> None:
        """End the workers that have waited too long, and forget those that have ended."""
        for device, (process, _, since) in list(self._idle.items()):
            if not process.ready or self._clock() - since >= self._keep:
                self._end_idle(device)
        for each in [each for each in self._ending if each[0].dead]:
            self._ending.remove(each)
            launch.bury(each[0])

    def close(self) -> None:
        """Let all workers end."""
        for process in self.processes():  # idle ones end since the socket is closed
            process.close()
        self._idle.clear()
        self._ending.clear()

    def _end_idle(self, device: int) -> None:
        process, kept, _ = self._idle.pop(device)
        self._end(process, device, kept)

    def _end(self, process: launch.Process, device: int, kept: Need) -> None:
        process.dismiss()
        process.send(signal.SIGKILL)  # it has no job, and nothing to finish
        self._ending.append((process, device, kept))
