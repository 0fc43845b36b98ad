"""Benchmark oocgemm's CUDA kernels against cuBLAS, and find the fastest kernel for each class of shapes.

`chart` draws the result of a benchmark.

`read_counters` reads the hardware counters of kernels with `ncu`, the command of NVIDIA Nsight Compute. `ncu`
runs this module as a program, which launches each kernel once. Its output (the "raw page") is a table of
metrics with one row per launch. The documentation of Nsight Compute describes the table and the metrics.
"""

import csv
import json
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from itertools import pairwise
from math import isnan, log2, nan, prod
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oocgemm import backends
from oocgemm.backends.base import known_dtypes
from oocgemm.errors import BackendError, InputError
from oocgemm.kernels import RUNGS, tuning
from oocgemm.kernels.ladder import LADDER, choose
from oocgemm.kernels.spec import Call, Kernel, Params
from oocgemm.kernels.tuning import CUBLAS, Measured, Tuning
from oocgemm.planning import COMPUTES, OPERANDS

if TYPE_CHECKING:
    from oocgemm.backends.cuda.measure import Product, Stopwatch

# A kernel that is timed, and its parameters. None, with no parameters, stands for cuBLAS.
Contender = tuple[Kernel | None, Params]
Say = Callable[[str], None]
Shape = tuple[int, int, int]

