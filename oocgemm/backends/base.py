"""The protocol between the engine and a backend: sessions that hold slots and run operations on streams.

The executor derives the waits of each operation and passes them as tokens. A backend makes its streams honour
them. Nothing else about an accelerator is visible outside its backend.
"""

import importlib
import importlib.util
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from oocgemm.errors import missing_bfloat16
from oocgemm.planning import DTYPES, OPERANDS, GemmProblem, Kind, Op, Operation, Plan, Region, Slot, Tier
from oocgemm.planning.check_blocks import StripOffsets
from oocgemm.planning.cost.footprint import DEVICE_ALIGNMENT, slot_bytes
from oocgemm.planning.tiling import round_up
from oocgemm.timeline.busy import BusyTime

Array = NDArray[Any]


class InPlace(tuple[Array, ...]):
    """A block of an operand in the caller's memory, copied from or to there without a host slot (zero-copy).

    A sequence of one array. `borders` are the addresses inside it where one pinned range ends and the next
    begins.
    """

    borders: Sequence[int]

    def __new__(cls, block: Array, borders: Sequence[int]) -> Self:
        self = super().__new__(cls, (block,))
        self.borders = borders
        return self


class Pinner(NamedTuple):
    """Pins the caller's memory for a device: `pin(address, bytes)` whole pages, `unpin(address)` what `pin`
    pinned there.

    Both raise the driver's error.
    """

    pin: Callable[[int, int], object]
    unpin: Callable[[int], object]


class Stream(NamedTuple):
    """A queue of operations on one device. They are submitted in the order of the schedule.

    `lane` names the kind of work, such as "h2d" or "compute". Operations of the schedule call it `stream`.
    """

    device: int
    lane: str

    @classmethod
    def of(cls, operation: Operation) -> Self:
        return cls(operation.device, operation.stream)


class Token(Protocol):
    """A submitted operation, which may still be running."""

    def synchronize(self) -> None:
        """Block the calling thread until the operation has ended; raise if it failed."""

    def interval(self) -> tuple[int, int]:
        """Return start and end, in nanoseconds of `time.perf_counter_ns`. Call it only after
        `synchronize`."""


@dataclass(frozen=True, slots=True)
class DoneToken:
    """An operation that the submitting thread ran to its end. `moved` is False if no bytes were copied
    (zero-copy)."""

    start: int
    end: int
    moved: bool = True

    def synchronize(self) -> None:
        return

    def interval(self) -> tuple[int, int]:
        return self.start, self.end


class Checksums(Protocol):
    """Checksums that a device takes of its slots during one run (the verification of `oocgemm.integrity`).

    `expected` is the pair of digests that the next Multiply must find in its panels of op(A) and op(B).
    `busy` collects the time that the device spends on checksums. `room` is the layout of the checksums of one
    strip of C.
    """

    expected: tuple[int, int]
    busy: BusyTime
    room: StripOffsets

    def begin(self, seed: int) -> None:
        """Draw the random signs of all later checksums from this seed."""


class Session(Protocol):
    """A backend at work on one plan: its arena is allocated, its streams exist.

    `checksums` is None unless the plan has the device take checksums. `submit` returns at once for the kinds
    in `asynchronous`; any thread may submit these, one thread at a time. `pinner` is None if the device needs
    no pinned memory.
    """

    pinner: Pinner | None
    asynchronous: Collection[Kind]

    @property
    def checksums(self) -> Checksums | None: ...

    def worker(self, stream: Stream) -> AbstractContextManager[None]:
        """Prepare the calling thread to submit the operations of one stream."""

    def submit(self, operation: Operation, host: Sequence[Array], after: Sequence[Token]) -> Token:
        """Run an operation of a device lane once those in `after` have ended.

        Args:
            operation: an Upload, a Prepare, a Multiply, a Finish or a Download.
            host: the host memory of an Upload or a Download: groups of columns of the block as stored, each
                contiguous, one after the other from the start of a host slot; or an `InPlace`.
            after: the operations that this one waits for.
        """

    def pin(self, host: Sequence[Array]) -> None:
        """Pin the pages of a host slot that `host`, as given to `submit`, covers. Does nothing if the device
        needs no pinned memory.

        The pages must be resident: pinning them is then ten times as fast. Any thread may call this for a
        slot that no other thread uses.
        """

    def view(self, operation: Operation, region: Region) -> Array:
        """Return a region of a device slot as host memory, as stored. Only where host and device share one
        memory."""

    def kernels_used(self) -> list[str]:
        """Return the names of the kernels that have multiplied so far."""

    def device_bytes(self) -> int:
        """Return the measured bytes of device memory that this session has allocated: arena and library
        workspaces.

        Memory that a library kept from an earlier session is not counted.
        """

    def close(self) -> None:
        """Wait for the operations in flight, then release everything."""


