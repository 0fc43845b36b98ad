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
    gpu, cpu = load("bench_stream.json"), load("bench_cpu.json")
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
        f"Two cores ({cpu['machine']['processor']}), no GPU; {cpu['what']}; BLAS: {cpu['blas']}:",
        "",
        "| product | T | of in-core |",
        "| --- | --- | --- |",
        f"| NumPy in-core, `A @ B` | {spread(cpu['samples_seconds']['in_core'])} | 1 |",
        f"| `oocgemm`, zarr to zarr | {spread(cpu['samples_seconds']['oocgemm'])} | {cpu['of_in_core']:.3f} |",
        "",
        f"Peak memory was {cpu['peak_over_imports_mib']:.0f} MiB above that of a process that only imports; the budget was "
        f"{cpu['budget_mib']:.0f} MiB.",
    ]
    return "\n".join(lines)


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
