"""Checksums that a device computes to verify C, and the random numbers that weigh their terms.

`random_words` is SplitMix64 (Steele, Lea and Flood, *Fast splittable pseudorandom number generators*, 2014),
a counter-based generator: any word of a random stream is computed from its index alone. The kernels of
kernels/checks/check_sums.cu have the same generator, so that host and device agree. The kernels compute:

- with the Upload of a panel, the checksums of the panel;
- with a Multiply, the product of the checksums of the two panels, which gives the expected checksums of C;
- with the Upload or the Download of a strip of C, the checksums of the strip.

The checksums are stored behind the data in the same device slots (layout: `oocgemm.planning.device_memory`).
This module does not import cupy: a `ChecksumDevice` launches the kernels.
"""

import ctypes
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from oocgemm.backends.base import Array
from oocgemm.kernels.spec import C_TYPES
from oocgemm.planning import DTYPES, Op, Operation, Plan, Region, Slot
from oocgemm.planning.cost.footprint import payload_bytes
from oocgemm.planning.device_memory import HEAD, SIDE, Blocking, PanelOffsets, PartOffsets, StripOffsets
from oocgemm.planning.tiling import Range, Tile, ceil_div
from oocgemm.timeline.spans import BusyTime

# Ids of random streams. The digest of a matrix is a weighted sum of its words. The weight of a word depends
# on its row (stream 0) and on its position in the row (stream 1). All later streams have random signs.
ROW_WEIGHTS, WORD_WEIGHTS, _SIGNS = 0, 1, 2
# Number of vectors in a `SignVectors`. Each of the 8 bits of a random byte is a sign of one vector.
VECTORS = 8
# Number of bytes that Philox generates for one value of its counter.
_BYTES_PER_COUNT = 32
_SIGNS_OF_BYTE = 1.0 - 2.0 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)