class Backend(Protocol):
    """A kind of machine that can run plans."""

    name: str

    def free_memory(self) -> int:
        """Return the bytes of device memory that could be allocated now."""

    def multiprocessors(self) -> int:
        """Return the number of multiprocessors, each of which multiplies one block of a product at a time; 1
        where the plan does not depend on it."""

    def is_pinned(self, address: int, size: int) -> bool:
        """Return whether one pinned range contains `size` bytes of host memory from `address` on."""

    def link_limit(self) -> float | None:
        """Return an upper bound on copies to or from the device, in bytes per second per direction.

        None where the system does not report one, or where there is no link.
        """

    def describe(self) -> dict[str, str]:
        """Return the device, the library versions and the kernel, for log headers and reports."""

    def check(self, plan: Plan, kernel: str) -> None:
        """Raise `InputError` if a kernel cannot run the steps of a plan on this device. Allocates nothing."""

    def arithmetic(self, problem: GemmProblem, kernel: str) -> str:
        """Describe what `kernel` runs for a problem. C has the same bits if the descriptions are equal."""

    def open(self, plan: Plan, kernel: str) -> Session:
        """Allocate the device arena and create the streams.

        Raises:
            OutOfMemoryError: the device has too little free memory.
        """


def stored_shape(operation: Operation, problem: GemmProblem) -> tuple[int, int]:
    """Return the shape of an operation's block as it is stored, op() undone."""
    (r0, r1), (c0, c1) = operation.block
    rows, cols = r1 - r0, c1 - c0
    op = {"A": problem.trans_a, "B": problem.trans_b}.get(operation.operand, Op.N)
    return (cols, rows) if op.swaps else (rows, cols)


def device_offsets(plan: Plan) -> tuple[dict[Slot, int], int]:
    """Return the offset of each device slot in the arena, and the bytes of all slots."""
    return slot_offsets(plan, "device", DEVICE_ALIGNMENT)


def slot_offsets(plan: Plan, tier: str, alignment: int) -> tuple[dict[Slot, int], int]:
    """Return the offset of each slot of a tier, one after the other in one arena, and the bytes of all
    slots."""
    sizes = slot_bytes(plan.problem, plan.tile, plan.slots.strip)
    offsets: dict[Slot, int] = {}
    end = 0
    for operand in "CABDP" if tier == "device" else "ABC":
        for index in range(plan.slots.count(Tier(tier), operand)):
            offsets[Slot(Tier(tier), operand, index)] = end
            end = round_up(end + sizes[tier, operand], alignment)
    return offsets, end


def step_scalars(problem: GemmProblem, first: bool) -> tuple[complex, complex]:
    """Return (alpha, beta) of one Multiply.

    The problem's beta belongs to the first Multiply of a tile, or to Finish if the problem has one.
    """
    if problem.finishes:
        return 1.0, 0.0 if first else 1.0
    return problem.applied_alpha, problem.beta if first else 1.0


def limits_of(name: str) -> Any:
    """Return `numpy.finfo` of a dtype of the project, bfloat16 included."""
    if name == "bfloat16":
        return importlib.import_module("ml_dtypes").finfo(name)
    return np.finfo(numpy_dtype(name))


def known_dtypes() -> list[str]:
    """Return the operand dtypes that NumPy supports here: bfloat16 only if ml_dtypes is installed."""
    missing = importlib.util.find_spec("ml_dtypes") is None
    return [name for name in OPERANDS if not (missing and name == "bfloat16")]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype for a dtype name of the project.

    Raises:
        InputError: the name is bfloat16 and ml_dtypes is not installed.
    """
    if name == "bfloat16":
        if name not in known_dtypes():
            raise missing_bfloat16()
        importlib.import_module("ml_dtypes")  # registers bfloat16 with NumPy
    return np.dtype(DTYPES[name].name)
