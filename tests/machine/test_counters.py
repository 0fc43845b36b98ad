"""Hardware counters that ncu reads. A fake program stands for ncu.

The tests cover launches, parsing, grouping and display.
"""

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from oocgemm.cli.display import print_bench
from oocgemm.cli.process import snake_keys
from oocgemm.errors import BackendError
from oocgemm.kernels.ladder import LADDER
from oocgemm.kernels.tuning import CUBLAS
from oocgemm.machine import kernel_bench
from tests.support import TOP
from tests.support.suite import slow

RESULTS = TOP / "scripts" / "bench" / "results"
ladder_tables: Any = importlib.import_module("ladder_tables")
tables: Any = importlib.import_module("tables")

HEADER = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size",'
    '"Device","CC","gpu__time_duration.sum","l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",'
    '"l1tex__m_xbar2l1tex_read_sectors.sum","l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",'
    '"l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum","sm__warps_active.avg.pct_of_peak_sustained_active",'
    '"smsp__inst_executed_op_ldsm.sum","smsp__inst_executed_op_shared_ld.sum","smsp__inst_executed_op_shared_st.sum"'
)
UNITS = '"","","","","","","","","","","","ns","","sector","sector","sector","%","inst","inst","inst"'


def launch(number: int, name: str, numbers: str) -> str:
    where = (
        f'"{number}","4711","python3.12","127.0.0.1","{name}","1","13","(32, 8, 1)","(64, 256, 1)","0","9.0"'
    )
    return f"{where},{numbers}"


PAGE = "\n".join(
    [
        "==PROF== Connected to process 4711 (/usr/bin/python3.12)",
        '==PROF== Profiling "naive_grid" - 0: 0%....50%....100% - 4 passes',
        HEADER,
        UNITS,
        launch(0, "void cutlass::Kernel2<gemm, 4>", '"3,000","7","1","20","5","10","30","4","0"'),
        launch(1, "splitKreduce_kernel", '"1,000","0","2","10","5","50.00","0","0","0"'),
        launch(2, "naive_grid", '"9","0","1,048,576","2,147,483,648","524,288","98.76","0","0","0"'),
        launch(3, "naive_grid", '"9","0","24","352","12","98.76","0","0","0"'),
        "==WARNING== A message in between",
        launch(4, "tiled", '"9","n/a","77","78","79","50","0","3","1"'),
        "==PROF== Disconnected from process 4711",
        "",
    ]
)


def test_counters_of_the_launches_of_a_row_are_summed() -> None:
    dealt = kernel_bench._grouped(
        kernel_bench.parse_launches(PAGE), [[], ["naive_grid", "naive_grid"], ["tiled"]]
    )
    blas, grid, tiled = map(kernel_bench._summed, dealt)
    assert blas == {
        **{"load_sectors": 30, "store_sectors": 10, "sectors_from_l2": 3, "bank_conflicts": 7 / 34},
        # The launches had 10% for three quarters of the time, and 50% for the rest.
        "occupancy": pytest.approx(0.2),
    }
    assert grid == {
        **{"load_sectors": 2**31 + 352, "store_sectors": 2**19 + 12, "sectors_from_l2": 2**20 + 24},
        **{"bank_conflicts": 0, "occupancy": pytest.approx(0.9876)},
    }
    assert tiled["bank_conflicts"] is None
    assert tiled["sectors_from_l2"] == 77


@pytest.mark.parametrize(
    "expected",
    [
        [[], ["naive_grid", "naive_grid"]],
        [[], ["naive_grid"], ["naive_grid"], ["tiled"], ["tiled"]],
        [["naive_grid", "naive_grid"], ["tiled"]],
        [[], ["naive_grid", "tiled"], ["naive_grid"]],
        [[], ["naive_grid", "naive_grid"], ["tiled"], []],
    ],
)
def test_launches_that_are_not_those_made_are_refused(expected: list[list[str]]) -> None:
    with pytest.raises(BackendError, match="ncu reports other kernels than were launched"):
        kernel_bench._grouped(kernel_bench.parse_launches(PAGE), expected)


