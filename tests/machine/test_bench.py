"""Benchmarks of kernels: the model of memory accesses, saved tunings, choices and charts.

Measuring needs a GPU.
"""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oocgemm.errors import BackendError, InputError
from oocgemm.kernels import RUNGS, ladder, tuning
from oocgemm.kernels import spec as model
from oocgemm.kernels.spec import Kernel
from oocgemm.kernels.tuning import CUBLAS, Measured, Tuning
from oocgemm.machine import kernel_bench
from oocgemm.machine.kernel_bench import chart
from oocgemm.planning import OPERANDS, Op
from tests.kernels.test_kernels import call
from tests.support import TOP
from tests.support.backends_here import CUDA, needs_gpu
from tests.support.command import command, contents
from tests.support.gemm_cases import assert_close, random_case

RESULTS = TOP / "scripts" / "bench" / "results"


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OOCGEMM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def rung(name: str) -> Kernel:
    return next(kernel for kernel in ladder.LADDER if kernel.name == name)


def measured_tuning() -> Tuning:
    found = {CUBLAS: Measured(50e12), "register": Measured(15e12, {"TILE": 32, "RESULTS": 16})}
    thin = {CUBLAS: Measured(10e12), "liang_opt": Measured(17e12, rung("liang_opt").variants[0])}
    return Tuning("NVIDIA H200", "2026-11-21", {"float32": {"square": found, "thin": thin}})


def test_a_tuning_is_kept_and_chosen_from() -> None:
    tuning.save(measured_tuning())
    known = tuning.load("NVIDIA H200")
    assert known == measured_tuning()
    square, thin, update = (4096, 4096, 4096), (4096, 100, 4096), (8192, 8192, 512)
    assert known.choice("auto", "float32", "native", square) == (CUBLAS, {})
    assert known.choice("auto", "float32", "native", thin) == ("liang_opt", rung("liang_opt").variants[0])
    # cuBLAS is chosen, since products of this shape were never measured.
    assert known.choice("auto", "float32", "native", update) == (CUBLAS, None)
    assert known.choice("auto", "float64", "native", thin) == (CUBLAS, None)
    assert known.choice("auto", "float32", "tf32", thin) == (CUBLAS, None)
    assert known.choice("register", "float32", "native", square) == ("register", {"TILE": 32, "RESULTS": 16})
    assert known.choice("tiled", "float32", "native", square) == ("tiled", None)
    assert tuning.load("NVIDIA A100") == Tuning("NVIDIA A100", "")


def test_tuning_again_keeps_what_was_not_measured_again() -> None:
    tuning.save(measured_tuning())
    again = {CUBLAS: Measured(1e12)}
    tuning.save(Tuning("NVIDIA H200", "2026-11-22", {"float32": {"thin": again}, "float64": {"thin": again}}))
    known = tuning.load("NVIDIA H200")
    assert known.rungs["float32"]["square"] == measured_tuning().rungs["float32"]["square"]
    assert known.rungs["float32"]["thin"] == known.rungs["float64"]["thin"] == again


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-20],
        lambda text: text.replace('"version": 1', '"version": 2'),
        lambda text: text.replace("NVIDIA H200", "NVIDIA H100"),
        lambda text: "[]",
        lambda text: text.replace('"rate": ', '"rat": '),
    ],
)
def test_a_damaged_tuning_is_as_good_as_none(damage: Any) -> None:
    path = tuning.save(measured_tuning())
    path.write_text(damage(path.read_text()))
    assert tuning.load("NVIDIA H200") == Tuning("NVIDIA H200", "")


def test_rungs_and_variants_that_are_gone_are_left_out() -> None:
    path = tuning.save(measured_tuning())
    path.write_text(path.read_text().replace('"RESULTS": 16', '"RESULTS": 64').replace("liang_opt", "gone"))
    rungs = tuning.load("NVIDIA H200").rungs["float32"]
    assert (set(rungs["square"]), set(rungs["thin"])) == ({CUBLAS}, {CUBLAS})


