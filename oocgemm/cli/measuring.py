"""The commands that measure: calibrate, bench, tune."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from oocgemm import backends, stores
from oocgemm.cli.display import doing
from oocgemm.cli.display_measured import print_bench, print_calibration, print_tuning
from oocgemm.cli.options import DEVICE, JSON
from oocgemm.cli.output import print_json
from oocgemm.cli.parameters import Size
from oocgemm.jobs.budgets import budgets_of
from oocgemm.kernels import registry as ladder
from oocgemm.kernels import tuning
from oocgemm.machine import bench
from oocgemm.machine.calibrate import calibrate as measure
from oocgemm.planning import OPERANDS
from oocgemm.reports.exports import check_place, writing
from oocgemm.reports.roofline import roofline_of
from oocgemm.system import cache


@click.command()
@click.option(
    "--backend",
    type=click.Choice(backends.NAMES),
    default="auto",
    show_default=True,
    help="What to measure; auto is cuda where a device answers.",
)
@DEVICE
@click.option(
    "--path",
    metavar="DIR",
    type=click.Path(),
    help="Folder whose storage is measured, with temporary files of some 500 MiB.  [default: the current one]",
)
@click.option("--svg", type=click.Path(dir_okay=False), help="Draw the machine's roofline to this file.")
@JSON
def calibrate(backend: str, device: int, path: str | None, svg: str | None, as_json: bool) -> None:
    """Measure this machine, for plans and reports to use.

    Kernels, links and memory, and the storage at a folder, in under a minute: run it once more for each file system that
    operands lie on. The figures are kept in the user's cache directory, or in $OOCGEMM_CACHE. Nothing else should run
    meanwhile.
    """
    if svg is not None:
        check_place("--svg", svg)
    if backends.resolve(backend) == "host":
        stores.load_zarr()
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
    """Measure parts of oocgemm by themselves."""


@bench_group.command(name="kernels")
@DEVICE
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    type=click.Choice(OPERANDS),
    help="May be repeated.  [default: float32 and float64]",
)
@click.option(
    "--compute", type=click.Choice(bench.PRECISIONS), default="native", show_default=True, help="Precision."
)
@click.option(
    "--kernel",
    "kernels",
    multiple=True,
    type=click.Choice(ladder.names()),
    help="May be repeated.  [default: all]",
)
@click.option(
    "--size",
    "shapes",
    multiple=True,
    metavar="MxNxK",
    type=Size(),
    help="Product to time, may be repeated.  [default: many]",
)
@click.option(
    "--seconds",
    metavar="S",
    type=click.FloatRange(min=0),
    default=0.05,
    show_default=True,
    help="Seconds for each measurement.",
)
@click.option(
    "--limit",
    metavar="S",
    type=click.FloatRange(min=0),
    default=1.0,
    show_default=True,
    help="Seconds that one product may take.",
)
@click.option("--svg", type=click.Path(dir_okay=False), help="Draw square products to this file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with all variants.")
def bench_kernels(as_json: bool, svg: str | None, **options: Any) -> None:
    """Time our kernels beside cuBLAS, which takes turns with them.

    Square products from 8 to 16384, odd and thin ones and the engine's updates of a 12288 x 12288 tile, on random
    numbers; the median of several samples. Loads, stores and bank conflicts are reckoned on paper; where Nsight Compute's
    ncu is on PATH and may read the GPU's counters, it counts them too, in one launch of each kernel.
    """
    if svg is not None:
        check_place("--svg", svg)
    given = {name: value for name, value in options.items() if value != ()}
    with doing(not as_json) as say:
        result = bench.bench_kernels(**given, say=say)
    if svg is not None:
        with writing("--svg", svg):
            Path(svg).write_text(bench.chart(result), encoding="utf-8")
    if as_json:
        print_json(result)
    else:
        print_bench(result, bench.best_rows(result))


@click.command()
@DEVICE
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    type=click.Choice(OPERANDS),
    help="May be repeated.  [default: all]",
)
@JSON
def tune(device: int, dtypes: tuple[str, ...], as_json: bool) -> None:
    """Find the fastest kernels on this GPU, for --kernel auto.

    Of our kernels, with all their parameters, and cuBLAS: for each dtype, on a large square product, on an update as
    the engine makes it, and on a thin one. What is found is kept in the user's cache directory, or in $OOCGEMM_CACHE.
    Nothing else should run meanwhile.
    """
    with doing(not as_json) as say:
        found = bench.tune(device=device, dtypes=dtypes, say=say)
    kept = str(tuning.save(found))
    if as_json:
        print_json(asdict(found) | {"kept": kept})
    else:
        print_tuning(found, kept)
