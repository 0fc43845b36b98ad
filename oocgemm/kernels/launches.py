"""Compiler options, arguments and launches of the kernels beside the ladder.

This module does not import cupy.

- `kernels/emulation`: float64 and float32 products from int8 products. Operands are split into residues
  modulo several small numbers (the moduli), the residues are multiplied, and the results are combined.
- `kernels/transforms`: steps on elements of A and B, and the means and scales that they need.
- `kernels/epilogue`: steps on elements of C, and reductions of its rows.
- `kernels/selection`: elements of C that are kept (topk.cu, threshold.cu).
- `kernels/encoding`: chunks of a strip of C, compressed.
"""

import ctypes
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import isnan
from typing import NamedTuple

from oocgemm.kernels.spec import C_TYPES, Device, Launch, TensorMap
from oocgemm.planning import Division, GemmProblem, index_bytes
from oocgemm.planning.cost.coding import ALIGNMENT, FIXED
from oocgemm.planning.device_memory import SEGMENT
from oocgemm.planning.elements import MAX_STEPS as MAX_ELEMENT_STEPS
from oocgemm.planning.elements import ElementStep, missing_code
from oocgemm.planning.emulation import EXACT_LIMIT, LEVELS, residues
from oocgemm.planning.sinks import MAX_STEPS, REDUCTIONS, AtLeast, Reduced
from oocgemm.planning.tiling import Shape, ceil_div, round_up

# The numbers of thread blocks along x, y and z.
Grid = tuple[int, int, int]


def _defined(**macros: object) -> tuple[str, ...]:
    return tuple(f"-DOOC_{name}={value}" for name, value in macros.items())


def _listed(values: Sequence[float]) -> str:
    return ",".join(map(repr, values))


# --- kernels/emulation --------------------------------------------------------------------------------------

# Macros of ozaki_multiply.cu, which explains them.
STAGES, GROUP = 4, 8
# Rows and columns of C that a cluster of two thread blocks computes.
_TILE = 256, 256
# Rows that one TMA copy moves to shared memory.
_BOX = 128


@lru_cache
def split_options(dtype: str, k_major: bool, number: int) -> tuple[str, ...]:
    """Return the compiler options of ozaki_split.cu, which splits a matrix into residues for `number` moduli.

    If `k_major`, elements along k are contiguous in memory.
    """
    found = residues(number)
    return _defined(
        STORED=C_TYPES[dtype],
        K_MAJOR=int(k_major),
        MODULI=_listed(found.moduli),
        EXPONENT=found.exponent,
        LEVELS=_listed(LEVELS),
    )


@lru_cache
def multiply_options(number: int) -> tuple[str, ...]:
    """Return the compiler options of ozaki_multiply.cu, which multiplies residues for `number` moduli."""
    return *_defined(MODULI=_listed(residues(number).moduli)), f"-DSTAGES={STAGES}", f"-DGROUP={GROUP}"


def multiply_launch(device: Device, rows: int, columns: int, number: int) -> Launch:
    """Return the launch of ozaki_multiply.cu for `rows` x `columns` elements of C and `number` moduli."""
    tiles = number * ceil_div(rows, _TILE[0]) * ceil_div(columns, _TILE[1])
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
    """Return the compiler options of ozaki_combine.cu, which computes C of this dtype from residues."""
    found = residues(number)
    return _defined(
        STORED=C_TYPES[dtype],
        WEIGHTS=",".join("{" + _listed(parts) + "}" for parts in found.weights),
        MODULUS=_listed(found.modulus),
        INVERSE=found.inverse,
    )


# --- kernels/transforms -------------------------------------------------------------------------------------

# Elements of a row that a thread loads and stores together, if rows consist of whole groups of them.
WIDTH = 4
# Threads across a row in a thread block, rows that a block transforms, and CUDA's limit on blocks along y.
_THREADS, _ROWS, _MAX_DOWN = 64, 64, 65535
# The kernel moments_columns cuts a column into parts of _PART_ROWS rows, and moments_rows cuts a row into
# parts of _PART_COLS columns. They find MOMENTS numbers per part.
_PART_ROWS, _PART_COLS, MOMENTS = 128, 4096, 5
# Rows per thread block of the kernels measure_sums and measure_products, if k is along columns.
_SUMMED, _BLOCK_ROWS = 1024, 32
# A kernel takes the axis of a step's numbers as an index into this tuple.
AXES = ("", "rows", "cols")


class ElementNumbers(ctypes.Structure):
    """The argument `step_t` of a kernel: the address of the numbers of a panel, and the constants."""

    _fields_ = (("numbers", ctypes.c_void_p), ("first", ctypes.c_double), ("second", ctypes.c_double))


class Elements(ctypes.Structure):
    """The argument `elements_t` of a kernel."""

    _fields_ = (("steps", ElementNumbers * MAX_ELEMENT_STEPS),)


