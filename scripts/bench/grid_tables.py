"""Markdown tables of the products that `bench_grid.py` measured."""

from statistics import geometric_mean, mean
from typing import Any

import tables
from grid_cases import BIG_SECONDS, IN_MEMORY, TINY_SECONDS, figures

HEADS = ["product", "bound", "by", "T", "first call"]
OLDER = (
    "The bounds of this table are older: loops in Python staged pageable arrays more slowly, kernels were "
    "only timed as a whole, and *scheduled* comes from one search."
)
RATIOS = ["bound / T", "scheduled / T", "loop / T", "in core / T"]


def grid() -> list[str]:
    """Return one table per machine."""
    lines: list[str] = []
    for key, found in tables.load("bench_grid.json").items():
        machine, _, kind = key.rpartition(", ")
        if kind != "grid":
            continue
        cases = {name: one for name, one in found["cases"].items() if one.get("samples", {}).get("oocgemm")}
        lines += [f"### {machine}, {len(cases)} products", "", *_summary(cases), ""]
        lines += [OLDER, ""] if "staged_small" not in found.get("links", {"staged_small": {}}) else []
        lines += [*tables.table([*HEADS, *RATIOS], [_row(name, one) for name, one in cases.items()]), ""]
    return lines[:-1]


def losses() -> list[str]:
    """Return the table of what separates T from the bound, by where the operands are."""
    heads = ["GPU", "operands", "products", "bound / T", "bound / scheduled", "scheduled / T"]
    rows = []
    for key, found in tables.load("bench_grid.json").items():
        machine, _, kind = key.rpartition(", ")
        if kind != "grid" or machine == "host":
            continue
        groups: dict[str, list[dict[str, Any]]] = {}
        for one in found["cases"].values():
            if one.get("samples", {}).get("oocgemm") and one["bound"] > TINY_SECONDS and "scheduled" in one:
                source = one["case"]["source"]
                groups.setdefault(source if source in IN_MEMORY else "in files", []).append(one)
        for source, cases in groups.items():
            ratios = [figures(one) for one in cases]
            means = (
                geometric_mean(one["bound"] for one in ratios),
                geometric_mean(one["bound"] / one["scheduled"] for one in ratios),
                geometric_mean(one["scheduled"] for one in ratios),
            )
            times = [tables.median(one["samples"]["oocgemm"]) for one in cases]
            parts = (
                mean(one["exposed"].get(part, 0.0) / t for one, t in zip(cases, times, strict=True))
                for part in ("start-up", "tail")
            )
            cells = [*(f"{x:.2f}" for x in means), *(f"{x:.0%}" for x in parts)]
            rows.append([machine, source, str(len(cases)), *cells])
    return tables.table([*heads, "start-up", "tail"], rows)


def directions() -> list[str]:
    """Return the table of the rates of copies to the device and back, alone and at once."""
    heads = [
        "GPU",
        "memory",
        "to the GPU",
        "from the GPU",
        "to the GPU, both at once",
        "from the GPU, both at once",
    ]
    rows = []
    for key, found in tables.load("bench_grid.json").items():
        machine, _, kind = key.rpartition(", ")
        for memory, prefix in (("pinned", ""), ("pageable", "staged_")) if kind == "grid" else ():
            names = [f"{prefix}{x}{both}" for both in ("", "_both") for x in ("h2d", "d2h")]
            rates = found.get("links", {})
            if all(name in rates for name in names):
                rows.append([machine, memory, *(f"{rates[name] / 1e9:.0f} GB/s" for name in names)])
    return tables.table(heads, rows)


def calls() -> list[str]:
    """Return the table of calls with small arrays, beside CuPy."""
    rows = []
    for key, found in tables.load("bench_grid.json").items():
        machine, _, kind = key.rpartition(", ")
        for name, one in found["cases"].items() if kind == "small" else ():
            samples = one["samples"]
            times = (f"{1e3 * tables.median(samples[who]):.3g} ms" for who in ("oocgemm", "in_core"))
            ratio = tables.median(samples["in_core"]) / tables.median(samples["oocgemm"])
            rows.append([machine, name.removesuffix(" pageable"), *times, f"{ratio:.2f}"])
    return tables.table(["GPU", "product", "T of oocgemm", "T of CuPy", "its T / our T"], rows)


