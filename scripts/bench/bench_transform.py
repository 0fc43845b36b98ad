"""Measure a Gram matrix of genotypes that are transformed on load, in turn with ones without a transform.

    python scripts/bench/bench_transform.py --backend host --people 2000 --places 20000 \\
        --folder /tmp/genotypes
    python scripts/bench/bench_transform.py --backend cuda --people 20000 --places 500000 \\
        --folder /dev/shm/types

The genotypes 0, 1 and 2 are zarr arrays of raw chunks: complete ones in int8 and in float16, and int8 with 1%
missing. The cases are

    int8         complete genotypes, no transform: exact int8 products
    float16      complete genotypes in float16, no transform
    transform    missing genotypes replaced by means, centred and scaled, cast to float16
    imputed      missing genotypes replaced by 0: exact int8 products
    centred      complete genotypes, centred: exact int8 products, and a correction of C

The first round is not counted. The statistics of the columns are taken before, in a pass that is timed
alone. The first rows of C are compared with a product in float64. On cuda, the kernel of transforms is timed
too. The results go to a JSON file.
"""

import ctypes
import shutil
import statistics
import time
from itertools import product
from pathlib import Path
from typing import Any

import click
import numpy as np
import zarr
from device_arrays import spread
from keeping import keep, output

import oocgemm
from oocgemm import Transform

CHUNK = 2000
# Rows of C that are compared with float64.
COMPARED = 100
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("complete", {}),
    "float16": ("half", {"out_dtype": "float32"}),
    "transform": ("missing", {"transform": Transform(missing=-1, center="k", scale="k", cast="float16")}),
    "imputed": ("missing", {"transform": Transform(missing=-1, impute=0)}),
    "centred": ("complete", {"transform": Transform(center="k", cast="int8")}),
}


def store(folder: Path, people: int, places: int) -> None:
    """Store the genotypes. Blocks of columns are the same genotypes with their rows rotated.

    So each chunk is a contiguous part of the same rows, repeated, and is written by one call.
    """
    rng = np.random.default_rng(0)
    width, height = min(CHUNK, places), min(CHUNK, people)
    some = rng.binomial(2, 0.3, (people, width)).astype(np.int8)
    lost = np.where(rng.random((people, width)) < 0.01, np.int8(-1), some)
    contents = {"complete": some, "missing": lost, "half": some.astype(np.float16)}
    down, across = -(-people // height), -(-places // width)
    for name, content in contents.items():
        shape, chunks = (people, places), (height, width)
        zarr.create_array(folder / name, shape=shape, dtype=content.dtype, chunks=chunks, compressors=None)
        # Rows and columns of a chunk beyond the end of the array are never read.
        contents[name] = content[np.arange(people + down * height) % people]

    def write(number: int) -> None:
        name, (row, col) = list(contents)[number % 3], divmod(number // 3, across)
        top = col * 37 % people + row * height
        path = folder / name / "c" / str(row) / str(col)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents[name][top : top + height].data)

    spread(write, 3 * down * across)


def rms_error(folder: Path, c: Any, found: oocgemm.Stats) -> float:
    """Return the error of elements off the diagonal in the first rows of C, relative to these elements."""
    rows = np.asarray(zarr.open_array(folder / "missing", mode="r")[:COMPARED]).astype(float)
    z = np.where(rows == -1, 0, (rows - found.mean) / found.std)
    right = np.tril(z @ z.T, -1)
    error = np.tril(np.asarray(c[:COMPARED, :COMPARED], float), -1) - right
    return float(np.sqrt((error**2).sum() / (right**2).sum()))


def kernel_rates(people: int) -> dict[str, float]:
    """Return the bytes per second that the kernel reads and writes, by dtypes and axis of k."""
    import cupy

    from oocgemm.backends.cuda.launch import Kernels
    from oocgemm.kernels.launches import ElementNumbers, Elements, expand_grid, expand_options
    from oocgemm.planning.elements import ElementStep

    found, rows = {}, people // 4 * 4
    for (stored, result), shape in product(
        (("int8", "float16"), ("float32",) * 2), ((rows, 2048), (2048, rows))
    ):
        axis = "cols" if shape[1] == 2048 else "rows"
        steps = (
            ElementStep("impute", axis, constants=(-1.0,)),
            *(ElementStep(kind, axis) for kind in ("center", "scale")),
        )
        options = expand_options(stored, result, steps, 4)
        function = Kernels(0).plain("expand", "expand", options)
        x, y = (cupy.zeros(shape, dtype) for dtype in (stored, result))
        numbers, elements = cupy.ones((3, 2048)), Elements()
        for number, step in enumerate(steps):
            elements.steps[number] = ElementNumbers(numbers[number].data.ptr, *step.constants)
        extents = map(ctypes.c_longlong, shape)
        values = ctypes.c_void_p(x.data.ptr), *extents, elements, ctypes.c_void_p(y.data.ptr)
        seconds = []
        for _ in range(9):
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record()
            function(expand_grid(*shape, 4), *values)
            end.record()
            end.synchronize()
            seconds.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3)
        found[f"{stored} to {result}, {shape[0]} x {shape[1]}"] = (x.nbytes + y.nbytes) / statistics.median(
            seconds
        )
    return found


