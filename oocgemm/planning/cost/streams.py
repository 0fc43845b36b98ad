"""The streams and slots of a run on the virtual clock: when each becomes free, and how long each is busy."""

from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple

from oocgemm.planning.cost.price import Prices
from oocgemm.planning.schedule.operation import Slots

# Lanes for which seconds are counted. "staged" is the time in which the host copies pageable arrays.
BUSY = ("read", "decode", "h2d", "prepare", "compute", "d2h", "write", "staged")
_TIMES = ("issued", "read", "h2d", "compute", "d2h", "write", "read_c", "h2d_c", "multiplied")
# Maximum number of slots that count for a kind of block. A stream that runs so far ahead of the other streams
# gains nothing by running further ahead.
MAX_AHEAD = 64
# A time before the run, at which slots that nothing has used yet became free.
_BEFORE = -1.0


class ClockState(NamedTuple):
    """The state on which later operations depend, and the seconds for which lanes were busy.

    `times` are relative to `base`, in seconds. So their rounding errors do not grow during the run. `unused`
    are the numbers of slots that nothing has used yet.
    """

    base: float
    times: list[float]
    busy: list[float]
    unused: list[int]


class Load:
    """How steps load a panel: seconds of its Read, page faults, Upload and staging.

    `share` is the fraction of these panels that is read. The others are in host slots. There are `times` as
    many device slots for them as `PanelSlots` says.
    """

    __slots__ = ("faults", "read", "share", "staged", "times", "upload")

    def __init__(
        self, prices: Prices, operand: str, rows: int, cols: int, share: float, times: int = 1
    ) -> None:
        self.read = prices.read(operand, rows, cols)
        self.faults = prices.faults(operand, rows, cols)
        self.upload = prices.upload(operand, rows, cols)
        self.staged = prices.staged(operand, rows, cols)
        self.share, self.times = share, times


class Strip(NamedTuple):
    """How a strip of C leaves the device: seconds of its Download, Write, staging and Finish.

    `old_read` and `old_upload` are the seconds to load the old strip. They are 0 if it is not read.
    """

    download: float
    write: float
    staged: float
    finish: float
    old_read: float
    old_upload: float


class PanelSlots:
    """The slots of A or of B. `lane` is the lane of its Reads."""

    def __init__(self, device: int, host: int, lane: str, *, fresh: int) -> None:
        self.device, self.host, self.lane = min(device, MAX_AHEAD), min(host, MAX_AHEAD), lane
        self.uploads = [_BEFORE] * max(1, self.host)  # ends of the latest Uploads
        self.fresh = fresh  # slots that no Read has filled yet


