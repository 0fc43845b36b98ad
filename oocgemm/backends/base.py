"""The protocol between the engine and a backend, and what all backends use.

A session of a backend owns the buffers on the device (slots) and runs operations on streams. With each
operation, the executor passes the handles (tokens) of the earlier operations to wait for. The session's
streams then wait for these.
"""

import importlib
import importlib.util
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import field
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from oocgemm.errors import ExecutionError, missing_bfloat16
from oocgemm.planning import (
    DTYPES,
    OPERANDS,
    GemmProblem,
    Kind,
    Operation,
    Plan,
    Region,
    Slot,
    Tier,
    TileShape,
)
from oocgemm.planning.cost.coding import slot_frames
from oocgemm.planning.cost.footprint import DEVICE_ALIGNMENT, slot_bytes
from oocgemm.planning.device_memory import StripOffsets
from oocgemm.planning.elements import ElementStep
from oocgemm.planning.schedule.operation import Slots
from oocgemm.planning.sinks import Sink
from oocgemm.planning.tiling import Range, Shape, round_up
from oocgemm.stores.codecs import Codec, Fetched
from oocgemm.stores.files import CachedBlock
from oocgemm.timeline.spans import BusyTime
from oocgemm.values import dataclass

# Maximum number of steps of a run in which one thread enqueues all operations, because the GPU copies all
# blocks from and to pinned arrays. An operation then takes 20 to 60 us, and 200 us with the threads of a long
# run. The limit bounds the memory for the operations, which need about 3 KB each.
MAX_ENQUEUED_STEPS = 2048


class Checksums(Protocol):
    """The checksums that a device computes during one run.

    Attributes:
        expected: the host's digests of the next Multiply's two panels. The engine sets them before it submits
            the Multiply. The device compares them with digests of the panels that it received.
        busy: the time that the device spends on checksums.
        room: the memory layout of the checksums of one strip of C.
    """

    expected: tuple[int, int]
    busy: BusyTime
    room: StripOffsets

    def begin(self, seed: int) -> None:
        """Set the seed of the random signs that the checksums of later operations use."""


