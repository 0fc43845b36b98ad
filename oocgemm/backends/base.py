"""What a backend is: something that holds slots and runs operations on streams.

The executor derives waits and hands them over as tokens; a backend makes its streams honour them. Nothing
else about an accelerator is visible outside its backend.
"""

import importlib
import importlib.util
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from oocgemm.backends.checksums import Summing
from oocgemm.errors import missing_bfloat16
from oocgemm.planning import DTYPES, OPERANDS, GemmProblem, Kind, Op, Operation, Plan, Region, Slot, Tier
from oocgemm.planning.cost.footprint import DEVICE_ALIGNMENT, slot_bytes
from oocgemm.planning.tiling import round_up

Array = NDArray[Any]


class InPlace(tuple[Array, ...]):
    """A panel where it lies in the memory of its operand, as the one group of its columns, with the addresses in it where one locked
    range of memory ends and the next begins."""

    borders: Sequence[int]

    def __new__(cls, block: Array, borders: Sequence[int]) -> Self:
        self = super().__new__(cls, (block,))
        self.borders = borders
        return self


class Locks(NamedTuple):
    """How memory of others is locked, for a device to copy from: whole pages, by where they begin and how many bytes they are; and
    unlocked, by where they begin. Both raise what the system refuses."""

    lock: Callable[[int, int], object]
    unlock: Callable[[int], object]


class Token(Protocol):
    """An operation that was issued, perhaps not done yet."""

    def synchronize(self) -> None:
        """Block the calling thread until the operation is done; raise if it failed."""

    def interval(self) -> tuple[int, int]:
        """Start and end, in nanoseconds of `time.perf_counter_ns`. Only after `synchronize`."""


@dataclass(frozen=True, slots=True)
class DoneToken:
    """An operation that ran in the thread that submitted it: done before there is a token. `moved` is whether that took moving
    its bytes."""

    start: int
    end: int
    moved: bool = True

    def synchronize(self) -> None:
        return

    def interval(self) -> tuple[int, int]:
        return self.start, self.end


class Session(Protocol):
    """A backend at work on one plan: its arena is allocated, its streams exist.

    `summing` is what takes checksums on the device, for a problem that says so. Of `asynchronous` kinds of operations
    `submit` returns as soon as the device has its order; any thread may issue these, one at a time. `locks` is None where nothing
    need be locked.
    """

    summing: Summing | None
    locks: Locks | None
    asynchronous: Collection[Kind]

    def worker(self, stream: str) -> AbstractContextManager[None]:
        """Prepares the calling thread to issue the operations of one stream."""

    def submit(self, operation: Operation, host: Sequence[Array], after: Sequence[Token]) -> Token:
        """Issue one operation of a device lane once those in `after` are done.

        `host` is the host end of an Upload or a Download, in stored orientation: groups of columns, each contiguous,
        one after the other from the start of a host slot. An Upload's may be `InPlace`.
        """

    def page_lock(self, host: Sequence[Array]) -> None:
        """Lock the pages of what of a host slot has been touched, as `submit` is to be given it, if the device wants that. Any
        thread may call it, for a slot that no other is at."""

    def view(self, operation: Operation, region: Region) -> Array:
        """A region of a device slot as host memory, in stored orientation; only where the two are one memory."""

    def multiplied_by(self) -> list[str]:
        """The kernels that have multiplied so far."""

    def device_bytes(self) -> int:
        """Bytes of device memory that this session has taken, as measured: the arena and library workspaces, but for what a
        library kept from a session before it has."""

    def close(self) -> None:
        """Wait for what is in flight, then release everything."""


class Backend(Protocol):
    """A kind of machine that can run plans."""

    name: str

    def free_memory(self) -> int:
        """Bytes of device memory that could be allocated now."""

    def multiprocessors(self) -> int:
        """Parts of the device that each multiply a block of a product at a time; 1 where the plan need not know."""

    def holds(self, address: int, size: int) -> bool:
        """Whether so many bytes of host memory from an address on are locked as one, for devices to copy from and to."""

    def link_limit(self) -> float | None:
        """Most bytes per second that can be copied to the device, or from it; None where the system does not say, or there is
        no link."""

    def describe(self) -> dict[str, str]:
        """Device, library versions and kernel, for headers and reports."""

    def check(self, plan: Plan, kernel: str) -> None:
        """Raise `InputError` if a kernel cannot do the steps of a plan on this device. Allocates nothing."""

    def arithmetic(self, problem: GemmProblem, kernel: str) -> str:
        """What `kernel` stands for with such a problem, as far as the bits of C hang on it."""

    def open(self, plan: Plan, kernel: str) -> Session:
        """Allocate the device arena and create the streams."""


def stored_shape(operation: Operation, problem: GemmProblem) -> tuple[int, int]:
    """Shape of the operation's block as it is stored, op() undone."""
    (r0, r1), (c0, c1) = operation.block
    rows, cols = r1 - r0, c1 - c0
    op = {"A": problem.trans_a, "B": problem.trans_b}.get(operation.operand, Op.N)
    return (cols, rows) if op.swaps else (rows, cols)


def device_offsets(plan: Plan) -> tuple[dict[Slot, int], int]:
    """Offset of each device slot in the arena, and the arena's bytes, cast room at its end included."""
    return slot_offsets(plan, "device", DEVICE_ALIGNMENT)


def slot_offsets(plan: Plan, tier: str, alignment: int) -> tuple[dict[Slot, int], int]:
    """Offsets of the slots of a tier, one after the other."""
    sizes = slot_bytes(plan.problem, plan.tile, plan.slots.strip)
    offsets: dict[Slot, int] = {}
    end = 0
    for operand in "CABDP" if tier == "device" else "ABC":
        for index in range(plan.slots.count(Tier(tier), operand)):
            offsets[Slot(Tier(tier), operand, index)] = end
            end = round_up(end + sizes[tier, operand], alignment)
    return offsets, end


def step_scalars(problem: GemmProblem, first: bool) -> tuple[complex, complex]:
    """(alpha, beta) of one Multiply: beta belongs to the first of a tile, and to Finish where there is one."""
    if problem.finishes:
        return 1.0, 0.0 if first else 1.0
    return problem.applied_alpha, problem.beta if first else 1.0


def limits_of(name: str) -> Any:
    """`numpy.finfo` of one of our dtypes, bfloat16 too."""
    if name == "bfloat16":
        return importlib.import_module("ml_dtypes").finfo(name)
    return np.finfo(numpy_dtype(name))


def known_dtypes() -> list[str]:
    """The dtypes of operands that NumPy has here: bfloat16 only with ml_dtypes."""
    missing = importlib.util.find_spec("ml_dtypes") is None
    return [name for name in OPERANDS if not (missing and name == "bfloat16")]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of one of ours. Raises `InputError` for bfloat16 where ml_dtypes, which brings it, is missing."""
    if name == "bfloat16":
        if name not in known_dtypes():
            raise missing_bfloat16()
        importlib.import_module("ml_dtypes")  # teaches NumPy the name
    return np.dtype(DTYPES[name].name)
