"""Compiler options and the launch of the kernel kernels/transforms/gaussian.cu, without importing cupy."""

from oocgemm.kernels.spec import C_TYPES, blocks

# Maximum numbers of thread blocks along a row of the strip, and along its rows (CUDA allows 65535).
_ACROSS, _DOWN = 64, 4096


def gaussian_options(accumulated: str) -> tuple[str, ...]:
    """Return the compiler options of the kernel for elements of a dtype."""
    return (f"-DOOC_ACCUMULATED={C_TYPES[accumulated]}",)


def gaussian_grid(rows: int, cols: int) -> tuple[int, int, int]:
    """Return the number of thread blocks along x, y and z for a strip of this shape."""
    return max(1, min(_ACROSS, blocks(cols, 256))), max(1, min(_DOWN, rows)), 1
