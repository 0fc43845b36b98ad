#!/usr/bin/env python
"""Many products of all shapes, dtypes, sources and budgets, each against its lower bound.

The bound of a product is the longest of: its time in core with the operands on the device, and all its bytes
once over each link at the rate that the link reached in this run (`grid_cases.bounds`). `scheduled` is the
time that the best plan would take at these rates (`grid_schedule.py`). T is the wall time of `oocgemm.gemm`
into an existing C, or into a file. Contenders are a double-buffered loop (`grid_loop.py`) and CuPy in core,
where the product fits; on the CPU a loop over slices and NumPy in core, which for stored operands reads,
multiplies and writes. C in a file is synced to the disk by all of them. Rows of each result are checked.

With --kind probe, other products run without contenders, against a simpler bound (`grid_cases.probe_bound`).
Where their time goes is printed (`grid_where.py`).

The first call of each contender is not counted; for oocgemm it is in the results as `first`. A contender that
takes long runs once. oocgemm runs up to `MAX_REPEATS` times if its samples differ much. Results are written
to --output after each product, under a key for the device. With --add, products that are there are not
measured again: so a grid can be spread over several calls.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import click
import grid_ceilings
import numpy as np
from grid_cases import (
    CHUNKS,
    COLD,
    CUDA,
    HOST,
    IN_MEMORY,
    PINNED,
    PROBE,
    SMALL,
    Case,
    bounds,
    budget_bytes,
    chosen,
    copies_bound,
    loop_tile,
    probe_bound,
    rows,
    spread,
    summary,
)
from grid_data import Files, Operands, evict, files_of, is_right, read_array, sync
from grid_loop import multiplier, slice_product, stream_product
from grid_runs import (
    Tree,
    commands,
    free_memory,
    in_core,
    pinned,
    prepare,
    release,
    serve,
    small_calls,
    timed,
)
from grid_schedule import scheduled
from grid_where import HEADER, line, where
from keeping import here

import oocgemm
from oocgemm.planning.units import parse_size

CONTENDER_SECONDS = 1.2  # a contender other than oocgemm stops once its calls took this long together
OWN_SECONDS = 1.5  # oocgemm runs at least twice, and no more once its calls took this long together
# With at most MAX_REPEATS samples, whose spread (largest less smallest, by median) is above WIDE_SPREAD.
MAX_REPEATS, WIDE_SPREAD = 7, 0.1
IN_CORE_BYTES = 4 << 30  # CuPy copies larger pageable arrays for many seconds, and is never the fastest
LINK_BYTES = 2 << 30  # copied for each sample of the rate of a link
COMMAND_SIZES = (2048, 16384)
# The samples of two trees, each in a process of its own: one beside the process that checks results would
# be 3 to 4% slower than the same tree in another.
THIS_TREE, OTHER_TREE = "this_tree", "other_tree"
Turn = Callable[[], object]


class Bench:
    """The products of one backend: their operands, the links of the machine, and the results so far."""

    def __init__(
        self, backend: str, folder: Path, repeats: int, skip_loop: bool, trees: tuple[Tree, ...]
    ) -> None:
        self.backend, self.repeats, self.skip_loop, self.trees = backend, repeats, skip_loop, trees
        self.operands, self.files = Operands(), Files(folder)
        self.rates: dict[str, Any] = {}
        self._kernels: dict[Any, tuple[float, str] | None] = {}

    @property
    def on_gpu(self) -> bool:
        return self.backend == "cuda"

    def measure_links(self, folder: Path, size: int, stored: bool) -> dict[str, Any]:
        """Measure the rates of the links, and print them."""
        self.rates = grid_ceilings.links(folder, size, True, stored)
        free_memory()
        alone = {name: rate for name, rate in self.rates.items() if isinstance(rate, float)}
        for name, rates in ("links", alone), ("the ring", self.rates["threads"]["ring"]):
            print(f"GB/s of {name}: { {x: _rounded(rate) for x, rate in rates.items()} }")
        return self.rates

    def measure(self, case: Case) -> dict[str, Any]:
        """Measure one product."""
        a, b, c = self.operands.make(case)
        found: dict[str, Any] = {"case": asdict(case), "samples": {}, "first_of_tree": {}, "right": {}}
        rates = dict(self.rates)
        paths = self.files.store(case, a, b) if case.source not in IN_MEMORY else None
        if self.on_gpu:
            self._bound_of_kernel(case, found)
        with pinned(*((a, b, c) if case.source == PINNED else ())):
            # On the CPU other programs disturb more, so contenders take turns with oocgemm.
            turns = {} if self.on_gpu or self.skip_loop else self._turns(case, (a, b, c), paths, 0)
            self._ours(case, (a, b, c), paths, found, turns)
            if paths and case.source in COLD:
                evict(*paths)
                rates["disk_read"] = found["disk_read"] = grid_ceilings.disk_read(files_of(*paths))
            if self.on_gpu and not self.skip_loop:
                self._others(case, (a, b, c), paths, found)
        if self.on_gpu:
            found["bounds"] = bounds(case, rates, found.get("compute_seconds"))
            found["bound_by"] = max(found["bounds"], key=found["bounds"].__getitem__)
            found["bound"] = found["bounds"][found["bound_by"]]
            found["scheduled"] = scheduled(case, rates, found.get("compute_seconds"))
            found["probe_bound"] = probe_bound(case, rates, found.get("compute_seconds"))
        return found

    def _bound_of_kernel(self, case: Case, found: dict[str, Any]) -> None:
        key = case.m, case.k, case.n, case.dtype, case.compute
        if key not in self._kernels:
            free_memory()
            try:
                self._kernels[key] = grid_ceilings.kernel_seconds(case, copies_bound(case, self.rates))
            except Exception as error:  # the bound is then that of the links
                found["compute_error"] = repr(error)
                self._kernels[key] = None
            free_memory()
        if timed := self._kernels[key]:
            found["compute_seconds"], found["compute_of"] = timed

    def _ours(
        self, case: Case, arrays: Any, paths: Any, found: dict[str, Any], turns: dict[str, tuple[Turn, Any]]
    ) -> None:
        """Run oocgemm: a first call, and the counted ones. After each, the contenders in `turns` run once."""
        a, b, c = arrays
        options = case.options | {"backend": self.backend} | ({"overwrite": True} if paths else {})
        place: Any = self.files.product(case, "oocgemm") if paths else c
        left, right = map(str, paths) if paths else (a, b)

        def call() -> Any:
            return oocgemm.gemm(left, right, str(place) if paths else c, **options)

        samples, wheres = list[float](), list[dict[str, Any]]()
        for repeat in range(max(self.repeats, MAX_REPEATS) + 1):
            enough = repeat > self.repeats and not differ(samples)
            if enough or (self.on_gpu and len(samples) > 1 and sum(samples) > OWN_SECONDS):
                break
            # The first one after a pause is slower, so that the trees take turns at being first.
            for tree in self.trees[:: -1 if repeat % 2 else 1]:
                tree.sample(case, paths, found)
            if not repeat or not self.trees:
                prepare(case, paths)
                seconds, result = timed(call)
            if self.trees and repeat:
                samples = found["samples"].get(THIS_TREE, [])
            elif repeat:
                samples.append(seconds)
                wheres += [where(result.timeline)] if self.on_gpu else []
            else:
                found["first"] = seconds
                found["right"]["oocgemm"] = is_right(case, read_array(place) if paths else c)
                plan = result.plan
                found["plan"] = {"tile": str(plan.tile), "steps": plan.steps}
                if self.trees:
                    release()
            for name, (turn, out) in turns.items():
                self._take_turn(name, case, paths, found, turn, out)
        for name, first in found.get("firsts", {}).items():
            found["samples"][name] = found["samples"][name] or [first]
        found["samples"]["oocgemm"] = samples
        found["T"] = spread(samples)
        found["exposed"] = result.report.exposed
        if wheres:  # of the run whose time is the median
            found["where"] = wheres[sorted(range(len(samples)), key=samples.__getitem__)[len(samples) // 2]]
        release()
        for tree in self.trees:
            tree.release()

    def _take_turn(
        self, name: str, case: Case, paths: Any, found: dict[str, Any], turn: Turn, result: Any
    ) -> None:
        """Run a contender once; check its first result. The first call is not counted unless it is the only.

        A loop runs no more once its calls took `CONTENDER_SECONDS`.
        """
        firsts, samples = found.setdefault("firsts", {}), found["samples"].setdefault(name, [])
        if name in firsts:
            if name == "in_core" or firsts[name] + sum(samples) < CONTENDER_SECONDS:
                samples.append(timed(turn)[0])
            return
        if isinstance(result, np.ndarray) and not paths:
            self.operands.spoil(result)
        firsts[name], _ = timed(turn)
        found["right"][name] = is_right(case, result)

    def _turns(self, case: Case, arrays: Any, paths: Any, free: int) -> dict[str, tuple[Turn, Any]]:
        """Return the contenders of a case: a function that multiplies, and its C."""
        a, b, c = arrays
        turns: dict[str, tuple[Turn, Any]] = {}
        if paths:
            place = self.files.product(case, "loop")
            out = self.files.open_product(case, place)

            def loop_from_files() -> None:
                stored = [read_array(path) for path in paths]  # a file that is mapped could not be evicted
                self._loop(case, (*stored, out), free)
                if place.suffix == ".npy":
                    out.flush()
                sync(place)

            turns["loop"] = loop_from_files, out
            if not self.on_gpu:
                turns["in_core"] = self._numpy_from_files(case, paths)
        elif self.on_gpu:
            turns["loop"] = (lambda: self._loop(case, arrays, free)), c
            copied = case.operand_bytes + case.c_bytes
            if copied * 1.1 < free and (case.source == PINNED or copied <= IN_CORE_BYTES):
                turns["in_core"] = (lambda: in_core(case, a, b, c)), c
        else:
            turns["in_core"] = (lambda: np.matmul(a, b, out=c)), c
        return turns

    def _others(self, case: Case, arrays: Any, paths: Any, found: dict[str, Any]) -> None:
        """Run the contenders on a GPU, one after the other."""
        for name, (turn, result) in self._turns(case, arrays, paths, free_memory()).items():
            try:
                self._turn(name, case, paths, found, turn, result)
            except Exception as error:  # such as too little memory for a contender
                found.setdefault("contender_errors", {})[name] = repr(error)
            free_memory()

    def _turn(
        self, name: str, case: Case, paths: Any, found: dict[str, Any], turn: Turn, result: Any
    ) -> None:
        """Run a contender: once uncounted, then until it took `CONTENDER_SECONDS`; check its first result."""
        if isinstance(result, np.ndarray) and not paths:
            self.operands.spoil(result)
        prepare(case, paths)
        first, _ = timed(turn)
        found["right"][name] = is_right(case, result)
        samples: list[float] = []
        while len(samples) < self.repeats and first + sum(samples) < CONTENDER_SECONDS:
            prepare(case, paths)
            samples.append(timed(turn)[0])
        found["samples"][name] = samples or [first]

    def _loop(self, case: Case, arrays: Any, free: int) -> None:
        align = CHUNKS.get(case.source, 256)
        if not self.on_gpu:
            budget = sum(parse_size(x) for x in (case.device, case.host) if x)
            a, b, c = arrays
            slice_product(a, b, c, budget or 1 << 30, align)
            return
        tile = loop_tile(case, budget_bytes(case, free), align)
        a, b, c = (x.view(np.uint16) if case.dtype == "bfloat16" else x for x in arrays)
        stream_product(a, b, c, tile, multiplier(case.dtype), case.source == PINNED)

    def _numpy_from_files(self, case: Case, paths: Any) -> tuple[Turn, Any]:
        place = self.files.product(case, "in-core")
        out = self.files.open_product(case, place)

        def product() -> None:
            a, b = (read_array(path)[:] for path in paths)
            out[:] = a @ b
            sync(place)

        return product, out


def differ(samples: Sequence[float]) -> bool:
    """Return whether samples differ so much that more of them are needed."""
    return not samples or max(samples) - min(samples) > WIDE_SPREAD * median(samples)


def write(output: Path | None, key: str, found: dict[str, Any]) -> None:
    """Replace a key of the results file; others are kept. The file is whole at any time."""
    if output is None:
        return
    kept = json.loads(output.read_text()) if output.exists() else {}
    output.parent.mkdir(parents=True, exist_ok=True)
    new = output.with_suffix(".new")
    new.write_text(json.dumps(kept | {key: found}, indent=1) + "\n")
    new.replace(output)


def kept_cases(output: Path | None, key: str) -> dict[str, Any]:
    """Return the products under a key of the results file."""
    if output is None or not output.exists():
        return {}
    found: dict[str, Any] = json.loads(output.read_text()).get(key, {}).get("cases", {})
    return found


def print_commands(found: dict[str, Any]) -> None:
    for name, one in found.items():
        t = f", T {min(one['T']):.3f} s" if "T" in one else ""
        print(f"{name}: process {min(one['process']):.3f} s{t}", flush=True)


def device_name(backend: str) -> str:
    if backend == "host":
        return "host"
    import cupy

    return str(cupy.cuda.runtime.getDeviceProperties(0)["name"].decode())


@click.command()
@click.option("--backend", type=click.Choice(["cuda", "host"]), default="cuda", show_default=True)
@click.option(
    "--kind",
    type=click.Choice(["grid", "small", "probe"]),
    default="grid",
    show_default=True,
    help="small: calls with small arrays, beside CuPy. probe: 18 products that are not in the grid.",
)
@click.option("--only", default="", help="Only products whose names contain this, such as 'float64 pinned'.")
@click.option("--repeats", default=3, show_default=True)
@click.option("--limit", type=float, help="Start no further product after this many seconds.")
@click.option("--large", is_flag=True, help="Products that take most of the host memory, too.")
@click.option("--skip-loop", is_flag=True, help="Neither the loop nor the product in core.")
@click.option("--commands", "with_commands", is_flag=True, help="Time whole processes instead of products.")
@click.option("--shrink", default=1, help="Divide all extents by this number: to try the script.")
@click.option(
    "--compare",
    type=click.Path(exists=True, path_type=Path),
    help="Another source tree. It and this one are timed in turns, each in a process.",
)
@click.option("--key", help="Key of the results.  [default: the name of the device and the kind]")
@click.option("--add", is_flag=True, help="Keep the products that --output has, and measure only the others.")
@click.option("--work", type=click.Path(path_type=Path), help="Folder for files.  [default: a temporary one]")
@click.option("--output", type=click.Path(path_type=Path), help="JSON for the results.")
@click.option("--worker", is_flag=True, hidden=True)
def main(
    backend: str,
    kind: str,
    only: str,
    repeats: int,
    limit: float | None,
    large: bool,
    skip_loop: bool,
    with_commands: bool,
    shrink: int,
    compare: Path | None,
    key: str | None,
    add: bool,
    work: Path | None,
    output: Path | None,
    worker: bool,
) -> None:
    if worker:
        serve(backend)
        return
    started = time.perf_counter()
    key = key or f"{device_name(backend)}, {'commands' if with_commands else kind}"
    with tempfile.TemporaryDirectory(prefix="oocgemm-grid-", dir=work or ".") as temporary:
        folder = Path(temporary).absolute()
        if with_commands:
            sizes = tuple(size // shrink for size in COMMAND_SIZES)
            found: dict[str, Any] = commands(folder, backend, sizes)
            write(output, key, here() | found)
            print_commands(found)
            return
        all_cases = {"small": SMALL, "probe": PROBE}.get(kind, CUDA if backend == "cuda" else HOST)
        cases = [shrunk(case, shrink) for case in chosen(all_cases, only, large)]
        here_too = {THIS_TREE: Path(__file__).parents[2], OTHER_TREE: compare.absolute()} if compare else {}
        trees = tuple(Tree(name, tree, backend) for name, tree in here_too.items())
        bench = Bench(backend, folder, repeats, skip_loop or kind == "probe", trees)
        result: dict[str, Any] = here() | {"cases": kept_cases(output, key) if add else {}}
        cases = [case for case in cases if "samples" not in result["cases"].get(case.name, {})]
        if kind != "small" and backend == "cuda":
            stored = any(case.source not in IN_MEMORY for case in cases)
            result["links"] = bench.measure_links(folder, LINK_BYTES >> (0 if shrink == 1 else 5), stored)
            print(f"after {time.perf_counter() - started:.1f} s", flush=True)
        if kind == "probe":
            print(f"{'product':42} {HEADER}")
        done = result["cases"]
        for number, case in enumerate(cases):
            if limit is not None and time.perf_counter() - started > limit:
                result["not_run"] = [one.name for one in cases[number:]]
                break
            before = time.perf_counter()
            try:
                done[case.name] = small_calls(case) if kind == "small" else bench.measure(case)
            except Exception as error:  # the others are measured all the same
                done[case.name] = {"case": asdict(case), "error": repr(error)}
                release()
                for tree in trees:
                    tree.release()
                free_memory()
            spent = done[case.name]["spent_seconds"] = time.perf_counter() - before
            result["summary"] = summary(done)
            write(output, key, result)
            if kind != "probe":
                print(f"{[*rows({case.name: done[case.name]})][1]}  ({spent:.1f} s)", flush=True)
            else:
                print(probe_line(case.name, done[case.name]), flush=True)
        for tree in trees:
            tree.close()
    print()
    for text in rows(done) if kind != "probe" else probe_means(done):
        print(text)
    for name in result.get("not_run", ()):
        print(f"{name} not run: --limit {limit:g}")
    for what, value in result.get("summary", {}).items():
        lines = value if isinstance(value, list) and what in ("slower", "wrong", "failed") else [value]
        for each in lines:
            print(f"{what}: {each}")


def _rounded(rates: float | Sequence[float]) -> list[float]:
    return [round(rate / 1e9, 1) for rate in ([rates] if isinstance(rates, float) else rates)]


def probe_line(name: str, one: dict[str, Any]) -> str:
    """Return a line of the table of `PROBE`: times, ratios, and where the time goes."""
    if "where" not in one:
        return f"{name:42} {one.get('error')}"
    t, first = median(one["samples"]["oocgemm"]), one["first"]
    numbers = line(t, one["probe_bound"], one["bound"], one.get("scheduled"), one["where"])
    wrong = "" if all(one["right"].values()) else "  WRONG"
    return f"{name:42} {numbers} first {1e3 * first:6.0f}  {one['plan']['tile']}{wrong}"


def probe_means(cases: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the geometric means of the ratios by source."""
    for source in IN_MEMORY:
        some = [one for one in cases.values() if one["case"]["source"] == source and "where" in one]
        for name in ("probe_bound", "bound", "scheduled") if some else ():
            ratios = [one[name] / median(one["samples"]["oocgemm"]) for one in some if one.get(name)]
            yield f"{source}: geometric mean of {name} / T {geometric_mean(ratios):.3f} of {len(ratios)}"


def shrunk(case: Case, factor: int) -> Case:
    """Return a case with extents divided by a factor, at least 1."""
    m, k, n = (max(1, extent // factor) for extent in (case.m, case.k, case.n))
    return Case(**(asdict(case) | {"m": m, "k": k, "n": n}))


if __name__ == "__main__":
    main()
