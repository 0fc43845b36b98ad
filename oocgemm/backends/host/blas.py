"""Compute ``C = alpha op(A) op(B) + beta C`` in place, through the BLAS that NumPy itself has loaded.

NumPy itself cannot add a product to an array without a temporary of that size. So this module finds NumPy's
BLAS among the libraries mapped into the process, and calls it through ctypes, which releases the GIL. If it
finds no BLAS, NumPy multiplies in blocks.
"""

import ctypes
import os
import re
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from oocgemm.backends.base import Array
from oocgemm.errors import BackendError
from oocgemm.planning import Op

# The letter of each dtype in the names of BLAS functions, such as dgemm.
_LETTERS = {"float32": "s", "float64": "d", "complex64": "c", "complex128": "z"}
# Values of the enumerations CBLAS_TRANSPOSE, CBLAS_LAYOUT and CBLAS_UPLO in cblas.h.
_TRANS = {Op.N: 111, Op.T: 112, Op.C: 113}
_ROW_MAJOR = 101
_UPPER, _LOWER = 121, 122
# OpenBLAS reads this environment variable when it is loaded. Its value (SkylakeX, say) selects the kernels.
CHOICE = "OPENBLAS_CORETYPE"
AVX512_FAMILIES = {"SkylakeX", "Cooperlake", "SapphireRapids"}
# The CPU flags that OpenBLAS's SkylakeX kernels require.
AVX512_FLAGS = {"avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512cd"}
# numpy_gemm multiplies blocks of this many rows and columns. The product of two blocks in float64 has 8 MiB.
_BLOCK = 1024

Gemm = Callable[[Op, Op, complex, Array, Array, complex, Array], None]


def gemm(trans_a: Op, trans_b: Op, alpha: complex, a: Array, b: Array, beta: complex, c: Array) -> None:
    """Compute ``c = alpha op(a) @ op(b) + beta c`` in place.

    Args:
        trans_a, trans_b: op() of a and b.
        alpha, beta: scalars. beta = 0 overwrites c without reading it.
        a, b: the operands as stored, in c's dtype. Each row is contiguous; a, b and c may be
            views of wider arrays.
        c: m x n; float32, float64, complex64 or complex128.

    Raises:
        BackendError: the BLAS has 32-bit integers, and an extent is 2^31 or more.
    """
    if c.size == 0:
        return
    if a.size == 0 or b.size == 0:
        _scale(beta, c)
        return
    (_cblas_gemm() or numpy_gemm)(trans_a, trans_b, alpha, a, b, beta, c)


def syrk(trans: Op, alpha: float, a: Array, beta: float, c: Array, *, upper: bool) -> None:
    """Compute one triangle of ``c = alpha op(a) @ op(a)^T + beta c`` in place, of real numbers.

    The other triangle is undefined afterwards. The arguments are as for `gemm`.
    """
    function = _cblas_syrk()
    if function is None or not a.size or not c.size:
        gemm(trans, Op.T if trans is Op.N else Op.N, alpha, a, a, beta, c)
        return
    if beta == 0:
        # Some versions of OpenBLAS multiply the old elements by 0, which keeps NaN.
        for top in range(0, len(c), _BLOCK):
            c[top : top + _BLOCK, slice(top, None) if upper else slice(0, top + _BLOCK)] = 0
        beta = 1
    function(trans, alpha, a, beta, c, upper)


def numpy_gemm(trans_a: Op, trans_b: Op, alpha: complex, a: Array, b: Array, beta: complex, c: Array) -> None:
    """Do the same as `gemm` with NumPy alone, block by block, so that temporary arrays stay small."""
    left, right = _view(trans_a, a), _view(trans_b, b)
    scalar = c.dtype.type
    _scale(beta, c)
    for i, j, p in product(*(range(0, extent, _BLOCK) for extent in (*c.shape, left.shape[1]))):
        rows, cols = left[i : i + _BLOCK, p : p + _BLOCK], right[p : p + _BLOCK, j : j + _BLOCK]
        rows = rows.conj() if trans_a is Op.C else rows
        cols = cols.conj() if trans_b is Op.C else cols
        part = rows @ cols
        if alpha != 1:
            part *= scalar(alpha)
        c[i : i + _BLOCK, j : j + _BLOCK] += part


def _view(trans: Op, x: Array) -> Array:
    return x if trans is Op.N else x.T


