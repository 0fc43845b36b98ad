"""A NumPy model of check_sums.cu, the CUDA kernels that compute checksums.

A host backend calls it in the same way as the CUDA backend calls the kernels.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from oocgemm.backends.base import Array, DoneToken, HostBlock, Token, numpy_dtype
from oocgemm.backends.checksums import CutFields, DeviceChecksums, Multiplied, Summed, random_words
from oocgemm.backends.host.backend import HostBackend, HostSession
from oocgemm.integrity.rounding import norms, wide_dtype
from oocgemm.jobs import operands
from oocgemm.kernels.spec import C_TYPES
from oocgemm.planning import OPERANDS, Kind, Operation, Plan
from oocgemm.planning.device_memory import DIGEST_ROWS, SIDE, borders
from tests.support.backends_here import staged

FLOATS = [name for name in OPERANDS if name != "int8"]  # a device computes no checksums of integers


def at(address: int, dtype: Any, *shape: int) -> Array:
    """Return the memory at an address as an array."""
    kind = np.dtype(dtype)
    count = int(np.prod(shape)) * kind.itemsize
    memory = (ctypes.c_ubyte * count).from_address(address)
    return np.asarray(np.frombuffer(memory, kind).reshape(shape))


def cuts(of: CutFields) -> list[int]:
    return borders(of.extent, of.strip)


def drawn(stream: int, first: int, count: int) -> Array:
    return 1.0 - 2.0 * (random_words(stream, count, first) >> np.uint64(63)).astype(float)


def weight(stream: int, index: int) -> int:
    return int(random_words(stream, 1, index)[0]) >> 32 | 1


def plain_digest(x: Array, every: int) -> int:
    """Return the digest of a stored matrix by its definition, with Python's integers."""
    total = 0
    for r, row in list(enumerate(x))[::every]:
        raw = row.tobytes()
        raw += bytes(-len(raw) % 4)
        for j in range(0, len(raw), 4):
            total += weight(0, r) * weight(1, j // 4) * int.from_bytes(raw[j : j + 4], "big")
    return total % 2**32


class ModelDevice:
    """Computes checksums with NumPy from the addresses that a launch of the CUDA kernels gets."""

    def __init__(self) -> None:
        self._loaded: set[tuple[str, tuple[str, ...]]] = set()

    def load(self, entry: str, macros: tuple[str, ...]) -> None:
        self._loaded.add((entry, macros))

    def launch(
        self, entry: str, macros: tuple[str, ...], grid: tuple[int, int, int], given: ctypes.Structure
    ) -> None:
        assert (entry, macros) in self._loaded, (
            "while a run is under way a kernel is loaded, which waits for all others"
        )
        stored, axis, wide = (macro.partition("=")[2] for macro in macros)
        dtype = numpy_dtype({c: name for name, c in C_TYPES.items()}[stored])
        with np.errstate(all="ignore"):
            if isinstance(given, Multiplied):
                self.product(given, np.dtype(np.float64 if wide == "double" else np.complex128))
            elif isinstance(given, Summed):
                (self.panel if entry == "check_panel" else self.strip)(given, dtype, int(axis), grid)

    def panel(self, p: Summed, dtype: np.dtype[Any], axis: int, grid: tuple[int, int, int]) -> None:
        shape = (p.depth, p.rows.extent) if axis else (p.rows.extent, p.depth)
        stored = at(p.x, dtype, *shape)
        wide = (stored.T if axis else stored).astype(wide_dtype(dtype))
        edges, chunks = cuts(p.rows), range(0, p.depth, SIDE)
        assert grid == (len(chunks), len(edges) - 1, 1)
        signed = drawn(p.row_signs, p.first_row, p.rows.extent)[:, None] * wide
        sums = np.add.reduceat(signed, edges[:-1], axis=0)
        at(p.sums, wide.dtype, *sums.shape)[...] = sums.conj() if p.conjugates else sums
        found = [
            [norms(part[:, d : d + SIDE].ravel()) for d in chunks] for part in np.split(wide, edges[1:-1])
        ]
        at(p.norms, float, len(edges) - 1, len(chunks))[...] = found
        self._note(p, stored, wide, DIGEST_ROWS)

    def strip(self, p: Summed, dtype: np.dtype[Any], axis: int, grid: tuple[int, int, int]) -> None:
        stored = at(p.x, dtype, p.rows.extent, p.cols.extent)
        rows, cols = cuts(p.rows), cuts(p.cols)
        assert grid == (len(cols) - 1, len(rows) - 1, 1)
        wide = stored.astype(wide_dtype(dtype))
        signed = drawn(p.row_signs, p.first_row, p.rows.extent)[:, None] * wide
        signed = signed * drawn(p.col_signs, p.first_col, p.cols.extent)
        sums = np.add.reduceat(np.add.reduceat(signed, rows[:-1], axis=0), cols[:-1], axis=1)
        at(p.sums, wide.dtype, len(rows) - 1, p.sums_pitch)[:, : len(cols) - 1] = sums
        blocks = [np.split(part, cols[1:-1], axis=1) for part in np.split(wide, rows[1:-1])]
        found = [[norms(block.ravel()) for block in row] for row in blocks]
        at(p.norms, float, len(rows) - 1, p.sums_pitch)[:, : len(cols) - 1] = found
        self._note(p, stored, wide, 1)

    def _note(self, p: Summed, stored: Array, wide: Array, every: int) -> None:
        if not p.head:
            return
        head = at(p.head, np.uint64, 2)
        words = np.zeros((len(stored), -(-stored.shape[1] * stored.itemsize // 4) * 4), np.uint8)
        words[:, : stored.shape[1] * stored.itemsize] = stored.view(np.uint8)
        rows, columns = (
            random_words(stream, count) >> np.uint64(32) | np.uint64(1)
            for stream, count in enumerate((len(words), words.shape[1] // 4))
        )
        rows[np.arange(len(rows)) % every != 0] = 0
        head[0] = (head[0] + (words.view(">u4") * rows[:, None] * columns).sum()) % np.uint64(1 << 32)
        broken = np.asarray(~np.isfinite(wide).all(axis=1))
        if p.flags and broken.any():
            at(p.flags, bool, len(broken))[...] |= broken
            head[1] = 1

    def product(self, p: Multiplied, wide: np.dtype[Any]) -> None:
        a_norm = norms(at(p.a_norms, float, p.down, p.chunks)) if p.depth else np.zeros(p.down)
        b_norm = norms(at(p.b_norms, float, p.across, p.chunks)) if p.depth else np.zeros(p.across)
        sums = np.zeros((p.down, p.across), wide)
        heads, flags = (np.zeros(2, np.uint64),) * 2, (np.zeros(p.rows, bool), np.zeros(p.cols, bool))
        if p.depth:
            sums += at(p.a, wide, p.down, p.depth) @ at(p.b, wide, p.across, p.depth).T
            heads = at(p.a_head, np.uint64, 2), at(p.b_head, np.uint64, 2)
            flags = at(p.a_flags, bool, p.rows), at(p.b_flags, bool, p.cols)
        damaged = bool(p.depth) and (heads[0][0] != p.a_expected or heads[1][0] != p.b_expected)
        for strip, top in enumerate(range(0, p.rows, p.strip)):
            start, blocks = p.strips + strip * p.strip_bytes, slice(strip * p.per, (strip + 1) * p.per)
            made = at(start + p.made, np.uint64, 2)
            count = len(sums[blocks])
            rows = at(start + p.row_flags, bool, min(p.strip, p.rows - top))
            cols = at(start + p.col_flags, bool, p.cols)
            into = at(start + p.sums, wide, count, p.pitch)[:, : p.across]
            norm = at(start + p.norms, float, count, p.pitch)[:, : p.across]
            if p.first:
                made[0], rows[...], cols[...], into[...], norm[...] = 0, 0, 0, 0, 0
            into += sums[blocks]
            norm += np.outer(a_norm[blocks], b_norm)
            made[0] |= np.uint64(damaged)
            if heads[0][1]:
                rows |= flags[0][top : top + p.strip]
            if heads[1][1]:
                cols |= flags[1]

    def zero(self, address: int, size: int) -> None:
        ctypes.memset(address, 0, size)

    def copy(self, to: int, source: int, size: int) -> None:
        ctypes.memmove(to, source, size)


class SummingSession(HostSession):
    """A host session that computes checksums of its slots by the same calls as a session of a GPU."""

    checksums: DeviceChecksums

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._arena[...] = 0x5A  # so that checksums which rely on cleared memory are wrong
        start = self._arena.ctypes.data
        items = {"C": "acc", "D": "C"}

        def address(region: Any) -> int:
            operand = region.slot.operand
            size = plan.problem.itemsizes[items.get(operand, operand)]
            return int(start + self._offsets[region.slot] + region.start * size)

        self.checksums = DeviceChecksums(plan, address, ModelDevice())

    def submit(self, operation: Operation, host: HostBlock, after: Sequence[Token]) -> DoneToken:
        for token in after:
            token.synchronize()
        checksums = self.checksums
        if operation.kind is Kind.DOWNLOAD:
            checksums.before_download(operation)
        token = super().submit(operation, host, after)
        match operation.kind:
            case Kind.UPLOAD:
                checksums.after_upload(operation)
            case Kind.MULTIPLY:
                checksums.with_multiply(operation)
            case Kind.FINISH:
                checksums.with_finish(operation)
            case Kind.DOWNLOAD:
                assert isinstance(host, list)  # strips that are checked have host slots
                to = checksums.host_address(host[0].ctypes.data)
                ctypes.memmove(to, checksums.device_address(operation), checksums.room.end)
        return token


@contextmanager
def summed() -> Iterator[None]:
    """For the block, make the host backend copy to a device that computes checksums."""

    def opened(self: HostBackend, plan: Plan, kernel: str) -> HostSession:
        return SummingSession(plan) if plan.problem.checked else HostSession(plan)

    with (
        staged(),
        patch.object(operands, "checksum_tier", lambda backend, problem: "device"),
        patch.object(HostBackend, "open", opened),
    ):
        yield
