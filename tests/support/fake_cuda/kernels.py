"""NumPy versions of cuBLAS's product and of the project's kernels, by the name of the kernel.

Each function prepares a launch. It returns the blocks of memory that the kernel reads and writes, and a
callable that does the work. Kernels that are missing here cannot run on the fake device.
"""

import ctypes
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from oocgemm.backends.base import numpy_dtype
from oocgemm.backends.host.finish import reduce_rows, run_chain
from oocgemm.kernels.launches import AXES, MOMENTS, ChainNumbers, Elements, parts_of
from oocgemm.kernels.spec import C_TYPES, Arguments
from oocgemm.planning.elements import ElementStep
from oocgemm.planning.sinks import REDUCTIONS, Step
from oocgemm.stores.transformed import apply
from tests.support.fake_cuda import measuring, packer, selecting, unpacker
from tests.support.fake_cuda.checksums import check_panel, check_product, check_strip
from tests.support.fake_cuda.memory import Array, Block, Memory, block_of
from tests.support.fake_cuda.placing import place, scatter
from tests.support.fake_cuda.work import Macros, Work, values

_LONG, _REAL, _POINTER = ctypes.c_longlong, ctypes.c_double, ctypes.c_void_p
_DTYPES = {c: name for name, c in C_TYPES.items()}


class Operand(NamedTuple):
    """A row-major matrix as it is stored, and the operation to apply to it.

    `op` is 0 for none, 1 for transpose and 2 for conjugate transpose.
    """

    address: int
    dtype: Any
    rows: int
    cols: int
    ld: int
    op: int = 0

    def block(self) -> Block:
        return block_of(self.address, self.dtype, self.rows, self.cols, self.ld)

    def view(self, memory: Memory) -> Array:
        stored = memory.matrix(self.address, self.dtype, self.rows, self.cols, self.ld)
        return stored if self.op == 0 else stored.T

    def load(self, memory: Memory, dtype: Any) -> Array:
        """Return op(X), converted to a dtype."""
        x = self.view(memory).astype(dtype, copy=False)
        return x.conj() if self.op == 2 else x


def gemm(memory: Memory, alpha: Any, a: Operand, b: Operand, beta: Any, c: Operand) -> Work:
    """Prepare C = alpha op(A) @ op(B) + beta C.

    alpha = 0 reads neither A nor B, and beta = 0 does not read C.
    """
    target = c.view(memory)
    multiplies = bool(alpha) and bool(a.rows and a.cols)
    # NumPy multiplies integers slowly, without a BLAS. In float64 it uses a BLAS, and these sums are exact
    # too.
    wide = np.float64 if target.dtype.kind == "i" else target.dtype
    operands = [a, b] if multiplies else []
    for operand in operands:
        operand.view(memory)  # raises an error if the address is wrong

    def run() -> None:
        with np.errstate(all="ignore"):
            value = np.zeros(target.shape, wide)
            if multiplies:
                np.matmul(a.load(memory, wide), b.load(memory, wide), out=value)
                value *= wide_scalar(alpha)
            if beta:
                value += wide_scalar(beta) * target.astype(wide, copy=False)
            target[...] = value

    def wide_scalar(value: Any) -> Any:
        return np.dtype(wide).type(value)

    blocks = [operand.block() for operand in operands]
    return Work(run, [*blocks, *([c.block()] if beta else [])], [c.block()])


def _rung(memory: Memory, macros: Macros, pointers: list[int]) -> Work:
    """Prepare a kernel whose only parameter is `gemm_arguments`."""
    g = Arguments.from_address(pointers[0])
    stored, summed = (numpy_dtype(_DTYPES[macros[name]]) for name in ("OOC_STORED", "OOC_ACCUMULATED"))
    op_a, op_b = int(macros["OOC_OP_A"]), int(macros["OOC_OP_B"])
    shapes = [(g.k, g.m) if op_a else (g.m, g.k), (g.n, g.k) if op_b else (g.k, g.n)]
    scalars = [complex(g.alpha_re, g.alpha_im), complex(g.beta_re, g.beta_im)]
    alpha, beta = scalars if summed.kind == "c" else (scalar.real for scalar in scalars)
    return gemm(
        *(memory, alpha, Operand(g.a or 0, stored, *shapes[0], g.lda, op_a)),
        *(Operand(g.b or 0, stored, *shapes[1], g.ldb, op_b), beta),
        Operand(g.c, summed, g.m, g.n, g.ldc),
    )


