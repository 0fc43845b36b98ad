"""Compiler options and launches of the kernels in kernels/epilogue, without importing cupy."""

import ctypes

from oocgemm.kernels.spec import C_TYPES, blocks
from oocgemm.planning import GemmProblem
from oocgemm.planning.epilogue import MAX_STEPS, REDUCTIONS
from oocgemm.planning.sinks import Reduced

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
