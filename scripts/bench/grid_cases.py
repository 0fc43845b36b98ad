"""The products of `bench_grid.py` as data, their lower bounds, and the summary of measured times.

Everything here is computed from numbers alone.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median
from typing import Any

from oocgemm.planning.units import parse_size

PINNED, PAGEABLE = "pinned", "pageable"  # arrays in memory
ZARR, SMALL_CHUNKS, NPY = "zarr", "zarr-256", "npy"  # files in the page cache
COLD_ZARR, COLD_NPY = "cold-zarr", "cold-npy"  # files that are evicted from it before each call
IN_MEMORY, COLD = (PINNED, PAGEABLE), (COLD_ZARR, COLD_NPY)
CHUNKS = {ZARR: 2048, SMALL_CHUNKS: 256, COLD_ZARR: 2048}  # side of the stored chunks
ITEM_BYTES = {
    "int8": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
MODES = "h2d", "d2h", "h2d_both", "d2h_both"  # names of the rates of a link: each way alone, and both at once
TINY_SECONDS = 0.001  # products whose bound is below this are calls: --kind small compares them with CuPy
BIG_SECONDS = 0.1  # products whose bound is above this are compared with the target for each product


@dataclass(frozen=True)
class Case:
    """One product: extents, dtype, where the operands are, the compute mode, and budgets (None: default)."""

    m: int
    k: int
    n: int
    dtype: str
    source: str
    device: str | None = None
    host: str | None = None
    compute: str = "native"
    large: bool = False  # runs only with --large: it takes most of the host memory

    @property
    def name(self) -> str:
        parts = [f"{self.m}x{self.k}x{self.n}", self.dtype, self.source]
        parts += [self.compute] if self.compute != "native" else []
        parts += [f"device={self.device}"] if self.device else []
        parts += [f"host={self.host}"] if self.host else []
        return " ".join(parts)

    @property
    def c_dtype(self) -> str:
        return "int32" if self.dtype == "int8" else self.dtype

    @property
    def operand_bytes(self) -> int:
        return (self.m + self.n) * self.k * ITEM_BYTES[self.dtype]

    @property
    def c_bytes(self) -> int:
        return self.m * self.n * self.c_item_bytes

    @property
    def c_item_bytes(self) -> int:
        return 4 if self.dtype == "int8" else ITEM_BYTES[self.dtype]

    @property
    def flops(self) -> int:
        return 2 * self.m * self.k * self.n * (4 if self.dtype.startswith("complex") else 1)

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of `oocgemm.gemm` for this case, without the backend."""
        budgets = {"device_memory": self.device, "host_memory": self.host}
        return {key: value for key, value in budgets.items() if value} | (
            {"compute": self.compute} if self.compute != "native" else {}
        )


def _cuda() -> Iterator[Case]:
    """Yield the products of the GPU grid. Neighbours share operands. Those that take long come last."""

    def each(m: int, k: int, n: int, dtype: str, *variants: tuple[Any, ...]) -> Iterator[Case]:
        for variant in variants:
            yield Case(m, k, n, dtype, *variant)

    def square(size: int, dtype: str, *variants: tuple[Any, ...]) -> Iterator[Case]:
        yield from each(size, size, size, dtype, *variants)

    emulated = (None, None, "emulated")
    yield from square(512, "float64", (PAGEABLE,))
    yield from square(2048, "float64", (PAGEABLE,), (PINNED,))
    yield from square(4096, "float64", (PAGEABLE,), (PINNED,))
    yield from square(4096, "float32", (PAGEABLE,))
    yield from square(8192, "float64", (PAGEABLE,), (PAGEABLE, "512MiB"), (PINNED,), (SMALL_CHUNKS,))
    yield from square(8192, "complex64", (PAGEABLE,))
    yield from square(8192, "complex128", (PINNED, "2GiB"))
    yield from each(512, 1048576, 512, "float32", (PAGEABLE,), (NPY,))
    yield from each(512, 262144, 512, "float32", (SMALL_CHUNKS,))
    yield from each(65536, 16384, 1, "float32", (PAGEABLE,), (PINNED,))
    yield from each(65536, 16384, 8, "float32", (PAGEABLE,), (PINNED, "512MiB"))
    yield from each(65536, 16384, 64, "float32", (PAGEABLE, "2GiB", "2GiB"))
    yield from each(65536, 16384, 512, "float32", (PAGEABLE,))
    yield from each(2097152, 512, 64, "float32", (PAGEABLE,), (PINNED, "2GiB"))
    yield from each(196608, 2048, 2048, "float64", (PAGEABLE,), (PINNED, "512MiB"))
    yield from each(16384, 64, 16384, "float32", (PAGEABLE,), (PINNED,))
    yield from each(16384, 64, 16384, "float64", (PAGEABLE, "512MiB"))
    yield from square(16384, "float16", (PAGEABLE,))
    yield from square(20480, "bfloat16", (PINNED,))
    yield from each(16384, 65536, 16384, "int8", (PAGEABLE,), (PINNED, "2GiB"))
    yield from square(
        16384, "float64", (PAGEABLE,), (PINNED, "1GiB"), (PINNED, *emulated), (ZARR,), (ZARR, "3GiB", "8GiB")
    )
    yield from each(16384, 16384, 8, "float64", (ZARR,))
    yield from each(4096, 131072, 4096, "float32", (ZARR,))
    yield from each(98304, 2048, 2048, "float64", (ZARR,))
    yield from each(2048, 65536, 2048, "float64", (COLD_ZARR,))
    yield from each(16384, 16384, 64, "float32", (COLD_NPY,))
    yield from square(40960, "float16", (PINNED, "8GiB"))
    yield from square(24576, "float64", (PAGEABLE, "3GiB", "8GiB"))
    yield from square(32768, "float32", (PINNED, "8GiB"))
    yield from each(4096, 262144, 4096, "float64", (PAGEABLE, "8GiB"), (PINNED,))
    yield from each(512, 4194304, 512, "float32", (PAGEABLE,), (PAGEABLE, "512MiB", "2GiB"), (PINNED, "8GiB"))
    for dtype, source in (("float64", PAGEABLE), ("float32", PINNED)):
        yield Case(49152, 49152, 49152, dtype, source, "16GiB", large=True)