def _scale(beta: complex, c: Array) -> None:
    if beta == 0:
        c[...] = 0
    elif beta != 1:
        with np.errstate(all="ignore"):  # Inf and NaN propagate silently, as in BLAS
            c *= c.dtype.type(beta)


@cache
def blas_name() -> str:
    """Return the name of the BLAS library, and the CPU family of its kernels if the library reports it.

    Returns "numpy" if no BLAS is found.
    """
    found = _library()
    if found is None:
        return "numpy"
    name = re.sub(r"-[0-9a-f]{8,}|\.so.*", "", found[1].rsplit("/", 1)[-1])
    family = _ask("get_corename")
    asked = os.environ.get(CHOICE)
    return f"{name} ({family}{f', {CHOICE}={asked}' if asked else ''})" if family else name


def better_family(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, str] | None:
    """Return the CPU family whose kernels OpenBLAS uses, and a family whose kernels are faster on this CPU.

    Returns None if no faster kernels are known, or if NumPy's BLAS is not OpenBLAS. OpenBLAS does not know
    CPUs that are newer than itself, and uses slow kernels on them. The environment variable
    OPENBLAS_CORETYPE selects another family, but only before the library is loaded.
    """
    picked = _ask("get_corename")
    if picked is None or picked in AVX512_FAMILIES or "DYNAMIC_ARCH" not in (_ask("get_config") or ""):
        return None
    try:
        flags = next(line for line in cpuinfo.read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        return None
    return (picked, "SkylakeX") if set(flags.split()) >= AVX512_FLAGS else None


def threads() -> int:
    """Return how many threads a product uses: those of OpenBLAS, or one per core with another BLAS."""
    count = _function("get_num_threads", ctypes.c_int)
    return len(os.sched_getaffinity(0)) if count is None else int(count())


def _ask(question: str) -> str | None:
    """Return the text of OpenBLAS's function `openblas_<question>`; None if the BLAS is not OpenBLAS."""
    function = _function(question, ctypes.c_char_p)
    return None if function is None else function().decode()


@cache
def _function(name: str, result: Any) -> Any:
    """Return the function `openblas_<name>`, without arguments; None if the BLAS is not OpenBLAS."""
    found = _library()
    if found is None:
        return None
    library, _, prefix, suffix = found
    function = getattr(library, f"{prefix.removesuffix('cblas_')}openblas_{name}{suffix}", None)
    if function is not None:
        function.restype = result
    return function


@cache
def _library() -> tuple[ctypes.CDLL, str, str, str] | None:
    """Find the loaded library that exports BLAS's gemm; None if there is none.

    Returns:
        The library, its path, and the prefix and the suffix of its function names: for
        scipy_cblas_dgemm64_, they are "scipy_cblas_" and "64_".
    """
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            paths = {line.split(maxsplit=5)[5].strip() for line in maps if line.count("/")}
    except OSError:
        return None
    wanted = [p for p in paths if re.search(r"openblas|mkl_rt|blis|libcblas", p.rsplit("/", 1)[-1])]
    # Libraries of NumPy are tried first: SciPy may have loaded another BLAS.
    for path in sorted(wanted, key=lambda p: ("numpy" not in p, p)):
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        for prefix, suffix in (
            ("scipy_cblas_", "64_"),
            ("cblas_", "64_"),
            ("scipy_cblas_", ""),
            ("cblas_", ""),
        ):
            if hasattr(library, f"{prefix}dgemm{suffix}"):
                return library, path, prefix, suffix
    return None


def _leading(x: Array) -> int:
    """Return the distance between the rows of an array, in elements: a view may be of a wider array."""
    apart = int(x.strides[0]) // x.itemsize if x.shape[0] > 1 else 0
    return max(1, int(x.shape[1]), apart)


def _bound(name: str, dtype: str) -> Any:
    """Return a function of the library that was found, such as dgemm, with the types of its arguments."""
    found = _library()
    assert found is not None
    library, _, prefix, suffix = found
    integer = _integer()
    pointer, enum = ctypes.c_void_p, ctypes.c_int
    scalar: Any = {"float32": ctypes.c_float, "float64": ctypes.c_double}.get(dtype, pointer)
    function = getattr(library, f"{prefix}{_LETTERS[dtype]}{name}{suffix}")
    function.restype = None
    # An array and its leading dimension; for a vector, the distance between its elements.
    array = pointer, integer
    enums, sizes, operands = {"gemm": (3, 3, 2), "gemv": (2, 2, 2), "syrk": (3, 2, 1)}[name]
    function.argtypes = [*[enum] * enums, *[integer] * sizes, scalar, *array * operands, scalar, *array]
    return function


def _integer() -> Any:
    """Return the type of extents in the library that was found."""
    found = _library()
    return ctypes.c_int64 if found is not None and found[-1] == "64_" else ctypes.c_int32


def _check_extents(m: int, n: int, k: int, *arrays: Array) -> None:
    if _integer() is ctypes.c_int32 and max(m, n, k, *map(_leading, arrays)) >= 2**31:
        raise BackendError(
            f"{m} x {n} x {k} is too large for NumPy's BLAS, whose extents must be below 2^31: "
            "pass a smaller --tile"
        )


@cache
def _cblas_syrk() -> Callable[[Op, float, Array, float, Array, bool], None] | None:
    if _library() is None:
        return None
    functions = {dtype: _bound("syrk", dtype) for dtype in ("float32", "float64")}

    def call(trans: Op, alpha: float, a: Array, beta: float, c: Array, upper: bool) -> None:
        n, k = len(c), a.shape[1] if trans is Op.N else a.shape[0]
        _check_extents(n, n, k, a, c)
        functions[c.dtype.name](
            *(_ROW_MAJOR, _UPPER if upper else _LOWER, _TRANS[trans], n, k, alpha),
            *(a.ctypes.data, _leading(a), beta, c.ctypes.data, _leading(c)),
        )

    return call


@cache
def _cblas_gemm() -> Gemm | None:
    if _library() is None:
        return None
    gemms = {dtype: _bound("gemm", dtype) for dtype in _LETTERS}
    gemvs = {dtype: _bound("gemv", dtype) for dtype in _LETTERS}

    def call(trans_a: Op, trans_b: Op, alpha: complex, a: Array, b: Array, beta: complex, c: Array) -> None:
        m, n = c.shape
        k = a.shape[1] if trans_a is Op.N else a.shape[0]
        _check_extents(m, n, k, a, b, c)
        vector = _as_gemv(trans_a, trans_b, a, b, c)
        if vector is not None and beta == 0:
            # Some versions of OpenBLAS multiply the old elements by 0, which keeps NaN.
            c[...], beta = 0, 1
        scalars: list[Any] = [alpha, beta]
        if c.dtype.kind == "c":
            boxed = [np.array(value, c.dtype) for value in scalars]
            scalars = [value.ctypes.data for value in boxed]
        if vector is not None:
            trans, matrix, x, x_step, c_step = vector
            gemvs[c.dtype.name](
                *(_ROW_MAJOR, _TRANS[trans], *matrix.shape, scalars[0], matrix.ctypes.data, _leading(matrix)),
                *(x.ctypes.data, x_step, scalars[1], c.ctypes.data, c_step),
            )
            return
        gemms[c.dtype.name](
            *(_ROW_MAJOR, _TRANS[trans_a], _TRANS[trans_b], m, n, k, scalars[0]),
            *(a.ctypes.data, _leading(a), b.ctypes.data, _leading(b), scalars[1], c.ctypes.data, _leading(c)),
        )

    return call


def _as_gemv(
    trans_a: Op, trans_b: Op, a: Array, b: Array, c: Array
) -> tuple[Op, Array, Array, int, int] | None:
    """Express a product with one row or one column as matrix times vector, which BLAS computes faster.

    Returns op(), the matrix, the vector, and the distances between elements of the vector and of C. Returns
    None for other products, and where BLAS has no such function: one that conjugates the vector, or that
    conjugates the matrix without transposing it.
    """
    conjugates = c.dtype.kind == "c"
    if c.shape[1] == 1 and not (conjugates and trans_b is Op.C):
        return trans_a, a, b, _leading(b) if trans_b is Op.N else 1, _leading(c)
    if c.shape[0] == 1 and not (conjugates and Op.C in (trans_a, trans_b)):
        # One row: C^T = op(B)^T op(A)^T.
        return Op.T if trans_b is Op.N else Op.N, b, a, 1 if trans_a is Op.N else _leading(a), 1
    return None
