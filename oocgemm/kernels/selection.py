"""Compiler options and launches of the kernels that select elements of C, without importing cupy.

Their sources are kernels/selection/topk.cu and threshold.cu.
"""

from functools import lru_cache

from oocgemm.errors import InputError
from oocgemm.kernels.spec import C_TYPES, Launch, blocks
from oocgemm.planning import GemmProblem
from oocgemm.planning.selection import SEGMENT
from oocgemm.planning.sinks import AtLeast, Largest, Sink

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
    more = {"ABSOLUTE": int(sink.absolute), "TRIANGLE": int(problem.cover.square)}
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
