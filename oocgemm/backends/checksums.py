"""Checksums that a device takes of what lies on it, by kernels/check_sums.cu: what is launched, and where it goes.

A panel is summed as a part of its Upload, the checksums of a step's panels are multiplied as a part of its Multiply, and a
strip of C is summed as a part of its Upload and of its Download. What they read and write lies in the slots of these
operations (`oocgemm.planning.check_blocks`), so that the waits of these are all that they need. Nothing here waits, and nothing
imports cupy: a device launches and copies on the stream that is current.
"""

import ctypes
from collections.abc import Callable
from dataclasses import fields
from typing import Protocol

from oocgemm.backends.random_words import sign_stream
from oocgemm.kernels.spec import C_TYPES
from oocgemm.planning import DTYPES, Op, Operation, Plan, Region, Slot
from oocgemm.planning.check_blocks import HEAD, SIDE, Blocking, PanelOffsets, PartOffsets, StripOffsets
from oocgemm.planning.cost.footprint import payload_bytes
from oocgemm.planning.tiling import Range, Tile, ceil_div
from oocgemm.timeline.busy import BusyTime

_LONG, _INT, _POINTER = ctypes.c_longlong, ctypes.c_int, ctypes.c_void_p


class CutFields(ctypes.Structure):
    """`cut` of kernels/check_sums.cu."""

    _fields_ = (*((field.name, _LONG) for field in fields(Blocking)[:3]), ("per", _INT))


class Summed(ctypes.Structure):
    """`summed` of kernels/check_sums.cu: a panel, or a strip of C."""

    _fields_ = (
        *((name, _POINTER) for name in ("x", "head", "flags", "norms", "sums")),
        *((name, CutFields) for name in ("rows", "cols")),
        *((name, _LONG) for name in ("depth", "pitch", "sums_pitch")),
        *((name, _LONG) for name in ("first_row", "first_col")),
        *((name, _INT) for name in ("row_signs", "col_signs", "conjugates")),
    )


class Multiplied(ctypes.Structure):
    """`multiplied` of kernels/check_sums.cu: the checksums of two panels and those of the strips that they make."""

    _fields_ = (
        *((f"{x}{part}", _POINTER) for part in ("", "_norms", "_head") for x in "ab"),
        *((f"{x}_expected", ctypes.c_ulonglong) for x in "ab"),
        *((f"{x}_flags", _POINTER) for x in "ab"),
        ("strips", _POINTER),
        *((name, _LONG) for name in ("strip_bytes", "made", "sums", "norms", "row_flags", "col_flags")),
        *((name, _LONG) for name in ("depth", "chunks", "rows", "cols", "strip")),
        *((name, _INT) for name in ("down", "across", "pitch", "per", "first")),
    )


class Device(Protocol):
    """What launches and copies on the current stream; addresses are integers."""

    def load(self, entry: str, macros: tuple[str, ...]) -> None:
        """Have a kernel of kernels/check_sums.cu ready to be launched."""

    def launch(
        self, entry: str, macros: tuple[str, ...], grid: tuple[int, int, int], given: ctypes.Structure
    ) -> None:
        """A kernel of kernels/check_sums.cu."""

    def zero(self, address: int, size: int) -> None:
        """Fill device memory with zeros."""

    def copy(self, to: int, source: int, size: int) -> None:
        """Copy within device memory."""


def check_options(dtype: str, accumulator: str, axis: int) -> tuple[str, ...]:
    """What kernels/check_sums.cu is told."""
    wide = "complex_t<double>" if DTYPES[accumulator].is_complex else "double"
    return f"-DOOC_STORED={C_TYPES[dtype]}", f"-DOOC_AXIS={axis}", f"-DOOC_WIDE={wide}"