def _finish(memory: Memory, macros: Macros, pointers: list[int]) -> Work:
    """Prepare kernels/common/finish.cu, which applies alpha, beta and the cast to C's dtype."""
    kinds = _LONG, _REAL, _REAL, _POINTER, _REAL, _REAL, _POINTER
    elements, alpha_re, alpha_im, source, beta_re, beta_im, result = values(kinds, pointers)
    summed, stored = (numpy_dtype(_DTYPES[macros[name]]) for name in ("OOC_ACCUMULATED", "OOC_STORED"))
    sums = memory.matrix(source, summed, 1, elements, elements)
    old = memory.matrix(result, stored, 1, elements, elements)
    alpha, beta = complex(alpha_re, alpha_im), complex(beta_re, beta_im)

    def run() -> None:
        with np.errstate(all="ignore"):
            value = _scalar(summed, alpha) * sums
            if beta:
                value = value + _scalar(summed, beta) * old.astype(summed)
            old[...] = value.astype(stored)

    to = block_of(result, stored, 1, elements, elements)
    return Work(run, [block_of(source, summed, 1, elements, elements), *([to] if beta else [])], [to])


def _complete(memory: Memory, macros: Macros, pointers: list[int]) -> Work:
    """Prepare the kernel of kernels/common/turn.cu that makes a square Hermitian."""
    at, pitch, extent = values((_POINTER, _LONG, _LONG), pointers)
    place = at, numpy_dtype(_DTYPES[macros["OOC_STORED"]]), extent, extent, pitch
    square = memory.matrix(*place)

    def run() -> None:
        lower = np.tril(np.ones(square.shape, bool), -1)
        kept = lower if macros["OOC_UPPER"] == "0" else lower.T
        other = square.conj().T if macros["OOC_MIRROR"] == "1" else 0
        square[...] = np.where(kept, square, np.where(kept.T, other, square.real))

    return Work(run, [block_of(*place)], [block_of(*place)])


def _turn(memory: Memory, macros: Macros, pointers: list[int]) -> Work:
    """Prepare the kernel of kernels/common/turn.cu that transposes a block of a strip of C."""
    source, pitch, rows, cols, result = values((_POINTER, _LONG, _LONG, _LONG, _POINTER), pointers)
    stored = numpy_dtype(_DTYPES[macros["OOC_STORED"]])
    strip, turned = (
        memory.matrix(*given)
        for given in ((source, stored, cols, rows, pitch), (result, stored, rows, cols, cols))
    )

    def run() -> None:
        turned[...] = strip.conj().T

    read, written = block_of(source, stored, cols, rows, pitch), block_of(result, stored, rows, cols, cols)
    return Work(run, [read], [written])


def _int8_finish(memory: Memory, macros: Macros, pointers: list[int]) -> Work:
    """Prepare kernels/integers/int8_finish.cu, which applies alpha, beta and the cast to int32 sums."""
    kinds = _LONG, _POINTER, _REAL, _REAL, _POINTER, _POINTER
    elements, source, alpha, beta, result, flag_address = values(kinds, pointers)
    summed, stored = (numpy_dtype(_DTYPES[macros[name]]) for name in ("OOC_ACCUMULATED", "OOC_STORED"))
    limit = float(macros["OOC_MAX"]) if "OOC_MAX" in macros else None
    sums = memory.matrix(source, summed, 1, elements, elements)
    old = memory.matrix(result, stored, 1, elements, elements)
    flag = memory.matrix(flag_address, np.int32, 1, 1, 1)

    def run() -> None:
        value = alpha * sums.astype(np.float64)
        size = np.abs(value)
        if beta:
            kept = beta * old.astype(np.float64)
            value, size = value + kept, size + np.abs(kept)
        fits = np.full(value.shape, True)
        if limit is not None:
            fits = (size < 2.0**53) & (value <= limit) & (value >= -limit - 1)
        old[fits] = value[fits].astype(stored)
        if not fits.all():
            flag[...] = 1

    to = block_of(result, stored, 1, elements, elements)
    return Work(run, [block_of(source, summed, 1, elements, elements), *([to] if beta else [])], [to])


