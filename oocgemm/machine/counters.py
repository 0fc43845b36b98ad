"""What the GPU counts of kernels, by Nsight Compute's `ncu`: it runs this module, which launches each kernel once.

Metrics and the raw page are those of NVIDIA's Nsight Compute documentation. Sectors are of 32 bytes.
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
    "sectors_from_l2": "l1tex__m_xbar2l1tex_read_sectors.sum",  # by loads, cp.async and the copy engine alike
    "bank_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "shared_loads": "smsp__inst_executed_op_shared_ld.sum",  # these are instructions of warps
    "shared_stores": "smsp__inst_executed_op_shared_st.sum",
    "matrix_loads": "smsp__inst_executed_op_ldsm.sum",
    "time": "gpu__time_duration.sum",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
# Clocks are left as they are; numbers are not scaled, so that a column has one unit.
_OPTIONS = "--csv --page raw --print-units base --print-kernel-base function --clock-control none --target-processes all"

Launched = Mapping[str, str]  # a row of the raw page, by its header


def counted(rows: Sequence[Mapping[str, Any]], device: int) -> list[dict[str, float | None]]:
    """What the device counts of one launch of each row of `bench.bench_kernels`.

    Sectors loaded, stored and brought from L2, bank conflicts in extra cycles an access to shared memory, and the occupancy
    achieved, as a fraction. None is what ncu does not tell.

    Raises:
        BackendError: nothing can be counted here, and why.
    """
    tool = shutil.which("ncu")
    if tool is None:
        raise BackendError("ncu, which comes with Nsight Compute, is not on PATH")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        asked = [tool, *_OPTIONS.split(), "--metrics", ",".join(METRICS.values()), "--log-file", str(log)]
        child = [sys.executable, "-m", "oocgemm.machine.counters", str(device), json.dumps(rows)]
        try:
            done = subprocess.run([*asked, *child], capture_output=True, text=True, check=False)
        except OSError as error:
            raise BackendError(f"ncu cannot be started: {error}") from error
        told = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    launches, names = launched(told), [line for line in done.stdout.splitlines() if line.startswith("[")]
    if done.returncode or "==ERROR==" in told or not (launches and names):
        raise BackendError(_refusal(told, done.stderr or done.stdout))
    return [_summed(own) for own in _dealt(launches, json.loads(names[-1]))]


def launched(told: str) -> list[Launched]:
    """The launches of a raw page in CSV, in order: a header, a row of units, a row for each; ncu's own lines are between."""
    lines = [line for line in told.splitlines() if line.startswith('"')]
    return [row for row in csv.DictReader(lines) if row.get("ID")]


def _refusal(told: str, complaint: str) -> str:
    """Why there are no launches, by what ncu told and what went to stderr."""
    if "ERR_NVGPUCTRPERM" in told + complaint:
        return (
            "this user may not read the GPU's counters (ERR_NVGPUCTRPERM): run it as root, or load the driver's module "
            "with NVreg_RestrictProfilingToAdminUsers=0"
        )
    own = [line for line in told.splitlines() if line.startswith(("==ERROR==", "==WARNING=="))]
    return " ".join(["ncu failed:", *own[:1], *complaint.strip().splitlines()[-1:]])


def _dealt(launches: Sequence[Launched], expected: Sequence[Sequence[str]]) -> list[list[Launched]]:
    """The launches of each row, of which our kernels are named; cuBLAS, without names, takes what is not ours."""
    left, ours = deque(launches), {name for names in expected for name in names}
    found: list[list[Launched]] = []
    for names in expected:
        own: list[Launched] = []
        while left and (len(own) < len(names) if names else left[0]["Kernel Name"] not in ours):
            own.append(left.popleft())
        found.append(own)
    seen = [[launch["Kernel Name"] for launch in own] for own in found]
    if left or any(not now or (names and now != names) for now, names in zip(seen, expected, strict=True)):
        raise BackendError(f"ncu counted other kernels than were launched: {seen}, not {expected}")
    return found


def _summed(launches: Sequence[Launched]) -> dict[str, float | None]:
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
    """A number, with its thousands apart; NaN for "n/a"."""
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return nan


def _launch(device: int, rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Launch each row once; the names of our kernels as they went."""
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
