"""Measure the fixed cost of calls and processes: small products beside CuPy or NumPy, processes beside T.

    python scripts/bench/bench_calls.py calls --backend cuda --sizes 64,512,1024,2048,4096
    python scripts/bench/bench_calls.py processes --work /dev/shm --output bench_calls.json

Calls multiply pageable arrays of small integers, after five calls that are not counted. oocgemm, with and
without short runs in one thread, and CuPy (`asarray`, `@`, `asnumpy`) take turns. On the host, NumPy stands
in for CuPy. Every result must equal that of NumPy. Times are medians, with least and most, in milliseconds.

Processes run in turns, all packages compiled to bytecode: one that starts Python, NumPy, CuPy, a CUDA context
and cuBLAS, those of `oocgemm run`, and one in which oocgemm is imported and called once, with all of that
started before. Its time is that of import and call.
"""

import compileall
import itertools
import json
import operator
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import numpy as np
import zarr
from keeping import keep, output, work

import oocgemm
from oocgemm.engine import executor

Call = Callable[[Any, Any], Any]


def _sizes(context: click.Context, parameter: click.Parameter, value: str) -> list[int]:
    return [int(size) for size in value.split(",")]


def described(seconds: list[float]) -> str:
    """Return the median, the least and the most of some times, in milliseconds."""
    median, least, most = statistics.median(seconds), min(seconds), max(seconds)
    return f"{1e3 * median:8.2f} ({1e3 * least:.2f} to {1e3 * most:.2f})"


def reference(backend: str) -> Call:
    """Return a function that multiplies two arrays with CuPy, or with NumPy on the host."""
    if backend == "host":
        return lambda a, b: a @ b
    import cupy

    return lambda a, b: cupy.asnumpy(cupy.asarray(a) @ cupy.asarray(b))


@click.group()
def main() -> None:
    """Measure the fixed cost of calls and commands."""


@main.command()
@click.option("--backend", default="cuda")
@click.option("--sizes", callback=_sizes, default="64,512,1024,2048,4096")
@click.option("--dtype", default="float64")
@click.option("--samples", default=50)
@click.option("--short-bytes", default=1 << 40, help="Largest product that the short run takes, in bytes.")
def calls(backend: str, sizes: list[int], dtype: str, samples: int, short_bytes: int) -> None:
    """Time warm calls of `oocgemm.matmul`."""
    limit = executor.MAX_STREAMED_STEPS
    executor.MAX_SHORT_BYTES = executor.MAX_STREAMED_BYTES = short_bytes

    def product(steps: int) -> Call:
        def multiply(a: Any, b: Any) -> Any:
            executor.MAX_STREAMED_STEPS = steps
            return oocgemm.matmul(a, b, backend=backend)

        return multiply

    contenders = {"short": product(limit), "threads": product(-1), "reference": reference(backend)}
    for size in sizes:
        rng = np.random.default_rng(size)
        a, b = (rng.integers(-3, 4, (size, size)).astype(dtype) for _ in "ab")
        expected = a @ b
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for sample in range(samples + 5):
            for name, multiply in contenders.items():
                start = perf_counter()
                found = multiply(a, b)
                seconds = perf_counter() - start
                if sample >= 5:
                    times[name].append(seconds)
                elif not np.array_equal(found, expected):
                    raise SystemExit(f"{name}: the product of {size} x {size} matrices is wrong")
        above = statistics.median(times["short"]) - statistics.median(times["reference"])
        print(f"{size}^3 {dtype}", *(f"{name} {described(found)}" for name, found in times.items()), sep="  ")
        print(f"    above the reference: {1e3 * above:.2f} ms", flush=True)