@given(*(st.integers(1, 40000),) * 3)
def test_the_class_of_a_shape_does_not_depend_on_order(m: int, n: int, k: int) -> None:
    assert tuning.shape_class(m, n, k) == tuning.shape_class(n, m, k) in tuning.CLASSES


def test_the_products_measured_are_of_their_class() -> None:
    assert all(tuning.shape_class(*shape) == name for name, shape in tuning.CLASSES.items())
    assert {tuning.shape_class(*shape) for shape in kernel_bench.UPDATES} == {"update"}


def test_accesses_are_counted_as_by_hand() -> None:
    square = call(128, 128, 128, "float32")
    # Tiles are 16 x 16. Each operand is read 128 / 16 times, with 8 floats per sector of 32 bytes. C is
    # written once.
    assert rung("tiled").model is not None
    tiled = rung("tiled").model(square, {"TILE": 16})  # type: ignore[misc]
    assert tiled == model.Access(2 * 128 * 128 * 8 // 8, 128 * 128 // 8, 0)
    # For each step along k, a warp of the naive kernel reads one sector of A and four sectors of B.
    naive = rung("naive").model(square, {"BLOCK_X": 32, "BLOCK_Y": 8})  # type: ignore[misc]
    assert naive.load_sectors == 128 * 128 // 32 * 128 * 5
    # A transposed tile is written to shared memory column by column. One extra column per row avoids bank
    # conflicts.
    transposed = call(128, 128, 128, "float32", (Op.T, Op.N))
    assert rung("tiled").model(transposed, {"TILE": 32}).bank_conflicts == 0  # type: ignore[misc]
    # Without the extra column, 32 threads access one bank.
    assert model.conflicts(4, lambda lane: lane * 32) == 31
    beta = rung("tiled").model(call(128, 128, 128, "float32", beta=1.0), {"TILE": 16})  # type: ignore[misc]
    assert beta.load_sectors - tiled.load_sectors == tiled.store_sectors


def test_what_would_take_too_long_is_left_out_but_cublas_is_not() -> None:
    naive = rung("naive"), rung("naive").variants[0]
    key = kernel_bench._key(naive)
    assert kernel_bench._affordable(naive, 10, {key: 10.0}, 1.0)
    assert not kernel_bench._affordable(naive, 11, {key: 10.0}, 1.0)
    assert kernel_bench._affordable(naive, 11, {}, 1.0)
    assert kernel_bench._affordable((None, {}), 11, {kernel_bench._key((None, {})): 1.0}, 1.0)


def test_the_picture_has_a_line_for_each_rung_inside_its_frame() -> None:
    result = json.loads((RESULTS / "bench_kernels.json").read_text())
    root = ElementTree.fromstring(chart(result))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    kernels = {row["kernel"] for row in result["rows"]}
    assert all(texts.count(kernel) == 2 for kernel in kernels)  # one chart for float32 and one for float64
    lines = [element.attrib for element in root.iter("{http://www.w3.org/2000/svg}line")]
    coordinates = [float(line[x]) for line in lines for x in ("x1", "x2", "y1", "y2")]
    assert len(lines) > 2 * 6 * len(kernels)
    assert all(0 <= value <= 800 for value in coordinates)
    with pytest.raises(InputError, match="nothing to draw"):
        chart({"rows": [row for row in result["rows"] if row["shape"][0] != row["shape"][1]]})


def test_the_fastest_variant_of_each_rung_is_shown() -> None:
    rows = [
        {"dtype": "float32", "shape": [8, 8, 8], "kernel": "tiled", "flops": flops, "params": {"TILE": tile}}
        for tile, flops in ((8, 1.0), (16, 3.0), (32, 2.0))
    ]
    assert [row["params"] for row in kernel_bench.best_rows({"rows": rows})] == [{"TILE": 16}]


@pytest.mark.skipif(CUDA, reason="a CUDA device answers")
def test_without_a_gpu_there_is_nothing_to_measure() -> None:
    for measure in (kernel_bench.bench_kernels, kernel_bench.tune):
        with pytest.raises(
            BackendError,
            match=r"timing kernels needs an NVIDIA GPU: no NVIDIA device|the cuda backend cannot run",
        ):
            measure()


def test_unknown_names_are_refused_before_anything_is_measured() -> None:
    with pytest.raises(InputError, match="there is no kernel 'fast': choose among naive"):
        kernel_bench.bench_kernels(kernels=["fast"])
    with pytest.raises(InputError, match="there is no dtype 'int7'"):
        kernel_bench.tune(dtypes=["int7"])


def test_kernels_are_tuned_for_every_dtype_where_none_is_named() -> None:
    assert set(kernel_bench.pairs(())) == {(dtype, "native") for dtype in OPERANDS} | {
        ("float32", "tf32"),
        ("float32", "bf16"),
    }
    assert kernel_bench.pairs(["float64"]) == [("float64", "native")]


@pytest.mark.parametrize("mark", [pytest.param(None, marks=needs_gpu)])
def test_bench_covers_all_rungs_and_tuning_is_saved(
    mark: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = kernel_bench.bench_kernels(shapes=[(64, 64, 64), (700, 300, 100)], seconds=0.001)
    assert {row["kernel"] for row in result["rows"]} == {CUBLAS, *RUNGS}
    assert all(row["flops"] > 0 and row["seconds"][1] <= row["seconds"][0] for row in result["rows"])
    assert all(0 < row["occupancy"] <= 1 for row in result["rows"] if row["kernel"] != CUBLAS)
    counted = {row["kernel"]: row["ncu"] for row in result["rows"] if "ncu" in row}
    assert set(counted) == (set() if "not_counted" in result else {CUBLAS, *RUNGS})
    assert all(0 < found["occupancy"] <= 1 and found["store_sectors"] > 0 for found in counted.values())
    found = kernel_bench.tune(dtypes=["float32"], seconds=0.001, classes={"thin": (300, 40, 50)})
    tuning.save(found)
    assert tuning.load(found.device) == found


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bench", "kernels", "--size", "8x8"], "write MxNxK"),
        (["bench", "kernels", "--kernel", "x"], "is not one of 'naive'"),
        (["tune", "--dtype", "x"], "is not one of 'float16'"),
        (
            ["run", "A.npy", "B.npy", "C.npy", "--backend", "host", "--kernel", "tiled"],
            "no kernel 'tiled': choose one of",
        ),
        (
            [
                "plan",
                "A.npy",
                "B.npy",
                "--backend",
                "cuda",
                "--device-memory",
                "1GiB",
                "--kernel",
                "single_block",
            ],
            "single_block cannot do this product: it stores op(A) 300 x ",
        ),
    ],
)
def test_a_command_says_what_is_wrong_in_one_line(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("A.npy", "B.npy"):
        np.save(name, np.ones((300, 300), "float32"))
    before = contents(tmp_path)
    done = command(*arguments)
    assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1)
    assert said in done.err
    assert contents(tmp_path) == before


def test_a_plan_takes_a_kernel_that_can_do_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("A.npy", "B.npy"):
        np.save(name, np.ones((300, 300)))
    given = "plan", "A.npy", "B.npy", "--backend", "cuda", "--device-memory", "1GiB", "--kernel"
    assert command(*given, "single_block", "--tile", "64x64x64").code == 0
    assert all(command(*given, name).code == 0 for name in RUNGS if name != "single_block")


def test_assert_close_rejects_nonfinite_and_wrong_elements() -> None:
    case = random_case(np.random.default_rng(7), "float32", (Op.T, Op.N), (20, 30, 40))
    exact = case.alpha * (case.a.T.astype(float) @ case.b.astype(float)) + case.beta * case.c
    good = exact.astype(np.float32)
    assert_close(good, case)
    for wrong in (np.nan, np.inf, good[3, 4] + 1e-3):
        bad = good.copy()
        bad[3, 4] = wrong
        with pytest.raises(AssertionError, match=r"at \(.*3.*, .*4.*\): .* off by"):
            assert_close(bad, case)