# Precisions that are benchmarked. "emulated" is left out: no kernel of the ladder computes emulated products.
PRECISIONS = [compute for compute in COMPUTES if compute != "emulated"]
# The default products of a benchmark. SQUARES has values of m = n = k. ODD and THIN have shapes (m, n, k).
# The products of ODD have unaligned rows and partial tiles.
SQUARES = (8, 32, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
ODD = ((1023, 1025, 1021), (4097, 4095, 4099))
THIN = ((16384, 16, 4096), (16, 16384, 4096), (4096, 1024, 16384), (1024, 16384, 4096))
# Products (m, n, k) as large as the steps of a run. They add to C (beta = 1), as steps do.
UPDATES = ((12288, 12288, 512), (12288, 12288, 1024), (12288, 12288, 2048))
SHAPES: tuple[Shape, ...] = (*((n, n, n) for n in SQUARES), *ODD, *THIN, *UPDATES)

# Maximum of m n k for a product whose hardware counters are read. To read them, ncu runs each kernel several
# times, so larger products would take long. If all products are larger, the smallest is used.
_MAX_COUNTED = 2048**3

# Peak flops per clock cycle and multiprocessor, by compute capability, and by dtype or reduced precision.
# Where the tensor cores are the fastest unit, the peak is theirs. Source: NVIDIA's architecture white papers.
_FLOPS_PER_CLOCK = {
    (8, 0): {
        "float64": 128,
        "float32": 128,
        "tf32": 1024,
        "bf16": 2048,
        "float16": 2048,
        "bfloat16": 2048,
        "int8": 4096,
    },
    (9, 0): {
        "float64": 256,
        "float32": 256,
        "tf32": 2048,
        "bf16": 4096,
        "float16": 4096,
        "bfloat16": 4096,
        "int8": 8192,
    },
}
# Headings of the columns that compare predicted accesses and occupancy with the hardware counters.
AGAINST = (
    "loads: model / ncu",
    "stores: model / ncu",
    "from L2",
    "conflicts",
    "occupancy: possible / achieved",
)
BY_NCU = (
    "Counters of one launch, by ncu; loads and stores in sectors of 32 bytes. Conflicts are extra cycles per "
    "access to shared memory: the model gives the worst access, ncu the mean. Loads may exclude what "
    "cp.async and TMA copy to shared memory; the sectors from L2 include it, but exclude hits of the L1 "
    "cache."
)
_COLOURS = (
    "#000000",
    "#4477aa",
    "#66ccee",
    "#228833",
    "#ccbb44",
    "#ee6677",
    "#aa3377",
    "#bbbbbb",
    "#ee8866",
    "#44bb99",
)


def bench_kernels(
    *,
    device: int = 0,
    dtypes: Sequence[str] = (),
    compute: str = "native",
    kernels: Sequence[str] = (),
    shapes: Sequence[Shape] = SHAPES,
    seconds: float = 0.05,
    limit: float = 1.0,
    say: Say = lambda doing: None,
) -> dict[str, Any]:
    """Time oocgemm's CUDA kernels, with each of their sets of parameters, and cuBLAS.

    Args:
        device: number of the CUDA device.
        dtypes: dtypes of A, B and C. The default is float32 and float64, as far as `compute` allows them.
        compute: precision of the products, one of `PRECISIONS`.
        kernels: names of kernels; all by default.
        shapes: products (m, n, k). Those of the class "update" (`tuning.shape_class`) are added to C (beta =
            1), like the steps of a run; the others overwrite C.
        seconds: approximate time per kernel, set of parameters and shape.
        limit: maximum seconds of a single product. A product that would take a kernel longer is not timed
            with it. All products are timed with cuBLAS.
        say: called with a description of each measurement before it starts.

    Returns:
        Plain data: the device, and a row per dtype, shape, kernel and set of parameters. A row has the
        flop/s, its ratio to the peak and to cuBLAS, the occupancy, and the predicted memory accesses.

    Raises:
        InputError: there is no such kernel, dtype or precision.
        BackendError: no device is available.
    """
    _check_known("kernel", kernels, RUNGS)
    _check_known("dtype", dtypes, OPERANDS)
    dtypes = dtypes or [dtype for dtype in ("float32", "float64") if dtype in COMPUTES.get(compute, ())]
    for dtype in dtypes or ("float32",):
        _check_known(f"precision of {dtype}", [compute], [c for c in PRECISIONS if dtype in COMPUTES[c]])
    rows: list[dict[str, Any]] = []
    with _open_stopwatch(device) as watch:
        facts = watch.multiplier.kernels.device
        clock = watch.clocks.max()
        for dtype in dtypes:
            peak = _peak(facts.capability, facts.processors, clock, dtype if compute == "native" else compute)
            best: dict[Any, float] = {}
            for shape in shapes:
                say(f"{dtype}, {'x'.join(map(str, shape))}")
                product = _product(dtype, compute, shape)
                with watch.operands(product) as call:
                    fitting = [
                        c for c in _contenders(kernels, call) if _affordable(c, product.flops, best, limit)
                    ]
                    timed = watch.compare(fitting, call, seconds)
                    reference = product.flops / timed[0].seconds
                    for contender, timing in zip(fitting, timed, strict=True):
                        rate = product.flops / timing.seconds
                        best[_key(contender)] = max(rate, best.get(_key(contender), 0.0))
                        rows.append(
                            {
                                "dtype": tuning.measured_as(dtype, compute),
                                "shape": shape,
                                "beta": product.beta,
                                "kernel": contender[0].name if contender[0] else CUBLAS,
                                "params": dict(contender[1]),
                                "flops": rate,
                                "of_peak": rate / peak if peak else None,
                                "of_cublas": rate / reference,
                                "seconds": [timing.seconds, timing.minimum, timing.maximum],
                                "samples": timing.samples,
                                "clock": timing.clock,
                            }
                            | _modelled(watch, contender, call, product)
                        )
        result = {
            "device": watch.name,
            "date": date.today().isoformat(),
            "max_clock": clock,
            "versions": backends.open_backend("cuda", device).describe(),
            "rows": rows,
        }
    say("hardware counters")
    count(result, device)
    return result


def tune(
    *,
    device: int = 0,
    dtypes: Sequence[str] = (),
    seconds: float = 0.1,
    classes: dict[str, Shape] | None = None,
    say: Say = lambda doing: None,
) -> Tuning:
    """Time cuBLAS and all kernels of the ladder, for each dtype, precision and class of shapes.

    `tuning.shape_class` defines the classes. Each kernel is timed with each of its sets of parameters, first
    on a small product (m = n = k = 1024). If the small product takes more than ten times as long with a set
    as with the fastest kernel, the set is not timed on larger products.

    Args:
        device: number of the CUDA device.
        dtypes: dtypes of A, B and C; by default all of oocgemm's (bfloat16 only if ml_dtypes is
            installed).
        seconds: approximate time per kernel, set of parameters and product.
        classes: the product (m, n, k) to time for each class; `tuning.CLASSES` by default.
        say: called with a description of each measurement before it starts.

    Returns:
        For each dtype, precision and class, the best parameters of each kernel. `tuning.save` stores them.

    Raises:
        InputError: `dtypes` has an unknown dtype.
        BackendError: no device is available.
    """
    _check_known("dtype", dtypes, OPERANDS)
    rungs: dict[str, dict[str, dict[str, Measured]]] = {}
    with _open_stopwatch(device) as watch:
        for dtype, compute in pairs(dtypes):
            small = _product(dtype, compute, (1024, 1024, 1024))
            with watch.operands(small) as call:
                contenders = _contenders((), call)
                timed = watch.compare(contenders, call, seconds / 10)
                first = {_key(c): t.seconds for c, t in zip(contenders, timed, strict=True)}
            for name, shape in (classes or tuning.CLASSES).items():
                say(f"{tuning.measured_as(dtype, compute)}, {name}")
                product = _product(dtype, compute, shape)
                with watch.operands(product) as call:
                    slowest = 10 * min(first.values())
                    fitting = [c for c in _contenders((), call) if first.get(_key(c), slowest) <= slowest]
                    found: dict[str, Measured] = {}
                    timed = watch.compare(fitting, call, seconds)
                    for (kernel, params), timing in zip(fitting, timed, strict=True):
                        rung, rate = kernel.name if kernel else CUBLAS, product.flops / timing.seconds
                        if rung not in found or rate > found[rung].rate:
                            found[rung] = Measured(rate, dict(params))
                rungs.setdefault(tuning.measured_as(dtype, compute), {})[name] = found
        return Tuning(watch.name, date.today().isoformat(), rungs)


def pairs(dtypes: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs (dtype, precision) that can be timed. No `dtypes` stand for all that are installed."""
    return [(d, c) for c in PRECISIONS for d in dtypes or known_dtypes() if d in COMPUTES[c]]


def _open_stopwatch(device: int) -> "Stopwatch":
    missing = backends.missing_for_cuda()
    if missing:
        raise BackendError(f"timing kernels needs an NVIDIA GPU: {missing}")
    backends.open_backend("cuda", device)  # raises BackendError if the device cannot be used
    from oocgemm.backends.cuda.measure import Stopwatch

    return Stopwatch(device)


def _product(dtype: str, compute: str, shape: Shape) -> "Product":
    from oocgemm.backends.cuda.measure import Product

    beta = 1.0 if tuning.shape_class(*shape) == "update" else 0.0
    return Product(*shape, dtype, beta=beta, compute=compute)


def _check_known(what: str, given: Sequence[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise InputError(f"there is no {what} {name!r}: choose among {', '.join(known)}")


def _contenders(kernels: Sequence[str], call: Call) -> list[Contender]:
    """Return cuBLAS, and each kernel with each set of parameters that can run `call`.

    Only the kernels named in `kernels` are returned, unless it is empty.
    """
    found: list[Contender] = [(None, {})]
    for kernel in LADDER:
        if not kernels or kernel.name in kernels:
            found += [(kernel, params) for params in kernel.variants if kernel.refusal(call, params) is None]
    return found


def _key(contender: Contender) -> tuple[object, ...]:
    kernel, params = contender
    return (kernel.source if kernel else CUBLAS, *params.values())


def _affordable(contender: Contender, flops: int, best: dict[Any, float], limit: float) -> bool:
    """Return whether a product would take a kernel at most `limit` seconds at its best rate so far.

    Also return True for cuBLAS, with which all kernels are compared, and for a kernel without a rate.
    """
    rate = best.get(_key(contender))
    return contender[0] is None or rate is None or flops / rate <= limit


def _peak(capability: tuple[int, int], processors: int, clock: int | None, dtype: str) -> float | None:
    """Return the peak flop/s for a dtype or precision at `clock` MHz; None for an unknown architecture."""
    real = {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)
    per_clock = _FLOPS_PER_CLOCK.get(capability, {}).get(real)
    return per_clock * processors * clock * 1e6 if per_clock and clock else None


def _modelled(watch: "Stopwatch", contender: Contender, call: Call, product: "Product") -> dict[str, Any]:
    """Return the fields of a row that are not timed: registers, occupancy, and predicted memory accesses."""
    kernel, params = contender
    if kernel is None:
        return {}
    found: dict[str, Any] = {
        "registers": watch.multiplier.kernels.registers(kernel, call, params),
        "occupancy": watch.multiplier.kernels.occupancy(kernel, call, params),
    }
    if kernel.model is not None:
        access = kernel.model(call, params)
        found |= {
            "load_sectors": access.load_sectors,
            "store_sectors": access.store_sectors,
            "intensity": product.flops / (32 * (access.load_sectors + access.store_sectors)),
            "bank_conflicts": access.bank_conflicts,
        }
    return found


def count(result: dict[str, Any], device: int) -> None:
    """Read hardware counters for one row per dtype and kernel of a benchmark, and add them as "ncu".

    It is the row of the largest product with m n k up to 2048^3, with the fastest parameters. If counters
    cannot be read, the reason is added to `result` as "not_counted".
    """
    chosen: dict[tuple[str, str], dict[str, Any]] = {}
    for row in best_rows(result):
        best = chosen.setdefault((row["dtype"], row["kernel"]), row)
        if _preference(row) > _preference(best):
            chosen[row["dtype"], row["kernel"]] = row
    ours = {dtype for dtype, kernel in chosen if kernel != CUBLAS}
    rows = [row for (dtype, _), row in chosen.items() if dtype in ours]
    if not rows:
        return
    launches = [{name: row[name] for name in ("dtype", "shape", "beta", "kernel", "params")} for row in rows]
    try:
        for row, found in zip(rows, read_counters(launches, device), strict=True):
            row["ncu"] = found
    except BackendError as error:
        result["not_counted"] = str(error)


def _preference(row: dict[str, Any]) -> tuple[bool, int]:
    """Return a sort key for rows of a benchmark: hardware counters are read for the row with the largest key.

    This is the largest product with m n k up to `_MAX_COUNTED` or, if all are larger, the smallest one.
    """
    size = prod(row["shape"])
    return (True, size) if size <= _MAX_COUNTED else (False, -size)


def against(row: dict[str, Any]) -> Iterator[str]:
    """Yield the cells of a benchmark row for the columns `AGAINST`, as text.

    These columns compare the predicted memory accesses and occupancy with those that ncu counted. A cell has
    both numbers, or for sectors from L2 only the counted one. "-" stands for a missing number.
    """
    counted = row["ncu"]
    for name in ("load_sectors", "store_sectors", "sectors_from_l2", "bank_conflicts", "occupancy"):
        found = (counted[name],) if name == "sectors_from_l2" else (row.get(name), counted[name])
        yield " / ".join("-" if number is None else f"{number:.3g}" for number in found)


def best_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the row with the fastest parameters for each dtype, shape and kernel, in the order measured."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in result["rows"]:
        key = row["dtype"], tuple(row["shape"]), row["kernel"]
        if key not in found or row["flops"] > found[key]["flops"]:
            found[key] = row
    return list(found.values())


def chart(result: dict[str, Any]) -> str:
    """Return a chart of flop/s against the side of square products, as the text of an SVG file.

    There is one plot per dtype and one line per kernel. Both axes are logarithmic. `result` is the return
    value of `bench.bench_kernels`.

    Raises:
        InputError: no square product was measured.
    """
    rows = [row for row in best_rows(result) if len(set(row["shape"])) == 1]
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    if not rows:
        raise InputError(
            "nothing to draw: the chart shows square products, but none was measured; add one with --size"
        )
    parts = list(_panels(rows, dtypes))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="720" height="{400 * len(dtypes)}" '
        f'font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def _panels(rows: Sequence[dict[str, Any]], dtypes: Sequence[str]) -> Iterator[str]:
    left, right, height = 60, 560, 320
    sides = sorted({row["shape"][0] for row in rows})
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    lowest, highest = log2(sides[0]), max(log2(sides[-1]), log2(sides[0]) + 1)
    for number, dtype in enumerate(dtypes):
        mine = [row for row in rows if row["dtype"] == dtype]
        top = 400 * number + 40
        # The vertical axis ends 20% above the highest rate, and begins at 1e-5 times its end.
        ceiling = log2(max(row["flops"] for row in mine) * 1.2)
        floor = ceiling - 5 * log2(10)

        def place(
            side: int, flops: float, top: int = top, floor: float = floor, ceiling: float = ceiling
        ) -> str:
            x = left + (log2(side) - lowest) / (highest - lowest) * (right - left)
            y = top + height * (1 - (max(log2(flops), floor) - floor) / (ceiling - floor))
            return f"{x:.1f},{y:.1f}"

        yield f'<text x="{left}" y="{top - 14}" font-weight="bold">{dtype}, flop/s of square products</text>'
        frame = f'width="{right - left}" height="{height}" fill="none" stroke="#999"'
        yield f'<rect x="{left}" y="{top}" {frame}/>'
        for side in sides:
            x, _ = place(side, 2**floor).split(",")
            yield f'<text x="{x}" y="{top + height + 16}" text-anchor="middle">{side}</text>'
        for power in range(8, 16):
            if floor <= log2(10**power) <= ceiling:
                _, y = place(sides[0], 10**power).split(",")
                yield f'<text x="{left - 6}" y="{y}" text-anchor="end">1e{power}</text>'
                yield f'<line x1="{left}" x2="{right}" y1="{y}" y2="{y}" stroke="#ddd"/>'
        for index, kernel in enumerate(kernels):
            points = sorted((row["shape"][0], row["flops"]) for row in mine if row["kernel"] == kernel)
            colour = _COLOURS[index % len(_COLOURS)]
            for (side, flops), (next_side, next_flops) in pairwise(points):
                (x1, y1), (x2, y2) = place(side, flops).split(","), place(next_side, next_flops).split(",")
                yield f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}" stroke-width="2"/>'
            line = top + 14 + 18 * index
            yield (
                f'<line x1="{right + 12}" x2="{right + 34}" y1="{line - 4}" y2="{line - 4}" '
                f'stroke="{colour}" stroke-width="2"/>'
            )
            yield f'<text x="{right + 40}" y="{line}">{kernel}</text>'


# The name of the ncu metric for each counter. A sector is 32 contiguous bytes of device memory.
METRICS = {
    "load_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "store_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    # Unlike "load_sectors", "sectors_from_l2" also counts the sectors that cp.async and TMA copy.
    "sectors_from_l2": "l1tex__m_xbar2l1tex_read_sectors.sum",
    "bank_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    # "shared_loads", "shared_stores" and "matrix_loads" count instructions, one per warp. All accesses to
    # shared memory are one of these three.
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

    The counters of a row are the sectors loaded, stored, and read from the L2 cache; bank conflicts, in extra
    cycles per access to shared memory; and the achieved occupancy, as a fraction. Unknown values are None.
    Raises `BackendError` if ncu is missing or fails.
    """
    tool = shutil.which("ncu")
    if tool is None:
        raise BackendError("ncu is not on the PATH: install NVIDIA Nsight Compute")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        profiler = [tool, *_OPTIONS.split(), "--metrics", ",".join(METRICS.values()), "--log-file", str(log)]
        child = [sys.executable, "-m", "oocgemm.machine.kernel_bench", str(device), json.dumps(rows)]
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
    """Parse the CSV table that ncu prints: a header, a row of units, and a row per launch.

    Messages of ncu between the rows are skipped.
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

    `expected` has the names of each row's kernels. A row of cuBLAS has none, because its kernels are unknown:
    it gets all launches up to the next kernel of oocgemm. Raises `BackendError` for other launches.
    """
    left, ours = deque(launches), {name for names in expected for name in names}
    found: list[list[Launch]] = []
    for kernels in expected:
        own: list[Launch] = []
        while left and (len(own) < len(kernels) if kernels else left[0]["Kernel Name"] not in ours):
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
    """Run the product of each benchmark row once. Return the kernel names of each row; none for cuBLAS."""
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
