#!/usr/bin/env python
"""Fills the README's tables from the files in scripts/results/, and its outputs and picture from the program itself; nothing
there is typed by hand.

usage: scripts/readme.py [--check]    --check: only say whether the README is up to date
"""

import io
import json
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from oocgemm.cli.display import print_plan, print_report
from oocgemm.cli.output import snake_keys
from oocgemm.machine.bench import AGAINST, BY_NCU, against
from oocgemm.planning import Budgets, GemmProblem, Layout, Layouts, default_model, make_plan
from oocgemm.reports.roofline import roofline
from oocgemm.stores import new_layout
from oocgemm.timeline import read_log, report
from oocgemm.timeline.verdict import shares, verdict

TOP = Path(__file__).resolve().parent.parent
RESULTS = TOP / "scripts" / "results"


def load(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return value


def load_kernels(name: str) -> dict[str, Any]:
    """What `oocgemm bench kernels --json` printed; its keys once held spaces."""
    value: dict[str, Any] = snake_keys(load(name))
    return value


def fenced(show: Callable[[], None]) -> str:
    """What a command prints, as wide as a README is shown."""
    os.environ["COLUMNS"] = "110"
    with redirect_stdout(io.StringIO()) as printed:
        show()
    return "```\n" + "\n".join(line.rstrip() for line in printed.getvalue().rstrip().splitlines()) + "\n```"


def plan() -> None:
    """`oocgemm plan` for a machine that need not be there."""
    names = "float64", "float64", "float64", "float64"
    problem, chunks = GemmProblem(32768, 32768, 524288, *names), Layout((2048, 2048))
    layouts = Layouts(chunks, chunks, new_layout("C.zarr", problem, None, None))
    print_plan(make_plan(problem, Budgets(8 << 30, 24 << 30), default_model("cuda", 16), layouts))


def reported() -> None:
    """`oocgemm report` of the run whose timeline is kept."""
    timeline = read_log(RESULTS / "report.jsonl")
    print_report(report(timeline), timeline, advise=True)


def picture() -> str:
    """`oocgemm calibrate --svg`, of the rates that are kept."""
    return roofline(**load("roofline.json"))


def spread(samples: list[float]) -> str:
    """Median, least and most."""
    ordered = sorted(samples)
    middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    return f"{middle:.3g} s ({ordered[0]:.3g}-{ordered[-1]:.3g})"


def measured() -> str:
    tables = (
        on_gpu(),
        from_disk(),
        on_cores(load("bench_cpu.json")["cases"]),
        trusted(),
        traffic(),
        recorded(),
    )
    return "\n\n".join("\n".join(lines) for lines in tables)


def on_gpu() -> list[str]:
    """A table of the cases of `bench_stream.py`."""
    cases = load("bench_stream.json")
    machine = next(iter(cases.values()))["machine"]
    lines = [
        f"One {machine['device']}, {machine['cores']} cores; NumPy arrays in host memory, medians (least-most) of runs that "
        "took turns. Pinned are arrays that were so before, which is not in the time, nor in that of cuBLASXt, whose best is with "
        "pinned arrays and with no budget: its seconds, and how many times as long as `oocgemm.matmul` natively and emulated "
        "it took on such arrays.",
        "",
        "| product | in-core cuBLAS | `oocgemm.matmul`, T | in-core over T | pinned, T | in-core over T | host copies, not pinned | emulated, T | in-core over T | pinned, T | in-core over T | cuBLASXt, best block | at its default | loop of CuPy calls | pinning and letting go |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case in cases.values():
        samples, median = case["samples_seconds"], case["median_seconds"]
        peers = [name for name in median if name.startswith("xt")]
        best, usual = min(peers, key=lambda name: median[name], default=""), "xt 2048 pageable"
        read = case["report"]["lanes"]["read"]

        def over(name: str, median: dict[str, float] = median) -> str:
            """Seconds of another, and how many times as long as ours on the same arrays it took."""
            suffix = "_pinned" if "pinned" in name else ""
            times = (median[name] / median[f"{own}{suffix}"] for own in ("oocgemm", "emulated"))
            return f"{median[name]:.3g} s, {' and '.join(f'{factor:.2f}' for factor in times)} times"

        ours = [
            f(one[name])
            for name in ("oocgemm", "oocgemm_pinned", "emulated", "emulated_pinned")
            for f, one in ((spread, samples), (ratio, case["of_in_core_samples"]))
        ]
        cells = [
            case["what"],
            spread(samples["in_core"]),
            *ours[:4],
            f"{read['bytes'] / read['busy'] / 1e9:.0f} GB/s" if read["bytes"] else "",
            *ours[4:],
            f"{over(best)} ({best.removeprefix('xt ')})" if best else "",
            over(usual) if usual in median else "",
            over("cupy_loop") if "cupy_loop" in median else "",
            f"{median['pinning']:.2f} s" if "pinning" in median else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def from_disk() -> list[str]:
    """A table of the cases of `bench_disk.py`."""
    cases = load("bench_disk.json")
    flat = [one for case in cases.values() for one in ([case] if "what" in case else case.values())]
    lines = [
        "From zarr to zarr on the same kind of machine, `oocgemm run`, C synced to disk:",
        "",
        "| product | T | whole process | compute share | beside it | ratio |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    beside = {
        "over_in_core": ("in_core_seconds", "in-core cuBLAS, same flops", "T {} times"),
        "over_disk": ("disk_alone_seconds", "reading the operands once", "T {} times"),
        "of_decode": ("decode_alone_seconds", "decoding alone, all cores", "{} of its rate"),
        "of_cublas": ("cublas_seconds", "the same with cuBLAS", "{} of its rate"),
    }
    for case in flat:
        share = sorted(case["compute_share"])
        key = next((key for key in beside if key in case), None)
        against, how = "", ""
        if key:
            seconds, what, form = beside[key]
            against, how = f"{what}: {spread(case[seconds])}", form.format(ratio(case[key]))
        elif "in_core_seconds" in case:
            against = f"in-core cuBLAS: {spread(case['in_core_seconds'])}"
        cells = [case["what"], spread(case["samples_seconds"]), spread(case["process_seconds"])]
        lines.append(f"| {' | '.join([*cells, f'{share[len(share) // 2]:.3f}', against, how])} |")
    return lines


def trusted() -> list[str]:
    """A table of the cases of `bench_verify.py` and `bench_journal.py`."""
    lines = [
        "T with a journal and with `--verify` over T without, runs that took turns, each as it is planned (a checked one may get other "
        "tiles):",
        "",
        "| product | on | rounds | with | least | median | most |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case in [*load("bench_verify.json").values(), *load("bench_journal.json").values()]:
        on = (
            case["machine"]["device"]
            if case["machine"]["name"] == "cuda"
            else f"{case['machine']['cores']} cores"
        )
        for name, over in case["over_plain"].items():
            cells = [case["what"], on, str(len(case["samples_seconds"][name])), name]
            lines.append(f"| {' | '.join([*cells, *(f'{over[x]:.2f}' for x in ('min', 'median', 'max'))])} |")
    return lines


def diagnosed() -> list[str]:
    """A table of the runs of `bench_diagnosis.py`: what bounded them, and what following their advice gained. The verdict is
    that of the first run of each, by its recorded figures."""
    lines = [
        "Six runs on an H200, each made to be bound by another cause; what their reports said, and what came of doing it:",
        "",
        "| product | verdict | T | less, predicted | less, measured |",
        "| --- | --- | --- | --- | --- |",
    ]
    for made_for, case in load("bench_diagnosis.json").items():
        gains = [f"{x:.0%}" if x is not None else "no gain" for x in (case["promised"], case["gained"])]
        first = case["before"]
        found = verdict(shares(first["lanes"]["compute"]["busy"], first["exposed"], first["seconds"]))
        said = "; ".join(filter(None, (found.headline, found.beside)))
        cells = f"{made_for}: {case['what']}", said, spread(case["seconds_before"]), *gains
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def traffic() -> list[str]:
    """What `bench_traffic.py` found."""
    found = load("bench_traffic.json")
    counted, closed = found["summary"]["announced"], found["summary"]["announced"]["closed_over_counted"]
    off = max(abs(1 - ratio) for ratio in closed.values())
    lines = [
        "Bytes that plans move over the best that a search over tilings, walks and slots finds at the same depth, with one "
        "link far slower than all else:",
        "",
        "| slow link | plans | largest | median | above 1.02 | above 1.10 of the lower bound | of these the search too |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    plans = 0
    for kind, one in found["summary"].items():
        if "over_oracle" in one:
            over = one["over_oracle"]
            cells = [str(one["plans"]), f"{over['max']:.3f}", f"{over['median']:.3f}"]
            cells += [str(one[name]) for name in ("above_target", "above_near", "of_these_the_oracle")]
            lines.append(f"| {' | '.join([kind, *cells])} |")
            plans += one["plans"]
    return [
        *lines,
        "",
        f"{found['cases_done']} of {found['cases']} cases of the grid, with beta 0 and 1. Bytes are counted exactly for the "
        f"{counted['counted']} of {plans} plans of up to a million steps; the closed form, taken for the others, is off by "
        f"at most {off:.2%} there. Why a plan is not near the lower bound is said in each row of the results.",
    ]


CONTENDERS = {
    "in-core": "NumPy in-core, `A @ B`",
    "oocgemm": "`oocgemm.matmul`",
    "oocgemm run": "`oocgemm run`, the whole process",
    "dask": "dask.array",
    "cubed": "cubed",
    "blosc2": "python-blosc2, its own format",
}


def recorded() -> list[str]:
    """What `bench_recording.py` found."""
    lines = [
        "Recording a run to a log, of which a report is made:",
        "",
        "| run | steps | log | processor's time over T | T over T unrecorded, median of pairs |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, case in load("bench_recording.json").items():
        cells = [
            name,
            str(case["steps"]),
            f"{case['log_bytes'] / 1e3:.0f} kB",
            f"{case['share']:.3%}",
            ratio(case["ratios"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def emulated() -> list[str]:
    """A table of the steps of `bench_emulated.py`: a row a shape, a column a dtype."""
    found = load("bench_emulated.json")
    rates = {(tuple(step["shape"]), step["dtype"]): step for step in found["steps"]}
    dtypes = list(dict.fromkeys(dtype for _, dtype in rates))
    lines = [
        f"Speed of one step by residues, preparing included, over that of cuBLAS on one {found['device']}:",
        "",
        f"| m x n x k | {' | '.join(dtypes)} |",
        f"| --- |{' --- |' * len(dtypes)}",
    ]
    for shape in dict.fromkeys(shape for shape, _ in rates):
        steps = [rates.get((shape, dtype)) for dtype in dtypes]
        cells = [
            f"{step['over_native']:.2f} ({step['moduli']} moduli)" if step and step["moduli"] else ""
            for step in steps
        ]
        lines.append(f"| {' | '.join([' x '.join(map(str, shape)), *cells])} |")
    return lines


def on_cores(cases: dict[str, Any]) -> list[str]:
    """A table for each case of `bench_cpu.py`: a row a contender."""
    lines: list[str] = []
    for found in cases.values():
        case, rounds, machine = found["case"], found["rounds"], found["machine"]
        versions = ", ".join(
            f"{name} {found['versions'][name]}" for name in found["versions"] if name != "oocgemm"
        )
        blas = ", ".join(sorted({one[name]["blas"] for one in rounds for name in one}))
        lines += [
            f"{machine['cores']} cores ({machine['processor']}), no GPU; {case['m']}x{case['k']}x{case['n']}, {case['dtype']}, chunks {case['chunk']}, "
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


def kernels() -> str:
    """A table of the rungs on square products of 4096, from `oocgemm bench kernels --json`, a column a dtype."""
    result, side = load_kernels("bench_kernels.json"), [4096] * 3
    rows = [row for row in result["rows"] if row["shape"] == side]
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    rates: dict[tuple[str, str, str], float] = {
        (row["kernel"], " ".join(map(str, row["params"].values())), row["dtype"]): row["flops"]
        for row in rows
    }
    lines = [
        f"TFLOP/s on one {result['device']}, square products of {side[0]}:",
        "",
        f"| kernel | parameters | {' | '.join(dtypes)} |",
        f"| --- | --- |{' --- |' * len(dtypes)}",
    ]
    for kernel, params in dict.fromkeys((kernel, params) for kernel, params, _ in rates):
        cells = [
            f"{rates[kernel, params, d] / 1e12:.3g}" if (kernel, params, d) in rates else "" for d in dtypes
        ]
        lines.append(f"| {kernel} | {params} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", steps_of_the_ladder(rates, dtypes), "", *fast_kernels(), *counted()])


def steps_of_the_ladder(rates: dict[tuple[str, str, str], float], dtypes: list[str]) -> str:
    """What each idea of the lower rungs gains, by the best parameters of each."""

    def best(kernel: str, dtype: str, params: str = "") -> float:
        return max(f for (k, p, d), f in rates.items() if (k, d) == (kernel, dtype) and p.endswith(params))

    gains = {
        "`tiled` over `naive`": [best("tiled", d) / best("naive", d) for d in dtypes],
        "8 results a thread over 1": [best("register", d, " 8") / best("register", d, " 1") for d in dtypes],
        "`liang_opt` over `liang_normal`": [best("liang_opt", d) / best("liang_normal", d) for d in dtypes],
    }
    said = [f"{what}: {' and '.join(f'{gain:.2f}' for gain in found)}" for what, found in gains.items()]
    return f"In {' and '.join(dtypes)}, {'; '.join(said)}."


# Square products, and updates of a result of 12288 x 12288 (beta 1) by panels of some depth.
FAST_SHAPES = [[n, n, n] for n in (4096, 8192, 16384)] + [[12288, 12288, r] for r in (512, 1024, 2048)]


def fast_kernels() -> list[str]:
    """A table of what `simt` and `tensor` reach of cuBLAS, from `oocgemm bench kernels --json` for each dtype."""
    results = load_kernels("kernels_fast.json")["results"]
    best: dict[tuple[str, str, tuple[int, ...]], dict[str, Any]] = {}
    for row in (row for result in results for row in result["rows"] if row["kernel"] != "cublas"):
        key = row["kernel"], row["dtype"], tuple(row["shape"])
        if key not in best or row["flops"] > best[key]["flops"]:
            best[key] = row
    titles = [f"{n}^3" if m == k else f"12288^2, k = {k}" for m, n, k in FAST_SHAPES]
    lines = [
        f"`simt` and `tensor` over cuBLAS on one {results[0]['device']}, the best parameters of each, medians of "
        f"{min(row['samples'] for row in best.values())} to {max(row['samples'] for row in best.values())} samples that took turns:",
        "",
        f"| kernel | {' | '.join(titles)} |",
        f"| --- |{' --- |' * len(titles)}",
    ]
    for rung, dtype in dict.fromkeys((rung, dtype) for rung, dtype, _ in best):
        found = [best.get((rung, dtype, tuple(shape))) for shape in FAST_SHAPES]
        cells = [f"{row['of_cublas']:.3f}" if row else "" for row in found]
        lines.append(f"| {' | '.join([f'`{rung}`, {dtype}', *cells])} |")
    return lines


def counted() -> list[str]:
    """A table of what ncu counted, from `oocgemm bench kernels --json`, where that has been measured."""
    name = "bench_kernels_counters.json"
    if not (RESULTS / name).exists():
        return []
    result = load_kernels(name)
    lines = [
        "",
        f"Sectors of 32 bytes, bank conflicts and occupancy on one {result['device']}, on paper and counted:",
        "",
        f"| dtype | product | kernel | {' | '.join(AGAINST)} |",
        f"| --- | --- | --- |{' --- |' * len(AGAINST)}",
    ]
    for row in (row for row in result["rows"] if "ncu" in row):
        cells = [row["dtype"], " x ".join(map(str, row["shape"])), f"`{row['kernel']}`", *against(row)]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", BY_NCU]


def ratio(values: list[float]) -> str:
    ordered = sorted(values)
    middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    return f"{middle:.3f} ({ordered[0]:.3f}-{ordered[-1]:.3f})"


def filled(text: str) -> str:
    blocks = {
        "plan": fenced(plan),
        "report": fenced(reported),
        "diagnosed": "\n".join(diagnosed()),
        "emulated": "\n".join(emulated()),
        "measured": measured(),
        "kernels": kernels(),
    }
    for name, block in blocks.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{block}\n{end}{rest.partition(end)[2]}"
    return text


def main() -> None:
    readme, drawn = TOP / "README.md", RESULTS / "roofline.svg"
    made = {readme: filled(readme.read_text()), drawn: picture()}
    if "--check" in sys.argv[1:]:
        stale = [path.name for path, text in made.items() if not path.exists() or path.read_text() != text]
        sys.exit(f"out of date: {', '.join(stale)}; run scripts/readme.py" if stale else 0)
    for path, text in made.items():
        path.write_text(text)


if __name__ == "__main__":
    main()
