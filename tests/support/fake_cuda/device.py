"""A device whose streams run asynchronously, in an order drawn from a seed, and whose calls fail on demand.

A command runs only when the host waits for an event, a stream or the device. The scheduler then draws a
stream whose next command can run, and runs that command, until what the host waits for is done. Every command
therefore runs as late as the waits allow, and streams overtake each other as far as the waits allow.

Two accesses to the same bytes, of which at least one is a write, must be ordered by streams, events or waits
of the host. Vector clocks find accesses that are not ordered, whatever order was drawn (Lamport, *Time,
clocks, and the ordering of events*, 1978).
"""

import itertools
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import oocgemm
from tests.support.fake_cuda.memory import BASE, Block, Memory, MisuseError, StatusError

NOT_READY, LAUNCH_FAILED = 600, 719
FOREVER = 1 << 30

Clock = dict[int, int]  # stream -> number of its last command that is known to be done


@dataclass
class Fault:
    """Makes calls of a function fail: number `first`, counted from 1, and the `times - 1` calls after it.

    With `late` the call returns, and its command fails on the device. All later calls then fail too, as on a
    GPU. If `device` is given, only calls for this device fail.
    """

    status: int = LAUNCH_FAILED
    first: int = 1
    times: int = FOREVER
    late: bool = False
    device: int | None = None


@dataclass(eq=False)
class Recording:
    """The point in a stream at which an event was recorded."""

    clock: Clock
    device: int = 0
    time: int = 0  # when it was reached, by `time.perf_counter_ns`
    done: bool = False
    lost: int = 0  # the error number of its device, if that failed before this was reached


class Access(NamedTuple):
    """A read or write of memory by a command, with the command's stream and its number on that stream."""

    stream: int
    number: int
    begin: int
    end: int
    block: Block
    writes: bool
    name: str


@dataclass
class Command:
    """A command on a stream: work, a wait for an event, or the recording of an event."""

    name: str
    run: Callable[[], None] | None = None
    awaits: Recording | None = None
    records: Recording | None = None
    seconds: float = 0.0
    fault: Fault | None = None


@dataclass
class Queue:
    """The commands of a stream that have not run.

    `clock` says which commands of other streams are done before the next command of this one.
    """

    number: int
    weight: float
    device: int = 0
    commands: deque[Command] = field(default_factory=deque)
    clock: Clock = field(default_factory=dict)
    count: int = 0
    busy_until: float = 0.0


class Current:
    """The numbers of the devices that each thread has entered with `with`, the innermost last.

    If C code has started a thread, `threading.local` has new values in each Python function that the thread
    calls. So the numbers of such threads are in a dictionary, by thread identifier.
    """

    def __init__(self) -> None:
        self._of_python, self._of_c = threading.local(), dict[int, list[int]]()

    @property
    def devices(self) -> list[int]:
        found: list[int] | None = getattr(self._of_python, "devices", None)
        if found is None:
            found = self._of_python.devices = [0]
        return found

    def called_by_c(self) -> None:
        """Find the devices of the calling thread, which C code or Python has started. C code calls this.

        If Python has entered no device in this thread, C code has started it.
        """
        if not hasattr(self._of_python, "devices"):
            self._of_python.devices = self._of_c.setdefault(threading.get_ident(), [0])

    def use(self, device: int) -> None:
        """Make a device the current one of a thread of C code."""
        self._of_c[threading.get_ident()] = [device]