# Replaces the GPU in the process that ncu starts. It records the launches in a file.
DEVICE = """
import os, sys, types
from contextlib import contextmanager
from oocgemm.kernels.spec import Call
from oocgemm.planning import Op

class Stopwatch:
    def __init__(self, device): assert device == 1
    def __enter__(self): return self
    def __exit__(self, *_): pass
    @contextmanager
    def operands(self, p):
        yield Call(p[3], Op.N, Op.N, *p[:3], 1.0, 0, p[2], 0, p[1], p[4], 0, p[1], p[5])
    def seconds(self, kernel, params, call):
        if kernel is None: names = ["void cutlass::Kernel2<gemm, 4>", "splitKreduce_kernel"]
        else: names = [kernel.entry or kernel.source for _ in kernel.parts(call, params)]
        with open(os.environ["LAUNCHED"], "a") as file: print(*names, sep="\\n", file=file)

module = sys.modules["oocgemm.backends.cuda.measure"] = types.ModuleType("measure")
module.Stopwatch = Stopwatch
module.Product = lambda m, n, k, dtype, beta, compute: (m, n, k, dtype, beta, compute)
"""

# A fake ncu. It runs the command that follows its options, and writes a page of raw results.
NCU = f"""#!{sys.executable}
import os, subprocess, sys
from pathlib import Path
at = sys.argv.index({sys.executable!r})
options = sys.argv[1:at]
metrics = options[options.index("--metrics") + 1].split(",")
log = Path(options[options.index("--log-file") + 1])
if said := os.environ.get("SAID"):
    log.write_text(said)
    sys.exit(1)
if code := subprocess.run(sys.argv[at:]).returncode:
    log.write_text("==PROF== Connected\\n==ERROR== The application returned an error code (1).\\n")
    sys.exit(code)
fixed = ["ID", "Kernel Name"]
lines = [fixed + metrics, ["", ""] + ["sector"] * len(metrics)]
for number, name in enumerate(Path(os.environ["LAUNCHED"]).read_text().splitlines()):
    lines.append([str(number), name] + ["1,000" if "pct" not in metric else "50" for metric in metrics])
page = "\\n".join(",".join('"' + cell + '"' for cell in line) for line in lines)
log.write_text("==PROF== Connected\\n" + page + "\\n")
"""