@lru_cache
def expand_options(stored: str, result: str, steps: tuple[ElementStep, ...], width: int) -> tuple[str, ...]:
    """Return the compiler options of expand.cu, which applies `steps` to elements.

    The steps change the dtype from `stored` to `result`. `width` is the number of elements that a thread
    loads together: 1 or `WIDTH`.
    """
    # A logarithm takes many registers. If a thread computed two rows at once, registers would be spilled.
    unroll = 1 if any(step.kind == "log1p" for step in steps) else 2
    types = {"STORED": C_TYPES[stored], "RESULT": C_TYPES[result]}
    return _defined(**types, CHAIN=_chain(steps), WIDTH=width, UNROLL=unroll)


def _chain(steps: Sequence[ElementStep]) -> str:
    return "".join(
        f"OOC_STEP({_form(step)},{number},{AXES.index(step.axis)})" for number, step in enumerate(steps)
    )


def _form(step: ElementStep) -> str:
    """Return the name of the function that does a step, in kernels/transforms/steps.cuh."""
    return f"{step.kind}_nan" if any(map(isnan, step.constants)) else step.kind


def expand_grid(rows: int, cols: int, width: int) -> Grid:
    return ceil_div(cols, _THREADS * width), min(ceil_div(rows, _ROWS), _MAX_DOWN), 1


@lru_cache
def measure_options(by_column: bool, steps: tuple[ElementStep, ...], width: int) -> tuple[str, ...]:
    """Return the compiler options of measure.cu, which computes numbers for element steps, such as means.

    If `by_column`, indices along k are columns of the panel, rather than rows.
    """
    rules = {step.kind: step.rule for step in steps if step.in_panel}
    return _defined(
        K_AXIS=int(by_column),
        MISSING=int(missing_code(steps) is not None),
        WIDTH=width,
        CENTER=int("center" in rules or "correct" in rules),
        SCALE=("", "k", "hwe").index(rules.get("scale", "")),
        FILL=int(rules.get("impute") == "mean"),
        RAISES=int(rules.get("impute") == "raise"),
        CORRECTS=int(any(step.is_deferred for step in steps)),
    )


def sums_grid(rows: int, cols: int, width: int, *, by_column: bool) -> Grid:
    """Return the grid of the kernel measure_sums for a stored panel."""
    return (ceil_div(cols, _THREADS * width), ceil_div(rows, _SUMMED), 1) if by_column else (rows, 1, 1)


def products_grid(rows: int, cols: int, width: int, *, by_column: bool) -> Grid:
    """Return the grid of the kernel measure_products for a stored panel."""
    return (ceil_div(rows, _BLOCK_ROWS) if by_column else ceil_div(cols, _THREADS * width)), 1, 1


@lru_cache
def moments_options(stored: str, steps: tuple[ElementStep, ...], code: float | None) -> tuple[str, ...]:
    """Return the compiler options of moments.cu.

    `steps` are applied to the elements first. `code` is the value that stands for a missing element, perhaps
    NaN; None if no element is missing.
    """
    missing = 0 if code is None else 2 if isnan(code) else 1
    return _defined(STORED=C_TYPES[stored], CHAIN=_chain(steps), MISSING=missing)


def parts_of(rows: int, cols: int, axis: int) -> int:
    """Return into how many parts the lines of a block along an axis are cut."""
    return ceil_div(rows, _PART_ROWS) if axis == 0 else ceil_div(cols, _PART_COLS)


def moments_grid(rows: int, cols: int, axis: int) -> Grid:
    """Return the grid of the kernels in moments.cu for the columns (`axis` 0) or rows (1) of a block."""
    return ceil_div(cols, 256) if axis == 0 else ceil_div(rows, 8), parts_of(rows, cols, axis), 1


# --- kernels/common and kernels/integers --------------------------------------------------------------------


def finish_options(sums: str, result: str) -> tuple[str, ...]:
    """Return the compiler options of the kernels `finish` and `int8_finish`.

    `sums` is the dtype of the accumulator, and `result` that of C.
    """
    limit = {"int32": 2**31 - 1, "int64": EXACT_LIMIT}.get(result)
    more = {} if limit is None else {"MAX": f"{limit}.0"}
    return _defined(ACCUMULATED=C_TYPES[sums], STORED=C_TYPES[result], **more)


# --- kernels/epilogue ---------------------------------------------------------------------------------------

# Maximum numbers of thread blocks along a row of the strip, and along its rows (CUDA allows 65535).
_ACROSS, _DOWN = 64, 4096
# Rows that a thread of the kernel `chain` changes at a time.
_GROUP = 4


class StepNumbers(ctypes.Structure):
    """The argument `step_t` of a kernel: addresses of numbers per row and per column, and a single number."""

    _fields_ = (("rows", ctypes.c_void_p), ("cols", ctypes.c_void_p), ("value", ctypes.c_double))


class ChainNumbers(ctypes.Structure):
    """The argument `chain_t` of a kernel."""

    _fields_ = (("steps", StepNumbers * MAX_STEPS),)