class SumsOfStrips(Protocol):
    """The sums of strips of the accumulator, which a device computes before a Finish changes the strip."""

    def begin(self, seed: int) -> None:
        """Set the seed of the random signs that later sums use."""

    def take(self, operation: Operation) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the sums and the norms of the blocks of a strip, once.

        `operation` is the Finish of the strip, which has ended, or another operation on the same rows.
        """


Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Pinned:
    """A block of an operand in memory that its owner has pinned: the device copies from or to it directly.

    `array` is a view of the owner's memory.
    """

    array: Array


@dataclass(frozen=True, slots=True)
class Pageable:
    """A block of an operand in memory that is not pinned, or in a file: it is copied through pinned buffers.

    Attributes:
        shape: rows and columns.
        dtype: dtype of its elements, in native byte order.
        move: copies some rows and columns of the block, counted from its first ones, to an array for an
            Upload, or from an array for a Download. The array is contiguous. Many threads call this.
        chunk: rows and columns of the chunks that the block is stored in; (1, 1) if it is not in chunks.
        origin: row and column of the block's first element in its chunk.
        stored: the block in files, if compiled code can read it; None otherwise.
        memory: the block itself, if it is in memory with the layout that it has on the device, except for
            gaps between rows, so that `move` only copies. None otherwise.
    """

    shape: Shape
    dtype: np.dtype[Any]
    move: Callable[[Range, Range, Array], None]
    chunk: Shape = (1, 1)
    origin: Shape = (0, 0)
    memory: Array | None = None
    stored: CachedBlock | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the block."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize


# A segment: elements of one row of C, in ascending order of columns, that were found together. `row` counts
# from the first row of the strip. The segment has the elements from `first` to `first + count` of all
# elements that were found in the strip. Of two segments of a row, the one with the larger `first` has later
# columns.
SEGMENTS = np.dtype([("row", np.uint32), ("count", np.uint32), ("first", np.uint64)])


@dataclass(frozen=True, slots=True)
class Found:
    """Takes the elements of a strip of a `sparse` C from the device.

    Attributes:
        put: called with the segments (`SEGMENTS`) of the strip, in any order, and with its elements
            (`SELECTED`). Many threads call this.
    """

    put: Callable[[Array, Array], None]


@dataclass(frozen=True, slots=True, eq=False)
class PanelNumbers:
    """The numbers of the steps that a device does to elements of an operand.

    Attributes:
        of_steps: a float64 array for each step of the operand (`Operand.elements`), per row or per column of
            the stored array; None for a step without numbers.
        check: raises an error if the steps are not defined for X. Called if the device computes numbers from
            X. The arguments are int64 arrays, per index along k: the number of elements that are not missing,
            their sum, and the sum of their squares.
    """

    of_steps: Sequence[Array | None]
    check: Callable[[Array, Array, Array], None] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Swept:
    """A matrix whose blocks a device reads, each block once.

    Attributes:
        shape: rows and columns.
        dtype: dtype of its elements.
        cuts: the rows and columns of its blocks, in the order in which they are read.
        block: returns a block, given its rows and columns.
        steps, numbers: what happens to each element before it is used. Numbers are as in `PanelNumbers`.
        code: the value that marks missing elements, which are left out; None if no element is missing.
    """

    shape: Shape
    dtype: np.dtype[Any]
    cuts: Sequence[tuple[Range, Range]]
    block: Callable[[Range, Range], Pageable]
    steps: tuple[ElementStep, ...] = ()
    numbers: Sequence[Array | None] = ()
    code: float | None = None


ElementNumbers = Mapping[str, PanelNumbers]  # by operand, "A" or "B"
Correction = tuple[Array, Array] | None
Numbers = tuple[Array | None, Array | None]


class Factors(NamedTuple):
    """Numbers u of rows and v of columns of C, which make scores of its elements c in the dtype of scores.

    A score is u[i] v[j] c, but at least -1 and at most 1. With `nearness`, it is 2 c - (u[i] + v[j]), but at
    most 0: a squared distance times -1.
    """

    rows: Array
    cols: Array
    nearness: bool = False


class Finishing(NamedTuple):
    """The float64 arrays that Finish operations use.

    rows[i] + cols[j] of a `correction` (rows, cols) is subtracted from C. Row i and column i of C are
    multiplied by `scales`[i]. Each step of the epilogue has `numbers` per row and per column of C, or None.
    """

    correction: Correction = None
    scales: Array | None = None
    numbers: Sequence[Numbers] = ()

    def factors(self, sink: Sink) -> Factors | None:
        """Return the numbers with which scores are computed where elements are selected; None for none."""
        if sink.ranks_distances:
            (rows, cols), *_ = self.numbers
            assert rows is not None
            assert cols is not None
            return Factors(rows, cols, nearness=True)
        return None if self.scales is None else Factors(self.scales, self.scales)


NOTHING = Finishing()

# Selected elements of C, by the names of their dtypes. Those of a row are in descending order of their
# scores. Elements of equal scores are in ascending order of their indices, the columns of C. NaN comes last.
# 0 and -0 are equal, and returned as 0.
SELECTED = {
    "void64": np.dtype([("score", np.float32), ("index", np.uint32)]),
    "void128": np.dtype([("score", np.float64), ("index", np.uint64)]),
}


# The host memory of an Upload or a Download is one of these: the contiguous arrays in a host slot, each with
# some columns of the stored block; a block in the memory of the operand's owner (`Pinned`, `Pageable`); or
# the object that takes the elements of a sparse C (`Found`).
HostBlock = Sequence[Array] | Pinned | Pageable | Found


class Stream(NamedTuple):
    """Identifies a queue of operations on one device, which are submitted in the order of the schedule.

    `lane` names the kind of work, such as "h2d" or "compute". The operations of the queue have this name in
    their attribute `stream`.
    """

    device: int
    lane: str


class Token(Protocol):
    """The handle of a submitted operation, which may still be running. A session's `submit` returns it.

    Attributes:
        times: what `interval` returns if the thread that submitted the operation has run it; otherwise None.
        bytes: how many bytes were copied; None if the number is `Operation.bytes`.
    """

    @property
    def times(self) -> tuple[int, int] | None: ...

    @property
    def bytes(self) -> int | None: ...

    def synchronize(self) -> None:
        """Block the calling thread until the operation has ended; raise if it failed."""

    def interval(self) -> tuple[int, int]:
        """Return when the operation started and ended, in nanoseconds of `time.perf_counter_ns`.

        Call `synchronize` first.
        """


@dataclass(slots=True)
class DoneToken:
    """The handle of an operation that has already ended, because the submitting thread ran it."""

    times: tuple[int, int]
    bytes: int | None = None

    def synchronize(self) -> None:
        return

    def interval(self) -> tuple[int, int]:
        return self.times


class Session(Protocol):
    """A backend at work on one plan. Its device memory is allocated and its streams exist.

    Attributes:
        checksums: None unless the plan asks the device to compute checksums.
        strip_sums: None unless the problem `checks_sums`, and the host cannot view the accumulator.
        asynchronous: kinds of operations for which `submit` returns at once, unless their host memory is
            `Pageable`. Any thread may submit these, but only one thread at a time.
        host_arena: resident, pinned memory for all host slots; None if the engine shall allocate it.
        repeats: whether the launches of operations are kept for the next run of the plan, in which the
            operations must be the same objects.
        begins_at_once: whether `begin` returns while a block is being copied, and may be called before the
            run.
    """

    host_arena: Array | None
    asynchronous: Collection[Kind]
    repeats: bool
    begins_at_once: bool

    @property
    def checksums(self) -> Checksums | None: ...

    @property
    def strip_sums(self) -> SumsOfStrips | None: ...

    def worker(self, stream: Stream) -> AbstractContextManager[None]:
        """Prepare the calling thread to submit the operations of one stream."""

    def submit(self, operation: Operation, host: HostBlock, after: Sequence[Token]) -> Token:
        """Start an operation of the device when the operations in `after` have ended; return its handle.

        Args:
            operation: an Upload, a Prepare, a Multiply, a Finish or a Download.
            host: for an Upload or a Download, the block in host memory. If it is `Pageable` or `Found`,
                several threads may make such calls at once. An Upload then returns when the block has been
                read, a Download when all copies from the device have been issued: only `Token.synchronize`
                waits until the block has been written.
            after: handles of the operations that this one waits for.
        """

    def keeps(self, operation: Operation) -> bool:
        """Return whether the launches of an operation are kept, and may then be made before the run."""

    def begin(self, operation: Operation, host: Pageable, after: Sequence[Token]) -> Callable[[], Token]:
        """Begin to copy a `Pageable` block as `submit` does, and return before the copy has ended.

        Returns:
            A function that waits as long as `submit` would, and returns the handle. Call it exactly once.
        """

    def pin(self, host: Sequence[Array]) -> None:
        """Pin the pages of `host`, the arrays in a host slot, if the device needs pinned memory.

        Pinning resident pages is ten times as fast. Any thread may call this while no other uses the slot.
        """

    def view(self, operation: Operation, region: Region) -> Array:
        """Return a part of a buffer on the device as an array, in the orientation of the stored operand.

        Called only if host and device share one memory.
        """

    def use_in_place(self, arrays: Mapping[str, Array]) -> None:
        """Multiply the caller's arrays of some operands ("A", "B", "C") where they are, without slots.

        Called before the first `submit`, with the operands for which the plan says so (`Layout.in_place`).
        """

    def use_numbers(self, elements: ElementNumbers, finishing: Finishing) -> None:
        """Set the numbers of steps that change elements of operands, and that correct, scale or change C.

        Called before the first `submit`.

        Args:
            elements: of the operands ("A", "B") whose panels the device transforms or measures.
            finishing: the arrays of Finish operations.
        """

    def use_factor(self, factor: Array) -> None:
        """Set Q of an `Updated` B, or V of an `Applied` sink. Called before the first `submit`.

        Args:
            factor: V, or an m x n matrix whose first columns are Q, in the accumulator's dtype.
        """

    def kernels_used(self) -> list[str]:
        """Return the names of the kernels that this session has used for multiplications so far."""

    def device_bytes(self) -> int:
        """Measure the device memory that this session has allocated, in bytes: slots and library workspaces.

        Memory that a library allocated during an earlier session and kept is not counted.
        """

    def close(self, failed: bool = False) -> None:
        """Wait for the operations in flight, then release everything.

        A session may leave streams and a little memory to the next one, unless the run has `failed`.
        """


class Backend(Protocol):
    """A kind of machine that can run plans."""

    name: str

    def device_count(self) -> int:
        """Return the number of devices that this kind of backend could open, numbered from 0."""

    def free_memory(self) -> int:
        """Return the bytes of device memory that could be allocated now."""

    def multiprocessors(self) -> int:
        """Return the number of multiprocessors; 1 if the device has none.

        Plans use it to estimate how well a tile occupies the device.
        """

    def is_pinned(self, address: int, size: int) -> bool:
        """Return whether the `size` bytes of host memory from `address` on are in one pinned range."""

    def link_limit(self) -> float | None:
        """Return the maximum rate of copies between host and device in each direction, in bytes per second.

        Return None if the system does not report the rate, or if device and host share one memory.
        """

    def describe(self) -> dict[str, str]:
        """Return names and versions of the device and the libraries, for log headers and reports."""

    def check(self, plan: Plan, kernel: str) -> None:
        """Raise `InputError` if a kernel cannot run a plan's multiplications on this device.

        The check allocates no device memory.
        """

    def arithmetic(self, problem: GemmProblem, kernel: str) -> str:
        """Describe the arithmetic that `kernel` performs for a problem, as text.

        If two runs of a problem have the same description, C is equal in every bit.
        """

    def moments(self, given: Swept, axis: int, host: int, device: int) -> Array | None:
        """Find moments of the columns (`axis` 0) or rows (1) of a matrix, in one pass over it.

        Args:
            given: the matrix.
            axis: the axis that is reduced.
            host, device: upper bounds in bytes on host and device memory.

        Returns:
            Five rows: the count of elements, their mean, the sum of their squared differences from the mean,
                their minimum and maximum. None if the host is as fast, or if there is too little memory.
        """

    def decomposed(self, s: Array, width: int, device: int) -> tuple[Array, Array] | None:
        """Return the eigenvalues of a symmetric matrix in descending order, and the first eigenvectors.

        Args:
            s: the matrix, in float64.
            width: the number of eigenvectors, which are columns of the result.
            device: an upper bound in bytes on device memory.

        Returns:
            All eigenvalues, and the eigenvectors. None if the host must decompose the matrix.
        """

    def open(self, plan: Plan, kernel: str, beside: "Sequence[Session]" = ()) -> Session:
        """Allocate the device memory of a plan, create the streams, and return the session.

        If a run uses several devices, `beside` are the open sessions of the devices before this one. The new
        session shares the pinned host slots of the first one, which must be closed last.

        Raises:
            OutOfMemoryError: the device has too little free memory.
        """


def limits_of(name: str) -> Any:
    """Return the floating-point limits of a dtype, as `numpy.finfo` does, but also for bfloat16."""
    if name == "bfloat16":
        return importlib.import_module("ml_dtypes").finfo(name)
    return np.finfo(numpy_dtype(name))


def known_dtypes() -> list[str]:
    """Return the names of the dtypes that operands may have; bfloat16 only if ml_dtypes is installed."""
    missing = importlib.util.find_spec("ml_dtypes") is None
    return [name for name in OPERANDS if not (missing and name == "bfloat16")]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype for the name of an operand's or accumulator's dtype, such as "bfloat16".

    Raises:
        InputError: the name is bfloat16 and ml_dtypes is not installed.
    """
    if name == "bfloat16":
        if name not in known_dtypes():
            raise missing_bfloat16()
        importlib.import_module("ml_dtypes")  # this import registers bfloat16 with NumPy
    return SELECTED[name] if name in SELECTED else np.dtype(DTYPES[name].name)