def _host() -> Iterator[Case]:
    """Yield the products of the CPU grid."""
    budgets = ("256MiB", "256MiB")
    yield Case(8000, 8000, 8000, "float64", ZARR, *budgets)
    yield Case(8000, 8000, 8000, "float64", PAGEABLE, *budgets)
    yield Case(4000, 4000, 4000, "float32", ZARR, *budgets)
    yield Case(4000, 4000, 4000, "float32", PAGEABLE)
    yield Case(4000, 4000, 4000, "complex64", PAGEABLE, *budgets)
    yield Case(512, 524288, 512, "float32", ZARR, *budgets)
    yield Case(512, 524288, 512, "float32", PAGEABLE, *budgets)
    yield Case(262144, 64, 2048, "float32", ZARR, *budgets)
    yield Case(262144, 64, 2048, "float32", PAGEABLE, *budgets)
    yield Case(65536, 2048, 512, "float64", ZARR, *budgets)
    yield Case(4000, 4000, 1, "float64", ZARR, *budgets)
    yield Case(32768, 8192, 1, "float32", PAGEABLE, *budgets)
    yield Case(16384, 64, 16384, "float32", ZARR, *budgets)


CUDA, HOST = tuple(_cuda()), tuple(_host())
SMALL = tuple(
    Case(size, size, size, dtype, PAGEABLE)
    for dtype in ("float64", "float32")
    for size in (512, 2048, 4096, 8192)
)


def _probe() -> Iterator[Case]:
    """Yield products that are not in the grid: half pageable, half pinned."""
    for m, k, n, dtype in (
        (2000, 2000, 200000, "float64"),  # those with the largest arrays first, so that few buffers are made
        (1000000, 300, 300, "float64"),
        (3000, 300000, 3000, "bfloat16"),
        (400000, 1024, 1024, "float32"),
        (10000, 10000, 10000, "float64"),
        (6000, 20000, 6000, "complex64"),
        (12000, 12000, 12000, "float32"),
        (30000, 5000, 5000, "int8"),
        (3000, 3000, 3000, "float64"),
    ):
        yield Case(m, k, n, dtype, PAGEABLE)
    for m, k, n, dtype in (
        (2000, 400000, 2000, "float32"),
        (40000, 10000, 40, "float64"),
        (2500, 2500, 150000, "float64"),
        (300000, 1500, 1500, "float32"),
        (8000, 120000, 8000, "int8"),
        (10000, 10000, 10000, "float64"),
        (14000, 14000, 14000, "float32"),
        (15000, 15000, 15000, "bfloat16"),
        (3000, 3000, 3000, "float64"),
    ):
        yield Case(m, k, n, dtype, PINNED)


PROBE = tuple(_probe())


def chosen(cases: Sequence[Case], only: str = "", large: bool = False) -> list[Case]:
    """Return the cases whose names contain `only`; those for --large only if `large` is set."""
    return [case for case in cases if only in case.name and (large or not case.large)]