def chain_options(problem: GemmProblem, result: str) -> tuple[str, ...]:
    """Return the compiler options of the kernel `chain`, whose result has the dtype `result`."""
    combines, more = problem.terms.count > 1, dict[str, object]()
    if combines:  # the first step combines sums
        pitch = 1 if problem.sink.stores_c else problem.terms.count
        more = {"TERMS": problem.terms.count, "COMBINE": problem.epilogue[0].kind, "PITCH": pitch}
    numbered = list(enumerate(problem.epilogue))[combines:]
    steps = "".join(f"OOC_STEP({step.kind},{number})" for number, step in numbered)
    types = {"ACCUMULATED": C_TYPES[problem.acc_dtype], "STORED": C_TYPES[result]}
    return _defined(**types, CHAIN=steps, READS=int(problem.reads_c), **more)


def chain_grid(rows: int, cols: int) -> Grid:
    return max(1, min(_ACROSS, ceil_div(cols, 256))), max(1, min(_DOWN, ceil_div(rows, _GROUP))), 1


def reduce_options(problem: GemmProblem) -> tuple[str, ...]:
    sink = problem.sink
    assert isinstance(sink, Reduced)
    return _defined(
        ACCUMULATED=C_TYPES[problem.combined_dtype],
        REDUCTION=REDUCTIONS.index(sink.reduction),
        **_pitched(problem),
    )


def _pitched(problem: GemmProblem) -> dict[str, int]:
    """Return the macro with the distance of two rows of sums, in rows of C: the number of terms, if not 1."""
    return {"PITCH": problem.terms.count} if problem.terms.count > 1 else {}


def reduce_grid(rows: int) -> Grid:
    return max(1, min(_DOWN, rows)), 1, 1


# --- kernels/selection --------------------------------------------------------------------------------------

# Largest number of selected elements of a row that are in the buffer of a warp. It has room for 64 more, and
# its size is a power of two. More elements stay in device memory, and the buffer has FAR_ROOM others.
MAX_NEAR, FAR_ROOM = 2048, 2048
# Maximum bytes of shared memory, and maximum number of warps, of a thread block. All GPUs since sm_75 have
# this much. Blocks that search columns have more warps: they read as many adjacent columns together.
_MAX_SHARED, _MAX_WARPS, _MAX_COLUMNS = 64 << 10, 8, 16
# Scores that a warp reads together.
_SCORES = 256
_MAX_GRID = (1 << 31) - 1


def _room(count: int) -> int:
    """Return the number of elements in the buffer of a warp."""
    return FAR_ROOM if count > MAX_NEAR else int(1 << (count + 63).bit_length())


@lru_cache
def topk_options(problem: GemmProblem) -> tuple[str, ...]:
    """Return the compiler options of the kernels `topk` and `topk_columns`."""
    count = problem.sink.per_row
    return _selecting(problem, ROOM=_room(count), FAR=int(count > MAX_NEAR))


@lru_cache
def threshold_options(problem: GemmProblem) -> tuple[str, ...]:
    sink = problem.sink
    assert isinstance(sink, AtLeast)
    triangle = int(problem.cover.halves)
    return _selecting(problem, ROOM=SEGMENT, ABSOLUTE=int(sink.absolute), TRIANGLE=triangle)


def _selecting(problem: GemmProblem, **more: int) -> tuple[str, ...]:
    given = {"WIDE": int(_is_wide(problem)), **more, **_pitched(problem)}
    given["RULE"] = 2 if problem.sink.ranks_distances else int(problem.sink.scaled)
    return _defined(ACCUMULATED=C_TYPES[problem.combined_dtype], **given)


def topk_launch(problem: GemmProblem, rows: int) -> Launch:
    each = _room(problem.sink.per_row) * (16 if _is_wide(problem) else 8)
    warps = max(1, min(_MAX_WARPS, _MAX_SHARED // each))
    return Launch((min(_MAX_GRID, ceil_div(rows, warps)), 1, 1), (32 * warps, 1, 1), warps * each)


def columns_launch(problem: GemmProblem, columns: int) -> Launch:
    """Return the launch of the kernel topk_columns for this many columns of a strip."""
    score, keys = (8, 16) if _is_wide(problem) else (4, 8)

    def shared(warps: int) -> int:
        turned = _SCORES + 32 // warps if warps > 1 else 0
        return warps * (_room(problem.sink.per_row) * keys + turned * score)

    warps = _MAX_COLUMNS
    while warps > 1 and shared(warps) > _MAX_SHARED:
        warps //= 2
    return Launch((min(_MAX_GRID, ceil_div(columns, warps)), 1, 1), (32 * warps, 1, 1), shared(warps))


def threshold_launch(rows: int) -> Launch:
    return Launch((min(_MAX_GRID, ceil_div(rows, _MAX_WARPS)), 1, 1), (32 * _MAX_WARPS, 1, 1))


def _is_wide(problem: GemmProblem) -> bool:
    """Tell whether scores are float64."""
    return problem.c_dtype == "void128"


# --- kernels/encoding ---------------------------------------------------------------------------------------

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
    """A strip of C on the device: its address, its shape, and the shape of C's chunks."""

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
        # After each part there is room for one word, since a word may be read beyond the end of the part.
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