def _int8_add(memory: Memory, macros: Macros, pointers: list[int]) -> Work:
    """Prepare kernels/integers/int8_add.cu, which adds int32 sums to C. The grid gives the number of rows."""
    kinds = _POINTER, _LONG, _LONG, _REAL, _POINTER, _LONG
    source, pitch, n, beta, to, ldc = values(kinds, pointers)
    rows = int(macros["grid y"])
    dtype = numpy_dtype(_DTYPES[macros["OOC_ACCUMULATED"]])
    sums, c = memory.matrix(source, np.int32, rows, n, pitch), memory.matrix(to, dtype, rows, n, ldc)

    def run() -> None:
        c[...] = sums + (_scalar(dtype, beta) * c if beta else 0)

    written = block_of(to, dtype, rows, n, ldc)
    return Work(run, [block_of(source, np.int32, rows, n, pitch), *([written] if beta else [])], [written])


def _int8_pack(memory: Memory, macros: Macros, pointers: list[int]) -> Work:
    """Prepare kernels/integers/int8_pack.cu, which copies an operand to rows whose length cuBLAS accepts."""
    source, ld, rows, k, to, pitch = values((_POINTER, _LONG, _LONG, _LONG, _POINTER, _LONG), pointers)
    x = Operand(source, np.int8, *((rows, k, ld, 0) if macros["OOC_K_MAJOR"] == "1" else (k, rows, ld, 1)))
    packed = memory.matrix(to, np.int8, rows, pitch, pitch)
    given = x.view(memory)

    def run() -> None:
        packed[:, :k] = given
        packed[:, k:] = 0

    return Work(run, [x.block()], [block_of(to, np.int8, rows, pitch, pitch)])


def elements_of(
    memory: Memory, macros: Macros, elements: Elements, rows: int, cols: int
) -> tuple[list[ElementStep], list[Array | None], list[Block]]:
    """Return the steps of a kernel for a panel, their numbers, and the memory of these."""
    chain, numbers, read = list[ElementStep](), list[Array | None](), list[Block]()
    for name, number, axis in re.findall(r"OOC_STEP\((\w+),(\d),(\d)\)", macros["OOC_CHAIN"]):
        given, extent = elements.steps[int(number)], (0, rows, cols)[int(axis)]
        kind = name.removesuffix("_nan")
        constants = (given.first if kind == name else np.nan, given.second)
        chain.append(ElementStep(kind, AXES[int(axis)], constants=constants))
        numbers.append(memory.matrix(given.numbers, np.float64, 1, extent, extent)[0] if extent else None)
        read += [block_of(given.numbers, np.float64, 1, extent, extent)] if extent else []
    return chain, numbers, read


def _expand(memory: Memory, macros: Macros, pointers: list[int]) -> Work:
    """Prepare kernels/transforms/expand.cu, which transforms the elements of a panel."""
    *plain, steps_at, to_at = pointers
    source, rows, cols = values((_POINTER, _LONG, _LONG), plain)
    elements, result = Elements.from_address(steps_at), _POINTER.from_address(to_at).value or 0
    stored, to = (numpy_dtype(_DTYPES[macros[name]]) for name in ("OOC_STORED", "OOC_RESULT"))
    assert cols % int(macros["OOC_WIDTH"]) == 0
    x, y = memory.matrix(source, stored, rows, cols, cols), memory.matrix(result, to, rows, cols, cols)
    chain, numbers, read = elements_of(memory, macros, elements, rows, cols)

    def run() -> None:
        with np.errstate(all="ignore"):
            y[...] = apply(chain, numbers, x.astype(np.float64)).astype(to)

    written = block_of(result, to, rows, cols, cols)
    return Work(run, [block_of(source, stored, rows, cols, cols), *read], [written])