class Streams:
    """The times at which streams and slots become free, and the seconds for which each lane is busy.

    The host issues operations one by one. An operation starts when it has been issued, its stream is free,
    and the operations that it waits for have ended. If a host thread runs the operation, waking the thread
    after such a wait takes extra time.
    """

    def __init__(self, prices: Prices, slots: Slots) -> None:
        setting = prices.setting
        machine, layouts, problem = setting.machine, setting.layouts, setting.problem
        self.prices, self.slots = prices, slots
        self.issue, self.shares_cores = machine.issue, machine.shares_cores
        self.wake = 0.0 if setting.enqueues else machine.issue
        self.finishes, self.reads_c = problem.finishes, problem.reads_c
        self.selects = problem.sink.per_row > 0
        lanes = ["decode" if x.decode_bytes else "read" for x in (layouts.a, layouts.b, layouts.c)]
        host_a, host_b = (0, 0) if slots.unified else (slots.host_a, slots.host_b)
        if problem.b.shares:  # the panels in both roles of a step have the same slots
            self.pools = [PanelSlots(max(1, slots.a // 2), host_a, lanes[0], fresh=host_a or slots.a)]
        else:
            counts = (slots.a, host_a, lanes[0]), (slots.b, host_b, lanes[1])
            self.pools = [PanelSlots(*each, fresh=each[1] or each[0]) for each in counts]
        self.panels = self.pools[0], self.pools[-1]
        self.c_lane, self.streams_c = lanes[2], slots.streams("C")
        # All times except `first_start` are relative to `base`.
        self.base = self.issued = self.read = self.h2d = self.compute = self.d2h = self.write = 0.0
        self.read_c = self.h2d_c = self.multiplied = 0.0
        self.first_start = -1.0  # start of the first Multiply
        self._steps_kept = (2 if problem.b.shares else 1) * max(panels.device for panels in self.panels)
        self.ends = [_BEFORE] * self._steps_kept  # ends of the latest steps
        # When the strips of each accumulator have drained, next accumulator first. When the host slots for
        # strips, and the device slots for finished strips, are free, next slot first.
        self.drained = [[_BEFORE] for _ in range(slots.c)]
        self.host_c = [_BEFORE] * min(max(1, slots.host_c), MAX_AHEAD)
        self.finished = [_BEFORE] * min(max(1, slots.finish), MAX_AHEAD)
        self.untouched = slots.c  # accumulators that no tile has used yet
        self.busy = dict.fromkeys(BUSY, 0.0)
        self.ran = 0  # how much the clock has run: roughly the number of operations

    # Steps that multiply the whole tile.

    def steps(
        self,
        count: int,
        loads: Sequence[Load | None],
        multiply: float,
        prepare: float,
        wait: float = -inf,
        *,
        calls: int = 1,
    ) -> None:
        """Run `count` equal steps.

        Args:
            count: number of steps.
            loads: how the panels of A and of B are loaded; None if they are in device slots already.
            multiply, prepare: seconds of the Multiply operations of a step, and of its Prepare.
            wait: time at which the accumulator of the tile becomes free; -inf if it is free already.
            calls: number of Multiply operations of a step, which take the time `multiply` together.
        """
        fresh = [
            x.fresh for x, load in zip(self.panels, loads, strict=True) if load and load.share and x.fresh
        ]
        new = min([count, *fresh]) if fresh else 0
        if wait > -inf:
            self._run(1, loads, multiply, prepare, wait, faults=new > 0, calls=calls)
            count, new = count - 1, max(0, new - 1)
        if new:
            self._run(new, loads, multiply, prepare, faults=True, calls=calls)
            count -= new
        if count and fresh and new < max(fresh):
            self.steps(count, loads, multiply, prepare, calls=calls)
        elif count:
            self._run(count, loads, multiply, prepare, calls=calls)

    def _run(
        self,
        count: int,
        loads: Sequence[Load | None],
        multiply: float,
        prepare: float,
        wait: float = -inf,
        *,
        faults: bool = False,
        calls: int = 1,
    ) -> None:
        more = (calls - 1) * self.issue
        issue, wake, ends, issued = self.issue, self.wake, self.ends, self.issued
        read_free, h2d, compute = self.read, self.h2d, self.compute
        unified, shares = self.slots.unified, self.shares_cores
        loaded = []
        for panels, load in zip(self.panels, loads, strict=True):
            if load is not None:
                read = load.share * load.read
                if faults and load.share and panels.fresh:
                    read += load.faults
                    panels.fresh = max(0, panels.fresh - count)
                self.busy[panels.lane] += count * read
                if not unified:
                    self.busy["h2d"] += count * load.upload
                    self.busy["staged"] += count * load.staged
                device = load.times * panels.device
                loaded.append((panels.uploads, device, panels.host, load.share, read, load.upload))
        self.ran += 2 + count
        for _ in range(count):
            arrived = wait
            for uploads, slots, host_slots, share, read, upload in loaded:
                free = ends[-slots]
                issued += share * issue
                if unified:
                    start = max(issued, compute if shares else read_free, free + wake)
                    read_free = start + read
                    arrived = max(arrived, read_free)
                    if shares:
                        compute = read_free
                    continue
                if share:
                    reused = uploads[-host_slots]
                    read_free = max(issued, read_free, reused + wake) + read
                    free = max(free, read_free)
                issued += issue
                h2d = max(issued, h2d, free + wake) + upload
                uploads.append(h2d)
                arrived = max(arrived, h2d)
            if prepare:
                issued += issue
                arrived = compute = max(issued, compute, arrived) + prepare
            issued += issue
            start = max(issued, compute, arrived)
            if self.first_start < 0:
                self.first_start = self.base + start
            issued += more
            compute = max(start + multiply, issued) if more else start + multiply
            ends.append(compute)
        self.busy["compute"] += count * multiply
        self.busy["prepare"] += count * prepare
        self.issued, self.compute, self.multiplied = issued, compute, compute
        self.read, self.h2d = read_free, h2d

    # Steps that run strip by strip, and the drain of a tile.

    def group(
        self,
        steps: Sequence[tuple[Sequence[Load | None], Sequence[float], float]],
        drained: Sequence[float],
        strips: Sequence[Strip],
        *,
        drains: bool,
    ) -> list[float]:
        """Run steps strip by strip. All panels are loaded first.

        Args:
            steps: per step, how its panels are loaded, the seconds of its Multiply per strip, and those of
                its Prepare.
            drained: per strip, when the accumulator is free; empty if these are not the first steps.
            strips: the strips of the tile.
            drains: whether each strip drains after these steps.

        Returns:
            When each strip has drained.
        """
        arrived = [self._load(number, loads) for number, (loads, _, _) in enumerate(steps)]
        for number, (_, _, prepare) in enumerate(steps):
            if prepare:
                self.issued += self.issue
                arrived[number] = self.compute = max(self.issued, self.compute, arrived[number]) + prepare
                self.busy["prepare"] += prepare
        ends, out = [0.0] * len(steps), []
        self.ran += len(steps) * (1 + len(strips))
        for number_of_strip, strip in enumerate(strips):
            for number, (_, multiply, _) in enumerate(steps):
                self.issued += self.issue
                wait = drained[number_of_strip] if drained and number == 0 else -inf
                start = max(self.issued, self.compute, arrived[number], wait)
                if self.first_start < 0:
                    self.first_start = self.base + start
                ends[number] = self.multiplied = self.compute = start + multiply[number_of_strip]
                self.busy["compute"] += multiply[number_of_strip]
            if drains:
                out.append(self.drain(number_of_strip, strip))
        self.ends += ends
        return out

    def _load(self, number: int, loads: Sequence[Load | None]) -> float:
        """Load the panels of the step with this number in a group; return when they have arrived."""
        arrived = -inf
        for panels, load in zip(self.panels, loads, strict=True):
            if load is None:
                continue
            free = self.ends[number - load.times * panels.device]
            read = load.share * load.read
            if panels.fresh and load.share:
                panels.fresh -= 1
                read += load.faults
            self.busy[panels.lane] += read
            self.issued += load.share * self.issue
            if self.slots.unified:
                stream = self.compute if self.shares_cores else self.read
                self.read = max(self.issued, stream, free + self.wake) + read
                if self.shares_cores:
                    self.compute = self.read
                arrived = max(arrived, self.read)
                continue
            if load.share:
                reused = panels.uploads[-panels.host]
                self.read = max(self.issued, self.read, reused + self.wake) + read
                free = max(free, self.read)
            self.issued += self.issue
            self.h2d = max(self.issued, self.h2d, free + self.wake) + load.upload
            panels.uploads.append(self.h2d)
            self.busy["h2d"] += load.upload
            self.busy["staged"] += load.staged
            arrived = max(arrived, self.h2d)
        return arrived

    def load_c(self, number: int, strip: Strip, free: float) -> float:
        """Load an old strip of C into a device slot that is free at `free`; return when it has arrived."""
        self.ran += 1
        slot = number % len(self.host_c)
        if not self.streams_c:
            self.issued += self.issue
            at = free if self.slots.unified else self.host_c[slot]
            stream = self.compute if self.shares_cores else self.read_c
            self.read_c = max(self.issued, stream, at + self.wake) + strip.old_read
            self.busy[self.c_lane] += strip.old_read
            if self.shares_cores:
                self.compute = self.read_c
            if self.slots.unified:
                return self.read_c
            free = max(free, self.read_c)
        self.issued += self.issue
        self.h2d_c = max(self.issued, self.h2d_c, free + self.wake) + strip.old_upload
        self.host_c[slot] = self.h2d_c
        self.busy["staged"] += strip.staged
        self.busy["h2d"] += strip.old_upload
        return self.h2d_c

    def drain(self, number: int, strip: Strip) -> float:
        """Finish, download and write the strip that was multiplied last; return when the accumulator is free.

        `number` is the number of the strip in its tile.
        """
        self.ran += 1
        ready, slot, finished = self.compute, number % len(self.host_c), number % len(self.finished)
        if self.finishes:
            # Selected elements of different rows are in different parts of the slot.
            free = -inf if self.selects else self.finished[finished]
            arrived = self.load_c(number, strip, free) if self.reads_c else free
            self.issued += self.issue
            ready = self.compute = max(self.issued, self.compute, arrived) + strip.finish
            self.busy["compute"] += strip.finish
        freed = ready
        if not self.slots.unified:
            self.issued += self.issue
            ready = max(ready, -inf if self.streams_c else self.host_c[slot]) + self.wake
            ready = self.d2h = max(self.issued, self.d2h, ready) + strip.download
            self.busy["d2h"] += strip.download
            self.busy["staged"] += strip.staged
        if not self.streams_c:
            self.issued += self.issue
            self.write = max(self.issued, self.write, ready + self.wake) + strip.write
            self.busy["write"] += strip.write
            self.host_c[slot] = self.write
        if self.shares_cores:
            self.compute += self.prices.write_cpu_share * strip.write
        copied = self.write if self.slots.unified else ready
        if not self.finishes:
            return copied
        self.finished[finished] = copied
        return freed

    # The state, to skip repetitions.

    def state(self) -> ClockState:
        """Return the state. Times are made relative to the end of the compute stream."""
        self._shift(self.compute)
        times = [getattr(self, name) for name in _TIMES]
        for some in self._lists():
            times += some
        self.ran += len(times) // 4
        unused = [self.untouched, *(panels.fresh for panels in self.pools)]
        return ClockState(self.base, times, list(self.busy.values()), unused)

    def advance(self, before: ClockState, now: ClockState, count: int, *, together: bool = False) -> None:
        """Skip `count` repetitions: in each, all times change as much as they did from `before` to `now`.

        With `together`, times that grew faster than the time of the compute stream grow only as fast.
        """
        changes = [count * (y - x) for x, y in zip(before.times, now.times, strict=True)]
        changes = [min(0.0, change) for change in changes] if together else changes
        changed = iter([y + change for y, change in zip(now.times, changes, strict=True)])
        for name in _TIMES:
            setattr(self, name, next(changed))
        for some in self._lists():
            some[:] = [next(changed) for _ in some]
        self.base = now.base + count * (now.base - before.base)
        grown = [y + count * (y - x) for x, y in zip(before.busy, now.busy, strict=True)]
        self.busy = dict(zip(BUSY, grown, strict=True))
        left = [max(0, y - count * (x - y)) for x, y in zip(before.unused, now.unused, strict=True)]
        self.untouched = left[0]
        for panels, fresh in zip(self.pools, left[1:], strict=True):
            panels.fresh = fresh

    def _shift(self, seconds: float) -> None:
        """Make all times relative to a base that is later by some seconds."""
        self.base += seconds
        for name in _TIMES:
            setattr(self, name, getattr(self, name) - seconds)
        for some in self._lists():
            some[:] = [time - seconds for time in some]

    def _lists(self) -> Iterator[list[float]]:
        del self.ends[: -self._steps_kept]
        yield self.ends
        for panels in self.pools:
            del panels.uploads[: -max(1, panels.host)]
            yield panels.uploads
        yield from self.drained
        yield self.host_c
        yield self.finished