def commands() -> list[str]:
    """Return the table of whole processes."""
    rows = []
    for key, found in tables.load("bench_grid.json").items():
        machine, _, kind = key.rpartition(", ")
        for name, one in found.items() if kind == "commands" else ():
            if isinstance(one, dict) and "process" in one:
                own = tables.seconds(one["T"]) if "T" in one else ""
                rows.append([machine, f"oocgemm {name.lstrip('-')}", tables.seconds(one["process"]), own])
    return tables.table(["machine", "command", "whole process", "T"], rows)


def processes() -> list[str]:
    """Return the table of `bench_calls.py`: processes and first calls, beside the packages alone."""
    rows = []
    for machine, found in tables.load("bench_calls.json").items():
        bare = found["seconds"]["packages"]["process"]
        for name, parts in found["seconds"].items():
            kind, _, size = name.rpartition(" ")
            what = "Python, NumPy, CuPy, a CUDA context and a cuBLAS handle"
            if size.isdigit():
                what = f"`oocgemm run`, {size}^3" if kind == "run" else f"import and first call, {size}^3"
            own = parts.get("T", parts["process"])
            rest = tables.median([x - y for x, y in zip(parts["process"], own, strict=True)])
            cells = (tables.seconds(own), f"{rest / tables.median(bare):.2f}") if "T" in parts else ("", "")
            rows.append([machine, what, tables.seconds(parts["process"]), *cells])
    heads = ["machine", "what", "time", "T", "(time - T) / time of the packages"]
    return tables.table(heads, rows)


def _summary(cases: dict[str, Any]) -> list[str]:
    """Return sentences with the geometric mean and the smallest of bound / T, or of in core / T."""
    ratios = {name: figures(one) for name, one in cases.items()}
    bound = {name: one["bound"] for name, one in ratios.items() if "bound" in one}
    if not bound:
        core = [one["in_core"] for one in ratios.values() if "in_core" in one]
        return [f"The geometric mean of in core / T is {geometric_mean(core):.2f}."]
    more = [ratio for name, ratio in bound.items() if cases[name]["bound"] > TINY_SECONDS]
    big = [ratio for name, ratio in bound.items() if cases[name]["bound"] > BIG_SECONDS]
    scheduled = [
        (cases[name]["bound"], cases[name]["scheduled"], one["scheduled"])
        for name, one in ratios.items()
        if "scheduled" in one and cases[name]["bound"] > TINY_SECONDS
    ]
    found = (
        f"The geometric mean of bound / T is {geometric_mean(more):.2f} over the {len(more)} products with a "
        f"bound above {1e3 * TINY_SECONDS:g} ms. Of the {len(big)} products with a bound above "
        f"{BIG_SECONDS:g} s, {sum(ratio >= 0.75 for ratio in big)} reach 0.75, and the smallest is "
        f"{min(big):.2f}."
    )
    if scheduled:
        of_bound = geometric_mean(least / best for least, best, _ in scheduled)
        of_t = geometric_mean(ratio for *_, ratio in scheduled)
        found += f" For these {len(scheduled)} products, that of bound / scheduled is {of_bound:.2f}, "
        found += f"and that of scheduled / T is {of_t:.2f}."
    return [found]


def _row(name: str, one: dict[str, Any]) -> list[str]:
    ratios = figures(one)
    bound = [f"{one['bound']:.3g} s", one["bound_by"]] if one.get("bound") else ["", ""]
    cells = (f"{ratios[x]:.2f}" if x in ratios else "" for x in ("bound", "scheduled", "loop", "in_core"))
    first = f"{one['first']:.3g} s" if "first" in one else ""
    return [name, *bound, tables.seconds(one["samples"]["oocgemm"]), first, *cells]