@dataclass(frozen=True, slots=True)
class Compressed(Pageable):
    """A block of an operand in compressed chunks, which the device decodes.

    `move` decodes a part of the block on the host, and raises the error of a damaged chunk.

    Attributes:
        codec: how the chunks are compressed.
        fetch: reads stored chunks one after another into an array of bytes: those that contain some rows and
            columns of the block. Rows and columns count from the first ones of the block. Many threads call
            this.
    """

    codec: Codec = field(kw_only=True)
    fetch: Callable[[Range, Range, Array], Sequence[Fetched]] = field(kw_only=True)


# Parts of the device's footprint that lie behind the slots, in this order.
AREAS = ("transform", "turned", "work", "decode", "encode")


def device_offsets(plan: Plan, device: int = 0) -> tuple[Mapping[Slot, int], int]:
    """Return the byte offset of each slot of a device in the arena (one allocation), and the arena's size."""
    return slot_offsets(plan, "device", DEVICE_ALIGNMENT, device)


def areas(plan: Plan, start: int) -> list[int]:
    """Return where each of `AREAS` ends in the memory of a device, if the first one begins at `start`."""
    return [start := start + plan.footprint.device[area] for area in AREAS]


def slot_offsets(plan: Plan, tier: str, alignment: int, device: int = 0) -> tuple[Mapping[Slot, int], int]:
    """Place the slots of a tier ("host" or "device") one after the other in one allocation, the arena.

    For the tier "device", they are the slots of one `device` of the run.

    Returns:
        The byte offset of each slot, a multiple of `alignment`, and the size of the arena in bytes.
    """
    frames = slot_frames(plan.setting, plan.tile, plan.slots.strip)
    given = plan.problem, plan.tile, plan.slots, frames, frozenset(plan.in_place), plan.devices
    return _slot_offsets(*given, tier, alignment, device)