class Summing:
    """The checksums of one run on a device."""

    def __init__(self, plan: Plan, address: Callable[[Region], int], device: Device) -> None:
        """`address`: where a region begins."""
        self._problem = problem = plan.problem
        self._rows = plan.grid.rows
        self._strip = plan.slots.strip
        self._address = address
        self._device = device
        self._held = payload_bytes(problem, plan.tile, plan.slots.strip)
        self.room = StripOffsets.of(problem, plan.tile, plan.slots.strip)
        self._seed = 0
        self.expected = 0, 0  # digests of the panels that the next Multiply must find
        self.busy = BusyTime()  # when the device was at it, in nanoseconds
        # To load a kernel while others run waits for all that was launched, and all that is to be launched for that.
        for operand in "AB":
            device.load("check_panel", self._options(problem.a_dtype, self._axis(operand)))
        device.load("check_product", self._options(problem.a_dtype))
        device.load("check_strip", self._options(problem.c_dtype))

    def begin(self, seed: int) -> None:
        """Take signs drawn with that seed from now on."""
        self._seed = seed

    def uploaded(self, op: Operation) -> None:
        """Sum what an Upload has brought."""
        if op.operand == "C":
            self._sum_strip(op, op.writes[0], self.room.old)
        else:
            self._sum_panel(op, op.writes[0])

    def multiplied(self, op: Operation) -> None:
        """Add the product of the checksums of a step's panels to those of the strips that a Multiply writes."""
        problem, room = self._problem, self.room
        top, bottom = self._rows(op.tile[0])
        depth, cols, c = op.k[1] - op.k[0], op.n[1] - op.n[0], op.writes[0].slot
        given = Multiplied(
            strips=self._at(c, op.tile, op.m), strip_bytes=room.end, made=room.made.begin,
            sums=room.made.sums, norms=room.made.norms, row_flags=room.made.rows, col_flags=room.made.cols,
            depth=depth, chunks=ceil_div(depth, SIDE), rows=op.m[1] - op.m[0], cols=cols, strip=self._strip,
            pitch=room.across, first=op.first, a_expected=self.expected[0], b_expected=self.expected[1],
        )  # fmt: skip
        down = Blocking.of(bottom - top, self._strip)
        given.down, given.per = Blocking.of(given.rows, self._strip).blocks, down.per
        given.across = Blocking.of(cols, cols).blocks
        if depth:
            skipped = (op.m[0] - top) // self._strip * down.per  # blocks of the panel, before the first strip
            wide = 16 if DTYPES[problem.acc_dtype].is_complex else 8
            sides = (
                ("a", op.reads[0].slot, bottom - top, self._strip, skipped, op.m[0] - top),
                ("b", op.reads[1].slot, cols, cols, 0, 0),
            )
            for name, slot, extent, strip, block, row in sides:
                start, of = self._behind(slot), PanelOffsets.of(problem, extent, depth, strip)
                setattr(given, name, start + of.sums + block * depth * wide)
                setattr(given, f"{name}_norms", start + of.norms + block * given.chunks * 8)
                setattr(given, f"{name}_head", start)
                setattr(given, f"{name}_flags", start + of.flags + row)
        self._device.launch(
            "check_product",
            self._options(problem.a_dtype),
            (ceil_div(given.across, 16), ceil_div(given.down, 16), 1),
            given,
        )

    def finished(self, op: Operation) -> None:
        """Take the checksums of a strip along with it, from its accumulator to its slot."""
        made = self.room.made
        source = self._at(op.reads[0].slot, op.tile, op.m)
        self._device.copy(
            self._behind(op.writes[0].slot) + made.begin, source + made.begin, made.end - made.begin
        )

    def leaving(self, op: Operation) -> None:
        """Sum a strip that a Download is to bring to the host."""
        self._sum_strip(op, op.reads[0], self.room.found)

    def strip_at(self, op: Operation) -> int:
        """Where all checksums of a strip begin that a Download is to bring to the host; they go with it."""
        return self._at(op.reads[0].slot, op.tile, op.m)

    def beside(self, host: int) -> int:
        """Where the checksums of a strip go, whose host slot begins at an address."""
        return host + self._held["host", "C"]

    def _behind(self, slot: Slot) -> int:
        """Where the checksums of a slot begin."""
        return self._address(Region(slot, 0, 0)) + self._held["device", slot.operand]

    def _at(self, slot: Slot, tile: Tile, rows: Range) -> int:
        """Where the checksums of a strip begin, or of the first of several."""
        number = (rows[0] - self._rows(tile[0])[0]) // self._strip if slot.operand == "C" else 0
        return self._behind(slot) + number * self.room.end

    def _options(self, dtype: str, axis: int = 0) -> tuple[str, ...]:
        return check_options(dtype, self._problem.acc_dtype, axis)

    def _axis(self, operand: str) -> int:
        """Whether the rows of op(A), or columns of op(B), are columns of the stored panel."""
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
        given = Summed(
            x=self._address(region), head=start, flags=start + room.flags, norms=start + room.norms,
            sums=start + room.sums, rows=_fields(rows), depth=depth, pitch=extent if axis else depth,
            first_row=span[0], row_signs=sign_stream(self._seed, int(not on_a)),
            conjugates=trans is Op.C,
        )  # fmt: skip
        options = self._options(problem.a_dtype, axis)
        self._device.launch("check_panel", options, (ceil_div(depth, SIDE), rows.blocks, 1), given)

    def _sum_strip(self, op: Operation, region: Region, part: PartOffsets) -> None:
        problem, (height, width) = self._problem, (span[1] - span[0] for span in (op.m, op.n))
        rows, cols = Blocking.of(height, self._strip), Blocking.of(width, width)
        start = self._at(region.slot, op.tile, op.m)
        flags = part is self.room.old
        self._device.zero(start + part.begin, HEAD + height * flags)
        given = Summed(
            x=self._address(region), head=start + part.begin, flags=start + part.rows if flags else None,
            norms=start + part.norms, sums=start + part.sums, rows=_fields(rows), cols=_fields(cols),
            pitch=width, sums_pitch=self.room.across, first_row=op.m[0], first_col=op.n[0],
            row_signs=sign_stream(self._seed, 0), col_signs=sign_stream(self._seed, 1),
        )  # fmt: skip
        options = self._options(problem.c_dtype)
        self._device.launch("check_strip", options, (cols.blocks, rows.blocks, 1), given)


def _fields(cut: Blocking) -> CutFields:
    return CutFields(cut.extent, cut.strip, cut.size, cut.per)
