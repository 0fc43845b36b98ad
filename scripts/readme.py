#!/usr/bin/env python
"""Fills the README's tables and outputs from the files in scripts/results/; nothing there is typed by hand.

usage: scripts/readme.py [--check]    --check: only say whether the README is up to date
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parent.parent
RESULTS = TOP / "scripts" / "results"


def load(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return value


def fenced(name: str) -> str:
    """The output of a command, as it was printed."""
    return "```\n" + (RESULTS / name).read_text().rstrip() + "\n```"


def spread(samples: list[float]) -> str:
    """Median, least and most."""
    ordered = sorted(samples)
    middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    return f"{middle:.3g} s ({ordered[0]:.3g}-{ordered[-1]:.3g})"


def measured() -> str:
    gpu = load("bench_stream.json")
    lines = [
        f"One {gpu['machine']['device']}, {gpu['machine']['cores']} cores; {gpu['what']}. Median (least-most) of "
        f"{len(gpu['samples_seconds']['in_core'])} runs, interleaved:",
        "",
        "| product | T | TFLOP/s | of in-core | compute share |",
        "| --- | --- | --- | --- | --- |",
    ]
    names = {
        "in_core": "in-core cuBLAS, all on the device",
        "numpy": "`matmul` of NumPy arrays",
        "zarr": "`matmul`, zarr to zarr",
    }
    for key, name in names.items():
        share = gpu["compute_share"].get(key)
        middle = f"{sorted(share)[len(share) // 2]:.2f}" if share else ""
        ratio = f"{gpu['of_in_core'][key]:.2f}" if key in gpu["of_in_core"] else "1"
        lines.append(
            f"| {name} | {spread(gpu['samples_seconds'][key])} | {gpu['tflops'][key]:.1f} | {ratio} | {middle} |"
        )
    written = gpu["report"]["zarr"]["lanes"]["write"]
    lines += [
        "",
        f"From zarr to zarr the run is bound by writing C: {written['bytes'] / 1e9:.2f} GB at "
        f"{written['bytes'] / written['busy'] / 1e9:.2f} GB/s, past the page cache, is what that machine's disk takes. The whole "
        f"process `oocgemm run` took {gpu['process_seconds']:.2f} s.",
        "",
        *on_cores(load("bench_cpu.json")["cases"]),
    ]
    return "\n".join(lines)


CONTENDERS = {
    "in-core": "NumPy in-core, `A @ B`",
    "oocgemm": "`oocgemm.matmul`",
    "oocgemm run": "`oocgemm run`, the whole process",
    "dask": "dask.array",
    "cubed": "cubed",
    "blosc2": "python-blosc2, its own format",
}


def on_cores(cases: dict[str, Any]) -> list[str]:
    """A table for each case of `bench_cpu.py`: a row a contender."""
    lines: list[str] = []
    for key, found in cases.items():
        case, rounds, machine = found["case"], found["rounds"], found["machine"]
        versions = ", ".join(
            f"{name} {found['versions'][name]}" for name in found["versions"] if name != "oocgemm"
        )
        blas = ", ".join(sorted({one[name]["blas"] for one in rounds for name in one}))
        lines += [
            f"{machine['cores']} cores ({machine['processor']}), no GPU; {key.replace(' ', ', ')}, chunks {case['chunk']}, "
            f"from zarr to zarr in {found['budget_mib']:.0f} MiB (device {case['device']}, host {case['host']}); "
            f"BLAS: {blas}; {versions}:",
            "",
            "| product | T, page cache warm | of in-core | T, cold | of in-core | memory |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for name, title in CONTENDERS.items():
            states = [name] if name == "in-core" else [name, f"{name}, cold"]
            samples = [one[state] for one in rounds for state in states if state in one]
            if not samples:
                continue
            cells = []
            for state in states:
                own = [one[state]["seconds"] for one in rounds if state in one]
                both = [one for one in rounds if state in one and "in-core" in one]
                ratios = [one["in-core"]["seconds"] / one[state]["seconds"] for one in both]
                cells += [spread(own) if own else "", ratio(ratios) if ratios else ""]
            cells += [""] * (4 - len(cells))
            peaks = [one["peak_mib"] for one in samples if "peak_mib" in one]
            cells.append(f"{max(peaks):.0f} MiB" if peaks else "")
            lines.append(f"| {title} | {' | '.join(cells)} |")
        lines.append("")
    return [
        *lines,
        "T is the median (least-most) of runs that took turns, the rest ratios of the runs of one round and the most memory seen.",
    ]


def ratio(values: list[float]) -> str:
    ordered = sorted(values)
    middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    return f"{middle:.3f} ({ordered[0]:.3f}-{ordered[-1]:.3f})"


def filled(text: str) -> str:
    blocks = {
        "plan": fenced("plan.txt"),
        "report": fenced("report.txt"),
        "measured": measured(),
    }
    for name, block in blocks.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        text = re.sub(
            f"{begin}.*?{end}", lambda _, b=block, x=begin, y=end: f"{x}\n{b}\n{y}", text, flags=re.DOTALL
        )
    return text


def main() -> None:
    readme = TOP / "README.md"
    old = readme.read_text()
    new = filled(old)
    if "--check" in sys.argv[1:]:
        sys.exit(0 if old == new else "README.md is out of date: run scripts/readme.py")
    readme.write_text(new)


if __name__ == "__main__":
    main()
