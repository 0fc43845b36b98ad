"""The benchmark over many products: its cases, bounds, operands, loops and summary."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import grid_piped  # type: ignore[import-not-found]
import numpy as np
import pytest
from grid_cases import (  # type: ignore[import-not-found]
    CUDA,
    HOST,
    IN_MEMORY,
    ITEM_BYTES,
    MODES,
    PAGEABLE,
    PINNED,
    PROBE,
    Case,
    bounds,
    chosen,
    copying_seconds,
    figures,
    loop_tile,
    rows,
    summary,
)
from grid_data import Operands, is_right  # type: ignore[import-not-found]
from grid_loop import slice_product, stream_product  # type: ignore[import-not-found]
from grid_where import PARTS, where  # type: ignore[import-not-found]
from hypothesis import given
from hypothesis import strategies as st

from oocgemm.backends.base import numpy_dtype
from oocgemm.planning.units import parse_size
from oocgemm.timeline.spans import Span, Timeline
from tests.support import TOP
from tests.support.suite import each_value

RATES: dict[str, Any] = {"h2d": 50e9, "d2h": 40e9, "h2d_both": 45e9, "d2h_both": 35e9, "page_read": 35e9}
RATES |= {"staged_h2d": 40e9, "staged_d2h": 30e9, "staged_h2d_both": 30e9, "staged_d2h_both": 25e9}
RATES |= {"disk_write": 1e9, "disk_read": 2e9}


def test_the_gpu_grid_has_every_kind_of_product() -> None:
    usual = chosen(CUDA)
    assert len(usual) >= 36
    assert {case.dtype for case in usual} == set(ITEM_BYTES)
    assert len({case.source for case in usual}) == 7
    assert {case.n for case in usual} >= {1, 8, 64, 512}
    assert any(case.compute == "emulated" for case in usual)
    assert any(case.k > 100 * case.m for case in usual)
    assert any(case.m > 50 * case.k for case in usual)
    assert len(chosen(CUDA, large=True)) > len(usual)
    for cases in (CUDA, HOST):
        assert len({case.name for case in cases}) == len(cases)


@pytest.mark.parametrize("case", CUDA, ids=lambda case: case.name)
def test_tiles_of_the_loop_keep_to_the_device_budget(case: Case) -> None:
    budget = parse_size(case.device or "64GiB")
    m, n, k = loop_tile(case, budget)
    item, out = ITEM_BYTES[case.dtype], case.c_item_bytes
    slots = [1 if stays else 2 for stays in (k >= case.k and m >= case.m, k >= case.k and n >= case.n)]
    tiles = 1 if m >= case.m and n >= case.n else 2
    assert slots[0] * m * k * item + slots[1] * k * n * item + tiles * m * n * out <= budget * 1.01
    assert (m, n, k) <= (case.m, case.n, case.k)


def test_the_loop_splits_the_longest_extent() -> None:
    assert loop_tile(Case(512, 1 << 20, 512, "float32", PAGEABLE), 8 << 30)[:2] == (512, 512)
    assert loop_tile(Case(1 << 20, 512, 64, "float32", PAGEABLE), 8 << 30)[1:] == (64, 512)
    assert loop_tile(Case(64, 512, 1 << 20, "float32", PAGEABLE), 8 << 30)[::2] == (64, 512)


def test_the_bound_names_the_slowest_resource() -> None:
    def slowest(source: str, compute: float | None = None) -> Any:
        found = bounds(Case(1000, 2000, 500, "float64", source), RATES, compute)
        return max(found.items(), key=lambda part: part[1])

    up, down = 8 * (1000 + 500) * 2000, 8 * 1000 * 500
    # While C is downloaded, less is uploaded.
    assert slowest("pinned") == ("copies", pytest.approx(down / 35e9 + (up - 45 / 35 * down) / 50e9))
    assert slowest("pinned", 0.5) == ("compute", 0.5)
    assert slowest("pageable") == ("copies", pytest.approx(down / 25e9 + (up - 30 / 25 * down) / 40e9))
    assert slowest("zarr") == ("disk write", down / 1e9)
    assert slowest("cold-npy") == ("disk read", up / 2e9)
    assert bounds(Case(1000, 2000, 500, "float64", "npy"), RATES)["page cache"] == up / 35e9


def rates_of_a_link() -> st.SearchStrategy[dict[str, float]]:
    rate = st.floats(1.0, 60.0)
    return st.fixed_dictionaries(dict.fromkeys(MODES, rate))


@given(st.floats(0.0, 1e3), st.floats(0.0, 1e3), rates_of_a_link(), st.floats(0.0, 1.0))
def test_no_mix_of_copies_is_faster_than_the_bound(
    up: float, down: float, rates: dict[str, float], share: float
) -> None:
    found = copying_seconds(up, down, rates)
    most = max(up / rates["h2d_both"], down / rates["d2h_both"])
    both = share * most
    alone = max(0.0, up - both * rates["h2d_both"]) / rates["h2d"]
    alone += max(0.0, down - both * rates["d2h_both"]) / rates["d2h"]
    assert found <= (both + alone) * (1 + 1e-9)
    fastest = {way: max(rates[way], rates[f"{way}_both"]) for way in ("h2d", "d2h")}
    assert found >= max(up / fastest["h2d"], down / fastest["d2h"]) * (1 - 1e-9)


def test_the_best_way_of_each_mode_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here each thread of the loop copies 1 byte per second, and the ring 9 bytes per second."""

    class Loop:
        def __init__(self, array: Any, device: Any, way: Any, *, uploads: bool) -> None:
            self.seconds = array.nbytes / way.threads

        def close(self) -> None: ...

    module = ModuleType("staging_loop")
    vars(module).update(
        Loop=Loop,
        Way=lambda threads, buffers, piece, streamed: SimpleNamespace(threads=threads),
        seconds=lambda loops: [loop.seconds for loop in loops],
    )
    cupy = ModuleType("cupy")
    vars(cupy).update(empty=np.empty)
    monkeypatch.setitem(sys.modules, "staging_loop", module)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    ring = {"staged_h2d": 9.0, "staged_d2h": 20.0, "staged_both": (9.0, 9.0)}
    monkeypatch.setattr(grid_piped, "ring_rates", lambda pageable: ring)
    monkeypatch.setattr(grid_piped, "SMALL", (64, 1 << 20))
    found, threads = grid_piped.piped(np.zeros(4096, np.uint8))
    assert found["staged_h2d"] == 12.0
    assert found["staged_d2h"] == 20.0
    assert (found["staged_h2d_both"], found["staged_d2h_both"]) == (9.0, 9.0)
    assert found["staged_small"].keys() == {64}
    assert found["staged_small"][64]["staged_d2h"] == 12.0
    assert len(threads["staged_h2d"]) == 12