def random_words(stream: int, count: int, first: int = 0) -> NDArray[np.uint64]:
    """Return words (uint64) of one of 2^16 random streams, of 2^48 words each, from index `first` on."""
    index = np.arange(first, first + count, dtype=np.uint64)
    z = (index + np.uint64((stream << 48) + 1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)


def sign_stream(seed: int, axis: int) -> int:
    """Return the random stream of the signs of rows (axis 0) or columns (axis 1)."""
    return _SIGNS + 2 * seed + axis


def signs(seed: int, axis: int, extent: int) -> NDArray[Any]:
    """Return `extent` random signs, 1.0 or -1.0, for the rows (axis 0) or columns (axis 1) of a product."""
    return 1.0 - 2.0 * (random_words(sign_stream(seed, axis), extent) >> np.uint64(63)).astype(np.float64)


class SignVectors:
    """`VECTORS` vectors of random signs, of unlimited length. Any part of them can be computed by itself.

    The generator is Philox (Salmon, Moraes, Dror and Shaw, *Parallel random numbers: as easy as 1, 2, 3*,
    2011). The 8 bits of byte j of its output are the signs of element j of the 8 vectors.
    """

    def __init__(self, *seed: int) -> None:
        self._key = np.random.SeedSequence(seed).generate_state(2, np.uint64)

    def part(self, start: int, stop: int) -> NDArray[Any]:
        """Return elements `start` to `stop` of all vectors: 1.0 or -1.0, of shape (stop - start, VECTORS)."""
        counter = start // _BYTES_PER_COUNT
        skipped = start - counter * _BYTES_PER_COUNT
        count = -(-(stop - counter * _BYTES_PER_COUNT) // 8)
        words = np.random.Philox(key=self._key, counter=counter).random_raw(count)
        drawn = words.astype("<u8", copy=False).view(np.uint8)[skipped : skipped + stop - start]
        return _SIGNS_OF_BYTE.take(drawn, axis=0)


_LONG, _INT, _POINTER = ctypes.c_longlong, ctypes.c_int, ctypes.c_void_p


class CutFields(ctypes.Structure):
    """The C struct `cut` of check_sums.cu: the division of rows or columns into blocks (`Blocking`)."""

    _fields_ = (*((field.name, _LONG) for field in fields(Blocking)[:3]), ("per", _INT))


class Summed(ctypes.Structure):
    """The C struct `summed` of check_sums.cu: a panel or a strip of C, and where to write its checksums."""

    _fields_ = (
        *((name, _POINTER) for name in ("x", "head", "flags", "norms", "sums")),
        *((name, CutFields) for name in ("rows", "cols")),
        *((name, _LONG) for name in ("depth", "pitch", "sums_pitch")),
        *((name, _LONG) for name in ("first_row", "first_col")),
        *((name, _INT) for name in ("row_signs", "col_signs", "conjugates")),
    )


class Multiplied(ctypes.Structure):
    """The C struct `multiplied` of check_sums.cu: where the checksums of two panels are, and the expected
    checksums of C, to which the product of the panels' checksums is added."""

    _fields_ = (
        *((f"{x}{part}", _POINTER) for part in ("", "_norms", "_head") for x in "ab"),
        *((f"{x}_expected", ctypes.c_ulonglong) for x in "ab"),
        *((f"{x}_flags", _POINTER) for x in "ab"),
        ("strips", _POINTER),
        *((name, _LONG) for name in ("strip_bytes", "made", "sums", "norms", "row_flags", "col_flags")),
        *((name, _LONG) for name in ("depth", "chunks", "rows", "cols", "strip")),
        *((name, _INT) for name in ("down", "across", "pitch", "per", "first")),
    )


class ChecksumDevice(Protocol):
    """Launches kernels of check_sums.cu and copies device memory, both on the current stream."""

    def load(self, entry: str, macros: tuple[str, ...]) -> None:
        """Compile and load a kernel now, so that its first launch does not have to."""

    def launch(
        self, entry: str, macros: tuple[str, ...], grid: tuple[int, int, int], arguments: ctypes.Structure
    ) -> None:
        """Launch the kernel `entry`, compiled with `macros`, on a grid. Its only argument is a struct."""

    def zero(self, address: int, size: int) -> None:
        """Fill `size` bytes of device memory from `address` on with zeros."""

    def copy(self, to: int, source: int, size: int) -> None:
        """Copy `size` bytes from device address `source` to device address `to`."""


def check_options(dtype: str, accumulator: str, axis: int) -> tuple[str, ...]:
    """Return the compiler options of check_sums.cu for a panel or strip of `dtype`.

    If the accumulator is complex, so are the checksums. `axis` is 0 if rows of the stored panel are added up,
    each with a random sign; 1 if columns are.
    """
    wide = "complex_t<double>" if DTYPES[accumulator].is_complex else "double"
    return f"-DOOC_STORED={C_TYPES[dtype]}", f"-DOOC_AXIS={axis}", f"-DOOC_WIDE={wide}"


class DeviceChecksums:
    """Computes the checksums of one run on a device. Implements `oocgemm.backends.base.Checksums`."""

    def __init__(self, plan: Plan, address: Callable[[Region], int], device: ChecksumDevice) -> None:
        """Load the kernels. `address` returns the device address of a region."""
        self._problem = problem = plan.problem
        self._rows = plan.grid.rows
        self._strip = plan.slots.strip
        self._address = address
        self._device = device
        self._data_bytes = payload_bytes(problem, plan.tile, plan.slots.strip)
        self.room = StripOffsets.of(problem, plan.tile, plan.slots.strip)
        self._seed = 0
        self.expected = 0, 0
        self.busy = BusyTime()
        # Load all kernels before the run: loading waits until the device is idle.
        for operand in "AB":
            device.load("check_panel", self._options(problem.a_dtype, self._axis(operand)))
        device.load("check_product", self._options(problem.a_dtype))
        device.load("check_strip", self._options(problem.c_dtype))

    def begin(self, seed: int) -> None:
        self._seed = seed

    def after_upload(self, op: Operation) -> None:
        """Launch the kernel that computes the checksums of the panel or strip that an Upload has copied."""
        if op.operand == "C":
            self._sum_strip(op, op.writes[0], self.room.old)
        else:
            self._sum_panel(op, op.writes[0])

    def with_multiply(self, op: Operation) -> None:
        """Multiply the checksums of a Multiply's two panels, and add the product to the expected checksums
        of C."""
        problem, room = self._problem, self.room
        top, bottom = self._rows(op.tile[0])
        depth, cols, c = op.k[1] - op.k[0], op.n[1] - op.n[0], op.writes[0].slot
        arguments = Multiplied(
            strips=self._at(c, op.tile, op.m), strip_bytes=room.end, made=room.made.begin,
            sums=room.made.sums, norms=room.made.norms, row_flags=room.made.rows, col_flags=room.made.cols,
            depth=depth, chunks=ceil_div(depth, SIDE), rows=op.m[1] - op.m[0], cols=cols, strip=self._strip,
            pitch=room.across, first=op.first, a_expected=self.expected[0], b_expected=self.expected[1],
        )  # fmt: skip
        down = Blocking.of(bottom - top, self._strip)
        arguments.down, arguments.per = Blocking.of(arguments.rows, self._strip).blocks, down.per
        arguments.across = Blocking.of(cols, cols).blocks
        if depth:
            # The panel of op(A) has all rows of the tile. Skip the checksums of the rows above `op.m`.
            skipped = (op.m[0] - top) // self._strip * down.per
            wide = 16 if DTYPES[problem.acc_dtype].is_complex else 8
            sides = (
                ("a", op.reads[0].slot, bottom - top, self._strip, skipped, op.m[0] - top),
                ("b", op.reads[1].slot, cols, cols, 0, 0),
            )
            for name, slot, extent, strip, block, row in sides:
                start, of = self._behind(slot), PanelOffsets.of(problem, extent, depth, strip)
                setattr(arguments, name, start + of.sums + block * depth * wide)
                setattr(arguments, f"{name}_norms", start + of.norms + block * arguments.chunks * 8)
                setattr(arguments, f"{name}_head", start)
                setattr(arguments, f"{name}_flags", start + of.flags + row)
        self._device.launch(
            "check_product",
            self._options(problem.a_dtype),
            (ceil_div(arguments.across, 16), ceil_div(arguments.down, 16), 1),
            arguments,
        )

    def with_finish(self, op: Operation) -> None:
        """Copy a strip's expected checksums to the slot to which a Finish writes the strip."""
        made = self.room.made
        source = self._at(op.reads[0].slot, op.tile, op.m)
        self._device.copy(
            self._behind(op.writes[0].slot) + made.begin, source + made.begin, made.end - made.begin
        )

    def before_download(self, op: Operation) -> None:
        """Launch the kernel that computes the checksums of a strip of C, for the host to compare."""
        self._sum_strip(op, op.reads[0], self.room.found)

    def device_address(self, op: Operation) -> int:
        """Return the device address of a strip's checksums, which its Download copies, too."""
        return self._at(op.reads[0].slot, op.tile, op.m)

    def host_address(self, host: int) -> int:
        """Return the address of checksums behind a strip in a host slot."""
        return host + self._data_bytes["host", "C"]

    def _behind(self, slot: Slot) -> int:
        """Return the device address of the checksums in a slot: they follow the slot's data."""
        return self._address(Region(slot, 0, 0)) + self._data_bytes["device", slot.operand]

    def _at(self, slot: Slot, tile: Tile, rows: Range) -> int:
        """Return the device address of a strip's checksums. A slot of C has those of all strips of a tile."""
        number = (rows[0] - self._rows(tile[0])[0]) // self._strip if slot.operand == "C" else 0
        return self._behind(slot) + number * self.room.end

    def _options(self, dtype: str, axis: int = 0) -> tuple[str, ...]:
        return check_options(dtype, self._problem.acc_dtype, axis)

    def _axis(self, operand: str) -> int:
        """Return whether the checksums of a stored panel add up its rows (0) or its columns (1).

        Rows of op(A) and columns of op(B) are added up.
        """
        trans = self._problem.trans_a if operand == "A" else self._problem.trans_b
        return int((operand == "A") == trans.swaps)

    def _sum_panel(self, op: Operation, region: Region) -> None:
        problem, on_a = self._problem, op.operand == "A"
        trans, span = (problem.trans_a, op.m) if on_a else (problem.trans_b, op.n)
        extent, depth = span[1] - span[0], op.k[1] - op.k[0]
        rows = Blocking.of(extent, self._strip if on_a else extent)
        start, room = self._behind(region.slot), PanelOffsets.of(problem, extent, depth, rows.strip)
        axis = self._axis(op.operand)
        self._device.zero(start, HEAD + extent)
        arguments = Summed(
            x=self._address(region), head=start, flags=start + room.flags, norms=start + room.norms,
            sums=start + room.sums, rows=_fields(rows), depth=depth, pitch=extent if axis else depth,
            first_row=span[0], row_signs=sign_stream(self._seed, int(not on_a)),
            conjugates=trans is Op.C,
        )  # fmt: skip
        options = self._options(problem.a_dtype, axis)
        self._device.launch("check_panel", options, (ceil_div(depth, SIDE), rows.blocks, 1), arguments)

    def _sum_strip(self, op: Operation, region: Region, part: PartOffsets) -> None:
        problem, (height, width) = self._problem, (span[1] - span[0] for span in (op.m, op.n))
        rows, cols = Blocking.of(height, self._strip), Blocking.of(width, width)
        start = self._at(region.slot, op.tile, op.m)
        flags = part is self.room.old
        self._device.zero(start + part.begin, HEAD + height * flags)
        arguments = Summed(
            x=self._address(region), head=start + part.begin, flags=start + part.rows if flags else None,
            norms=start + part.norms, sums=start + part.sums, rows=_fields(rows), cols=_fields(cols),
            pitch=width, sums_pitch=self.room.across, first_row=op.m[0], first_col=op.n[0],
            row_signs=sign_stream(self._seed, 0), col_signs=sign_stream(self._seed, 1),
        )  # fmt: skip
        options = self._options(problem.c_dtype)
        self._device.launch("check_strip", options, (cols.blocks, rows.blocks, 1), arguments)


class DeviceStripSums:
    """Computes the sums of strips of the accumulator on a device. Implements `SumsOfStrips`.

    The kernel writes the sums to pinned host memory, so that the host can compare them as soon as the Finish
    has
    ended: 16 bytes per block of 128 x 128 elements.
    """

    def __init__(
        self,
        plan: Plan,
        address: Callable[[Region], int],
        device: ChecksumDevice,
        allocate: Callable[[int], Any],
    ) -> None:
        """Load the kernel. `address` returns the device address of a region, `allocate` pinned memory."""
        self._problem, self._strip = plan.problem, plan.slots.strip
        self._address, self._device, self._allocate = address, device, allocate
        self._options = check_options(self._problem.acc_dtype, self._problem.acc_dtype, 0)
        self._seed = 0
        self._taken: dict[tuple[Tile, Range], tuple[Any, tuple[int, int]]] = {}
        self._free: list[Any] = []
        height, width = min(plan.tile.m, self._problem.m), min(plan.tile.n, self._problem.n)
        rows, cols = self._cut(height, width)
        self._size = 16 * rows.per * cols.blocks
        device.load("check_strip", self._options)

    def begin(self, seed: int) -> None:
        self._seed = seed

    def before_finish(self, op: Operation) -> None:
        """Launch the kernel that adds up the strip of a Finish, before the Finish."""
        height, width = (span[1] - span[0] for span in (op.m, op.n))
        rows, cols = self._cut(height, width)
        memory = self._free.pop() if self._free else self._allocate(self._size)
        shape = rows.blocks, cols.blocks
        self._taken[op.tile, op.m] = memory, shape
        columns = sign_stream(self._seed, int(not self._problem.b.shares))
        arguments = Summed(
            x=self._address(op.reads[0]), norms=memory.ptr + 8 * shape[0] * shape[1], sums=memory.ptr,
            rows=_fields(rows), cols=_fields(cols), pitch=width, sums_pitch=shape[1],
            first_row=op.m[0], first_col=op.n[0],
            row_signs=sign_stream(self._seed, 0), col_signs=columns,
        )  # fmt: skip
        self._device.launch("check_strip", self._options, (shape[1], shape[0], 1), arguments)

    def take(self, operation: Operation) -> tuple[Array, Array]:
        memory, (down, across) = self._taken.pop((operation.tile, operation.m))
        found = np.frombuffer(memory, np.float64, 2 * down * across).reshape(2, down, across).copy()
        self._free.append(memory)
        return found[0], found[1]

    def _cut(self, height: int, width: int) -> tuple[Blocking, Blocking]:
        """Return how the rows and the columns of a strip are divided into blocks; alike for a Gram matrix."""
        across = self._strip if self._problem.cover.square else width
        return Blocking.of(height, self._strip), Blocking.of(width, across)


def _fields(cut: Blocking) -> CutFields:
    return CutFields(cut.extent, cut.strip, cut.size, cut.per)
