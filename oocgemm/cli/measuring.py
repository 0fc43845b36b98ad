"""The commands that measure: calibrate, bench, tune."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from oocgemm import backends
from oocgemm.cli.console import doing
from oocgemm.cli.display import print_bench, print_calibration, print_tuning
from oocgemm.cli.parameters import Size, option
from oocgemm.cli.printing import JSON, print_json
from oocgemm.jobs.budgets import budgets_of
from oocgemm.kernels import ladder, tuning
from oocgemm.machine import kernel_bench
from oocgemm.machine.calibrate import calibrate as measure
from oocgemm.machine.kernel_bench import chart
from oocgemm.planning import OPERANDS
from oocgemm.reports.exports import check_writable, writing
from oocgemm.reports.roofline import roofline_of
from oocgemm.system import cache


@click.command()
@click.option(
    "--backend",
    type=click.Choice(backends.NAMES),
    default="auto",
    show_default=True,
    help="Backend to measure; auto is cuda if a device is available, else host.",
)
@option("gemm", "device")
@click.option(
    "--path",
    metavar="DIR",
    type=click.Path(),
    help="Folder whose storage is measured, such as /data. Needs up to 1.5 GiB there for temporary files.  "
    "[default: current folder]",
)
@click.option(
    "--svg",
    type=click.Path(dir_okay=False),
    help="Write a roofline chart of the machine to this file, as SVG.",
)
@JSON
def calibrate(backend: str, device: int, path: str | None, svg: str | None, as_json: bool) -> None:
    """Measure this machine, for plans and reports.

    This takes less than a minute. It measures the kernels, the copies between host and device, the memory,
    and the storage of one folder. Run it once per file system on which operands are stored, while no other
    program is busy. The results are stored in the user's cache directory, or in $OOCGEMM_CACHE.

    Without a calibration, the first long run on a machine measures a few rates, in less than a second. Set
    OOCGEMM_PROBE=0 to turn that off.

    Example: oocgemm calibrate --path /data
    """
    if svg is not None:
        check_writable("--svg", svg)
    with doing(not as_json) as say:
        found = measure(backend, device, path, say=say)
    kept = cache.save(found)
    if svg is not None:
        engine = backends.open_backend(found.backend, device)
        budget = budgets_of(engine.name, engine.free_memory).device
        with writing("--svg", svg):
            Path(svg).write_text(roofline_of(found, budget), encoding="utf-8")
    if as_json:
        print_json(found.to_dict() | {"kept": str(kept)})
    else:
        print_calibration(found, str(kept))


@click.group(name="bench")
def bench_group() -> None:
    """Measure single parts of oocgemm: at present, its kernels."""


@bench_group.command(name="kernels")
@option("gemm", "device")
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    type=click.Choice(OPERANDS),
    help="dtype of the operands; may be repeated.  [default: float32 and float64]",
)
@click.option(
    "--compute",
    type=click.Choice(kernel_bench.PRECISIONS),
    default="native",
    show_default=True,
    help="Precision of float32 products; tf32 and bf16 round the operands.",
)
@click.option(
    "--kernel",
    "kernels",
    multiple=True,
    type=click.Choice(ladder.names()),
    help="Kernel to time; may be repeated.  [default: all]",
)
@click.option(
    "--size",
    "shapes",
    multiple=True,
    metavar="MxNxK",
    type=Size(),
    help="Product to time, such as 4096x4096x1024; may be repeated.  [default: many shapes]",
)
@click.option(
    "--seconds",
    metavar="S",
    type=click.FloatRange(min=0),
    default=0.05,
    show_default=True,
    help="Time that one measurement takes, in seconds.",
)
@click.option(
    "--limit",
    metavar="S",
    type=click.FloatRange(min=0),
    default=1.0,
    show_default=True,
    help="Time limit of a single product, in seconds. A kernel that needs longer for a product skips it.",
)
@click.option(
    "--svg",
    type=click.Path(dir_okay=False),
    help="Write a chart of the rates of square products to this file, as SVG.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object. It has all variants of a kernel; the tables show only the fastest.",
)
def bench_kernels(as_json: bool, svg: str | None, **options: Any) -> None:
    """Time the kernels of this package against cuBLAS.

    By default it times products of random matrices of many shapes: square (8 to 16384), odd, thin, and
    updates of a 12288 x 12288 tile of C. Kernels and cuBLAS take turns, and the median of several samples is
    shown. Loads, stores and bank conflicts are computed from the kernel's definition. If ncu (Nsight Compute)
    is on PATH and may read the GPU's counters, the command also counts them, in one launch per kernel.

    Example: oocgemm bench kernels --dtype float32 --size 4096x4096x1024
    """
    if svg is not None:
        check_writable("--svg", svg)
    given = {name: value for name, value in options.items() if value != ()}
    with doing(not as_json) as say:
        result = kernel_bench.bench_kernels(**given, say=say)
    if svg is not None:
        with writing("--svg", svg):
            Path(svg).write_text(chart(result), encoding="utf-8")
    if as_json:
        print_json(result)
    else:
        print_bench(result, kernel_bench.best_rows(result))


@click.command()
@option("gemm", "device")
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    type=click.Choice(OPERANDS),
    help="dtype of the operands; may be repeated.  [default: all]",
)
@JSON
def tune(device: int, dtypes: tuple[str, ...], as_json: bool) -> None:
    """Find the fastest kernels on this GPU, for --kernel auto.

    It compares cuBLAS and the kernels of this package with all their parameters. For each dtype it times a
    large square product, an update of a tile of C, and a thin product. Run it while no other program uses the
    GPU. The results are stored in the user's cache directory, or in $OOCGEMM_CACHE.

    Example: oocgemm tune --dtype float32
    """
    with doing(not as_json) as say:
        found = kernel_bench.tune(device=device, dtypes=dtypes, say=say)
    kept = str(tuning.save(found))
    if as_json:
        print_json(asdict(found) | {"kept": kept})
    else:
        print_tuning(found, kept)