def _moments(memory: Memory, macros: Macros, pointers: list[int], *, axis: int) -> Work:
    """Prepare the kernels moments_columns and moments_rows of kernels/transforms/moments.cu."""
    *plain, steps_at, parts_at, stride_at = pointers
    source, rows, cols, code = values((_POINTER, _LONG, _LONG, _REAL), plain)
    to, stride = values((_POINTER, _LONG), [parts_at, stride_at])
    stored, lines = numpy_dtype(_DTYPES[macros["OOC_STORED"]]), (cols, rows)[axis]
    elements = Elements.from_address(steps_at)
    chain, numbers, read = elements_of(memory, macros, elements, rows, cols)
    x, count = memory.matrix(source, stored, rows, cols, cols), parts_of(rows, cols, axis)
    size = {0: (rows, 128), 1: (cols, 4096)}[axis]
    parts = memory.matrix(to, np.float64, MOMENTS, count * lines, stride)

    def run() -> None:
        wide = x.astype(np.float64)
        first = sum(step.decodes for step in chain)
        wide = apply(chain[:first], numbers[:first], wide)
        lost = {"0": np.zeros(x.shape, bool), "1": wide == code, "2": np.isnan(wide)}[macros["OOC_MISSING"]]
        with np.errstate(all="ignore"):
            wide = apply(chain[first:], numbers[first:], wide)
            for part in range(count):
                at = slice(part * size[1], min(size[0], (part + 1) * size[1]))
                here = (at, slice(None)) if axis == 0 else (slice(None), at)
                found = parts[:, part * lines : (part + 1) * lines]
                known = (~lost[here]).sum(axis)
                values = np.where(lost[here], 0, wide[here])
                mean = values.sum(axis) / np.maximum(known, 1)
                apart = np.where(lost[here], 0, wide[here] - np.expand_dims(mean, axis))
                found[0], found[1], found[2] = known, mean, (apart * apart).sum(axis)
                found[3] = np.where(lost[here], np.inf, wide[here]).min(axis)
                found[4] = np.where(lost[here], -np.inf, wide[here]).max(axis)

    written = block_of(to, np.float64, MOMENTS, count * lines, stride)
    return Work(run, [block_of(source, stored, rows, cols, cols), *read], [written])


def _moments_merge(memory: Memory, macros: Macros, pointers: list[int]) -> Work:
    """Prepare the kernel that adds parts of a block to what earlier blocks have given."""
    kinds = _LONG, _LONG, _POINTER, _LONG, _LONG, _LONG, _POINTER
    lines, count, source, stride, first, extent, to = values(kinds, pointers)
    parts = memory.matrix(source, np.float64, MOMENTS, count * lines, stride)
    found = memory.matrix(to + 8 * first, np.float64, MOMENTS, lines, extent)

    def run() -> None:
        for part in range(count):
            n, mean, squares, low, high = parts[:, part * lines : (part + 1) * lines]
            both, apart = found[0] + n, np.where(found[0] > 0, mean - found[1], 0)
            begins = found[0] == 0
            with np.errstate(all="ignore"):
                weight = np.where(both > 0, n / both, 0)
                found[2] += np.where(n > 0, squares + apart * apart * found[0] * weight, 0)
                found[1] = np.where(begins, mean, found[1] + apart * weight)
                found[3] = np.where(begins, low, np.minimum(found[3], low))
                found[4] = np.where(begins, high, np.maximum(found[4], high))
            found[0] = both

    block = block_of(to + 8 * first, np.float64, MOMENTS, lines, extent)
    return Work(run, [block_of(source, np.float64, MOMENTS, count * lines, stride), block], [block])


def _rank_one(memory: Memory, macros: Macros, pointers: list[int]) -> Work:
    """Prepare kernels/transforms/rank_one.cu, which subtracts a matrix of rank one from a strip of C."""
    elements, width, *at, to = values((_LONG, _LONG, _POINTER, _POINTER, _POINTER), pointers)
    height = elements // width
    c = memory.matrix(to, np.float64, height, width, width)
    rows, cols = (
        memory.matrix(start, np.float64, 1, extent, extent)
        for start, extent in zip(at, (height, width), strict=True)
    )

    def run() -> None:
        c[...] = c - rows.T - cols

    read = [block_of(x, np.float64, 1, n, n) for x, n in zip(at, (height, width), strict=True)]
    block = block_of(to, np.float64, height, width, width)
    return Work(run, [*read, block], [block])


