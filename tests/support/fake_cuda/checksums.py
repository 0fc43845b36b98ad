"""The kernels of checksums, on the fake device: `tests.support.summing` applied to device memory."""

import ctypes
from typing import Any

from oocgemm.backends.base import numpy_dtype
from oocgemm.backends.checksums import Multiplied, Summed
from oocgemm.integrity.rounding import wide_dtype
from oocgemm.kernels.spec import C_TYPES
from tests.support.fake_cuda.memory import Block, Memory
from tests.support.fake_cuda.work import Macros, Work

HEAD = 16
_DTYPES = {c: name for name, c in C_TYPES.items()}


def check_panel(memory: Memory, macros: Macros, pointers: list[int]) -> Work:
    """Prepare the kernel that computes the checksums of a panel."""
    given = Summed.from_buffer_copy(Summed.from_address(pointers[0]))
    dtype = numpy_dtype(_DTYPES[macros["OOC_STORED"]])
    blocks, extent = given.rows.extent and _blocks(given.rows), given.rows.extent
    wide = wide_dtype(dtype).itemsize
    writes = [
        Block(given.head, HEAD),
        Block(given.flags, extent),
        Block(given.norms, 8 * blocks * -(-given.depth // 128)),
        Block(given.sums, wide * blocks * given.depth),
    ]
    return _work(
        "check_panel", memory, macros, given, [Block(given.x, extent * given.depth * dtype.itemsize)], writes
    )


def check_strip(memory: Memory, macros: Macros, pointers: list[int]) -> Work:
    """Prepare the kernel that computes the checksums of some rows of a tile of C."""
    given = Summed.from_buffer_copy(Summed.from_address(pointers[0]))
    dtype = numpy_dtype(_DTYPES[macros["OOC_STORED"]])
    size = given.rows.extent * given.cols.extent * dtype.itemsize
    sums = _blocks(given.rows) * given.sums_pitch
    writes = [Block(given.norms, 8 * sums), Block(given.sums, wide_dtype(dtype).itemsize * sums)]
    writes += [Block(given.head, HEAD)] if given.head else []
    return _work("check_strip", memory, macros, given, [Block(given.x, size)], writes)


def check_product(memory: Memory, macros: Macros, pointers: list[int]) -> Work:
    """Prepare the kernel that multiplies the checksums of two panels."""
    given = Multiplied.from_buffer_copy(Multiplied.from_address(pointers[0]))
    wide = 8 if macros["OOC_WIDE"] == "double" else 16
    reads = []
    if given.depth:
        for name, blocks in (("a", given.down), ("b", given.across)):
            reads.append(Block(getattr(given, f"{name}_head"), HEAD))
            reads.append(Block(getattr(given, name), wide * blocks * given.depth))
    count = -(-given.rows // given.strip)
    writes = [Block(given.strips + given.made, HEAD, count, given.strip_bytes)]
    return _work("check_product", memory, macros, given, reads, writes)


def _work(
    entry: str, memory: Memory, macros: Macros, given: Any, reads: list[Block], writes: list[Block]
) -> Work:
    from tests.support.summing import (
        ModelDevice,  # imported here, because `tests.support.summing` imports this package
    )

    for block in (*reads, *writes):
        memory.bytes_of(block)
    for name, kind in type(given)._fields_:
        address = getattr(given, name)
        if kind is ctypes.c_void_p and address:
            setattr(given, name, memory.real_address(address))
    model = ModelDevice()
    options = tuple(f"-D{name}={value}" for name, value in macros.items() if name.startswith("OOC_"))
    grid = int(macros["grid x"]), int(macros["grid y"]), 1
    model.load(entry, options)
    return Work(lambda: model.launch(entry, options, grid, given), reads, writes)


def _blocks(cut: Any) -> int:
    whole, rest = divmod(cut.extent, cut.strip)
    return int(whole * cut.per + -(-rest // cut.size))