@lru_cache(64)
def _slot_offsets(
    problem: GemmProblem,
    tile: TileShape,
    slots: Slots,
    frames: int,
    in_place: frozenset[str],
    devices: int,
    tier: str,
    alignment: int,
    device: int,
) -> tuple[Mapping[Slot, int], int]:
    sizes = slot_bytes(problem, tile, slots.strip, frames)
    # Slots of operands that are multiplied in place have no memory.
    sizes |= {("device", operand): 0 for operand in in_place}
    offsets: dict[Slot, int] = {}
    end = 0
    for operand in "CABDP" if tier == "device" else "ABC":
        # Devices share the host slots for panels. Each has host slots of its own for strips of C.
        owners = range(devices) if (tier, operand) == ("host", "C") else (device,)
        for owner in owners:
            for index in range(slots.count(Tier(tier), operand)):
                offsets[Slot(Tier(tier), operand, index, owner)] = end
                end = round_up(end + sizes[tier, operand], alignment)
    return offsets, end


def too_large(c_dtype: str) -> ExecutionError:
    """Return the error for an element of C that does not fit C's integer dtype."""
    if c_dtype == "int32":
        limit, wider = "int32 holds (2^31 - 1)", "int64"
    else:
        limit, wider = "can be summed exactly (2^53)", "float64"
    return ExecutionError(
        f"an element of C is larger than {limit}: pass out_dtype='{wider}' (--out-dtype {wider})"
    )