@pytest.fixture
def ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a fake ncu on the PATH, and replace the GPU in the process that it starts.

    Return the path of the file that records the launches.
    """
    for name, text in (("ncu", NCU), ("sitecustomize.py", DEVICE)):
        (tmp_path / name).write_text(text)
    (tmp_path / "ncu").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(kernel_bench.__file__).parents[2])])
    )
    monkeypatch.setenv("LAUNCHED", str(tmp_path / "launched"))
    return tmp_path / "launched"


def kept() -> dict[str, Any]:
    """Return the benchmark in scripts/bench/results/ without its counters."""
    result: dict[str, Any] = snake_keys(json.loads((RESULTS / "bench_kernels.json").read_text()))
    result.pop("not_counted", None)
    for row in result["rows"]:
        row.pop("ncu", None)
    return result


def test_each_rung_is_counted_on_its_largest_affordable_product(
    ncu: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = kept()
    kernel_bench.count(result, 1)
    assert "not_counted" not in result
    rows = [row for row in result["rows"] if "ncu" in row]
    rungs = {(row["dtype"], row["kernel"]) for row in result["rows"]}
    assert sorted((row["dtype"], row["kernel"]) for row in rows) == sorted(rungs)
    shapes = {tuple(row["shape"]) for row in rows if row["kernel"] != "single_block"}
    assert shapes == {(2048, 2048, 2048)}
    for row in rows:
        launches = 2 if row["kernel"] == CUBLAS else 1
        key = "dtype", "shape", "kernel"
        variants = [one for one in result["rows"] if all(one[x] == row[x] for x in key)]
        assert row["flops"] == max(one["flops"] for one in variants)
        assert row["ncu"]["load_sectors"] == 1000 * launches
        assert (row["ncu"]["bank_conflicts"], row["ncu"]["occupancy"]) == (pytest.approx(1 / 3), 0.5)
    print_bench(result, kernel_bench.best_rows(result))
    shown = capsys.readouterr().out
    tiled = next(row for row in rows if (row["dtype"], row["kernel"]) == ("float64", "tiled"))
    model = f"{tiled['load_sectors']:.3g} / 1e+03", f"{tiled['occupancy']:.3g} / 0.5"
    (tmp_path / "bench_kernels_counters.json").write_text(json.dumps(result))
    with patch.object(tables, "RESULTS", tmp_path):
        table = ladder_tables.counted()
    for lines in (shown.splitlines(), table):
        assert any(all(cell in line for cell in ("float64", "tiled", *model)) for line in lines)


def test_a_product_launched_in_parts_is_one_row(ncu: Path) -> None:
    given = {"dtype": "float32", "shape": [40000, 8, 8], "beta": 0.0, "kernel": CUBLAS, "params": {}}
    rounded = given | {"dtype": "float32/tf32"}
    grid = next(kernel for kernel in LADDER if kernel.name == "naive_grid")
    mma = [kernel for kernel in LADDER if (kernel.source, kernel.compute) == ("tensor_mma", ("tf32",))][-1]
    rows = [
        *(given, given | {"kernel": "naive_grid", "params": grid.variants[0]}),
        *(rounded, rounded | {"kernel": "tensor", "params": mma.variants[0]}),
    ]
    found = kernel_bench.read_counters(rows, 1)
    assert [one["store_sectors"] for one in found] == [2000, 2000, 2000, 1000]
    launches = ncu.read_text().splitlines()
    assert (launches[2:4], launches[-1]) == (["naive_grid", "naive_grid"], "tensor_mma")


def test_cublas_alone_is_not_counted(ncu: Path) -> None:
    given = {"shape": [64, 64, 64], "beta": 0.0, "params": {}, "flops": 1.0}
    short, single = ({**given, "dtype": dtype, "kernel": CUBLAS} for dtype in ("float16", "float32"))
    tiled = {**given, "dtype": "float32", "kernel": "tiled", "params": {"TILE": 16}}
    kernel_bench.count({"rows": [short, single, tiled]}, 1)
    assert ["ncu" in row for row in (short, single, tiled)] == [False, True, True]
    alone: dict[str, Any] = {"rows": [short]}
    kernel_bench.count(alone, 1)
    assert alone == {"rows": [short]}


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (
            "==PROF== Connected to process 1\n==ERROR== ERR_NVGPUCTRPERM - The user does not have "
            "permission to access "
            "NVIDIA GPU Performance Counters on the target device 0. For instructions ...\n",
            r"may not read the GPU's counters \(ERR_NVGPUCTRPERM\): run as root",
        ),
        *slow(
            (
                "==ERROR== Failed to find metric regex:^x$\n",
                r"ncu failed: ==ERROR== Failed to find metric regex:\^x\$",
            )
        ),
        *slow(
            (
                "==PROF== Connected\n==WARNING== No kernels were profiled.\n",
                "ncu failed: ==WARNING== No kernels",
            )
        ),
        (PAGE, "ncu failed: ==WARNING== A message in between"),  # ncu ends with exit code 1
    ],
)
def test_where_ncu_refuses_a_line_says_why(
    ncu: Path, said: str, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SAID", said)
    result = kept()
    kernel_bench.count(result, 1)
    with pytest.raises(BackendError, match=why):
        raise BackendError(result["not_counted"])
    assert not any("ncu" in row for row in result["rows"])
    print_bench(result, kernel_bench.best_rows(result))
    assert f"no counters of the device: {result['not_counted']}" in capsys.readouterr().out.splitlines()


def test_what_fails_below_ncu_is_said(ncu: Path) -> None:
    with pytest.raises(
        BackendError, match=r"ncu failed: ==ERROR== The application .* error code \(1\)\. AssertionError"
    ):
        kernel_bench.read_counters([], 2)  # the fake device has the number 1, so number 2 is wrong


def test_without_ncu_a_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = kept()
    kernel_bench.count(result, 0)
    assert result["not_counted"] == "ncu is not on the PATH: install NVIDIA Nsight Compute"
