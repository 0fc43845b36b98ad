"""Several devices of one host as one backend: its sessions pass each operation to the session of its device.

All devices are of one kind, so that the same tile has the same bits on each of them. They share the host
slots for panels, which are pinned for all devices. If a device is listed twice, it runs two
sessions, each with half of the device's memory.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from oocgemm.backends.base import (
    Array,
    Backend,
    Checksums,
    ElementNumbers,
    Finishing,
    HostBlock,
    Pageable,
    Session,
    Stream,
    SumsOfStrips,
    Swept,
    Token,
)
from oocgemm.backends.registry import open_backend, resolve
from oocgemm.errors import BackendError, ExecutionError, InputError
from oocgemm.planning import GemmProblem, Kind, Operation, Plan, Region


class Devices:
    """Several devices of one kind, by their numbers. Implements `Backend`."""

    def __init__(self, numbers: Sequence[int], each: Sequence[Backend]) -> None:
        self.numbers, self.each = tuple(numbers), tuple(each)
        self._first = each[0]
        self.name = self._first.name

    def described(self) -> list[dict[str, str]]:
        """Return names and versions of every device, in the order of the spans' attribute `device`."""
        return [
            {"number": str(number)} | engine.describe()
            for number, engine in zip(self.numbers, self.each, strict=True)
        ]

    def device_count(self) -> int:
        return self._first.device_count()

    def free_memory(self) -> int:
        """Return the bytes that each session could allocate now."""
        sessions = Counter(self.numbers)
        if self.name == "host":
            return self._first.free_memory() // len(self.numbers)
        return min(
            engine.free_memory() // sessions[number]
            for number, engine in zip(self.numbers, self.each, strict=True)
        )

    def multiprocessors(self) -> int:
        return self._first.multiprocessors()

    def is_pinned(self, address: int, size: int) -> bool:
        return self._first.is_pinned(address, size)

    def link_limit(self) -> float | None:
        return self._first.link_limit()

    def describe(self) -> dict[str, str]:
        return self._first.describe()

    def check(self, plan: Plan, kernel: str) -> None:
        for engine in self.each:
            engine.check(plan, kernel)

    def arithmetic(self, problem: GemmProblem, kernel: str) -> str:
        """Describe the common arithmetic. Raises `InputError` if two devices would compute other bits."""
        first = self._first.arithmetic(problem, kernel)
        for number, engine in zip(self.numbers, self.each, strict=True):
            if engine.arithmetic(problem, kernel) != first:
                raise InputError(
                    f"devices {self.numbers[0]} and {number} would use different kernels, whose results are "
                    "rounded differently: pass devices of one kind, or name a kernel with --kernel"
                )
        return first

    def moments(self, given: Swept, axis: int, host: int, device: int) -> Array | None:
        return self._first.moments(given, axis, host, device)

    def open(self, plan: Plan, kernel: str, beside: Sequence[Session] = ()) -> "DevicesSession":
        """Open a session on every device. An `OutOfMemoryError` names the device."""
        opened: list[Session] = []
        try:
            for number, engine in zip(self.numbers, self.each, strict=True):
                try:
                    opened.append(engine.open(plan, kernel, opened))
                except BackendError as error:
                    raise type(error)(f"device {number}: {error}") from error
        except BaseException:
            for session in reversed(opened):
                session.close(failed=True)
            raise
        return DevicesSession(opened, self.numbers)