def test_the_parts_of_a_run_add_up() -> None:
    def span(number: int, kind: str, lane: str, start: int, end: int, size: int = 0) -> Span:
        return Span(number, kind, "A", lane, lane, 0, (0, 0), 0, start, end, size, 0)

    plain = (
        span(0, "upload", "h2d", 10, 30, 40),
        span(1, "multiply", "compute", 35, 60),
        span(2, "upload", "h2d", 30, 70, 60),
        span(3, "multiply", "compute", 75, 90),
        span(4, "download", "d2h", 80, 110, 30),
    )
    spans = tuple(one._replace(waits=(one.id - 1,)) if one.kind == "multiply" else one for one in plain)
    found = where(Timeline(spans, 120))
    seconds = {part: round(1e9 * found[part]) for part in PARTS if found[part]}
    assert seconds == {
        **{"before": 10, "fill": 25, "compute": 40, "h2d": 10, "issue": 5, "drain": 20, "after": 10}
    }
    assert sum(seconds.values()) == 120
    assert found["rates"] == {"h2d": 1e9 * 100 / 60, "d2h": 1e9}
    assert found["both"] == 0


def test_the_probe_has_other_products() -> None:
    assert len(PROBE) == 18
    assert len({case.name for case in PROBE} | {case.name for case in CUDA}) == 18 + len(CUDA)
    assert sorted(case.source for case in PROBE) == [PAGEABLE] * 9 + [PINNED] * 9


def test_the_summary_names_losers() -> None:
    cases: dict[str, Any] = {
        "fast": {"bound": 0.2, "samples": {"oocgemm": [0.25, 0.24, 0.3], "loop": [0.5]}, "right": {}},
        "slow": {
            "bound": 0.05,
            "samples": {"oocgemm": [0.2], "loop": [0.3], "in_core": [0.1]},
            "right": {"oocgemm": False, "loop": True},
        },
        "none": {"error": "BudgetError()"},
    }
    found = summary(cases)
    assert figures(cases["fast"]) == {"bound": 0.8, "loop": 2.0}
    assert found["geometric_mean"] == pytest.approx((0.8 * 0.25) ** 0.5)
    assert found["worst"] == ["slow", 0.25]
    assert found["worst_above_0.1_s"] == ["fast", 0.8]
    assert found["slower"] == [["slow", "in_core", 0.5]]
    assert found["wrong"] == ["slow: oocgemm"]
    assert found["failed"] == ["none"]
    lines = list(
        rows(
            cases | {"fast": cases["fast"] | {"bound_by": "h2d"}, "slow": cases["slow"] | {"bound_by": "d2h"}}
        )
    )
    assert len(lines) == 4
    assert lines[2].endswith("WRONG")
    assert "BudgetError" in lines[3]


