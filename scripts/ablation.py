#!/usr/bin/env python
"""Switch off one part of the planner at a time, and compare the predicted times of the plans.

The script needs no hardware. The virtual clock predicts the times. The products are those of `bench_grid.py`
and some larger ones in files. A part is worth its lines if the geometric mean of the times is at least 1%
longer without it, or if a product takes more than 5% longer.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click

sys.path.insert(0, str(Path(__file__).resolve().parent / "bench"))

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
    make_plan,
)
from oocgemm.planning.search import candidates, depths, moves, planner, shapes, slot_counts
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


def nothing(*_: Any, **__: Any) -> Iterator[Any]:
    return iter(())


def once(search: Any, reached: set[Any], descend: Any = planner._Search._descend) -> None:
    """Improve the best candidate, but do not do so again from another one."""
    if not reached:
        descend(search, reached)


Patch = tuple[Any, str, Any]
# Per part of the planner: the attributes to replace to switch it off.
PARTS: dict[str, list[Patch]] = {
    "changes of the best candidate": [(planner, "moves", nothing)],
    "other shapes": [(moves, "_shapes", nothing)],
    "first steps strip by strip by formula": [(slot_counts, "_draining", lambda _1, _2, base, *_3: base)],
    "bands": [(slot_counts, "_bands", lambda *_1, **_2: [1])],
    "shapes that read few bytes": [(shapes, "_reading_shapes", nothing)],
    "a second search from another shape": [(planner._Search, "_descend", once)],
    "two sizes of tiles": [(shapes, "BINS", 1)],
    "multiples of 32 rows": [(shapes, "LARGE_EXTENT", 1 << 40)],
    "four depths": [(depths, "BEST_DEPTHS", 2)],
    "all depths where memory is scarce": [(candidates, "SCARCE_MEMORY", 0)],
    "pruning by shape": [(candidates, "PRUNE_FACTOR", math.inf)],
    "panels four times as deep": [(moves, "DEPTH_FACTORS", (2, 0.5))],
    "8 ms of search for short runs": [(planner, "MIN_EFFORT", 0.004)],
    "8 MiB strips of pinned arrays": [(slot_counts, "DIRECT_STRIP_BYTES", slot_counts.STRIP_BYTES)],
    "strips of C of pinned arrays": [(candidates, "strip_shapes", nothing)],
    "least work of close candidates": [(planner, "CLOSE", 0.0)],
}


def planned(clear: Callable[[], None] = planner._planned.cache_clear) -> dict[str, tuple[float, float]]:
    """Plan all products; return the predicted seconds, and the seconds that planning took."""
    found = {}
    for name, setting in settings():
        clear()
        planner._plan_with_advice.cache_clear()
        shapes._long_extents.cache_clear()
        started = time.process_time()
        plan = make_plan(setting.problem, setting.budgets, setting.machine, setting.layouts)
        found[name] = plan.prediction.total, time.process_time() - started
    return found


@click.command()
@click.option("--output", type=click.Path(path_type=Path), default="scripts/bench/results/ablation.json")
@click.option("--only", default="", help="Only parts whose names contain this.")
def main(output: Path, only: str) -> None:
    """Plan all products with every part of the planner, and without each part."""
    whole = planned()
    result: dict[str, Any] = {
        "products": len(whole),
        "planning_seconds": sum(spent for _, spent in whole.values()),
        "parts": {},
        # Parts that were removed, as they were measured before that.
        "removed": json.loads(output.read_text())["removed"] if output.exists() else {},
    }
    for part, patches in PARTS.items():
        if only not in part:
            continue
        with ExitStack() as stack:
            for patched in patches:
                stack.enter_context(patch.object(*patched))
            without = planned()
        ratios = {name: without[name][0] / whole[name][0] for name in whole}
        worst = max(ratios, key=ratios.__getitem__)
        best = min(ratios, key=ratios.__getitem__)
        row = {
            "geometric_mean": math.exp(sum(map(math.log, ratios.values())) / len(ratios)),
            "most": [worst, ratios[worst]],
            "least": [best, ratios[best]],
            "slower_by_1_percent": sum(ratio > 1.01 for ratio in ratios.values()),
            "planning_seconds": sum(spent for _, spent in without.values()),
        }
        result["parts"][part] = row
        print(
            f"{part:40} {row['geometric_mean']:.4f} {ratios[worst]:.3f} {worst} {ratios[best]:.3f} {best} "
            f"{row['planning_seconds']:.2f} s",
            flush=True,
        )
    output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