@click.command()
@click.option("--backend", default="host", show_default=True)
@click.option("--people", default=2000, show_default=True, help="Rows of X.")
@click.option("--places", default=20000, show_default=True, help="Columns of X.")
@click.option("--folder", type=Path, required=True, help="Keep X and C in this folder. It is removed.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--seconds", default=90.0, show_default=True, help="Begin no third round after this time.")
@output
def main(
    backend: str, people: int, places: int, folder: Path, rounds: int, seconds: float, output: Path | None
) -> None:
    begun, taken = time.perf_counter(), {name: list[float]() for name in CASES}
    row: dict[str, Any] = {"people": people, "places": places}
    folder.mkdir(parents=True)
    try:
        store(folder, people, places)
        started = time.perf_counter()
        click.echo(f"stored in {started - begun:.1f} s")
        known = oocgemm.stats(str(folder / "missing"), missing=-1)
        row["stats"] = time.perf_counter() - started
        click.echo(f"statistics: {row['stats']:.2f} s")
        for turn in range(rounds + 1):
            for name, (source, options) in CASES.items():
                shutil.rmtree(folder / "c", ignore_errors=True)
                started = time.perf_counter()
                result = oocgemm.gram(str(folder / source), folder / "c", backend=backend, **options)
                passed = time.perf_counter() - started
                report = result.report.to_dict()
                lanes = {lane: round(x["busy"], 4) for lane, x in report["lanes"].items()}
                click.echo(f"{turn} {name}: {passed:.3f} s, {lanes}")
                if turn:
                    taken[name].append(passed)
                    row[f"{name} lanes"] = lanes
                    continue
                row["device"] = result.timeline.header["backend"]["device"]
                row[f"{name} plan"] = f"{result.plan.tile}, {result.plan.slots}"
                click.echo(row[f"{name} plan"])
                if name == "transform":
                    row["rms error"] = rms_error(folder, result.out, known)
            if turn and time.perf_counter() - begun > seconds:
                break
    finally:
        shutil.rmtree(folder)
    row |= {name: statistics.median(times) for name, times in taken.items() if times}
    row["seconds"] = taken
    row["to int8"], row["to float16"] = (row["transform"] / row[name] for name in ("int8", "float16"))
    row |= {f"{name} to int8": row[name] / row["int8"] for name in ("imputed", "centred")}
    if backend == "cuda":
        row["kernel"] = kernel_rates(people)
    keep(output or Path("scripts/bench/results/bench_transform.json"), f"{backend} {people}x{places}", row)
    click.echo(row)


if __name__ == "__main__":
    main()