def _chain(memory: Memory, macros: Macros, pointers: list[int]) -> Work:
    """Prepare kernels/epilogue/chain.cu, which applies the steps of an epilogue to a strip of C."""
    *plain, chain_at, to_at = pointers
    height, width, source, alpha, beta = values((_LONG, _LONG, _POINTER, _REAL, _REAL), plain)
    chain, to = ChainNumbers.from_address(chain_at), _POINTER.from_address(to_at).value or 0
    summed, stored = (numpy_dtype(_DTYPES[macros[name]]) for name in ("OOC_ACCUMULATED", "OOC_STORED"))
    terms, pitch = (int(macros.get(name, "1")) for name in ("OOC_TERMS", "OOC_PITCH"))
    sums = memory.matrix(source, summed, height, width * terms, width * terms)
    sums = sums.reshape(height, terms, width) if terms > 1 else sums
    result = memory.matrix(to, stored, height, width, width * pitch)
    read, steps, numbers = [block_of(source, summed, height, width * terms, width * terms)], [], []
    combine = f"OOC_STEP({macros['OOC_COMBINE']},0)" if terms > 1 else ""
    for name, number in re.findall(r"OOC_STEP\((\w+),(\d)\)", combine + macros["OOC_CHAIN"]):
        given, arrays = chain.steps[int(number)], list[Array | None]()
        for at, extent in ((given.rows, height), (given.cols, width)):
            arrays.append(memory.matrix(at, np.float64, 1, extent, extent)[0] if at else None)
            read += [block_of(at, np.float64, 1, extent, extent)] if at else []
        steps.append(Step(name, bool(given.rows), bool(given.cols), given.value))
        numbers.append((arrays[0], arrays[1]))
    block, reads = block_of(to, stored, height, width, width * pitch), macros["OOC_READS"] == "1"

    def run() -> None:
        run_chain(steps, numbers, sums, (alpha, beta), result, reads=reads)

    return Work(run, [*read, *([block] if reads else [])], [block])


def _reduce(memory: Memory, macros: Macros, pointers: list[int]) -> Work:
    """Prepare kernels/epilogue/reduce.cu, which reduces the rows of a strip of C."""
    source, height, width, begins, to = values((_POINTER, _LONG, _LONG, _LONG, _POINTER), pointers)
    summed = numpy_dtype(_DTYPES[macros["OOC_ACCUMULATED"]])
    pitch = width * int(macros.get("OOC_PITCH", "1"))
    strip, kept = (
        memory.matrix(source, summed, height, width, pitch),
        memory.matrix(to, np.float64, 1, height, height),
    )
    block = block_of(to, np.float64, 1, height, height)

    def run() -> None:
        kind = REDUCTIONS[int(macros["OOC_REDUCTION"])]
        reduce_rows(kind, strip, kept[0], begins=bool(begins))

    return Work(run, [block_of(source, summed, height, width, pitch), *([] if begins else [block])], [block])


def _scalar(dtype: np.dtype[Any], value: complex) -> Any:
    return dtype.type(value if dtype.kind == "c" else complex(value).real)


Prepare = Callable[[Memory, Macros, list[int]], Work]

# Name of a kernel -> the number of its parameters, and the function that prepares a launch.
KERNELS: dict[str, tuple[int, Prepare]] = {
    "tiled": (1, _rung),
    "finish": (7, _finish),
    "turn": (5, _turn),
    "complete": (3, _complete),
    "int8_finish": (6, _int8_finish),
    "int8_add": (6, _int8_add),
    "int8_pack": (6, _int8_pack),
    "expand": (5, _expand),
    "rank_one": (5, _rank_one),
    "moments_columns": (7, partial(_moments, axis=0)),
    "moments_rows": (7, partial(_moments, axis=1)),
    "moments_merge": (7, _moments_merge),
    "measure_sums": (6, measuring.measure_sums),
    "measure_numbers": (10, measuring.measure_numbers),
    "measure_products": (6, measuring.measure_products),
    "measure_square": (3, measuring.measure_square),
    "measure_center": (7, measuring.measure_center),
    "chain": (7, _chain),
    "reduce": (5, _reduce),
    "threshold": (12, selecting.threshold),
    "topk": (10, selecting.topk),
    "topk_columns": (10, selecting.topk_columns),
    "place": (4, place),
    "scatter": (7, scatter),
    "frames": (1, unpacker.frames),
    **dict.fromkeys(("crc32c", "zstd_walk", "zstd_entropy", "lz4_parse", "execute"), (1, unpacker.nothing)),
    "assemble": (1, packer.assemble),
    **dict.fromkeys(("shuffle", "lz4_compress", "zstd_compress", "locate"), (1, packer.nothing)),
    "check_panel": (1, check_panel),
    "check_strip": (1, check_strip),
    "check_product": (1, check_product),
}