# A process that starts what a run needs of other packages, and a process that calls oocgemm once. The second
# one prints three times in seconds: to import oocgemm, of import and call, and the T of the call.
BARE = {
    "host": "import numpy",
    "cuda": "import numpy, cupy\nfrom cupy_backends.cuda.libs import cublas\n"
    "cupy.cuda.runtime.free(0)\ncublas.create()",
}
CALL = """
import sys, time
{bare}
import numpy as np
a = np.ones(({size}, {size}), np.float32)
start = time.perf_counter()
import oocgemm
oocgemm.gemm
imported = time.perf_counter() - start
result = oocgemm.gemm(a, a, backend="{backend}")
print(imported, time.perf_counter() - start, result.report.wall)
"""


def _process(code: list[str], tree: Path) -> tuple[float, str]:
    """Run Python with a source tree. Return the seconds of the process, and what it printed.

    It does not run in the current folder, which may have another source tree that Python would prefer.
    """
    environment = os.environ | {"PYTHONPATH": str(tree)}
    start = perf_counter()
    command = [sys.executable, *code]
    given: dict[str, Any] = {"capture_output": True, "text": True}
    done = subprocess.run(command, env=environment, cwd=tempfile.gettempdir(), check=False, **given)
    seconds = perf_counter() - start
    if done.returncode:
        raise SystemExit(done.stderr)
    return seconds, done.stdout


@main.command()
@click.option("--backend", default="cuda", type=click.Choice(sorted(BARE)))
@click.option("--sizes", callback=_sizes, default="1500,12000")
@click.option("--rounds", default=7)
@click.option("--tree", type=click.Path(path_type=Path), help="Another source tree, which takes turns.")
@work
@output
def processes(
    backend: str, sizes: list[int], rounds: int, tree: Path | None, work: Path | None, output: Path | None
) -> None:
    """Time processes: of `oocgemm run` on zarr arrays, of a first call, and of the packages alone."""
    trees = {"": Path(__file__).resolve().parents[2]} | ({"other: ": tree.resolve()} if tree else {})
    for place in trees.values():
        compileall.compile_dir(place / "oocgemm", quiet=2)
    times: dict[str, dict[str, list[float]]] = {}

    def add(name: str, **found: float) -> None:
        for part, seconds in found.items():
            times.setdefault(name, {}).setdefault(part, []).append(seconds)

    with tempfile.TemporaryDirectory(dir=work) as folder:
        for size, x in itertools.product(sizes, "AB"):
            data = np.random.default_rng(size).standard_normal((size, size), np.float32)
            zarr.create_array(f"{folder}/{x}{size}.zarr", data=data)
        for turn in range(rounds + 1):  # the first one is not counted
            if turn == 1:
                times.clear()
            add("packages", process=_process(["-c", BARE[backend]], trees[""])[0])
            for kind, place in trees.items():
                for size in sizes:
                    shutil.rmtree(f"{folder}/C.zarr", ignore_errors=True)
                    given = [f"{folder}/A{size}.zarr", f"{folder}/B{size}.zarr", f"{folder}/C.zarr"]
                    code = ["-m", "oocgemm", "run", *given, "--backend", backend, "--json"]
                    seconds, text = _process(code, place)
                    add(f"{kind}run {size}", process=seconds, T=json.loads(text)["report"]["wall"])
                code = ["-c", CALL.format(bare=BARE[backend], size=sizes[0], backend=backend)]
                imported, wall, own = map(float, _process(code, place)[1].split())
                add(f"{kind}first call {sizes[0]}", imports=imported, process=wall, T=own)
    bare = statistics.median(times["packages"]["process"])
    for name, found in times.items():
        parts = (f"{part} {described(seconds)} ms" for part, seconds in found.items())
        over = statistics.median(map(operator.sub, found["process"], found.get("T", found["process"])))
        print(f"{name:22} {', '.join(parts)}; process - T {1e3 * over:.0f} ms, {over / bare:.2f} of packages")
    device = oocgemm.backends.open_backend(backend).describe().get("device", "CPU")
    keep(output, f"{device}", {"seconds": times})


if __name__ == "__main__":
    main()