class DevicesSession:
    """The sessions of one plan on several devices. Implements `Session`."""

    repeats = False
    begins_at_once = False  # `engine.executor.Prefetch` supports one device

    def __init__(self, each: Sequence[Session], numbers: Sequence[int]) -> None:
        self._each, self._numbers = each, numbers
        first = each[0]
        self.host_arena: Array | None = first.host_arena
        self.asynchronous: Collection[Kind] = first.asynchronous
        found = [session.checksums for session in each]
        summing = [checksums for checksums in found if checksums is not None]
        self.checksums: Checksums | None = DevicesChecksums(summing) if summing else None
        taking = [session.strip_sums for session in each if session.strip_sums is not None]
        self.strip_sums: SumsOfStrips | None = DevicesStrips(taking) if taking else None

    @contextmanager
    def worker(self, stream: Stream) -> Iterator[None]:
        with self._named(stream.device), self._each[stream.device].worker(stream):
            yield

    def submit(self, operation: Operation, host: HostBlock, after: Sequence[Token]) -> Token:
        with self._named(operation.device):
            return self._each[operation.device].submit(operation, host, after)

    def keeps(self, operation: Operation) -> bool:
        return False

    def begin(self, operation: Operation, host: Pageable, after: Sequence[Token]) -> Callable[[], Token]:
        with self._named(operation.device):
            ended = self._each[operation.device].begin(operation, host, after)

        def finish() -> Token:
            with self._named(operation.device):
                return ended()

        return finish

    @contextmanager
    def _named(self, device: int) -> Iterator[None]:
        """Add the number of a device to the errors of the `with` block."""
        try:
            yield
        except Exception as error:
            named = f"device {self._numbers[device]}: {error or type(error).__name__}"
            raise ExecutionError(named) from error

    def pin(self, host: Sequence[Array]) -> None:
        self._each[0].pin(host)

    def view(self, operation: Operation, region: Region) -> Array:
        return self._each[operation.device].view(operation, region)

    def use_in_place(self, arrays: Mapping[str, Array]) -> None:
        for session in self._each:
            session.use_in_place(arrays)

    def use_numbers(self, elements: ElementNumbers, finishing: Finishing) -> None:
        for session in self._each:
            session.use_numbers(elements, finishing)

    def use_factor(self, factor: Array) -> None:
        for session in self._each:
            session.use_factor(factor)

    def kernels_used(self) -> list[str]:
        return list(dict.fromkeys(name for session in self._each for name in session.kernels_used()))

    def device_bytes(self) -> int:
        """Measure the device memory of the largest session. Sessions of one device count as equally large."""
        sessions = Counter(self._numbers)
        measured = dict[int, int]()
        for number, session in zip(self._numbers, self._each, strict=True):
            # The first session of a device measures the memory of all of them.
            measured.setdefault(number, session.device_bytes())
        return max(size // sessions[number] for number, size in measured.items())

    def close(self, failed: bool = False) -> None:
        # The first session unpins the host slots, when no other one copies from them any more.
        for session in reversed(self._each):
            session.close(failed)


class DevicesChecksums:
    """The checksums that several devices compute during one run. Implements `Checksums`."""

    def __init__(self, each: Sequence[Checksums]) -> None:
        self._each = each
        self.room, self.busy = each[0].room, each[0].busy
        for checksums in each:
            checksums.busy = self.busy  # the time in which at least one device is busy

    @property
    def expected(self) -> tuple[int, int]:
        return self._each[0].expected

    @expected.setter
    def expected(self, digests: tuple[int, int]) -> None:
        # The next Multiply that is submitted is on one of these devices.
        for checksums in self._each:
            checksums.expected = digests

    def begin(self, seed: int) -> None:
        for checksums in self._each:
            checksums.begin(seed)


class DevicesStrips:
    """The sums of strips that several devices take of their accumulators. Implements `SumsOfStrips`."""

    def __init__(self, each: Sequence[SumsOfStrips]) -> None:
        self._each = each

    def begin(self, seed: int) -> None:
        for sums in self._each:
            sums.begin(seed)

    def take(self, operation: Operation) -> tuple[Array, Array]:
        return self._each[operation.device].take(operation)


def open_devices(name: str, numbers: Sequence[int] | str) -> Devices:
    """Open several devices of a backend by their numbers, or all devices if `numbers` is "all".

    Raises:
        BackendError: a device cannot be opened.
        InputError: the devices are not of one kind.
    """
    first = open_backend(name, 0 if isinstance(numbers, str) or resolve(name) == "host" else numbers[0])
    if isinstance(numbers, str):
        numbers = range(first.device_count())
    if first.name == "host" and set(numbers) != {0}:
        other = next(number for number in numbers if number)
        raise InputError(
            f"there is no device {other}: the host backend has one, number 0; pass 0 once per session "
            "(--devices 0,0), or --backend cuda"
        )
    opened = {numbers[0]: first}
    for number in numbers:
        if number not in opened:
            opened[number] = open_backend(first.name, number)
    kinds = {number: engine.describe()["device"] for number, engine in opened.items()}
    for number, kind in kinds.items():
        if kind != kinds[numbers[0]]:
            raise InputError(
                f"device {number} is {kind}, device {numbers[0]} is {kinds[numbers[0]]}: they may round "
                "differently; pass devices of one kind"
            )
    return Devices(numbers, [opened[number] for number in numbers])
