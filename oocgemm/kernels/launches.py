"""Compiler options, arguments and launches of the kernels beside the ladder.

This module does not import cupy.

- `kernels/emulation`: float64 and float32 products from int8 products. Operands are split into residues
  modulo several small numbers (the moduli), the residues are multiplied, and the results are combined.
- `kernels/epilogue`: steps on elements of C, and reductions of its rows.
- `kernels/selection`: elements of C that are kept (topk.cu, threshold.cu).
- `kernels/encoding`: chunks of a strip of C, compressed.
"""

import ctypes
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from oocgemm.errors import InputError
from oocgemm.kernels.spec import C_TYPES, Device, Launch, TensorMap, blocks
from oocgemm.planning import Division, GemmProblem, index_bytes
from oocgemm.planning.cost.coding import ALIGNMENT, FIXED
from oocgemm.planning.emulation import LEVELS, residues
from oocgemm.planning.epilogue import MAX_STEPS, REDUCTIONS
from oocgemm.planning.selection import SEGMENT
from oocgemm.planning.sinks import AtLeast, Largest, Reduced, Sink
from oocgemm.planning.tiling import Shape, ceil_div, round_up

# Macros of ozaki_multiply.cu, which explains them.
STAGES, GROUP = 4, 8
# Rows and columns of C that a cluster of two thread blocks computes.
_TILE = 256, 256
# Rows that one TMA copy moves to shared memory.
_BOX = 128


@lru_cache
def split_options(dtype: str, k_major: bool, number: int) -> tuple[str, ...]:
    """Return the compiler options of ozaki_split.cu, which splits a matrix into residues.

    Args:
        dtype: dtype of the matrix.
        k_major: whether elements along k are contiguous in memory.
        number: number of moduli.
    """
    found = residues(number)
    return (
        f"-DOOC_STORED={C_TYPES[dtype]}",
        f"-DOOC_K_MAJOR={int(k_major)}",
        f"-DOOC_MODULI={_listed(found.moduli)}",
        f"-DOOC_EXPONENT={found.exponent!r}",
        f"-DOOC_LEVELS={_listed(LEVELS)}",
    )


@lru_cache
def multiply_options(number: int) -> tuple[str, ...]:
    """Return the compiler options of ozaki_multiply.cu, which multiplies residues, for `number` moduli."""
    moduli = _listed(residues(number).moduli)
    return f"-DOOC_MODULI={moduli}", f"-DSTAGES={STAGES}", f"-DGROUP={GROUP}"


