"""Markdown tables about this project's kernels, from what `oocgemm bench kernels --json` measured."""

from typing import Any

from tables import load, table

from oocgemm.machine.kernel_bench import AGAINST, BY_NCU, against

Rates = dict[tuple[str, str, str], float]  # flop/s, by kernel, parameters and dtype
# Square products, and products of thin panels that are added to a C of 12288 x 12288 (beta = 1).
FAST_SHAPES = [[n, n, n] for n in (4096, 8192, 16384)] + [[12288, 12288, k] for k in (512, 1024, 2048)]


def _rates() -> tuple[str, list[str], Rates]:
    """Return the device, the dtypes, and the rates of all kernels on square products of 4096."""
    result = load("bench_kernels.json")
    rows = [row for row in result["rows"] if row["shape"] == [4096] * 3]
    rates = {
        (row["kernel"], " ".join(map(str, row["params"].values())), row["dtype"]): row["flops"]
        for row in rows
    }
    return result["device"], list(dict.fromkeys(row["dtype"] for row in rows)), rates


def rungs() -> list[str]:
    """Return the table of the rates of all kernels, with a column for each dtype."""
    device, dtypes, rates = _rates()
    rows = []
    for kernel, params in dict.fromkeys((kernel, params) for kernel, params, _ in rates):
        found = [rates.get((kernel, params, dtype)) for dtype in dtypes]
        rows.append([f"`{kernel}`", params, *(f"{rate / 1e12:.3g}" if rate else "" for rate in found)])
    return [
        f"TFLOP/s on one {device}, square products of 4096:",
        "",
        *table(["kernel", "parameters", *dtypes], rows),
    ]


def gains() -> list[str]:
    """Return the table of what each optimisation of the simpler kernels gains, with their best parameters."""
    _, dtypes, rates = _rates()

    def best(kernel: str, dtype: str, params: str = "") -> float:
        return max(f for (k, p, d), f in rates.items() if (k, d) == (kernel, dtype) and p.endswith(params))

    steps = {
        "`tiled` over `naive`": [best("tiled", d) / best("naive", d) for d in dtypes],
        "`register`: 8 results per thread over 1": [
            best("register", d, " 8") / best("register", d, " 1") for d in dtypes
        ],
        "`liang_opt` over `liang_normal`": [best("liang_opt", d) / best("liang_normal", d) for d in dtypes],
    }
    return table(["step", *dtypes], [[what, *(f"{x:.2f}" for x in found)] for what, found in steps.items()])


def fast() -> list[str]:
    """Return the table of the speed of the kernels `simt` and `tensor` divided by that of cuBLAS."""
    results = load("kernels_fast.json")["results"]
    best: dict[tuple[str, str, tuple[int, ...]], dict[str, Any]] = {}
    for row in (row for result in results for row in result["rows"] if row["kernel"] != "cublas"):
        key = row["kernel"], row["dtype"], tuple(row["shape"])
        if key not in best or row["flops"] > best[key]["flops"]:
            best[key] = row
    rows = []
    for rung, dtype in dict.fromkeys((rung, dtype) for rung, dtype, _ in best):
        found = [best.get((rung, dtype, tuple(shape))) for shape in FAST_SHAPES]
        rows.append([f"`{rung}`, {dtype}", *(f"{row['of_cublas']:.3f}" if row else "" for row in found)])
    samples = [row["samples"] for row in best.values()]
    return [
        f"Speed divided by that of cuBLAS on one {results[0]['device']}, with the best parameters "
        f"of each, medians of "
        f"{min(samples)} to {max(samples)} interleaved samples:",
        "",
        *table(["kernel", *(f"{n}^3" if m == k else f"12288^2, k = {k}" for m, n, k in FAST_SHAPES)], rows),
    ]


def counted() -> list[str]:
    """Return the table of memory accesses that ncu counted, beside the numbers that the model predicts."""
    result = load("bench_kernels_counters.json")
    rows = [
        [row["dtype"], " x ".join(map(str, row["shape"])), f"`{row['kernel']}`", *against(row)]
        for row in result["rows"]
        if "ncu" in row
    ]
    return [
        f"Sectors of 32 bytes, bank conflicts and occupancy on one {result['device']}:",
        "",
        *table(["dtype", "product", "kernel", *AGAINST], rows),
        "",
        BY_NCU,
    ]
