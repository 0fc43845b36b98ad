"""The commands that measure (calibrate, bench, tune), and that show what was measured (info, report)."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from oocgemm import backends
from oocgemm.cli.display import (
    doing,
    print_bench,
    print_calibration,
    print_comparison,
    print_info,
    print_report,
    print_tuning,
)
from oocgemm.cli.parameters import PRODUCT, option
from oocgemm.cli.process import JSON, print_json, taking
from oocgemm.cli.queue import SERVICE, JobId, find
from oocgemm.jobs.prepare import budgets_of
from oocgemm.kernels import RUNGS, tuning
from oocgemm.machine import info as system
from oocgemm.machine import kernel_bench
from oocgemm.machine.calibrate import calibrate as measure
from oocgemm.machine.kernel_bench import chart
from oocgemm.planning import OPERANDS
from oocgemm.reports.charts import roofline_of
from oocgemm.reports.exports import check_writable, export, writing
from oocgemm.service.client import Client
from oocgemm.service.protocol import SHORT
from oocgemm.system import cache
from oocgemm.system.text import plain
from oocgemm.timeline import Timeline, damage, read_log, same_product
from oocgemm.timeline import report as figures_of


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
    type=click.Choice(RUNGS),
    help="Kernel to time; may be repeated.  [default: all]",
)
@click.option(
    "--size",
    "shapes",
    multiple=True,
    metavar="MxNxK",
    type=PRODUCT,
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


@click.command()
@click.argument("timeline", type=click.Path(), required=False)
@click.argument("other", type=click.Path(), required=False)
@click.option(
    "--job",
    "jobs",
    type=JobId(),
    metavar="ID",
    multiple=True,
    help="Report on this job of a service instead of a file; give it twice to compare two jobs. The last "
    'characters of its id are enough; "last" is the newest job.',
)
@click.option(
    "--html", type=click.Path(dir_okay=False), help="Write a self-contained page with charts to this file."
)
@click.option("--svg", type=click.Path(dir_okay=False), help="Write the Gantt chart to this file, as SVG.")
@click.option("--png", type=click.Path(dir_okay=False), help="Write the Gantt chart to this file, as PNG.")
@click.option(
    "--trace", type=click.Path(dir_okay=False), help="Write a trace for ui.perfetto.dev to this file."
)
@taking(SERVICE, JSON)
def report(
    timeline: str | None,
    other: str | None,
    jobs: tuple[str, ...],
    service: str | None,
    as_json: bool,
    **outputs: str | None,
) -> None:
    """Show what limited the speed of a run, and what to change.

    TIMELINE is a file that `oocgemm run --timeline` wrote. With OTHER, a second such file, the two runs are
    compared.

    Example: oocgemm report run.jsonl --html run.html
    """
    logs = [path for path in (timeline, other) if path is not None]
    if bool(logs) == bool(jobs):
        raise click.UsageError("give a TIMELINE, or --job ID for a job of a service")
    if len(jobs) > 2:
        raise click.UsageError(f"--job was given {len(jobs)} times, and at most two jobs can be compared")
    for kind, path in outputs.items():
        if path is not None:
            check_writable(f"--{kind}", path)
    if jobs:
        logs, recorded = _of_jobs(jobs, service)
    else:
        recorded = [read_log(log) for log in logs]
    with damage(*logs):
        figures = [figures_of(one) for one in recorded]
        written = export(logs, recorded, outputs)
        if as_json:
            several = {"same_product": same_product(recorded), "runs": [one.to_dict() for one in figures]}
            print_json(figures[0].to_dict() if len(logs) == 1 else several)
            return
        if len(logs) == 1:
            print_report(figures[0], recorded[0], advise=True)
        else:
            print_comparison(logs, figures, recorded)
    for what, path in written:
        click.echo(plain(f"{what}: {path}"))


def _of_jobs(ids: Sequence[str], service: str | None) -> tuple[list[str], list[Timeline]]:
    """Return names for the jobs of a service, and their timelines."""
    jobs = find(Client(service), ids)
    with TemporaryDirectory() as folder:
        path = Path(folder, "timeline")
        recorded = []
        for job in jobs:
            job.timeline(path)
            recorded.append(read_log(str(path)))
    return [job.info["name"] or f"job {job.id[-SHORT:]}" for job in jobs], recorded


@click.command()
@JSON
def info(as_json: bool) -> None:
    """Show what is installed, how fast it is, and what is missing.

    The rates are those that a plan in the current folder would use: measured by `oocgemm calibrate`, or
    assumed. Each missing part is listed with the command that installs or measures it.
    """
    found = system.info()
    if as_json:
        print_json(found)
    else:
        print_info(found)