class Device:
    """One fake GPU, or several of one host. Its methods may be called by several threads.

    Several devices have one scheduler and one range of addresses, as under CUDA. Each has its own memory and
    streams, and fails alone.
    """

    def __init__(self, seed: int = 0, capacity: int = 1 << 30, devices: int = 1) -> None:
        self.devices, self.current = devices, Current()
        self.memory = Memory(capacity)
        self.faults: dict[str, Fault] = {}  # name of a function -> its fault
        self.calls: list[tuple[str, tuple[object, ...]]] = []
        self.link_rate: float | None = None  # bytes per second of host copies; None for no delay
        self.misuses: list[MisuseError] = []
        self.peers: set[tuple[int, int]] = set()  # (device, another one whose memory it may access)
        self.lock = threading.RLock()
        self.failed: dict[int, int] = {}  # device -> the error number of its first command that failed
        self._random = random.Random(seed)
        self._counts: Counter[str] = Counter()
        self._queues: dict[int, Queue] = {}
        self._retired: deque[int] = deque()
        self._handles = itertools.count(16)
        self._accesses: list[Access] = []
        self._host: Clock = {}
        self.new_queue(0)

    def new_handle(self) -> int:
        return next(self._handles)

    def new_queue(self, handle: int) -> None:
        """Create a stream. The scheduler draws some streams far more often than others."""
        with self.lock:
            while self._retired:
                if not self._queues[retired := self._retired.popleft()].commands:
                    del self._queues[retired]
            self._queues[handle] = Queue(handle, 10 ** self._random.uniform(-1.5, 1.5), self.number)

    @property
    def number(self) -> int:
        """The number of the calling thread's current device."""
        return self.current.devices[-1]

    def device_of(self, stream: int) -> int:
        """Return the number of a stream's device."""
        return self._queues[stream].device

    def count(self, name: str) -> int:
        """Return how often a function was called."""
        return self._counts[name]

    def enter(self, name: str, *arguments: object) -> Fault | None:
        """Count a call, and raise an error if it must fail.

        Return the call's fault if the call succeeds and its command must fail on the device later.

        Raises:
            StatusError: the call must fail, or a command has failed before.
        """
        with self.lock:
            self.calls.append((name, arguments))
            self._counts[name] += 1
            fault = self.faults.get(name)
            if fault is not None and fault.device not in (None, self.number):
                fault = None
            if fault is not None and not fault.first <= self._counts[name] < fault.first + fault.times:
                fault = None
            failed = self.failed.get(self.number, 0)
            if failed or (fault is not None and not fault.late):
                raise StatusError(failed or (fault.status if fault else 0))
            return fault

    def work(
        self,
        stream: int,
        name: str,
        run: Callable[[], None],
        reads: Iterable[Block] = (),
        writes: Iterable[Block] = (),
        *,
        link_bytes: int = 0,
        fault: Fault | None = None,
    ) -> None:
        """Put work on a stream.

        Raises:
            MisuseError: the work accesses memory of the host, or is not ordered with another access.
        """
        seconds = link_bytes / self.link_rate if self.link_rate else 0.0
        with self.lock:
            queue = self._append(stream, Command(name, run, seconds=seconds, fault=fault))
            for blocks, writing in ((reads, False), (writes, True)):
                for block in blocks:
                    if block.rows and block.width:
                        owner = self.memory.device_of(block)
                        copied = name == "cuMemcpyAsync" and block.address >= BASE  # between devices
                        if owner not in (None, queue.device) and not copied:
                            raise self.misuse(f"{name} on device {queue.device} accesses {block} of another")
                        self._access(
                            queue, Access(stream, queue.count, block.address, block.end, block, writing, name)
                        )

    def record(self, stream: int) -> Recording:
        """Record an event on a stream."""
        with self.lock:
            recording = Recording({}, self.device_of(stream))
            queue = self._append(stream, Command("record", records=recording))
            recording.clock = dict(queue.clock)
            return recording

    def write_value(self, stream: int, to: Block, write: Callable[[], None], fault: Fault | None) -> None:
        """Write a value that the host polls. Then the host knows that the work before it is done."""
        with self.lock:

            def run() -> None:
                write()
                _merge(self._host, clock)

            queue = self._append(stream, Command("write", run, fault=fault))
            clock = dict(queue.clock)
            self._access(queue, Access(stream, queue.count, to.address, to.end, to, True, "write"))

    def idle(self, stream: int) -> bool:
        """Return whether a stream is idle, after running some commands, since a device works meanwhile."""
        with self.lock:
            for _ in range(100):
                self._step()
            return not self._queues[stream].commands

    def await_(self, stream: int, recording: Recording | None) -> None:
        """Make a stream wait for an event. An event that was never recorded counts as done."""
        if recording is None:
            return
        with self.lock:
            queue = self._append(stream, Command("wait", awaits=recording))
            _merge(queue.clock, recording.clock)

    def done(self, recording: Recording | None) -> bool:
        """Return whether an event is done. Also runs a command, since a device works while the host polls."""
        with self.lock:
            if recording is not None and not recording.done:
                self._step()
            return recording is None or self._known(recording)

    def finish(self, recording: Recording | None) -> None:
        """Block until an event is done.

        Raises:
            StatusError: a command has failed.
        """
        while recording is not None:
            with self.lock:
                if failed := recording.lost or self.failed.get(recording.device, 0):
                    raise StatusError(failed)
                if self._known(recording):
                    return
                pause = self._step()
            if pause:
                time.sleep(pause)

    def finish_all(self) -> None:
        """Block until every stream of the current device is idle."""
        with self.lock:
            own = [handle for handle, queue in self._queues.items() if queue.device == self.number]
            recordings = [self.record(handle) for handle in own]
        for recording in recordings:
            self.finish(recording)

    def retire(self, handle: int) -> None:
        """Let the next call of `new_queue` forget a stream, if all of its commands have run by then.

        The garbage collector calls this in any thread, which may hold any lock. So it waits for no lock.
        """
        self._retired.append(handle)

    def misuse(self, text: str) -> MisuseError:
        """Return an error, and keep it for `check`, since the caller may catch it."""
        self.misuses.append(MisuseError(text))
        return self.misuses[-1]

    def check(self) -> None:
        """Raise the first misuse, or an error if memory is still allocated or pinned."""
        oocgemm.release()
        if self.misuses:
            raise self.misuses[0]
        assert not self.memory.allocated, f"{self.memory.allocated} bytes of device memory are not freed"
        assert not self.memory.pinned, f"host memory is still pinned: {self.memory.pinned}"

    def in_flight(self, begin: int, end: int) -> bool:
        """Return whether a command that has possibly not run yet accesses this memory.

        Commands of a failed device never run. Those of a stream that was retired have all run.
        """
        with self.lock:
            queues = ((each, self._queues.get(each.stream)) for each in self._accesses)
            working = [each for each, queue in queues if queue and queue.device not in self.failed]
            return any(each.begin < end and begin < each.end for each in working)

    def _append(self, stream: int, command: Command) -> Queue:
        queue = self._queues[stream]
        _merge(queue.clock, self._host)
        queue.count += 1
        queue.clock[stream] = queue.count
        queue.commands.append(command)
        return queue

    def _access(self, queue: Queue, new: Access) -> None:
        kept = []
        for old in self._accesses:
            if old.begin < new.end and new.begin < old.end:
                known = old.number <= queue.clock.get(old.stream, 0)
                if not known and (old.writes or new.writes) and not _interleave(old.block, new.block):
                    raise self.misuse(f"{new} is not ordered after {old}")
                # Every command that is ordered after the new access is then also ordered after the old one,
                # which can be forgotten.
                if (
                    known
                    and new.writes
                    and new.begin <= old.begin
                    and old.end <= new.end
                    and new.block.rows == 1
                ):
                    continue
            kept.append(old)
        self._accesses = [*kept, new]

    def _known(self, recording: Recording) -> bool:
        if recording.done:
            _merge(self._host, recording.clock)
            self._accesses = [each for each in self._accesses if each.number > self._host.get(each.stream, 0)]
        return recording.done

    def _step(self) -> float:
        """Run one command, if any can run. Return how many seconds to wait before the next call."""
        now = time.perf_counter()
        working = [queue for queue in self._queues.values() if queue.device not in self.failed]
        waiting = [queue for queue in working if queue.commands]
        free = [q for q in waiting if (awaits := q.commands[0].awaits) is None or awaits.done]
        ready = [q for q in free if q.busy_until <= now]
        if not ready:
            return min((q.busy_until - now for q in free), default=0.0)
        queue = self._random.choices(ready, [q.weight for q in ready])[0]
        command = queue.commands.popleft()
        if command.fault is not None:
            self._fail(queue.device, command.fault.status, command)
            return 0.0
        if command.run is not None:
            command.run()
            queue.busy_until = now + command.seconds
        if command.records is not None:
            command.records.time, command.records.done = time.perf_counter_ns(), True
        return 0.0

    def _fail(self, device: int, status: int, command: Command) -> None:
        """Drop all commands of a device. They never run, since the memory that they access may be freed."""
        self.failed[device] = status
        own = [queue for queue in self._queues.values() if queue.device == device]
        for lost in [command, *(each for queue in own for each in queue.commands)]:
            if lost.records is not None:
                lost.records.lost = status
        for queue in own:
            queue.commands.clear()


def _merge(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        if number > clock.get(stream, 0):
            clock[stream] = number


def _interleave(x: Block, y: Block) -> bool:
    """Return whether two blocks are disjoint columns of one matrix, although their address ranges overlap."""
    if x.pitch != y.pitch or min(x.rows, y.rows) < 2:
        return False
    apart = (y.address - x.address) % x.pitch
    return x.width <= apart and apart + y.width <= x.pitch