@each_value
@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize(("m", "k", "n"), [(300, 1300, 600), (700, 3, 1), (5, 2500, 40)])
def test_results_are_checked(dtype: str, m: int, k: int, n: int) -> None:
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    case = Case(m, k, n, dtype, PAGEABLE)
    a, b, c = Operands().make(case)
    assert not is_right(case, c)
    wide = {"int8": "int32", "complex64": "complex64", "complex128": "complex128", "float64": "float64"}
    used = wide.get(dtype, "float32")
    c[...] = (a.astype(used) @ b.astype(used)).astype(numpy_dtype(case.c_dtype))
    assert is_right(case, c)
    c[m - 1, n // 2] *= 2
    assert not is_right(case, c)


def test_operands_are_reused_and_restored() -> None:
    operands = Operands()
    first, _, _ = operands.make(Case(600, 1100, 20, "float64", PAGEABLE))
    kept = first.copy()
    again, _, _ = operands.make(Case(600, 1100, 30, "float64", PAGEABLE))
    assert np.array_equal(again, kept)
    operands.make(Case(100, 50, 20, "float32", PAGEABLE))
    restored, _, _ = operands.make(Case(600, 1100, 20, "float64", PAGEABLE))
    assert np.array_equal(restored, kept)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have device arrays be NumPy arrays, and every stream run its commands at once."""

    class Stream:
        ptr = 0

        def __init__(self, **_: Any) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...
        def wait_event(self, event: Any) -> None: ...
        def synchronize(self) -> None: ...

    def copy(to: int, pitch: int, source: int, source_pitch: int, width: int, height: int, *_: int) -> None:
        import ctypes

        for row in range(height):
            ctypes.memmove(to + row * pitch, source + row * source_pitch, width)

    runtime = SimpleNamespace(
        memcpy2DAsync=copy,
        memcpyAsync=lambda to, source, size, *rest: copy(to, size, source, size, size, 1),
    )
    event = SimpleNamespace(record=lambda stream: None, synchronize=lambda: None)
    cuda = ModuleType("cupy.cuda")
    vars(cuda).update(
        Stream=Stream,
        Event=lambda **_: event,
        alloc_pinned_memory=bytearray,
        runtime=runtime,
    )
    module = ModuleType("cupy")
    vars(module).update(cuda=cuda, empty=np.empty)
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)


@pytest.mark.usefixtures("cupy")
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("tile", [(50, 40, 30), (107, 90, 16), (25, 90, 70), (107, 20, 70), (300, 300, 300)])
def test_the_loop_multiplies_any_tile(tile: tuple[int, int, int], in_place: bool) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(-9, 9, (107, 70)).astype(float), rng.integers(-9, 9, (70, 90)).astype(float)
    c = np.full((107, 90), np.nan)

    def multiply(x: Any, y: Any, total: Any, add: bool) -> None:
        total[...] = x @ y + (total if add else 0)

    extents = tuple(min(pair) for pair in zip(tile, (107, 90, 70), strict=True))
    stream_product(a, b, c, extents, multiply, in_place)
    assert np.array_equal(c, a @ b)


@pytest.mark.parametrize("budget", [1 << 12, 1 << 16, 1 << 20])
def test_the_loop_over_slices_multiplies_with_any_budget(budget: int) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(-9, 9, (107, 70)).astype(float), rng.integers(-9, 9, (70, 90)).astype(float)
    c = np.full((107, 90), np.nan)
    slice_product(a, b, c, budget, 8)
    assert np.array_equal(c, a @ b)


def test_results_are_kept_after_each_product(tmp_path: Path) -> None:
    output = tmp_path / "grid.json"
    line = [
        sys.executable,
        str(TOP / "scripts/bench/bench_grid.py"),
        "--backend",
        "host",
        "--shrink",
        "16",
    ]
    line += ["--repeats", "1", "--output", str(output)]
    for only in (("4000x4000x1",), ("8000x8000", "--add")):
        done = subprocess.run(
            [*line, "--only", *only], cwd=tmp_path, check=True, capture_output=True, text=True
        )
    (result,) = json.loads(output.read_text()).values()
    asked = [case for case in HOST if "8000x8000" in case.name or "4000x4000x1 " in case.name]
    assert len(result["cases"]) == len(asked)
    assert result["summary"]["wrong"] == []
    assert result["summary"]["failed"] == []
    for case in result["cases"].values():
        stored = case["case"]["source"] not in IN_MEMORY
        assert case["samples"].keys() == {"oocgemm", "in_core"} | ({"loop"} if stored else set())
    assert "geometric_mean" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["grid.json"]