def loop_tile(case: Case, budget: int, align: int = 256, block: int = 128 << 20) -> tuple[int, int, int]:
    """Return the tile (m, n, k) of the double-buffered loop: how an expert would split this product.

    Three splits read each operand once: C stays on the device and panels of A and B stream, if k is the
    longest extent by far; B stays and rows of A and C stream; A stays and columns of B and C stream. They
    need room for what stays. Otherwise C is cut into tiles.

    Args:
        case: the product.
        budget: bytes of device memory for two slots of what streams, and one of what stays.
        align: blocks are multiples of this extent, such as that of stored chunks.
        block: bytes of the blocks that stream. There are at least eight of them.
    """
    m, k, n, item, out = case.m, case.k, case.n, ITEM_BYTES[case.dtype], case.c_item_bytes

    def cut(extent: int, each: int, resident: int) -> int:
        elements = min(block, (budget - resident) // 2) // each
        return min(extent, max(align, min(elements, math.ceil(extent / 8)) // align * align))

    if k >= 2 * max(m, n) and m * n * out <= budget // 2:
        return m, n, cut(k, (m + n) * item, m * n * out)
    if m >= n and k * n * item <= budget // 2:
        return cut(m, k * item + n * out, k * n * item), n, k
    if k * m * item <= budget // 2:
        return m, cut(n, k * item + m * out, k * m * item), k
    side = math.isqrt(
        budget // (2 * out + 2 * item)
    )  # two tiles of C, and two panels half as deep of A and B
    side = max(align, side // align * align)
    return min(m, side), min(n, side), min(k, max(align, side // 2 // align * align))


def bounds(case: Case, rates: dict[str, Any], compute: float | None = None) -> dict[str, float]:
    """Return the least seconds that each resource takes; the longest is the bound of the product.

    Args:
        case: the product.
        rates: bytes per second of the links, as `grid_ceilings` measures them. `h2d` and `d2h`: copies from
            and to pinned memory, alone; `h2d_both` and `d2h_both`: both at once. The same with `staged_`:
            copies from and to pageable memory. `page_h2d`: from the page cache to the device, or `page_read`
            to memory. `disk_read`, `disk_write`: the disk.
        compute: seconds of the product in core, operands on the device; None if they are not known.

    >>> case = Case(1000, 1000, 1000, "float64", "pinned")
    >>> rates = {"h2d": 16e9, "d2h": 8e9, "h2d_both": 8e9, "d2h_both": 8e9}
    >>> bounds(case, rates, 0.0005)
    {'compute': 0.0005, 'copies': 0.0015}
    """
    up, down, found = case.operand_bytes, case.c_bytes, {}
    if compute is not None:
        found["compute"] = compute
    if "h2d" in rates:
        found["copies"] = copies_bound(case, rates)
    if case.source not in IN_MEMORY:
        found["disk write"] = down / rates["disk_write"]  # direct I/O needs no page cache for C
        if case.source in COLD:
            found["disk read"] = up / rates["disk_read"]
        else:
            found["page cache"] = up / rates.get("page_h2d", rates["page_read"])
    return found


def copies_bound(case: Case, rates: Mapping[str, Any]) -> float:
    """Return the minimum time of uploading A and B and downloading C once, in seconds."""
    up, down = case.operand_bytes, case.c_bytes
    staged = case.source == PAGEABLE
    of = staged_rates(max(up, down), rates) if staged else {name: rates[name] for name in MODES}
    return copying_seconds(up, down, of)


def copying_seconds(up: float, down: float, rates: Mapping[str, float]) -> float:
    """Return the least seconds in which `up` and `down` bytes cross a link with the rates of `MODES`.

    A schedule copies up alone for x seconds, down alone for y, and both ways for z. The least x + y + z with
    ``h2d x + h2d_both z >= up`` and ``d2h y + d2h_both z >= down`` is piecewise linear in z, and convex. So
    it is at z = 0, or where one of the directions is done.

    >>> copying_seconds(100, 40, {"h2d": 10, "d2h": 10, "h2d_both": 8, "d2h_both": 8})
    11.0
    """

    def total(both: float) -> float:
        rest_up, rest_down = up - rates["h2d_both"] * both, down - rates["d2h_both"] * both
        return both + max(0.0, rest_up) / rates["h2d"] + max(0.0, rest_down) / rates["d2h"]

    return min(map(total, (0.0, up / rates["h2d_both"], down / rates["d2h_both"])))


def staged_rates(size: int, rates: Mapping[str, Any]) -> dict[str, float]:
    """Return the rates of `MODES` for arrays of `size` bytes: those of the least measured size that has room.

    >>> modes = dict.fromkeys(("staged_h2d", "staged_d2h", "staged_h2d_both", "staged_d2h_both"), 40.0)
    >>> small = {name: 10.0 for name in modes}
    >>> staged_rates(5, modes | {"staged_small": {"8": small}})["h2d"], staged_rates(9, modes)["h2d"]
    (10.0, 40.0)
    """
    small = {int(few): of for few, of in rates.get("staged_small", {}).items() if int(few) >= size}
    of = small[min(small)] if small else rates
    return {name: of[f"staged_{name}"] for name in MODES}


def probe_bound(case: Case, rates: Mapping[str, float], compute: float | None) -> float:
    """Return the bound of a product of `PROBE`: its kernel, or its bytes over the link of pinned memory."""
    return max(compute or 0.0, case.operand_bytes / rates["h2d"], case.c_bytes / rates["d2h"])


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Return the median, the least and the most of samples."""
    return {"median": median(samples), "min": min(samples), "max": max(samples)}


def figures(found: dict[str, Any]) -> dict[str, float]:
    """Return bound / T, scheduled / T, loop / T and in-core / T of one case, as far as they were measured.

    T is the median of the samples of oocgemm. For the loop and in-core it is their median too.
    """
    samples = found["samples"]
    t = median(samples["oocgemm"])
    ratios = {name: found[name] / t for name in ("bound", "scheduled") if found.get(name)}
    return ratios | {
        name: median(times) / t for name, times in samples.items() if name != "oocgemm" and times
    }


def summary(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the geometric mean and the worst value of bound / T, and the cases that lose.

    Cases without samples (they failed) are left out. `slower` names the products that take longer than
    another contender, with that contender and the ratio. `wrong` names those whose result is wrong.
    """
    measured = {name: figures(one) for name, one in cases.items() if one.get("samples", {}).get("oocgemm")}
    of_bound = {name: one["bound"] for name, one in measured.items() if "bound" in one}
    big = {name: ratio for name, ratio in of_bound.items() if cases[name]["bound"] > BIG_SECONDS}
    more = [ratio for name, ratio in of_bound.items() if cases[name]["bound"] > TINY_SECONDS]
    in_core, trees = (
        [one[other] for one in measured.values() if other in one] for other in ("in_core", "other_tree")
    )

    def worst(ratios: dict[str, float]) -> list[Any] | None:
        return [(name := min(ratios, key=ratios.__getitem__)), ratios[name]] if ratios else None

    return {
        "cases": len(measured),
        "geometric_mean": geometric_mean(of_bound.values()) if of_bound else None,
        "geometric_mean_above_0.001_s": geometric_mean(more) if more else None,
        "in_core_geometric_mean": geometric_mean(in_core) if in_core else None,
        "other_tree_geometric_mean": geometric_mean(trees) if trees else None,
        "worst": worst(of_bound),
        "worst_above_0.1_s": worst(big),
        "slower": [
            [name, other, ratio]
            for name, one in measured.items()
            for other, ratio in one.items()
            if other not in ("bound", "scheduled") and ratio < 1
        ],
        "wrong": [
            f"{name}: {who}"
            for name, one in cases.items()
            for who, right in one.get("right", {}).items()
            if not right
        ],
        "failed": [name for name, one in cases.items() if "error" in one],
    }


def rows(cases: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a text table: bound, T, and the ratios to T."""
    others = ("bound", "scheduled", "loop", "in_core", "other_tree")
    heads = ("bound/T", "sched/T", "loop/T", "in core/T", "other/T")
    yield f"{'product':58} {'bound':>8} {'by':>10} {'T':>8} {' '.join(f'{head:>9}' for head in heads)}"
    for name, one in cases.items():
        if not one.get("samples", {}).get("oocgemm"):
            yield f"{name:58} {one.get('error', 'not measured')}"
            continue
        ratios, t = figures(one), median(one["samples"]["oocgemm"])
        cells = " ".join(f"{ratios[other]:9.3f}" if other in ratios else f"{'-':>9}" for other in others)
        bound = f"{one['bound']:8.4f} {one['bound_by']:>10}" if one.get("bound") else f"{'-':>8} {'-':>10}"
        yield f"{name:58} {bound} {t:8.4f} {cells}{'' if all(one['right'].values()) else '  WRONG'}"


def budget_bytes(case: Case, free: int) -> int:
    """Return the device memory of a case in bytes: its budget, or 80% of the free memory."""
    return parse_size(case.device) if case.device else free * 4 // 5
