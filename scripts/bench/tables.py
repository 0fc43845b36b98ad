"""Markdown tables of the measurements in scripts/bench/results/."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oocgemm.timeline.activities import shares, verdict

RESULTS = Path(__file__).resolve().parent / "results"
# The reasons that bench_traffic.py gives for moving more than the lower bound, and their texts in a table.
MISSES = {
    "the plan": "the plan is not the best",
    "memory set aside": "memory is reserved for the kernel library",
    "the bound's - 2 M - m n": "the bound subtracts `2 M + m n`, which no such schedule saves",
    "no accumulators in host memory": "accumulators are on the device only",
    "whole tiles, two panels of each operand": "tiles are whole, and each operand needs two panel slots",
}
CONTENDERS = {
    "in-core": "NumPy in-core, `A @ B`",
    "oocgemm": "`oocgemm.matmul`",
    "dask": "dask.array",
    "cubed": "cubed",
    "blosc2": "python-blosc2, its own format",
}


def load(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table.

    >>> table(["a", "b"], [["1", "2"]])
    ['| a | b |', '| --- | --- |', '| 1 | 2 |']
    """
    return [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def seconds(samples: Sequence[float]) -> str:
    """Return the median, the minimum and the maximum of samples, in seconds."""
    return unbroken(f"{median(samples):.3g} s ({min(samples):.3g}-{max(samples):.3g})")


def ratio(samples: Sequence[float]) -> str:
    """Return the median, the minimum and the maximum of samples."""
    return unbroken(f"{median(samples):.3f} ({min(samples):.3f}-{max(samples):.3f})")


def unbroken(text: str) -> str:
    """Return the text with spaces and hyphens at which a browser does not break a line."""
    return text.replace(" ", "\N{NO-BREAK SPACE}").replace("-", "\N{NON-BREAKING HYPHEN}")


def supported() -> list[str]:
    """Return the oldest and the newest versions of packages with which the tests pass."""
    constraints = RESULTS.parents[2] / "tests" / "constraints"
    versions = [
        dict(line.split("==") for line in (constraints / name).read_text().splitlines() if "==" in line)
        for name in ("oldest.txt", "newest.txt")
    ]
    rows = [["Python", "3.11", "3.13"]]
    rows += [[name, version, versions[1][name]] for name, version in versions[0].items()]
    return table(["package", "oldest", "newest"], rows)


def two_commands() -> list[str]:
    """Return what scripts/demo and scripts/test take and leave behind, as `bench_commands.py` measured it."""
    found = load("bench_commands.json")["first run"]
    left = {
        "demo": "its reports in `demo/`, and the environment in `.venv`",
        "test": "the environment in `.venv`, the built documentation, and caches",
    }
    rows = [
        [
            f"`scripts/{name}`",
            f"{found['seconds'][name] / 60:.0f} min",
            f"{text}: {found['left_bytes'][name] / 1e6:,.0f} MB",
            f"`rm -r {' '.join(found['left'][name])}`",
        ]
        for name, text in left.items()
    ]
    heads = ["command", f"first run on {found['machine']['cores']} cores", "leaves behind", "removed by"]
    return table(heads, rows)


def results() -> list[str]:
    """Return the table of the README: T of oocgemm, and of other programs for the same product."""
    pinned = load("bench_stream.json")["float64 24576"]
    beyond = load("bench_disk.json")["beyond"]
    cores = load("bench_cpu.json")["cases"]["12000x12000x12000 float64 libscipy_openblas64_ (Haswell)"]
    rows = []
    times = pinned["median_seconds"]
    block = min((name for name in times if name.startswith("xt")), key=lambda name: times[name])
    gpu = {
        "cuBLAS in-core": "in_core",
        f"cuBLASXt, best block ({block.split()[1]}), no memory limit": block,
        "cuBLASXt, default block": "xt 2048 pageable",
        "loop of CuPy calls": "cupy_loop",
    }
    for other, name in gpu.items():
        arrays = "pageable" if name in ("xt 2048 pageable", "cupy_loop") else "pinned"
        own = times["oocgemm" if arrays == "pageable" else "oocgemm_pinned"]
        product = f"24576^3 float64, {arrays} host arrays, 3 GiB of GPU memory"
        rows.append([product, "H200", f"{own:.3g} s", other, f"{times[name]:.3g} s", times[name] / own])
    own, other = beyond["median_seconds"], median(beyond["in_core_seconds"])
    product = "32768 x 524288 x 32768 float64, zarr to zarr, 8 GiB of GPU memory"
    rows.append(
        [product, "H200", f"{own:.3g} s", "cuBLAS in-core, same flops", f"{other:.3g} s", other / own]
    )
    rounds = cores["rounds"]
    cpu = {name: median([one[name]["seconds"] for one in rounds if name in one]) for name in CONTENDERS}
    case = cores["case"]
    product = f"{case['m']}^3 float64, zarr to zarr, {cores['budget_mib']:.0f} MiB of RAM"
    for name in ("in-core", "dask", "cubed", "blosc2"):
        other, ours = CONTENDERS[name].partition(",")[0], f"{cpu['oocgemm']:.3g} s"
        rows.append([product, "2 CPU cores", ours, other, f"{cpu[name]:.3g} s", cpu[name] / cpu["oocgemm"]])
    heads = ["product", "machine", "T of oocgemm", "compared with", "T of it", "its T / our T"]
    return table(heads, [[*cells, f"{over:.2f}"] for *cells, over in rows])


def streamed() -> list[str]:
    """Return tables of `bench_stream.py`, one per product.

    They show T of oocgemm beside that of cuBLAS on matrices in GPU memory.
    """
    cases = load("bench_stream.json")
    machine = next(iter(cases.values()))["machine"]
    lines = [
        f"One {machine['device']}, {machine['cores']} CPU cores, NumPy arrays in host memory. "
        f"Pinned arrays were pinned before "
        "the run; pinning is not part of T.",
    ]
    for case in cases.values():
        samples, of_in_core = case["samples_seconds"], case["of_in_core_samples"]
        rows = [["cuBLAS in-core", "in GPU memory", seconds(samples["in_core"]), ""]]
        for name in ("oocgemm", "oocgemm_pinned", "emulated", "emulated_pinned"):
            compute = "emulated" if "emulated" in name else "native"
            arrays = "pinned" if "pinned" in name else "pageable"
            rows.append([f"oocgemm, {compute}", arrays, seconds(samples[name]), ratio(of_in_core[name])])
        lines += ["", f"### {case['what']}", "", *table(["run", "operands", "T", "in-core T / T"], rows)]
    return lines


def peers() -> list[str]:
    """Return the table of `bench_stream.py` on other ways to multiply arrays in host memory."""
    lines: list[str] = []
    heads = ["program", "operands", "T", "its T / T of oocgemm, native", "its T / T of oocgemm, emulated"]
    for case in load("bench_stream.json").values():
        times, rows = case["median_seconds"], []
        for name in sorted(times, key=lambda name: times[name]):
            if not name.startswith("xt") and name != "cupy_loop":
                continue
            title = "loop of CuPy calls" if name == "cupy_loop" else f"cuBLASXt, block {name.split()[1]}"
            suffix = "_pinned" if "pinned" in name else ""
            over = [f"{times[name] / times[own + suffix]:.2f}" for own in ("oocgemm", "emulated")]
            rows.append([title, "pinned" if suffix else "pageable", f"{times[name]:.3g} s", *over])
        if rows:
            lines += [f"### {case['what']}, beside others", "", *table(heads, rows), ""]
    return lines[:-1]


def from_disk() -> list[str]:
    """Return the tables of `bench_disk.py`."""
    cases = load("bench_disk.json")
    beside = {
        "over_in_core": ("in_core_seconds", "cuBLAS in-core, same flops", "T / its T"),
        "over_disk": ("disk_alone_seconds", "reading the operands once", "T / its T"),
        "of_decode": ("decode_alone_seconds", "decoding alone, all cores", "its T / T"),
        "of_cublas": ("cublas_seconds", "the same run with cuBLAS", "its T / T"),
    }
    rows = []
    for case in (one for some in cases.values() for one in ([some] if "what" in some else some.values())):
        compared = ["", ""]
        key = next((key for key in beside if key in case), None)
        if key:
            samples, what, form = beside[key]
            compared = [f"{what}: {seconds(case[samples])}", f"{form}: {ratio(case[key])}"]
        elif "in_core_seconds" in case:
            compared = [f"cuBLAS in-core: {seconds(case['in_core_seconds'])}", ""]
        share = f"{median(case['compute_share']):.3f}"
        times = seconds(case["samples_seconds"]), seconds(case["process_seconds"])
        rows.append([case["what"], *times, share, *compared])
    return table(["product", "T", "whole process", "compute share", "compared with", "ratio"], rows)


def on_cores() -> list[str]:
    """Return the tables of `bench_cpu.py`, one for each case, with a row for each program."""
    lines: list[str] = []
    for found in load("bench_cpu.json")["cases"].values():
        case, rounds, machine = found["case"], found["rounds"], found["machine"]
        versions = [f"{name} {version}" for name, version in found["versions"].items() if name != "oocgemm"]
        blas = ", ".join(sorted({one[name]["blas"] for one in rounds for name in one}))
        rows = []
        for name, title in CONTENDERS.items():
            states = [name] if name == "in-core" else [name, f"{name}, cold"]
            peaks = [one[state].get("peak_mib", 0) for one in rounds for state in states if state in one]
            if not peaks:
                continue
            cells = []
            for state in states:
                own = [one[state]["seconds"] for one in rounds if state in one]
                both = [one for one in rounds if state in one and "in-core" in one]
                ratios = [one["in-core"]["seconds"] / one[state]["seconds"] for one in both]
                cells += [seconds(own) if own else "", ratio(ratios) if ratios else ""]
            cells += [""] * (4 - len(cells))
            rows.append([title, *cells, f"{max(peaks):.0f} MiB"])
        lines += [
            f"### {case['m']} x {case['k']} x {case['n']} {case['dtype']}, {blas}",
            "",
            f"{machine['cores']} cores ({machine['processor']}), no GPU. Chunks of {case['chunk']} "
            f"x {case['chunk']}, from "
            f"zarr to zarr, within {found['budget_mib']:.0f} MiB (device {case['device']}, host "
            f"{case['host']}). "
            f"Versions: {', '.join(versions)}.",
            "",
            *table(["program", "T, warm", "in-core T / T", "T, cold", "in-core T / T", "peak memory"], rows),
            "",
        ]
    return lines[:-1]


def safeguards() -> list[str]:
    """Return the table of what checks and a journal cost, by `bench_verify.py` and `bench_journal.py`."""
    rows = []
    for case in [*load("bench_verify.json").values(), *load("bench_journal.json").values()]:
        machine = case["machine"]
        on = machine["device"] if machine["name"] == "cuda" else f"{machine['cores']} cores"
        for name, over in case["over_plain"].items():
            figures = [f"{over[x]:.2f}" for x in ("min", "median", "max")]
            rows.append([case["what"], on, str(len(case["samples_seconds"][name])), name, *figures])
    return table(["product", "on", "rounds", "with", "minimum", "median", "maximum"], rows)


def served() -> list[str]:
    """Return the table of what the service adds to the T of its jobs, by `bench_service.py`."""
    rows = []
    for case in load("bench_service.json").values():
        warm, size = case["warm"], case["size"]
        cells = [f"{case['jobs']} of {size}x{size}x{size} float64", ", ".join(warm["devices"])]
        cells.append(seconds(warm["T"]))
        for mode in ("warm", "cold"):
            found = case.get(mode)
            if found is None:
                cells += ["", ""]
                continue
            cells.append(f"{found['ratio']:.3f}")
            gap = sum(found["median gaps"].values())
            cells.append(unbroken(f"{1e3 * gap:.0f} ms"))
        rows.append(cells)
    heads = ["products", "on", "T of one", "warm worker: time / sum of T", "between two"]
    return table([*heads, "a process per job: time / sum of T", "between two"], rows)


def queued() -> list[str]:
    """Return the table of how long a submission takes, by `bench_queue.py`."""
    found = load("bench_queue.json")["queue"]
    cells = ("p50_ms", "p99_ms", "max_ms")
    rows = [
        [f"{jobs:,}", str(figures["count"]), *(unbroken(f"{figures[name]:.0f} ms") for name in cells)]
        for jobs, figures in ((0, found["empty"]), (found["queued"], found["full"]))
    ]
    return [
        *table(["queued jobs", "submissions", "median", "99th percentile", "maximum"], rows),
        "",
        f"On {found['machine']['cores']} cores. From its submission to its end, a job that runs alone takes "
        f"{found['overhead_s']:.2f} s longer than its T.",
    ]


def libraries() -> list[str]:
    """Return the table of `bench_peers.py`: other libraries' products beside ours."""
    what = {
        "corr": "all correlations of rows",
        "topk": "50 nearest rows",
        "grm": "genetic relationship",
        "pairwise": "genetic relationship, pairwise counts",
        "pca": "20 principal components",
        "kernel": "Gaussian kernel matrix times 10 columns",
    }
    rows = []
    for key, found in load("bench_peers.json").items():
        kind, _, extents = key.removeprefix("cpu ").partition(" of ")
        for name, samples in found["samples"].items():
            most = f"{found['median_bytes'][name] / 2**20:.0f} MiB"
            rows.append(
                [f"{what[kind]}, {extents}", name, seconds([x["seconds"] for x in samples]), unbroken(most)]
            )
    return table(["product", "with", "time", "most memory"], rows)


def similar() -> list[str]:
    """Return the table of `bench_similarity.py` on a GPU, beside the plain product in its memory."""
    rows = []
    for found in load("bench_similarity.json").values():
        ours, plain = (seconds(found["samples_seconds"][name]) for name in ("ours", "plain"))
        rows.append([found["what"], ours, plain, f"{median(found['rate_of_other']):.2f}"])
    return table(["product", "T", "plain product in core", "rate, relative to it"], rows)


def nearest() -> list[str]:
    """Return the table of `bench_neighbors.py`: neighbors beside similarity and what people use instead."""
    names = ("similarity", "neighbors", "loop", "scikit-learn", "faiss")
    rows = []
    for key, found in load("bench_neighbors.json").items():
        taken, where = found["seconds"], found["device"] or f"{found['machine']['cores']} cores"
        times = [seconds(taken[name]) if name in taken else "" for name in names]
        rows.append([key.split()[2], where, *times])
    return table(["X float32", "on", *names], rows)


def fits() -> list[str]:
    """Return the table of `bench_fits.py`: least squares and singular values, relative to a Gram matrix."""
    rows = []
    for key, found in load("bench_fits.json").items():
        where = found["device"] or f"{found['machine']['cores']} cores"
        for name, taken in found["seconds"].items():
            rows.append([key.split()[2], where, name, seconds(taken), f"{found['to_gram'][name]:.2f}"])
    return table(["X float32", "on", "what", "time", "relative to gram"], rows)


def on_devices() -> list[str]:
    """Return the table of several GPUs beside one, by `bench_devices.py` on hosts with two and with one."""
    sources = {
        "page-cache": "zarr in the page cache, C in memory",
        "memory": "arrays in memory",
        "pinned": "pinned arrays in memory",
        "zarr": "zarr to zarr in memory",
    }
    rows, first_runs = [], list[str]()
    for host in ("bench_two_gpus.json", "bench_devices.json"):
        for name, samples in load(host)["cases"].items():
            source, size, dtype = name.partition(":")[0].split()
            measured = [one for one in samples if one.get("round")]
            times, read = dict[str, list[float]](), dict[str, int]()
            for one in measured:
                times.setdefault(one["devices"], []).append(one["seconds"])
                read[one["devices"]] = one["read_bytes"]
            first = next(iter(times))
            first_runs += [
                f"Before the measured rounds, a product took {one['seconds']:.2f} s on the workers of "
                f"{one['workers']}: they started Python and CUDA."
                for one in samples
                if "workers" in one and one["round"] == 0
            ]
            names = max((one["names"] for one in measured), key=len)
            gpu = names[0].partition(": ")[2].removeprefix("NVIDIA ").partition(" ")[0]
            kind = next((one["workers"] for one in measured if "workers" in one), "")
            lists = {"0": f"one {gpu}", "0,0": f"one {gpu} twice (`0,0`)"}
            lists |= {"all": f"{len(names)} {gpu}s", "dask": f"{len(names)} {gpu}s, workers of {kind}"}
            for given, seconds_each in times.items():
                rows.append(
                    [
                        f"{size if 'x' in size else size + '^3'} {dtype}, {sources[source]}",
                        lists[given],
                        str(len(seconds_each)),
                        seconds(seconds_each),
                        f"{median(times[first]) / median(seconds_each):.2f}",
                        f"{read[given] / read[first]:.2f}",
                    ]
                )
    heads = ["product", "on", "rounds", "T", "speed, relative", "bytes read, relative"]
    return [*table(heads, rows), "", *first_runs]


def diagnosed() -> list[str]:
    """Return the table of `bench_diagnosis.py`: what limited each run, and what the advice gained."""
    rows = []
    for made_for, case in load("bench_diagnosis.json").items():
        gains = [f"{x:.0%}" if x is not None else "no gain" for x in (case["promised"], case["gained"])]
        first = case["before"]
        found = verdict(shares(first["lanes"]["compute"]["busy"], first["exposed"], first["seconds"]))
        said = "; ".join(filter(None, (found.headline, found.beside)))
        rows.append([made_for, case["what"], said, seconds(case["seconds_before"]), *gains])
    heads = ["made for", "product", "verdict", "T", "predicted reduction of T", "measured reduction"]
    return table(heads, rows)


def traffic() -> list[str]:
    """Return the tables of `bench_traffic.py`."""
    found = load("bench_traffic.json")
    counted, closed = found["summary"]["announced"], found["summary"]["announced"]["closed_over_counted"]
    off = max(abs(1 - value) for value in closed.values())
    kinds = {kind: one for kind, one in found["summary"].items() if "over_oracle" in one}
    plans = sum(one["plans"] for one in kinds.values())
    rows, causes = [], dict[str, int]()
    for kind, one in kinds.items():
        for cause, count in one["because_of"].items():
            causes[cause] = causes.get(cause, 0) + count
        over = one["over_oracle"]
        figures = f"{over['median']:.3f}", f"{over['max']:.3f}"
        counts = [str(one[name]) for name in ("above_target", "above_near", "of_these_the_oracle")]
        rows.append([kind, str(one["plans"]), *figures, *counts])
    heads = ["slow link", "plans", "median", "maximum", "above 1.02", "above 1.10 of the lower bound"]
    return [
        *table([*heads, "of these, the search too"], rows),
        "",
        f"The grid has {found['cases']} cases, with beta 0 and 1; {found['cases_done']} were run. "
        f"Plans of up to a million steps, {counted['counted']} of {plans}, have their bytes counted exactly. "
        "A closed form gives the bytes of the other plans. Where both are known, they differ by at most "
        f"{off:.2%}.",
        "",
        *table(
            ["why plans are above 1.10 of the lower bound", "plans"],
            [[MISSES[cause], str(count)] for cause, count in causes.items()],
        ),
    ]


def recorded() -> list[str]:
    """Return the table of `bench_recording.py`."""
    rows = []
    for name, case in load("bench_recording.json").items():
        figures = f"{case['log_bytes'] / 1e3:.0f} kB", f"{case['share']:.3%}", ratio(case["ratios"])
        rows.append([name, str(case["steps"]), *figures])
    return table(["run", "steps", "log", "CPU time of recording / T", "T / T without a log"], rows)


def emulated() -> list[str]:
    """Return the table of `bench_emulated.py`, with a row for each shape and a column for each dtype."""
    found = load("bench_emulated.json")
    rates = {(tuple(step["shape"]), step["dtype"]): step for step in found["steps"]}
    dtypes = list(dict.fromkeys(dtype for _, dtype in rates))
    rows = []
    for shape in dict.fromkeys(shape for shape, _ in rates):
        steps = [rates.get((shape, dtype)) for dtype in dtypes]
        cells = [f"{x['over_native']:.2f} ({x['moduli']} moduli)" if x and x["moduli"] else "" for x in steps]
        rows.append([" x ".join(map(str, shape)), *cells])
    return [
        f"Speed of one emulated step, preparation included, divided by the speed of cuBLAS on one "
        f"{found['device']}:",
        "",
        *table(["m x n x k", *dtypes], rows),
    ]
