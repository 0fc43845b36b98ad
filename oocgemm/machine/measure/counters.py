"""Hardware counters of kernels, read with Nsight Compute's `ncu`.

`ncu` runs this module as a program, which launches each kernel once. NVIDIA's Nsight Compute documentation
describes the metrics and the raw page. A sector has 32 bytes.
"""

import csv
import json
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from math import isnan, nan
from operator import mul
from pathlib import Path
from typing import Any

from oocgemm.errors import BackendError
from oocgemm.kernels.registry import choose
from oocgemm.kernels.tuning import CUBLAS

METRICS = {
    "load_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "store_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "sectors_from_l2": "l1tex__m_xbar2l1tex_read_sectors.sum",  # of loads, cp.async and TMA
    "bank_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "shared_loads": "smsp__inst_executed_op_shared_ld.sum",  # warp instructions, as the next two
    "shared_stores": "smsp__inst_executed_op_shared_st.sum",
    "matrix_loads": "smsp__inst_executed_op_ldsm.sum",
    "time": "gpu__time_duration.sum",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
# Clocks are not locked. Base units keep every column in one unit.
_OPTIONS = (
    "--csv --page raw --print-units base --print-kernel-base function --clock-control none "
    "--target-processes all"
)

Launch = Mapping[str, str]  # a row of the raw page, by column name


def read_counters(rows: Sequence[Mapping[str, Any]], device: int) -> list[dict[str, float | None]]:
    """Launch each row of `bench.bench_kernels` once under ncu and return its counters.

    The counters are sectors loaded, stored and read from L2, bank conflicts as extra cycles per access to
    shared memory, and the achieved occupancy as a fraction. A value is None if ncu does not report it.

    Raises:
        BackendError: ncu is missing or fails.
    """
    tool = shutil.which("ncu")
    if tool is None:
        raise BackendError("ncu is not on the PATH: install NVIDIA Nsight Compute")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        profiler = [tool, *_OPTIONS.split(), "--metrics", ",".join(METRICS.values()), "--log-file", str(log)]
        child = [sys.executable, "-m", "oocgemm.machine.measure.counters", str(device), json.dumps(rows)]
        try:
            done = subprocess.run([*profiler, *child], capture_output=True, text=True, check=False)
        except OSError as error:
            raise BackendError(f"ncu cannot be started: {error}") from error
        output = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    launches, names = (
        parse_launches(output),
        [line for line in done.stdout.splitlines() if line.startswith("[")],
    )
    if done.returncode or "==ERROR==" in output or not (launches and names):
        raise BackendError(_failure(output, done.stderr or done.stdout))
    return [_summed(own) for own in _grouped(launches, json.loads(names[-1]))]


def parse_launches(output: str) -> list[Launch]:
    """Parse the launches of a raw page in CSV, in order.

    The page has a header, a row of units and a row per launch. Messages of ncu may come between them.
    """
    lines = [line for line in output.splitlines() if line.startswith('"')]
    return [row for row in csv.DictReader(lines) if row.get("ID")]


def _failure(output: str, stderr: str) -> str:
    """Return why there are no counters, from the output and the stderr of ncu."""
    if "ERR_NVGPUCTRPERM" in output + stderr:
        return (
            "this user may not read the GPU's counters (ERR_NVGPUCTRPERM): run as root, or load the driver "
            "module with NVreg_RestrictProfilingToAdminUsers=0"
        )
    own = [line for line in output.splitlines() if line.startswith(("==ERROR==", "==WARNING=="))]
    return " ".join(["ncu failed:", *own[:1], *stderr.strip().splitlines()[-1:]])


def _grouped(launches: Sequence[Launch], expected: Sequence[Sequence[str]]) -> list[list[Launch]]:
    """Group launches by row.

    `expected` names the kernels of each row; cuBLAS rows, without names, take all others.

    Raises `BackendError` if the launches are not the expected ones.
    """
    left, ours = deque(launches), {name for names in expected for name in names}
    found: list[list[Launch]] = []
    for names in expected:
        own: list[Launch] = []
        while left and (len(own) < len(names) if names else left[0]["Kernel Name"] not in ours):
            own.append(left.popleft())
        found.append(own)
    seen = [[launch["Kernel Name"] for launch in own] for own in found]
    if left or any(not now or (names and now != names) for now, names in zip(seen, expected, strict=True)):
        raise BackendError(f"ncu reports other kernels than were launched: {seen} instead of {expected}")
    return found


def _summed(launches: Sequence[Launch]) -> dict[str, float | None]:
    """Sum the counters of several launches; the occupancy is weighted by time."""
    numbers = {name: [_number(launch.get(metric)) for launch in launches] for name, metric in METRICS.items()}
    total = {name: sum(values) for name, values in numbers.items()}
    accesses = total["shared_loads"] + total["shared_stores"] + total["matrix_loads"]
    active = sum(map(mul, numbers["time"], numbers["occupancy"]))
    found = {
        **{name: total[name] for name in ("load_sectors", "store_sectors", "sectors_from_l2")},
        "bank_conflicts": total["bank_conflicts"] and total["bank_conflicts"] / (accesses or nan),
        "occupancy": active / (total["time"] or nan) / 100,
    }
    return {name: None if isnan(value) else value for name, value in found.items()}


def _number(text: str | None) -> float:
    """Parse a number with thousands separators; NaN if it is missing or "n/a"."""
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return nan


def _launch(device: int, rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Launch each row once; return the names of our kernels by row, in the order of their launches."""
    from oocgemm.backends.cuda.measure import Product, Stopwatch

    names: list[list[str]] = []
    with Stopwatch(device) as watch:
        for row in rows:
            dtype, _, compute = row["dtype"].partition("/")
            m, n, k = row["shape"]
            with watch.operands(
                Product(m, n, k, dtype, beta=row["beta"], compute=compute or "native")
            ) as call:
                if row["kernel"] == CUBLAS:
                    names.append([])
                    watch.seconds(None, {}, call)
                else:
                    kernel, params = choose(row["kernel"], call, row["params"])
                    names.append([kernel.entry or kernel.source for _ in kernel.parts(call, params)])
                    watch.seconds(kernel, params, call)
    return names


if __name__ == "__main__":
    print(json.dumps(_launch(int(sys.argv[1]), json.loads(sys.argv[2]))))