def multiply_launch(device: Device, rows: int, columns: int, number: int) -> Launch:
    """Return the launch of ozaki_multiply.cu for `rows` x `columns` elements of C and `number` moduli."""
    tiles = number * blocks(rows, _TILE[0]) * blocks(columns, _TILE[1])
    clusters = max(1, min(device.processors // 2, tiles))
    return Launch((2 * clusters, 1, 1), (384, 1, 1), STAGES * (3 * _BOX * 128 + 16) + 1024)


def planes_map(address: int, ld: int, rows: int, number: int, plane: int) -> TensorMap:
    """Return the tensor map with which ozaki_multiply.cu reads the residues of A or B.

    A plane is the int8 matrix of one residue. `number` is the number of planes, `rows` their rows, `ld` the
    bytes per row, and `plane` the bytes from one plane to the next.
    """
    return TensorMap("int8", address, (ld, rows, number), (ld, plane), (128, _BOX, 1), 128)


@lru_cache
def combine_options(dtype: str, number: int) -> tuple[str, ...]:
    """Return the compiler options of ozaki_combine.cu, which computes C from its residues.

    Args:
        dtype: dtype of C.
        number: number of moduli.
    """
    found = residues(number)
    return (
        f"-DOOC_STORED={C_TYPES[dtype]}",
        f"-DOOC_WEIGHTS={','.join('{' + _listed(parts) + '}' for parts in found.weights)}",
        f"-DOOC_MODULUS={_listed(found.modulus)}",
        f"-DOOC_INVERSE={found.inverse!r}",
    )


def _listed(values: Sequence[float]) -> str:
    return ",".join(map(repr, values))


# Maximum numbers of thread blocks along a row of the strip, and along its rows (CUDA allows 65535).
_ACROSS, _DOWN = 64, 4096
# Rows that a thread of the kernel chain changes at a time.
_GROUP = 4


class StepNumbers(ctypes.Structure):
    """The argument `step_t` of a kernel: addresses of the numbers per row and per column, and the number."""

    _fields_ = (("rows", ctypes.c_void_p), ("cols", ctypes.c_void_p), ("value", ctypes.c_double))


class ChainNumbers(ctypes.Structure):
    """The argument `chain_t` of a kernel."""

    _fields_ = (("steps", StepNumbers * MAX_STEPS),)


def chain_options(problem: GemmProblem, result: str) -> tuple[str, ...]:
    """Return the compiler options of the kernel chain, whose result has the dtype `result`."""
    steps = "".join(f"OOC_STEP({step.kind},{number})" for number, step in enumerate(problem.epilogue))
    macros = {
        "ACCUMULATED": C_TYPES[problem.acc_dtype],
        "STORED": C_TYPES[result],
        "CHAIN": steps,
        "READS": int(problem.reads_c),
    }
    return tuple(f"-DOOC_{name}={value}" for name, value in macros.items())


def chain_grid(rows: int, cols: int) -> tuple[int, int, int]:
    """Return the number of thread blocks along x, y and z for a strip of this shape."""
    return max(1, min(_ACROSS, blocks(cols, 256))), max(1, min(_DOWN, blocks(rows, _GROUP))), 1


def reduce_options(problem: GemmProblem) -> tuple[str, ...]:
    """Return the compiler options of the kernel reduce."""
    sink = problem.sink
    assert isinstance(sink, Reduced)
    macros = {"ACCUMULATED": C_TYPES[problem.acc_dtype], "REDUCTION": REDUCTIONS.index(sink.reduction)}
    return tuple(f"-DOOC_{name}={value}" for name, value in macros.items())


def reduce_grid(rows: int) -> tuple[int, int, int]:
    """Return the number of thread blocks along x, y and z for a strip of this many rows."""
    return max(1, min(_DOWN, rows)), 1, 1


# Largest number of elements of a row that the kernel selects. The buffer of a warp has room for 64 more, and
# its size is a power of two.
MAX_TOPK = 2048
# Maximum bytes of shared memory, and maximum number of warps, of a thread block. All GPUs since sm_75 have as
# much. Blocks that search columns have more warps: they read as many adjacent columns together.
_MAX_SHARED, _MAX_WARPS, _MAX_COLUMNS = 64 << 10, 8, 16
# Scores that a warp reads together.
_SCORES = 256
_MAX_GRID = (1 << 31) - 1


def check_sink(sink: Sink) -> None:
    """Raise `InputError` if the kernels select fewer elements of a row than are to be found."""
    if isinstance(sink, Largest) and sink.topk > MAX_TOPK:
        raise InputError(
            f"topk = {sink.topk}, but a GPU selects at most {MAX_TOPK} elements of a row: pass a smaller "
            "topk, or backend='host' (--backend host)"
        )


def _room(count: int) -> int:
    """Return the number of elements in the buffer of a warp."""
    return int(1 << (count + 63).bit_length())


@lru_cache
def topk_options(problem: GemmProblem) -> tuple[str, ...]:
    """Return the compiler options of the kernels topk and topk_columns."""
    return _options(problem, {"ROOM": _room(problem.sink.per_row)})


@lru_cache
def threshold_options(problem: GemmProblem) -> tuple[str, ...]:
    """Return the compiler options of the kernel threshold."""
    sink = problem.sink
    assert isinstance(sink, AtLeast)
    more = {"ABSOLUTE": int(sink.absolute), "TRIANGLE": int(problem.cover.halves)}
    return _options(problem, {"ROOM": SEGMENT} | more)


def _options(problem: GemmProblem, more: dict[str, int]) -> tuple[str, ...]:
    macros = {
        "ACCUMULATED": C_TYPES[problem.acc_dtype],
        "WIDE": int(_is_wide(problem)),
        "SCALED": int(problem.sink.scaled),
    }
    return tuple(f"-DOOC_{name}={value}" for name, value in (macros | more).items())


def topk_launch(problem: GemmProblem, rows: int) -> Launch:
    """Return the launch of the kernel topk for a strip of this many rows."""
    each = _room(problem.sink.per_row) * (16 if _is_wide(problem) else 8)
    warps = max(1, min(_MAX_WARPS, _MAX_SHARED // each))
    return Launch((min(_MAX_GRID, blocks(rows, warps)), 1, 1), (32 * warps, 1, 1), warps * each)


def columns_launch(problem: GemmProblem, columns: int) -> Launch:
    """Return the launch of the kernel topk_columns for this many columns of a strip."""
    score, keys = (8, 16) if _is_wide(problem) else (4, 8)

    def shared(warps: int) -> int:
        turned = _SCORES + 32 // warps if warps > 1 else 0
        return warps * (_room(problem.sink.per_row) * keys + turned * score)

    warps = _MAX_COLUMNS
    while warps > 1 and shared(warps) > _MAX_SHARED:
        warps //= 2
    return Launch((min(_MAX_GRID, blocks(columns, warps)), 1, 1), (32 * warps, 1, 1), shared(warps))


def threshold_launch(rows: int) -> Launch:
    """Return the launch of the kernel threshold for a strip of this many rows."""
    return Launch((min(_MAX_GRID, blocks(rows, _MAX_WARPS)), 1, 1), (32 * _MAX_WARPS, 1, 1))


def _is_wide(problem: GemmProblem) -> bool:
    """Tell whether scores are float64."""
    return problem.c_dtype == "void128"


# Elements of a chunk that a thread block of the kernel `shuffle` gathers.
_ELEMENTS = 1 << 10


class EncodingBatch(ctypes.Structure):
    """A batch of chunks to compress: the C struct `encoding_t` of `encoding.cuh`."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in (
            "strip", "content", "encoded", "sequences", "literals", "host", "sizes", "places", "end",
        )),
        *((name, ctypes.c_uint32) for name in (
            "frames", "count", "first", "rows", "cols", "across", "height", "width", "item", "compressor",
            "block", "streams", "length", "room",
        )),
    )  # fmt: skip


class DeviceStrip(NamedTuple):
    """A strip of C on the device: its address, its shape, and that of chunks."""

    address: int
    shape: Shape
    chunk: Shape

    @property
    def chunks(self) -> int:
        """Number of chunks of the strip."""
        (rows, cols), (height, width) = self.shape, self.chunk
        return ceil_div(rows, height) * ceil_div(cols, width)


def batches(
    division: Division, strip: DeviceStrip, work: tuple[int, int], host: int
) -> Iterator[EncodingBatch]:
    """Yield the batches of the chunks of a strip.

    Args:
        division: how a chunk is divided into blocks and streams.
        strip: the strip of C.
        work: address and bytes of the device memory that one batch may use.
        host: address of the host slot that receives the compressed chunks.
    """
    start, size, total = round_up(work[0], ALIGNMENT), work[1], strip.chunks
    max_count = max(1, (size - FIXED) // division.chunk_work)
    for first in range(0, total, max_count):
        count = min(max_count, total - first)
        streams, at, addresses = count * division.streams, start + ALIGNMENT, []
        # Behind each part there is room for a word that is read beyond it.
        for part in (
            count * division.chunk,
            *3 * (streams * division.room,),
            4 * streams,
            8 * (streams + count),
        ):
            addresses.append(at)
            at = round_up(at + part + 8, ALIGNMENT)
        content, encoded, sequences, literals, sizes, places = addresses
        yield EncodingBatch(
            strip.address, content, encoded, sequences, literals, host,
            *(sizes, places, start, index_bytes(total), count, first, *strip.shape),
            *(ceil_div(strip.shape[1], strip.chunk[1]), *strip.chunk, division.item, division.compressor),
            *(division.block, division.streams, division.length, division.room),
        )  # fmt: skip


def shuffle_blocks(given: EncodingBatch) -> int:
    """Return the number of thread blocks of the kernel `shuffle` per chunk."""
    return max(1, int(given.height) * int(given.width) // _ELEMENTS)
