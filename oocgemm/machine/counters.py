"""Read the hardware counters of kernels with `ncu`, the command of NVIDIA Nsight Compute.

`ncu` runs this module as a program, which launches each kernel once. Its output (the "raw page") is a table
of metrics with one row per launch. The documentation of Nsight Compute describes the table and the metrics.
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
from oocgemm.kernels.ladder import choose
from oocgemm.kernels.tuning import CUBLAS

# The name of the ncu metric for each counter. A sector is 32 contiguous bytes of device memory.
METRICS = {
    "load_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "store_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    # Unlike "load_sectors", "sectors_from_l2" also counts the sectors that cp.async and TMA copy.
    "sectors_from_l2": "l1tex__m_xbar2l1tex_read_sectors.sum",
    "bank_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    # "shared_loads", "shared_stores" and "matrix_loads" count instructions of warps. Their sum is the number
    # of accesses to shared memory.
    "shared_loads": "smsp__inst_executed_op_shared_ld.sum",
    "shared_stores": "smsp__inst_executed_op_shared_st.sum",
    "matrix_loads": "smsp__inst_executed_op_ldsm.sum",
    "time": "gpu__time_duration.sum",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
# --clock-control none: by default, ncu slows the GPU's clocks. --print-units base: otherwise ncu chooses a
# unit per number, such as kilobytes.
_OPTIONS = (
    "--csv --page raw --print-units base --print-kernel-base function --clock-control none "
    "--target-processes all"
)

Launch = Mapping[str, str]  # the metrics of one launch, as ncu prints them: text by column name


def read_counters(rows: Sequence[Mapping[str, Any]], device: int) -> list[dict[str, float | None]]:
    """Run the product of each benchmark row once under ncu, and return its counters.

    Args:
        rows: rows of the result of `bench.bench_kernels`.
        device: number of the CUDA device.

    Returns:
        For each row: the sectors loaded, stored and read from the L2 cache; bank conflicts, in extra cycles
        per access to shared memory; and the achieved occupancy, as a fraction. Unknown values are None.

    Raises:
        BackendError: ncu is missing or fails.
    """
    tool = shutil.which("ncu")
    if tool is None:
        raise BackendError("ncu is not on the PATH: install NVIDIA Nsight Compute")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        profiler = [tool, *_OPTIONS.split(), "--metrics", ",".join(METRICS.values()), "--log-file", str(log)]
        child = [sys.executable, "-m", "oocgemm.machine.counters", str(device), json.dumps(rows)]
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
    """Parse the table that ncu prints as CSV, and return its launches in order.

    The table has a header, a row of units, and a row per launch. Messages of ncu between the rows are
    skipped.
    """
    lines = [line for line in output.splitlines() if line.startswith('"')]
    return [row for row in csv.DictReader(lines) if row.get("ID")]


def _failure(output: str, stderr: str) -> str:
    """Return an error message that says why ncu read no counters. `output` is the log of ncu."""
    if "ERR_NVGPUCTRPERM" in output + stderr:
        return (
            "this user may not read the GPU's counters (ERR_NVGPUCTRPERM): run as root, or load the driver "
            "module with NVreg_RestrictProfilingToAdminUsers=0"
        )
    own = [line for line in output.splitlines() if line.startswith(("==ERROR==", "==WARNING=="))]
    return " ".join(["ncu failed:", *own[:1], *stderr.strip().splitlines()[-1:]])


def _grouped(launches: Sequence[Launch], expected: Sequence[Sequence[str]]) -> list[list[Launch]]:
    """Divide the launches, which are in order, among the benchmark rows that caused them.

    `expected` has the names of each row's kernels. A row of cuBLAS has no names, because its kernels are
    unknown. It gets all launches up to the next launch of a kernel of oocgemm.

    Raises:
        BackendError: the launches are not the expected ones.
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
    """Combine the counters of all launches of one product, as `read_counters` returns them."""
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
    """Run the product of each benchmark row once, and return the names of the launched kernels for each row.

    A row of cuBLAS gets no names, because the names of its kernels are unknown.
    """
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
