"""The products whose plans are measured: those of the benchmark grid, larger and random ones."""

import random
from collections.abc import Iterator

from grid_cases import CHUNKS, CUDA, HOST, IN_MEMORY, ITEM_BYTES, Case

from oocgemm.planning import (
    DTYPES,
    Budgets,
    Chunked,
    GemmProblem,
    InMemory,
    Layout,
    Layouts,
    Lines,
    Op,
    Setting,
    Writing,
    default_model,
)
from oocgemm.planning.units import parse_size

GIB, MIB = 1 << 30, 1 << 20
ROW = 32 << 10  # bytes of a row of a block for `InMemory.zero_copy_width`
# Budgets of a GPU with 80 GB and a host with 128 GiB, and of a host with 2 cores.
DEFAULTS = {"cuda": Budgets(70 * GIB, 60 * GIB), "host": Budgets(4 * GIB, 4 * GIB)}
CORES = {"cuda": 16, "host": 2}
STORED = Layouts(Chunked((2048, 2048)), Chunked((2048, 2048)), Chunked(writing=Writing(free=True)))
PACKED = Layouts(
    *(
        Chunked(
            (1000, 1000),
            partial_reads=False,
            decode_bytes=16_000_000,
            writing=Writing((1000, 1000), encodes=True, encode_bytes=8_000_000),
        )
        for _ in "ABC"
    )
)
# Products in files: m, n, k, dtype, beta, budgets in units of GiB (GPU) or MiB (host).
LARGE: dict[str, list[tuple[int, int, int, str, float, int, int]]] = {
    "cuda": [
        (32_768, 32_768, 524_288, "float64", 0, 8, 24),
        (32_768, 32_768, 524_288, "float64", 0, 8, 60),
        (24_576, 24_576, 24_576, "float64", 0, 3, 8),
        (24_576, 24_576, 24_576, "float64", 1, 3, 8),
        (50_000, 9_000, 20_000, "float64", 0, 1, 3),
        (16_384, 16_384, 16_384, "float64", 0, 1, 3),
        (12_288, 12_288, 32_768, "float64", 0, 1, 8),
        (100_000, 100_000, 100_000, "float32", 0, 8, 64),
        (200_000, 2_048, 6_000, "float16", 0, 1, 4),
        (4_096, 4_096, 600_000, "float64", 0, 1, 4),
    ],
    "host": [
        (7_000, 7_000, 7_000, "float32", 0, 640, 64),
        (20_000, 20_000, 20_000, "float64", 0, 1024, 1024),
        (3_000, 100_003, 9_000, "float64", 0, 128, 128),
        (200_000, 2_048, 6_000, "float16", 0, 128, 128),
        (4_096, 4_096, 600_000, "float64", 0, 128, 128),
        (9_000, 9_000, 9_000, "float64", 1, 256, 256),
    ],
}


def layout(case: Case, rows: int, cols: int, size: int, *, new: bool = False) -> Layout:
    """Return the layout of an operand of a case of the grid; `new` tells that the run creates it."""
    if case.source in IN_MEMORY:
        return InMemory(
            itemsize=size, zero_copy_width=min(cols, -(-ROW // size)), pinned=case.source == "pinned"
        )
    if case.source not in CHUNKS:
        return Lines(cols, itemsize=size, scratch_bytes=MIB, page_cached=not new)
    chunk = min(CHUNKS[case.source], rows), min(CHUNKS[case.source], cols)
    if new:
        return Chunked(itemsize=size, writing=Writing(free=True))
    return Chunked(chunk, itemsize=size, writing=Writing(chunk))


def grid_setting(case: Case, backend: str) -> Setting:
    """Return the inputs of the planner for a case of the grid."""
    accumulator = "int32" if case.dtype == "int8" else DTYPES[case.dtype].accumulator
    size = ITEM_BYTES[case.dtype]
    names = case.dtype, case.dtype, accumulator, case.c_dtype
    problem = GemmProblem.of(case.m, case.n, case.k, *names, compute=case.compute)
    layouts = Layouts(
        layout(case, case.m, case.k, size),
        layout(case, case.k, case.n, size),
        layout(case, case.m, case.n, case.c_item_bytes, new=True),
    )
    default = DEFAULTS[backend]
    budgets = Budgets(
        parse_size(case.device) if case.device else default.device,
        parse_size(case.host) if case.host else default.host,
    )
    return Setting(problem, default_model(backend, CORES[backend]), layouts, budgets)


def settings() -> Iterator[tuple[str, Setting]]:
    """Yield the name and the inputs of the planner of each product."""
    for backend, cases in (("cuda", CUDA), ("host", HOST)):
        for case in cases:
            yield f"{backend} {case.name}", grid_setting(case, backend)
    for backend, large in LARGE.items():
        unit = GIB if backend == "cuda" else MIB
        for m, n, k, dtype, beta, device, host in large:
            d = DTYPES[dtype]
            names = d.name, d.name, d.accumulator, d.results[0]
            problem = GemmProblem.of(m, n, k, *names, 1.0, beta, Op.N, Op.N)
            for kind, on in (("raw", STORED), ("packed", PACKED)):
                name = f"{backend} {m}x{k}x{n} {dtype} {kind} beta={beta} {device}+{host}"
                model = default_model(backend, CORES[backend])
                yield name, Setting(problem, model, on, Budgets(device * unit, host * unit))


# Of random products: dtypes, and per backend the sources and the device and host budgets.
RANDOM_DTYPES = "float64", "float32", "float16", "int8", "complex64"
RANDOM = {
    "cuda": (
        ("pageable", "pinned", "zarr", "npy", "zarr-256", "cold-zarr"),
        (None, "512MiB", "1GiB", "2GiB", "8GiB"),
        (None, "2GiB", "8GiB"),
    ),
    "host": (("pageable", "zarr", "npy"), ("128MiB", "256MiB", "1GiB"), ("128MiB", "256MiB")),
}


def random_settings(count: int, seed: int = 5) -> Iterator[tuple[str, Setting]]:
    """Yield `count` random products of 1 MB to 300 GB, four of five for a GPU."""
    draw = random.Random(seed)
    while count:
        backend = "cuda" if draw.random() < 0.8 else "host"
        sources, devices, hosts = RANDOM[backend]
        m, n, k = (int(2 ** draw.uniform(6, 18)) for _ in range(3))
        dtype, source = draw.choice(RANDOM_DTYPES), draw.choice(sources)
        case = Case(m, k, n, dtype, source, draw.choice(devices), draw.choice(hosts))
        if 1e6 < case.operand_bytes + case.c_bytes < 3e11 and case.flops <= 5e15:
            count -= 1
            yield f"{backend} {case.name}", grid_setting(case, backend)
